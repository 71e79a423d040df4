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
        next_ids         d  0  0  0              token after each chunk, if it is known
        draft_stops      1 16  1  1              where slots for drafts of rows that sample end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...graphs.buffers import TensorSpec
from ..scheduling.plan import RowSpan, TableUpdate

__all__ = [
    "DraftInputs",
    "EmbedInputs",
    "StepInputs",
    "prefill_fields",
    "write_decode_rows",
    "write_drafts",
    "write_embeds",
    "write_prefill",
    "write_table_updates",
]

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
    prefill_rows: A
    """int64 `[P]`: the distinct rows of the chunks."""
    sample_rows: A
    """int64 `[P]`: the rows that sample; the null row for chunks before the last known token."""
    query_start_loc: A
    """int64 `[P + 1]`: index into `token_ids` of the first token of each chunk, then the end of the
    last chunk, repeated for rows of padding."""
    next_ids: A
    """int64 `[P]`: the token after each chunk, which drafters read; 0 if it is not known yet."""
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
            "prefill_rows": ints(prefill_rows, fill=null_row),
            "sample_rows": ints(prefill_rows, fill=null_row),
            "query_start_loc": ints(prefill_rows + 1),
            "next_ids": ints(prefill_rows),
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
    where a row has fewer, and `OWN_DRAFT` for those that the state of the row has."""
    counts: A
    """int64 `[max_num_seqs]`: valid tokens of each row, the newest one included; 1 for padding."""
    stops: A
    """int64 `[max_num_seqs]`: the first position that has no slot, for a drafter; 1 for padding."""

    @staticmethod
    def layout(*, max_num_seqs: int, drafts: int) -> dict[str, TensorSpec]:
        """Return shape and initial value of every field: no drafts."""
        return {
            "token_ids": TensorSpec((max_num_seqs, drafts), torch.int64, 0),
            "counts": TensorSpec((max_num_seqs,), torch.int64, 1),
            "stops": TensorSpec((max_num_seqs,), torch.int64, 1),
        }


def write_drafts(
    drafts: Sequence[Sequence[int]], stops: Sequence[int], host: DraftInputs[Int64Array]
) -> None:
    """Write the drafts of the decoding rows, in their order, and where their slots end."""
    host.token_ids.fill(0)
    host.counts.fill(1)
    host.stops.fill(1)
    host.stops[: len(stops)] = stops
    for index, tokens in enumerate(drafts):
        host.token_ids[index, : len(tokens)] = tokens
        host.counts[index] = 1 + len(tokens)


def write_decode_rows(rows: Sequence[int], null_row: int, host: StepInputs[Int64Array]) -> None:
    """Write the decoding rows to `decode_rows`."""
    host.decode_rows[: len(rows)] = rows
    host.decode_rows[len(rows) :] = null_row


def write_prefill(
    chunks: Sequence[RowSpan],
    null_row: int,
    bucket: int,
    host: StepInputs[Int64Array],
) -> None:
    """Write the prefill fields for a step of `bucket` tokens; see the example above."""
    host.prefill_rows[:] = null_row
    host.sample_rows[:] = null_row
    host.next_ids[:] = 0
    host.draft_stops[:] = 1
    offset = 0
    for i, chunk in enumerate(chunks):
        end = offset + chunk.count
        stop = chunk.start + chunk.count
        host.token_ids[offset:end] = chunk.request.tokens(chunk.start, stop)
        host.positions[offset:end] = np.arange(chunk.start, stop)
        host.token_rows[offset:end] = chunk.row
        host.prefill_rows[i] = chunk.row
        host.sample_rows[i] = chunk.row if chunk.samples else null_row
        host.draft_stops[i] = chunk.draft_stop
        host.query_start_loc[i] = offset
        host.next_ids[i] = 0 if chunk.samples else chunk.request.tokens(stop, stop + 1)[0]
        offset = end
    host.query_start_loc[len(chunks) :] = offset
    assert offset <= bucket
    host.token_ids[offset:bucket] = 0
    host.positions[offset:bucket] = 0
    host.token_rows[offset:bucket] = null_row


def prefill_fields(bucket: int, prefill_rows: int) -> dict[str, int]:
    """Return the fields that `write_prefill` writes, with the number of elements of each."""
    return {
        **dict.fromkeys(("token_ids", "positions", "token_rows"), bucket),
        **dict.fromkeys(("prefill_rows", "sample_rows", "next_ids", "draft_stops"), prefill_rows),
        "query_start_loc": prefill_rows + 1,
    }


def write_embeds(chunks: Sequence[RowSpan], host: EmbedInputs[torch.Tensor]) -> None:
    """Write the embeddings in the chunks of a step."""
    host.mask.zero_()
    offset = 0
    for chunk in chunks:
        for span in chunk.request.embeds:
            start = max(span.position, chunk.start)
            stop = min(span.stop, chunk.start + chunk.count)
            if start < stop:
                shown = span.content.embeds[start - span.position : stop - span.position]
                to = slice(offset + start - chunk.start, offset + stop - chunk.start)
                host.embeds[to] = shown
                host.mask[to] = True
        offset += chunk.count


def write_table_updates(updates: Sequence[TableUpdate], host: StepInputs[Int64Array]) -> None:
    """Write the beginning of `table_updates`; only that part is read."""
    host.table_updates[: len(updates)] = updates
