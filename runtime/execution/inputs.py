"""StepPlan (host) → StepInputs (tensors): the layout of the step inputs.

The inputs of a step live in buffers of fixed size and address. Unused elements are padding: they
point at the null row, whose block table contains only the null block.

    rows 4 (positions 0-2) and 1 (positions 7-8, its last known tokens), bucket 8, null row 9

        token_ids        a  b  c  x  y  .  .  .
        positions        0  1  2  7  8  0  0  0
        token_rows       4  4  4  1  1  9  9  9
        prefill_rows     4  1  9  9                rows whose blocks are read
        sample_rows      9  1  9  9                rows that sample; row 4 has more chunks
        query_start_loc  0  3  5  5  5           first token of each row, and the end of the last
        next_ids         b  c  d  y  0  0  0  0  token after each, if it is known
        draft_stops      1 16  1  1              where slots for drafts of rows that sample end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...cache.arena import StateMemory
from ...graphs.buffers import StaticBuffers, TensorSpec
from ...profiling import ranges
from ..kernels.ops.batch import RowStates
from ..mask_words import MASK_BITS
from ..models.config import DecoderConfig
from ..models.plan import plan_of
from ..models.resolved_config import ResolvedConfig
from ..sampling.sampling_state import SamplingState
from ..scheduling.plan import RowSpan, TableUpdate
from .step_key import MOST_VERIFIED_TOKENS, most_table_updates


@dataclass(frozen=True, slots=True)
class MaskState:
    """Masks of all rows, and what a step leaves for the `sample` step that continues it.

    Device tensors; `kernels/ops/token_masks.py` applies the masks. R rows, the null row included;
    N masks of a row: one for each token that a verify step samples, 1 without speculation; V tokens
    of the vocabulary, W of these on the rank; L lanes: most tokens that a step samples, 0 where
    steps are not cut.
    """

    bits: torch.Tensor
    """int32 `[N * R, ceil(V / 32)]`: bit i % 32 of word i // 32 is set if token i may be sampled.
    Mask `n * R + row` applies to the token after the newest one of a row and `n` drafts. All bits
    of rows without a grammar are set, the null row's included."""
    logits: torch.Tensor
    """`[L, W]` in the model's dtype: logits of the lanes."""
    rows: torch.Tensor
    """int64 `[L]`: the rows that sample."""
    positions: torch.Tensor
    """int64 `[L]`: the positions after which the lanes sample."""

    @classmethod
    def of(
        cls, config: ResolvedConfig, model: DecoderConfig, device: torch.device
    ) -> MaskState | None:
        """Allocate the state of an engine, or of one rank; None without structured output."""
        if not config.structured_output:
            return None
        lanes = 0
        if config.is_async_device:
            verified = MOST_VERIFIED_TOKENS if config.tokens_per_row else 0
            lanes = max(config.user.max_num_seqs, config.max_prefill_rows, verified)
        shard = plan_of(model).shard
        own_vocab_size = model.vocab_size if shard is None else len(shard.vocab)
        masks = max(config.tokens_per_row, default=1) * (config.user.max_num_seqs + 1)
        words = -(-model.vocab_size // MASK_BITS)
        return cls(
            torch.full((masks, words), -1, dtype=torch.int32, device=device),
            torch.zeros(lanes, own_vocab_size, dtype=config.dtype, device=device),
            torch.zeros(lanes, dtype=torch.int64, device=device),
            torch.zeros(lanes, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """State of each row on the device, which steps read and update; R = max_num_seqs + 1.

    The host never reads it back.
    The last row is the null row, which padded lanes use. Its block table contains only the null
    block, its position remains 0, and its sampled tokens are never read.
    """

    token_ids: torch.Tensor
    """int64 `[R]`: the newest token, whose keys and values the next decode step computes."""
    positions: torch.Tensor
    """int64 `[R]`: its position in the sequence."""
    block_tables: torch.Tensor
    """int32 `[groups, R, max_blocks_per_row]`. Columns before a row's window and after its blocks
    may contain blocks of other rows. They are never read, because reads begin with the window and
    end at the row's position."""
    sampling: SamplingState
    rope_lengths: torch.Tensor | None = None
    """int64 `[R]`: rope length of each row's request (see `rope_lengths.py`); None where rotations
    do not depend on the length."""
    masks: MaskState | None = None
    """Token masks of rows whose output follows a grammar; None without structured output."""
    drafts: torch.Tensor | None = None
    """int64 `[R, K]`: what a drafter proposed last to follow the newest token; 0 where a row has
    none. None without a drafter, or if the host always sends the drafts."""
    stored: torch.Tensor | None = None
    """int64 `[R]`: the last block column whose snapshot of recurrent state is stored. None without
    recurrent layers; with them, the last two `block_tables` are of snapshots and inputs."""
    memory: StateMemory | None = None
    """Of recurrent state."""

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        num_groups: int,
        max_blocks_per_row: int,
        vocab_size: int,
        device: torch.device,
        *,
        rope_by_length: bool = False,
        masks: MaskState | None = None,
        drafts: int = 0,
        recurrent: bool = False,
        memory: StateMemory | None = None,
    ) -> DeviceRows:
        """Allocate the state of `max_num_seqs` rows and the null row.

        `masks`: token masks, if steps may have any. `drafts`: those that a row keeps. `recurrent`:
        whether layers have recurrent state, in `memory`.
        """
        rows = max_num_seqs + 1
        num_groups += 2 * recurrent

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=ints(rows),
            positions=ints(rows),
            block_tables=ints(num_groups, rows, max_blocks_per_row, dtype=torch.int32),
            sampling=SamplingState.allocate(max_num_seqs, vocab_size, device),
            rope_lengths=ints(rows) if rope_by_length else None,
            masks=masks,
            drafts=ints(rows, drafts) if drafts else None,
            stored=ints(rows) if recurrent else None,
            memory=memory,
        )

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        model: DecoderConfig,
        num_groups: int,
        device: torch.device,
        memory: StateMemory | None = None,
    ) -> DeviceRows:
        """Allocate the state of an engine, or of one rank; `num_groups`: layer groups."""
        return cls.allocate(
            config.user.max_num_seqs,
            num_groups,
            config.max_blocks_per_row,
            model.vocab_size,
            device,
            rope_by_length=plan_of(model).rope_by_length,
            masks=MaskState.of(config, model, device),
            drafts=config.kept_drafts,
            recurrent=bool(plan_of(model).row_states),
            memory=memory,
        )

    @property
    def null_row(self) -> int:
        """Index of the null row."""
        return self.token_ids.shape[0] - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "memory"}
        for name in ("sampling", "masks"):
            if part := found.pop(name):
                found |= {f"{name}.{f.name}": getattr(part, f.name) for f in fields(part)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def accept(
        self, rows_B: torch.Tensor, tokens_BN: torch.Tensor, accepted_B: torch.Tensor
    ) -> None:
        """Advance each row by the first `accepted_B` tokens of a verify step.

        Rows and counts are int64; counts are at least 1. The null row remains at position 0.
        """
        last_B = tokens_BN.gather(1, accepted_B[:, None] - 1)[:, 0]
        positions_B = self.positions[rows_B] + accepted_B
        self.token_ids.index_put_((rows_B,), last_B.clamp(min=0))
        self.positions.index_put_((rows_B,), torch.where(rows_B == self.null_row, 0, positions_B))

    def chosen_drafts(
        self, rows_B: torch.Tensor, given_BK: torch.Tensor, are_given: torch.Tensor
    ) -> torch.Tensor:
        """Return the drafts that a step verifies, int64 `[B, K]`.

        The given ones, or if bool `[1]` `are_given` is False, the drafts that the rows keep.
        """
        if self.drafts is None:
            return given_BK
        return torch.where(are_given, given_BK, self.drafts[rows_B, : given_BK.shape[1]])

    def keep_drafts(self, rows_B: torch.Tensor, drafts_BK: torch.Tensor) -> None:
        """Keep what a drafter has proposed for rows, if rows keep drafts."""
        if self.drafts is not None:
            self.drafts[:, : drafts_BK.shape[1]].index_put_((rows_B,), drafts_BK)

    @property
    def row_states(self) -> RowStates:
        """The recurrent state as layers read it, of a model that has some."""
        memory, stored = self.memory, self.stored
        assert memory is not None, "the engine gives recurrent layers memory"
        assert stored is not None
        *_, snapshot_tables, input_tables = self.block_tables.unbind()
        return RowStates(memory.snapshots, memory.inputs, snapshot_tables, input_tables, stored)

    def store_states(
        self, rows_B: torch.Tensor, positions_B: torch.Tensor, block_size: int
    ) -> None:
        """Note that a step has stored the snapshots up to the blocks of these positions."""
        assert self.stored is not None, "a step without recurrent state"
        columns_B = torch.where(rows_B == self.null_row, 0, positions_B // block_size)
        self.stored.index_put_((rows_B,), columns_B)

    def take_row(self, row: int, rope_length: int, stored: int) -> None:
        """Forget what is left of a row's last request, and begin with that of the next one.

        `stored` is the last column of its recurrent state that is stored.
        """
        if self.drafts is not None:
            self.drafts[row].zero_()
        if self.rope_lengths is not None:
            self.rope_lengths[row] = rope_length
        if self.stored is not None:  # columns without an entry are skipped, so none may be left
            self.stored[row] = stored
            self.block_tables[-2:, row].zero_()

    def copy_newest(self, inputs: StepInputs[torch.Tensor], count: int) -> None:
        """Copy the newest tokens of `count` decoding rows to the inputs of a mixed step."""
        rows_B = inputs.decode_rows[:count]
        inputs.token_ids[:count] = self.token_ids[rows_B]
        inputs.positions[:count] = self.positions[rows_B]

    def update_tables(self, updates_U4: torch.Tensor) -> None:
        """Write (group, row, column, block) entries into the block tables."""
        group, row, column, block = updates_U4.unbind(1)
        self.block_tables.index_put_((group, row, column), block.to(torch.int32))


Int64Array = npt.NDArray[np.int64]

A = TypeVar("A", torch.Tensor, Int64Array)


@dataclass(frozen=True)
class StepInputs(Generic[A]):
    """Step inputs: tensors on the device, arrays on the host.

    M: maximum tokens of a prefill step, P: maximum rows of one, U: maximum table updates of one
    copy. The functions below write the fields, only when they change.
    """

    decode_rows: A
    """int64 `[max_num_seqs]`: the decoding rows, padded with the null row."""
    token_ids: A
    """int64 `[M]`: the tokens of the prefill chunks, row by row."""
    positions: A
    """int64 `[M]`: position of each of them in its sequence."""
    token_rows: A
    """int64 `[M]`: row of each of them."""
    next_ids: A
    """int64 `[M]`: the token after each of them, for drafters and log-probabilities of prompts; 0
    if it is not known yet."""
    prefill_rows: A
    """int64 `[P]`: the distinct rows of the chunks."""
    sample_rows: A
    """int64 `[P]`: the rows that sample; the null row for chunks before the last known token."""
    query_start_loc: A
    """int64 `[P + 1]`: index into `token_ids` of the first token of each chunk, then the end of the
    last chunk, repeated for rows of padding."""
    draft_stops: A
    """int64 `[P]`: as `DraftInputs.stops`, of `sample_rows`, in steps that propose drafts."""
    table_updates: A
    """int64 `[U, 4]`: (group, row, column, block) to write into the block tables."""

    @staticmethod
    def layout(
        *, max_num_seqs: int, prefill_tokens: int, prefill_rows: int, table_updates: int
    ) -> dict[str, TensorSpec]:
        """Return shape and initial value of every field: everything points at the null row."""
        null_row = max_num_seqs

        def ints(*shape: int, fill: int = 0) -> TensorSpec:
            return TensorSpec(shape, torch.int64, fill)

        return {
            "decode_rows": ints(max_num_seqs, fill=null_row),
            "token_ids": ints(prefill_tokens),
            "positions": ints(prefill_tokens),
            "token_rows": ints(prefill_tokens, fill=null_row),
            "next_ids": ints(prefill_tokens),
            "prefill_rows": ints(prefill_rows, fill=null_row),
            "sample_rows": ints(prefill_rows, fill=null_row),
            "query_start_loc": ints(prefill_rows + 1),
            "draft_stops": ints(prefill_rows, fill=1),
            "table_updates": ints(table_updates, 4),
        }


@dataclass(frozen=True)
class EmbedInputs(Generic[A]):
    """Embeddings that replace tokens, for engines with `prompt_embeds`.

    Separate buffers, because they are large and most steps need none. M: maximum tokens of a
    prefill step.
    """

    embeds: A
    """float32 `[M, hidden_size]`: embeddings of the tokens where `mask` is set."""
    mask: A
    """bool `[M]`: tokens of the chunks that are replaced by embeddings."""

    @staticmethod
    def layout(*, prefill_tokens: int, hidden_size: int) -> dict[str, TensorSpec]:
        """Return shape and initial value of every field: no token is replaced."""
        return {
            "embeds": TensorSpec((prefill_tokens, hidden_size), torch.float32),
            "mask": TensorSpec((prefill_tokens,), torch.bool, False),
        }


@dataclass(frozen=True)
class DraftInputs(Generic[A]):
    """Drafts of the decoding rows, for verify steps, and room for new ones. K: maximum drafts."""

    token_ids: A
    """int64 `[max_num_seqs, K]`: draft tokens after the newest token of each of `decode_rows`; 0
    where a row has fewer, or if the rows verify the drafts that they keep."""
    are_given: A
    """bool `[1]`: whether the host has given the drafts, and not left them to the rows."""
    counts: A
    """int64 `[max_num_seqs]`: valid tokens of each row, the newest one included; 1 for padding."""
    stops: A
    """int64 `[max_num_seqs]`: the first position that has no slot, for a drafter; 1 for padding."""

    @staticmethod
    def layout(*, max_num_seqs: int, drafts: int) -> dict[str, TensorSpec]:
        """Return shape and initial value of every field: no drafts."""
        return {
            "token_ids": TensorSpec((max_num_seqs, drafts), torch.int64, 0),
            "are_given": TensorSpec((1,), torch.bool, True),
            "counts": TensorSpec((max_num_seqs,), torch.int64, 1),
            "stops": TensorSpec((max_num_seqs,), torch.int64, 1),
        }


def input_layouts(
    config: ResolvedConfig, num_groups: int, hidden_size: int
) -> dict[str, dict[str, TensorSpec]]:
    """Return the fields of each input buffer of an engine; `num_groups`: layer groups."""
    layouts: dict[str, dict[str, TensorSpec]] = {
        "steps": StepInputs.layout(
            max_num_seqs=config.user.max_num_seqs,
            prefill_tokens=config.prefill_tokens,
            prefill_rows=config.prefill_rows,
            table_updates=most_table_updates(config, num_groups),
        )
    }
    if config.user.prompt_embeds:
        layouts["embeds"] = EmbedInputs.layout(
            prefill_tokens=config.prefill_tokens, hidden_size=hidden_size
        )
    if config.tokens_per_row:
        layouts["drafts"] = DraftInputs.layout(
            max_num_seqs=config.user.max_num_seqs, drafts=config.tokens_per_row[-1] - 1
        )
    return layouts


class PrefillChunk(NamedTuple):
    """A `RowSpan` as all ranks read it: without its request."""

    row: int
    start: int
    token_ids: list[int]
    next_id: int = 0
    """The token after the chunk; 0 if it is not known yet."""
    samples: bool = True
    draft_stop: int = 1
    scored: range = range(0)
    num_top: int = 0
    """Most probable tokens of the scored positions."""
    embeds: Sequence[tuple[int, npt.NDArray[np.float32]]] = ()
    """Embeddings in the chunk, each with the index of its first token."""

    @classmethod
    def of(cls, span: RowSpan) -> PrefillChunk:
        """Return the chunk of a plan's span."""
        request, start, stop = span.request, span.start, span.start + span.count
        scores = request.prompt_logprobs
        return cls(
            *(span.row, start, request.tokens(start, stop)),
            next_id=0 if span.samples else request.tokens(stop, stop + 1)[0],
            samples=span.samples,
            draft_stop=span.draft_stop,
            scored=span.scored,
            num_top=0 if scores is None else scores.num_top,
            embeds=[
                (
                    max(shown.position - start, 0),
                    shown.content.embeds[max(start - shown.position, 0) : stop - shown.position]
                    .detach()
                    .to("cpu", torch.float32)
                    .numpy(),
                )
                for shown in request.embeds
                if shown.position < stop and start < shown.stop
            ],
        )


def write_drafts(
    counts: Sequence[int],
    drafts: Sequence[Sequence[int]],
    stops: Sequence[int],
    host: DraftInputs[Any],
) -> None:
    """Write the drafts of the decoding rows, in their order; see `StepPlan`."""
    host.token_ids.fill(0)
    host.are_given.fill(len(drafts) > 0)
    host.counts.fill(1)
    host.stops.fill(1)
    host.counts[: len(counts)] = counts
    host.stops[: len(stops)] = stops
    for index, tokens in enumerate(drafts):
        host.token_ids[index, : len(tokens)] = tokens


def write_decode_rows(rows: Sequence[int], null_row: int, host: StepInputs[Int64Array]) -> None:
    """Write the decoding rows to `decode_rows`."""
    host.decode_rows[: len(rows)] = rows
    host.decode_rows[len(rows) :] = null_row


def write_prefill(
    chunks: Sequence[PrefillChunk],
    null_row: int,
    bucket: int,
    host: StepInputs[Int64Array],
) -> None:
    """Write the prefill fields for a step of `bucket` tokens; see the example above."""
    host.prefill_rows[:] = null_row
    host.sample_rows[:] = null_row
    host.draft_stops[:] = 1
    offset = 0
    for i, chunk in enumerate(chunks):
        count = len(chunk.token_ids)
        end = offset + count
        host.token_ids[offset:end] = chunk.token_ids
        host.positions[offset:end] = np.arange(chunk.start, chunk.start + count)
        host.token_rows[offset:end] = chunk.row
        host.prefill_rows[i] = chunk.row
        host.sample_rows[i] = chunk.row if chunk.samples else null_row
        host.draft_stops[i] = chunk.draft_stop
        host.query_start_loc[i] = offset
        host.next_ids[offset : end - 1] = host.token_ids[offset + 1 : end]
        host.next_ids[end - 1] = chunk.next_id
        offset = end
    host.query_start_loc[len(chunks) :] = offset
    assert offset <= bucket
    host.token_ids[offset:bucket] = 0
    host.positions[offset:bucket] = 0
    host.token_rows[offset:bucket] = null_row
    host.next_ids[offset:bucket] = 0


class InputWriter:
    """Writes the changed inputs of steps, and copies them to the device."""

    def __init__(
        self, config: ResolvedConfig, num_groups: int, hidden_size: int, state: DeviceRows
    ) -> None:
        """Allocate the buffers; `num_groups`: layer groups, whose tables in `state` it updates."""
        self._state = state
        layouts, device = input_layouts(config, num_groups, hidden_size), config.device
        kinds: dict[str, Any] = {
            "steps": StepInputs[torch.Tensor],
            "embeds": EmbedInputs[torch.Tensor],
            "drafts": DraftInputs[torch.Tensor],
        }
        self._buffers: dict[str, StaticBuffers[Any]] = {
            name: StaticBuffers(kinds[name], specs, device) for name, specs in layouts.items()
        }
        """Of every step and, where there are any, of embeddings and drafts."""
        self.inputs: StaticBuffers[StepInputs[torch.Tensor]] = self._buffers["steps"]
        self.embeds: StaticBuffers[EmbedInputs[torch.Tensor]] | None = self._buffers.get("embeds")
        self.drafts: StaticBuffers[DraftInputs[torch.Tensor]] | None = self._buffers.get("drafts")
        self._host: StepInputs[Int64Array] = self.inputs.arrays(StepInputs[Int64Array])
        self._written_drafts: tuple[list[int], list[list[int]], list[int]] = ([], [], [])
        self.decode_rows: list[int] = []
        """As last written."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(buffers.nbytes for buffers in self._buffers.values())

    def addresses(self) -> dict[str, int]:
        """Return the device address of each field of the buffers, which must never change."""
        return {
            f"{name}.{field}": address
            for name, buffers in self._buffers.items()
            for field, address in buffers.addresses().items()
        }

    def write(
        self,
        rows: list[int],
        updates: Sequence[TableUpdate],
        chunks: Sequence[PrefillChunk],
        size: int,
        *,
        mixed: bool,
    ) -> None:
        """Write the decoding rows, updates of block tables, and the chunks of a step of `size`.

        In a `mixed` step, the newest token of each of the rows is a chunk before the others.
        """
        if mixed:
            chunks = [*(PrefillChunk(row, 0, [0]) for row in rows), *chunks]
        with ranges.span(ranges.PREPARE, len(rows)):
            self.inputs.begin_write()
            if rows != self.decode_rows:
                write_decode_rows(rows, self._state.null_row, self._host)
                self.decode_rows = rows
            if chunks:
                write_prefill(chunks, self._state.null_row, size, self._host)
                self._write_embeds(chunks)
        most = len(self._host.table_updates)
        for start in range(0, len(updates) or 1, most):
            part = updates[start : start + most]
            if part:
                self.inputs.begin_write()
                self._host.table_updates[: len(part)] = part
            with ranges.span(ranges.COPY, self.inputs.nbytes):
                self.inputs.copy_to_device()
            if part:
                self._state.update_tables(self.inputs.device.table_updates[: len(part)])
        if mixed:
            self._state.copy_newest(self.inputs.device, len(rows))

    def write_drafts(
        self, counts: Sequence[int], drafts: Sequence[Sequence[int]], stops: Sequence[int] = ()
    ) -> None:
        """Write and copy the drafts of the decoding rows, in their order; see `StepPlan`.

        They seldom change where rows keep their drafts on the device.
        """
        assert self.drafts is not None, "a verify step without speculation"
        written = list(counts), [list(own) for own in drafts], list(stops)
        if written != self._written_drafts:
            self.drafts.begin_write()
            write_drafts(counts, drafts, stops, self.drafts.arrays(DraftInputs[npt.NDArray[Any]]))
            self.drafts.copy_to_device()
            self._written_drafts = written

    def _write_embeds(self, chunks: Sequence[PrefillChunk]) -> None:
        """Copy the embeddings of the chunks, or clear the mask of the last prefill step."""
        if self.embeds is None:
            return
        host = self.embeds.arrays(EmbedInputs[npt.NDArray[Any]])
        if any(chunk.embeds for chunk in chunks) or host.mask.any():
            self.embeds.begin_write()
            host.mask.fill(False)
            offset = 0
            for chunk in chunks:
                for start, embeds in chunk.embeds:
                    to = slice(offset + start, offset + start + len(embeds))
                    host.embeds[to] = embeds
                    host.mask[to] = True
                offset += len(chunk.token_ids)
            self.embeds.copy_to_device()
