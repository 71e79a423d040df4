"""The computation of a step, as callables over tensors with fixed addresses.

The only host input of a decode step is the list of its rows. Newest tokens, positions and block
tables are state on the device. The step derives the write index from them, and writes the sampled
tokens back.

    decode   rows -> token, position -> slot -> forward -> sample -> token, position + 1
    verify   rows, drafts -> newest token and drafts -> slots -> forward -> sample at each of them
             -> accept the drafts that were sampled too -> token, position + 1 + accepted
             -> with a drafter: new drafts
    prefill  chunk -> slot -> forward -> sample at the last token of each chunk -> token, position
    mixed    on a CPU: a prefill step that has the newest token of each decoding row as a chunk

A verify step samples after the newest token of each row, and after each of its drafts. A draft is
accepted if all drafts before it are, and if it is the token that is sampled in its place. So the
accepted tokens, and the one sampled after them, are those that decode steps would sample one by
one; a decode step is a verify step without drafts.

A step with token masks waits for these before it samples: the host computes them during the
forward pass. On a device that runs asynchronously it is cut there: the step stores its logits, and
a `sample` step, before which the host copies the masks, continues.

Steps with native layers are not compiled: there is nothing to fuse, and compiled code has to check
its guards. Other greedy steps are compiled as a whole: forward pass, head, sampling and token
feedback. Any other step is a greedy one, followed by the full sampler,
whose tokens replace the greedy ones: so both share the compiled forward pass. A plain PyTorch
sampler is compiled, on its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch

from ...graphs.compilation import StepCompilationError
from ..bounded_repr import bounded_text
from ..kernels import RaggedBatch
from ..kernels.cpu import drafted  # noqa: F401  defines the operators below
from ..kernels.ops.batch import Feedback
from ..kernels.ops.token_masks import LaneMasks, mask_logits
from ..kernels.triton.dependent import dependent_launch
from ..models.decoder import Decoder
from ..models.drafters.drafter import (
    Drafter,
    Drafts,
    FollowedTokens,
    NewestTokens,
    SampledTokens,
)
from ..models.sharding import ShardedVocabulary
from ..models.transformers.decoder import DecoderModel
from ..operation_scopes import operation
from ..sampling.reference_sampler import SampleOutput, drafted_lanes
from ..sampling.samplers import SAMPLERS, torch_sampler
from .inputs import DeviceRows, DraftInputs, EmbedInputs, MaskState, StepInputs
from .step_key import StepKey, StepOutput
from .token_masks import TokenMasks

# Where the tokens of a step read and write, from the state of their rows.


def write_index(
    state: DeviceRows,
    block_size: int,
    positions_T: torch.Tensor,
    token_rows_T: torch.Tensor,
    valid_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the slots of tokens, int64 `[G, T]`; tokens that are not valid get the null block.

    Token at position 37 of row 2, blocks of 16: it is written to slot
    `block_tables[group, 2, 37 // 16] * 16 + 37 % 16` in each layer group.
    """
    with operation("begin"):
        blocks_GT = state.block_tables[:, token_rows_T, positions_T // block_size]
        slots_GT = blocks_GT.to(torch.int64) * block_size + positions_T % block_size
        return slots_GT if valid_T is None else torch.where(valid_T, slots_GT, 0)


def batch_of_slots(
    state: DeviceRows,
    block_size: int,
    positions_T: torch.Tensor,
    slots_GT: torch.Tensor,
    token_rows_T: torch.Tensor,
    rows_R: torch.Tensor,
    read_blocks: int,
    *,
    tokens_per_row: int | None = None,
    query_start_loc: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> RaggedBatch:
    """Return the batch of tokens whose write index is known; see `RaggedBatch` for the shapes."""
    rope_lengths_T = None
    if state.rope_lengths is not None:
        rope_lengths_T = torch.maximum(positions_T + 1, state.rope_lengths[token_rows_T])
    return RaggedBatch(
        positions=positions_T,
        slots=slots_GT,
        token_rows=token_rows_T,
        rows=rows_R,
        block_tables=state.block_tables,
        read_blocks=read_blocks,
        block_size=block_size,
        tokens_per_row=tokens_per_row,
        query_start_loc=query_start_loc,
        rope_lengths=rope_lengths_T,
        states=None if state.stored is None else state.row_states,
        token_ids=token_ids,
    )


# Compiles the parts of a step with `torch.compile`, at their first call.
#
# All buckets share the compiled code of a part: one version for any number of tokens or rows, and
# one for a single one, which torch specialises. So do verify steps with any number of tokens per
# row. Inputs are small copies, so that they differ only in length: torch recompiles for views at
# other offsets, and for two arguments that are the same tensor.
#
# torch limits the versions of a code object. So no other size that differs between steps may be 1
# in one of them, or reach an operator as an `int`.

_serial = itertools.count()

_FEW_THREADS = 4

_one_at_a_time = threading.RLock()

_OF_SELF = re.compile(r"\bself\b")


def compiled_part(part: Callable[..., Any], *, few_tokens: bool = False) -> Callable[..., Any]:
    """Return a bound method that torch compiles at its first call, as one profiler scope.

    With `few_tokens`, and on a CPU with few threads, its elementwise code runs in the calling
    thread: OpenMP's threads wait for each other after each loop, which takes longer than the work
    of few tokens, and many times as long where another process has their core.

    The returned function raises `StepCompilationError` if the code cannot be compiled as one graph.
    """
    few_threads = torch.get_num_threads() <= _FEW_THREADS
    compiled = torch.compile(
        _own_code(part),
        fullgraph=True,
        dynamic=True,
        options={
            "guard_filter_fn": _guards_of_arguments,
            **({"cpp.threads": 1} if few_tokens or few_threads else {}),
        },
    )

    def run(*arguments: Any) -> Any:
        with operation("inputs"):
            arguments = tuple(
                x.clone() if isinstance(x, torch.Tensor) and x._is_view() else x for x in arguments
            )
        with operation("compiled"):
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.Unsupported as error:
                refusal = _refusal(error)
        raise refusal

    return run


@contextmanager
def compile_settings() -> Iterator[None]:
    """Set how torch compiles parts: numbers are constants, and equal sizes may become different.

    Numbers of modules, such as the epsilon of a norm, as inputs of the graph would make torch trace
    the step twice: it finds late that the operators need constants. And by default code for 4 rows
    of 4 tokens is specific to as many rows as tokens.

    One thread at a time, as older versions of torch have one setting per process.
    """
    from torch.fx.experimental import _config  # torch.compile imports it, which takes a second

    floats: Any = torch._dynamo.config
    sizes: Any = _config
    with (
        _one_at_a_time,
        floats.patch(specialize_float=True),
        sizes.patch(use_duck_shape=False),
    ):
        yield


def _guards_of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards on arguments and on torch's global state.

    The object of a method and the modules below it never change once its steps run. Their guards,
    several per module, would be checked at each call.
    """
    return [not (guard.is_global or _OF_SELF.search(guard.name)) for guard in guards]


def _refusal(error: RuntimeError) -> StepCompilationError:
    """Return the error for code that torch.compile cannot put in one graph."""
    stack = getattr(error, "real_stack", None)
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown line"
    reason = bounded_text(str(error).partition("\n")[0], 200)
    return StepCompilationError(
        f"torch.compile cannot compile the step as one graph, because of {place}: {reason}. Use"
        " mode='eager'"
    )


def _own_code(bound: Callable[..., Any]) -> MethodType:
    """Return the method with a code object of its own.

    torch stores compiled code with the code object, and limits recompilations per code object.
    Without copies, engines of a process would share this limit and keep each other's code alive.
    """
    method = cast(MethodType, bound)
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_serial)}")
    own = FunctionType(
        code, function.__globals__, argdefs=function.__defaults__, closure=function.__closure__
    )
    return MethodType(own, method.__self__)


# The part of a step that a drafter runs, after the target model has sampled.
#
# Every prefill step lets the drafter follow its chunks. Decode and verify steps run it only if they
# propose drafts. What it misses in the others stays as it was when the block was allocated: zeros.
# Prefill steps may propose too, for the prompts that end in them.


class DraftStep:
    """Runs a drafter over the tokens of steps."""

    def __init__(
        self,
        drafter: Drafter,
        arena: torch.Tensor,
        state: DeviceRows,
        block_size: int,
        *,
        native: bool = False,
    ) -> None:
        """Bind the drafter, its arena and the state of the rows, which steps have advanced.

        `native`: whether the C++ operators of the CPU are loaded.
        """
        self.aux_layers = drafter.aux_layers
        self._drafter, self._arena = drafter, arena
        self._state, self._block_size, self._native = state, block_size, native

    def propose(
        self,
        key: StepKey,
        tokens: FollowedTokens,
        rows_B: torch.Tensor,
        first_B: torch.Tensor,
        stops_B: torch.Tensor,
    ) -> Drafts:
        """Return `key.drafts` tokens that may follow the newest one of each row. Rows keep them.

        Args:
            key: of the step.
            tokens: its tokens, row by row, and those sampled after them.
            rows_B: int64, the rows that get drafts; the null row for padding.
            first_B: int64, index of each row's first token. The state has the position of the row's
                newest token, which follows its accepted ones.
            stops_B: int64, the first position of each row that has no slot.
        """
        positions_R = self._state.positions
        with operation("draft"):
            operator = self._drafter.operator if self._native else None
            if operator is not None:
                sampled = SampledTokens(tokens, rows_B, positions_R, first_B, stops_B)
                drafts = operator(sampled, self._arena, key.drafts)
            else:
                sampled_T = tokens.next_ids.flatten().clamp(min=0)  # 0 for `NON_FINITE`
                # Where the token before the newest one stands. The null row stays at its position.
                last_B = positions_R[rows_B] - tokens.batch.positions[first_B] - 1
                index_B = first_B + last_B.clamp(min=0)
                later = partial(self._batch, rows_B, stops_B, key)
                previous_B = tokens.token_ids[index_B]
                newest = NewestTokens(sampled_T[index_B], previous_B, index_B, later)
                tokens = dataclasses.replace(tokens, next_ids=sampled_T)
                drafts = self._drafter.propose(tokens, newest, self._arena, key.drafts)
            self._state.keep_drafts(rows_B, drafts.token_ids)
        return drafts

    def _batch(
        self, rows_B: torch.Tensor, stops_B: torch.Tensor, key: StepKey, first: int, count: int
    ) -> RaggedBatch:
        """See `NewestTokens.batch`. Positions without a slot read as the last one that has one."""
        state, size = self._state, self._block_size
        if self._native:
            positions_T, slots_GT, token_rows_T = torch.ops.stepgraph.drafted_inputs.default(
                rows_B, state.positions, stops_B, state.block_tables, size, first, count
            )
        else:
            offsets_N = torch.arange(first, first + count, device=rows_B.device)
            positions_BN = state.positions[rows_B][:, None] + offsets_N
            valid_BN = (positions_BN >= 0) & (positions_BN < stops_B[:, None])
            positions_BN = torch.minimum(positions_BN, stops_B[:, None] - 1).clamp(min=0)
            positions_T = positions_BN.flatten()
            token_rows_T = rows_B[:, None].expand(-1, count).contiguous().flatten()
            slots_GT = write_index(state, size, positions_T, token_rows_T, valid_BN.flatten())
        return batch_of_slots(
            *(state, size, positions_T, slots_GT, token_rows_T, rows_B, key.read_blocks),
            tokens_per_row=count,
        )

    def after_prefill(
        self,
        inputs: StepInputs[torch.Tensor],
        key: StepKey,
        sampled_P: torch.Tensor,
        forward: Forward,
    ) -> Drafts | None:
        """Let the drafter follow the chunks of a prefill step, which has sampled these tokens.

        `inputs` are of the step alone. With `key.drafts`, return drafts of the rows that sample;
        other rows have 0.
        """
        assert forward.slots is not None
        with operation("draft"):
            rows_P = inputs.sample_rows
            last_P = (inputs.query_start_loc[1:] - 1).clamp(min=0)
            # The next token of rows that sample is 0 so far.
            new_P = torch.where(rows_P != self._state.null_row, sampled_P.clamp(min=0), 0)
            next_ids_T = inputs.next_ids.index_add(0, last_P, new_P)
            batch = batch_of_slots(
                *(self._state, self._block_size, inputs.positions, forward.slots),
                *(inputs.token_rows, inputs.prefill_rows, key.read_blocks),
                query_start_loc=inputs.query_start_loc,
            )
            ids = inputs.token_ids, next_ids_T
            tokens = FollowedTokens(*ids, forward.features, batch, of_prompts=True)
            if not key.drafts:
                self._drafter.follow(tokens, self._arena)
                return None
        first_P = inputs.query_start_loc[:-1].clamp(max=len(next_ids_T) - 1)
        drafts = self.propose(key, tokens, rows_P, first_P, inputs.draft_stops)
        # The null row's drafts depend on which of its tokens was written last.
        unused_P1 = (rows_P == self._state.null_row)[:, None]
        return Drafts(drafts.token_ids.masked_fill(unused_P1, 0), drafts.probabilities)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Forward(NamedTuple):
    """A forward pass. T: lanes, which sample a token each.

    Decode and verify steps have a lane for each of their tokens, row by row, and prefill steps one
    for each chunk.
    """

    logits: torch.Tensor
    """`[T, vocab_size]`, or the columns of the rank's own tokens."""
    rows: torch.Tensor
    """int64 `[T]`: the rows that sample; the null row for padding."""
    positions: torch.Tensor
    """int64 `[T]`: the positions after which tokens are sampled."""
    tokens: torch.Tensor | None = None
    """int64 `[T]`: greedy tokens; None: not sampled yet."""
    features: torch.Tensor | None = None
    """`[tokens, F]`: the hidden states that the drafter reads, of all tokens of the step."""
    slots: torch.Tensor | None = None
    """int64 `[G, tokens]`: the write index, of steps after which a drafter may run."""


_NO_TOKEN = -2
"""Differs from every token, and from `NON_FINITE`."""


_PARALLEL_ELEMENTS = 32_768
"""torch copies this many elements or more with several threads on a CPU."""


def _copy_rows(from_TD: torch.Tensor, to: torch.Tensor, *, one_thread: bool) -> None:
    """Copy rows to the first rows of `to`.

    With `one_thread`, in parts small enough for one: torch's threads spin for milliseconds after a
    parallel operation, on the cores of the C++ operators.
    """
    rows = max(1, (_PARALLEL_ELEMENTS - 1) // to.shape[1]) if one_thread else len(to)
    parts_of_to = to[: from_TD.shape[0]].split(rows)
    for part_TD, part_of_to in zip(from_TD.split(rows), parts_of_to, strict=True):
        part_of_to.copy_(part_TD)


class StepFunctions:
    """The steps of one model over one arena and one set of buffers.

    Each step reads its inputs, runs the model, samples, and advances its rows. On the C++ operators
    of a CPU, steps are `ragged`, and a prefill step may have decoding rows: chunks of one token.
    """

    def __init__(
        self,
        model: DecoderModel,
        arena: torch.Tensor,
        block_size: int,
        state: DeviceRows,
        inputs: StepInputs[torch.Tensor],
        embeds: EmbedInputs[torch.Tensor] | None,
        compiled: bool,
        drafts: DraftInputs[torch.Tensor] | None = None,
        hidden: torch.Tensor | None = None,
        drafting: DraftStep | None = None,
        masks_thread: TokenMasks | None = None,
    ) -> None:
        """Bind the tensors. With `compiled`, steps are compiled at their first call.

        Prefill steps read `embeds` if prompts may have embeddings, and write their final hidden
        states to `hidden`, at least `[M, hidden_size]`, if it is given. Verify steps read `drafts`.
        `drafting` proposes them on the device. Steps with token masks that are not cut before they
        sample let `masks_thread` compute these.
        """
        self.model = model
        self.arena = arena
        self.block_size = block_size
        self.state = state
        self.inputs = inputs
        self.embeds = embeds
        self.drafts = drafts
        self.hidden = hidden
        self.ragged = model.stack is not None and model.kernels.sampler == "cpu"
        """Whether verify steps have no padding between rows, and prefill steps none at all: on the
        C++ operators, whose sizes are not captured."""
        self._drafting = drafting
        self._aux_layers = () if drafting is None else drafting.aux_layers
        self._masks_thread = masks_thread
        self._is_cut = state.masks is not None and len(state.masks.logits) > 0
        """Whether `sample` steps continue steps with token masks."""
        self._sampler = SAMPLERS[model.kernels.sampler]
        lanes = len(inputs.decode_rows)
        self._no_drafts = inputs.decode_rows.new_zeros((lanes, 0))
        self._ones = inputs.decode_rows.new_ones(lanes)
        self._compiled: dict[str, Callable[..., Any]] = {}
        """Compiled code of methods, by what it is for; other methods run as they are."""
        whole = compiled and model.stack is None
        self._always_greedy = whole
        """Whether compiled code contains greedy sampling, also for steps of the full sampler: so it
        has one version."""
        if whole and model.kernels.sampler == "triton":
            self._sampler = torch_sampler  # torch.compile cannot trace Triton launches
        if compiled and (whole or self._sampler is torch_sampler):
            for tensor in (
                arena,
                *state.tensors().values(),
                *(() if hidden is None else (hidden,)),
            ):
                torch._dynamo.mark_static_address(tensor)
                # torch lets the sizes of other inputs vary.
                torch._dynamo.mark_static(tensor)
        if whole:
            self._compiled["decode"] = compiled_part(self._forward_rows, few_tokens=True)
            self._compiled["prefill"] = compiled_part(self._forward_chunks)
            self._compiled["verify"] = compiled_part(self._forward_rows)
        if compiled and self._sampler is torch_sampler:
            self._compiled["draw"] = compiled_part(self._drawn)
            if state.masks is not None:
                self._compiled["mask"] = compiled_part(self._masked_logits)
                self._compiled["greedy"] = compiled_part(self._greedy_tokens)

    def close(self) -> None:
        """Release compiled code, which references this object."""
        self._compiled.clear()

    def has_own_code(self, key: StepKey) -> bool:
        """Whether a step may compile what the same step without masks does not."""
        return not (key.masked and self._sampler.takes_masks)

    def bind(self, key: StepKey) -> Callable[[], StepOutput]:
        """Return the step of a key as a callable without arguments."""
        step = self._prefill if key.phase == "prefill" else self._decode
        device, kernels = self.arena.device, self.model.kernels

        def run() -> StepOutput:
            with torch.inference_mode(False), torch.no_grad():
                return step(key)

        def run_kernels() -> StepOutput:
            with on_device(device), dependent_launch(kernels.dependent_launch):
                return run()

        return run_kernels if kernels.library is None else run

    def _prefill(self, key: StepKey) -> StepOutput:
        """Run a prefill step, up to the logits if it is cut."""
        inputs, drafting = self._chunks(key), self._drafting
        if key.masked and self._masks_thread is not None:
            self._masks_thread.start()
        embeds: tuple[torch.Tensor, ...] = ()
        if self.embeds is not None:
            size = len(inputs.token_ids)
            embeds = self.embeds.embeds[:size], self.embeds.mask[:size]
        forward: Forward = self._compiled.get("prefill", self._forward_chunks)(
            *(inputs.token_ids, inputs.positions, inputs.token_rows),
            *(inputs.prefill_rows, inputs.query_start_loc, inputs.sample_rows),
            *(key.read_blocks, self._always_greedy or not (key.full_sampler or key.masked)),
            *embeds,
        )
        if key.masked and self._is_cut:
            if drafting is not None:
                # The drafter takes the most probable token for the one that the grammar will allow.
                likely_P = self._greedy_tokens(*forward[:3], False, self.model.vocabulary)
                drafting.after_prefill(inputs, key, likely_P, forward)
            return self._stored(forward)
        if key.masked and self._masks_thread is not None:
            self._masks_thread.wait()
        output = self._sampled(key, forward, None, forward.rows)
        if drafting is None:
            return _packed(output)
        drafts = drafting.after_prefill(inputs, key, output.tokens, forward)
        return _packed(dataclasses.replace(output, drafts=drafts))

    def _chunks(self, key: StepKey) -> StepInputs[torch.Tensor]:
        """Return the inputs of a prefill step, cut to its bucket, or to its tokens if `ragged`.

        Without any chunk, as in measurements, all tokens of the bucket are padding.
        """
        inputs, size, rows = self.inputs, key.size, len(self.inputs.prefill_rows)
        if self.ragged:
            rows = int((inputs.prefill_rows != self.state.null_row).sum()) or 1
            size = int(inputs.query_start_loc[rows]) or size
        return dataclasses.replace(
            inputs,
            token_ids=inputs.token_ids[:size],
            positions=inputs.positions[:size],
            token_rows=inputs.token_rows[:size],
            next_ids=inputs.next_ids[:size],
            prefill_rows=inputs.prefill_rows[:rows],
            sample_rows=inputs.sample_rows[:rows],
            query_start_loc=inputs.query_start_loc[: rows + 1],
            draft_stops=inputs.draft_stops[:rows],
        )

    def _decode(self, key: StepKey) -> StepOutput:
        """Run a decode or verify step, up to the logits if it is cut, or a `sample` step."""
        state, rows_B, n = self.state, self.inputs.decode_rows[: key.size], key.tokens_per_row
        drafts_BK, counts_B = self._no_drafts[: key.size], self._ones[: key.size]
        verifies, is_cut = n > 1 or key.drafts > 0, key.masked and self._is_cut
        ragged, thread = self.ragged and not is_cut, self._masks_thread if key.masked else None
        token_ids: torch.Tensor | None = None
        if verifies:
            assert self.drafts is not None, "these steps were made without room for drafts"
            with operation("inputs"):
                given_BK = self.drafts.token_ids[: key.size, : n - 1]
                drafts_BK = state.chosen_drafts(rows_B, given_BK, self.drafts.are_given)
                counts_B = self.drafts.counts[: key.size]
        # Waiting for masks may take drafts out of the inputs.
        computed_B = counts_B.clone() if verifies and thread is not None else counts_B
        if ragged:
            with operation("inputs"):  # see `kernels/cpu/drafted.py`
                token_ids, positions_T, slots_GT, rows_T, query_start_loc = (
                    torch.ops.stepgraph.row_inputs.default(
                        *(rows_B, drafts_BK, computed_B, state.token_ids, state.positions),
                        *(state.block_tables, self.block_size),
                    )
                )
                batch = batch_of_slots(
                    *(state, self.block_size, positions_T, slots_GT, rows_T, rows_B),
                    key.read_blocks,
                    query_start_loc=query_start_loc,
                    token_ids=token_ids,
                )
            with operation("begin"):
                x_TD = self.model.embed(token_ids)
            if thread is not None:
                thread.start()  # not earlier: the thread needs Python's lock to start
            hidden_TD, features_TF = self._hidden(x_TD, batch, key.drafts > 0)
            logits_TV = self.model.own_logits(hidden_TD)
            forward = Forward(logits_TV, rows_T, positions_T, None, features_TF)
        else:
            if thread is not None:
                thread.start()
            if verifies:  # not drafts: torch has a version for each size of 1
                with operation("inputs"):
                    token_ids = torch.cat((state.token_ids[rows_B][:, None], drafts_BK), dim=1)
            constants = key.read_blocks, self._always_greedy or not (key.full_sampler or key.masked)
            if key.phase == "sample":
                lanes, masks = key.size * n, self._masks
                forward = Forward(masks.logits[:lanes], masks.rows[:lanes], masks.positions[:lanes])
            elif token_ids is not None:
                forward = self._compiled.get("verify", self._forward_rows)(
                    rows_B, *constants, token_ids, computed_B
                )
            elif self.model.decode_step is None:
                forward = self._compiled.get("decode", self._forward_rows)(rows_B, *constants)
            else:  # its kernels read the state of the rows
                hidden_BD, positions_B = self.model.decode_step(
                    *(rows_B, state.token_ids, state.positions, state.block_tables),
                    *(self.arena, key.read_blocks, self.block_size),
                )
                forward = self._lanes(hidden_BD, rows_B, positions_B, constants[1])
            if is_cut and key.phase == "decode":
                return self._stored(forward)
        if thread is not None:
            thread.wait()
        mask_rows_T = forward.rows
        if n > 1 and (key.masked or not ragged):
            with operation("inputs"):
                number_K = torch.arange(1, n, device=rows_B.device)
                drafts_BK = torch.where(number_K < counts_B[:, None], drafts_BK, _NO_TOKEN)
                if key.masked:
                    # Rows by lane, and the places of lanes in their rows.
                    if ragged:
                        index_T = torch.arange(key.size).repeat_interleave(computed_B)
                        first_B = computed_B.cumsum(0) - computed_B
                        place_T = torch.arange(len(index_T)) - first_B[index_T]
                    else:
                        place_T = torch.arange(n, device=rows_B.device).repeat(key.size)
                        index_T = torch.arange(key.size, device=rows_B.device).repeat_interleave(n)
                    rows_T, kept_T = rows_B[index_T], place_T < counts_B[index_T]
                    mask_rows_T = rows_T + len(state.token_ids) * place_T
                    forward = forward._replace(rows=torch.where(kept_T, rows_T, state.null_row))
        output = self._sampled(key, forward, token_ids, mask_rows_T)
        if ragged:
            with operation("accept"):
                lanes_NB = torch.ops.stepgraph.advance_rows.default(
                    *(output.tokens, rows_B, drafts_BK, computed_B, state.token_ids),
                    *(state.positions, state.stored, self.block_size),
                )
            if not verifies:
                return output
            accepted_B = state.positions[rows_B] - forward.positions[lanes_NB[0]]
        elif not verifies:
            return _packed(output)
        else:
            with operation("accept"):
                tokens_BN = output.tokens.view(key.size, n)
                equal_BK = tokens_BN[:, :-1] == drafts_BK
                accepted_B = 1 + equal_BK.cumprod(dim=1).sum(dim=1)
                state.accept(rows_B, tokens_BN, accepted_B)
                first_B = torch.arange(0, n * key.size, n, device=rows_B.device)
                lanes_NB = first_B + torch.arange(n, device=rows_B.device)[:, None]
        proposed = None
        if key.drafts:
            assert self.drafts is not None
            assert token_ids is not None
            assert self._drafting is not None, "these steps were made without a drafter"
            if not ragged:
                assert forward.slots is not None
                token_rows_T = rows_B[:, None].expand(-1, n).contiguous().flatten()
                batch = batch_of_slots(
                    *(state, self.block_size, forward.positions, forward.slots, token_rows_T),
                    *(rows_B, key.read_blocks),
                    tokens_per_row=n,
                )
            tokens = FollowedTokens(token_ids.flatten(), output.tokens, forward.features, batch)
            stops_B = self.drafts.stops[: key.size]
            proposed = self._drafting.propose(key, tokens, rows_B, lanes_NB[0], stops_B)
        with operation("outputs"):
            details = None if output.details is None else output.details.at(lanes_NB)
            tokens_NB = output.tokens.take(lanes_NB) if details is None else details.tokens
            return _packed(StepOutput(tokens_NB, output.logits, details, proposed, accepted_B))

    def _forward_rows(
        self,
        rows_B: torch.Tensor,
        read_blocks: int,
        greedy: bool,
        token_ids_BN: torch.Tensor | None = None,
        counts_B: torch.Tensor | None = None,
    ) -> Forward:
        """A decode step of the rows `[B]`, int64, or a verify step of these tokens.

        Of the latter `counts_B` tokens of each row are valid: the newest one and its drafts. The
        other tokens, and rows of padding, write to the null block. They have the row's last
        position, so that they read only slots that the row reads.
        """
        state, n = self.state, 1
        rows_T = token_rows_T = rows_B
        valid_T = None
        with operation("inputs"):
            positions_T = state.positions[rows_B]
            if token_ids_BN is None or counts_B is None:
                token_ids_T = state.token_ids[rows_B]
            else:
                n, token_ids_T = token_ids_BN.shape[1], token_ids_BN.flatten()
                step_N = torch.arange(n, device=rows_B.device)
                valid_T = (step_N < counts_B[:, None]).flatten()
                steps_BN = torch.minimum(step_N, counts_B[:, None] - 1)
                positions_T = (positions_T[:, None] + steps_BN).flatten()
                token_rows_T = rows_B[:, None].expand(-1, n).contiguous().flatten()
                rows_T = torch.where(valid_T, token_rows_T, state.null_row)
        slots_GT = write_index(state, self.block_size, positions_T, token_rows_T, valid_T)
        batch = batch_of_slots(
            *(state, self.block_size, positions_T, slots_GT, token_rows_T, rows_B, read_blocks),
            tokens_per_row=n,
            token_ids=token_ids_T,
        )
        with operation("begin"):
            x_TD = self.model.embed(token_ids_T)
        hidden_TD, features_TF = self._hidden(x_TD, batch, token_ids_BN is not None)
        if state.stored is not None:
            state.store_states(rows_B, positions_T[::n], self.block_size)
        lanes = hidden_TD, rows_T, positions_T, greedy
        return self._lanes(*lanes, token_ids_BN is None, features_TF, slots_GT)

    def _forward_chunks(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        token_rows_T: torch.Tensor,
        rows_R: torch.Tensor,
        query_start_loc: torch.Tensor,
        sample_rows_R: torch.Tensor,
        read_blocks: int,
        greedy: bool,
        embeds_TD: torch.Tensor | None = None,
        embed_mask_T: torch.Tensor | None = None,
    ) -> Forward:
        """A prefill step; with `greedy`, it samples after the last token of each chunk."""
        state = self.state
        with operation("begin"):
            x_TD = self.model.embed(token_ids_T)
            if embeds_TD is not None and embed_mask_T is not None:
                x_TD = torch.where(embed_mask_T[:, None], embeds_TD.to(x_TD.dtype), x_TD)
                token_ids_T = token_ids_T.masked_fill(embed_mask_T, 0)
        slots_GT = write_index(state, self.block_size, positions_T, token_rows_T)
        batch = batch_of_slots(
            *(state, self.block_size, positions_T, slots_GT, token_rows_T, rows_R, read_blocks),
            query_start_loc=query_start_loc,
            token_ids=token_ids_T,
        )
        hidden_TD, features_TF = self._hidden(x_TD, batch, True)
        with operation("last_tokens"):
            if self.hidden is not None:
                _copy_rows(hidden_TD, self.hidden, one_thread=self.ragged)
            # Rows of padding have no tokens; clamp their index, which can be -1.
            last_R = (query_start_loc[1:] - 1).clamp(min=0)
            if state.stored is not None:
                state.store_states(rows_R, positions_T[last_R], self.block_size)
            lanes = hidden_TD[last_R], sample_rows_R, positions_T[last_R], greedy
        return self._lanes(*lanes, True, features_TF, slots_GT)

    def _hidden(
        self, x_TD: torch.Tensor, batch: RaggedBatch, drafting: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the final hidden states, and if it is `drafting`, what the drafter reads."""
        if not (drafting and self._aux_layers):
            return self.model.decode(x_TD, self.arena, batch), None
        assert isinstance(self.model, Decoder), "drafters for other models are refused"
        return self.model.decode_with_aux_layers(x_TD, self.arena, batch, self._aux_layers)

    def _lanes(
        self,
        hidden_TD: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        greedy: bool,
        advance: bool = True,
        features_TF: torch.Tensor | None = None,
        slots_GT: torch.Tensor | None = None,
    ) -> Forward:
        """Compute logits, and with `greedy` sample; see `_greedy_tokens`."""
        logits_TV = self.model.own_logits(hidden_TD)
        tokens_T, lanes = None, (logits_TV, rows_T, positions_T)
        if greedy:
            tokens_T = self._greedy_tokens(*lanes, advance, self.model.vocabulary)
        return Forward(*lanes, tokens_T, features_TF, slots_GT)

    # Sampling.

    def _stored(self, forward: Forward) -> StepOutput:
        """Store the lanes of a forward pass, for a `sample` step."""
        masks, count = self._masks, len(forward.positions)
        logits, positions = masks.logits[:count], masks.positions[:count]
        with operation("outputs"):
            logits.copy_(forward.logits)
            masks.rows[:count].copy_(forward.rows)
            positions.copy_(forward.positions)
        return StepOutput(positions, logits, None)

    @property
    def _masks(self) -> MaskState:
        assert self.state.masks is not None, "these steps were made without token masks"
        return self.state.masks

    def _sampled(
        self,
        key: StepKey,
        forward: Forward,
        token_ids: torch.Tensor | None,
        mask_rows_T: torch.Tensor,
    ) -> StepOutput:
        """Sample the token of each lane, with its mask if the step has any.

        Without the `token_ids` of a verify step, each lane advances its row.
        """
        logits_TV, rows_T, positions_T, tokens_T, *_ = forward
        advance, masks = token_ids is None, None
        if not (key.full_sampler or key.masked):
            if tokens_T is None:
                lanes = logits_TV, rows_T, positions_T
                tokens_T = self._greedy_tokens(*lanes, advance, self.model.vocabulary)
            return StepOutput(tokens_T, logits_TV, None)
        if self.model.vocabulary is not None:
            with operation("sample"):
                logits_TV = self.model.vocabulary.gather(logits_TV)
        if key.masked:
            if self._sampler.takes_masks:
                masks = LaneMasks(self._masks.bits, mask_rows_T)
            else:  # one compiled version of the sampler serves both cases
                logits_TV = self._compiled.get("mask", self._masked_logits)(logits_TV, mask_rows_T)
        lanes = logits_TV, rows_T, positions_T
        if not key.full_sampler:
            tokens_T = self._compiled.get("greedy", self._greedy_tokens)(
                *lanes, advance, None, masks
            )
            return StepOutput(tokens_T, logits_TV, None)
        tokens: tuple[torch.Tensor, ...] = () if token_ids is None else (token_ids,)
        if token_ids is not None and self._sampler is torch_sampler:
            tokens = drafted_lanes(token_ids)
        details: SampleOutput = self._compiled.get("draw", self._drawn)(*lanes, masks, *tokens)
        return StepOutput(details.tokens, logits_TV, details)

    def _masked_logits(self, logits_BV: torch.Tensor, mask_rows_B: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary with the masks of their lanes."""
        with operation("mask"):
            return mask_logits(logits_BV, LaneMasks(self._masks.bits, mask_rows_B))

    def _greedy_tokens(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        advance: bool,
        vocabulary: ShardedVocabulary | None,
        masks: LaneMasks | None = None,
    ) -> torch.Tensor:
        """Return the most probable token of each lane, int64 `[T]`.

        With `advance` they become the newest tokens of the rows. The logits cover the whole
        vocabulary, or with `vocabulary` the rank's own tokens.
        """
        sampler = self._sampler
        with operation("greedy"):
            if vocabulary is not None:
                tokens_T = vocabulary.greedy(logits_TV, sampler.greedy)
            elif advance and sampler.stores:
                return sampler.greedy(logits_TV, masks, self._feedback(rows_T, positions_T))
            else:
                tokens_T = sampler.greedy(logits_TV, masks)
            if advance:
                self._feedback(rows_T, positions_T).store(tokens_T)
            return tokens_T

    def _drawn(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        masks: LaneMasks | None,
        *token_ids: torch.Tensor,
    ) -> SampleOutput:
        """Draw the token of each lane, which without `token_ids` advances its row."""
        sampler, lanes = self._sampler, (logits_TV, self.state.sampling, rows_T)
        with operation("sample"):
            if token_ids:
                return sampler.full(*lanes, positions_T + 1, masks, *token_ids)
            feedback = self._feedback(rows_T, positions_T)
            if sampler.stores:
                return sampler.full(*lanes, positions_T, masks, None, feedback)
            details = sampler.full(*lanes, positions_T + 1, masks)
            feedback.store(details.tokens)
            return details

    def _feedback(self, rows_T: torch.Tensor, positions_T: torch.Tensor) -> Feedback:
        return Feedback(rows_T, positions_T, self.state.token_ids, self.state.positions)


def _packed(output: StepOutput) -> StepOutput:
    """Put the details of an output on CUDA in one buffer, so that one copy transfers them."""
    if output.details is None or not output.logits.is_cuda:
        return output
    found = output.details
    details = SampleOutput.unpack(found.pack(), *found.top_ids.shape[-2:])
    return dataclasses.replace(output, tokens=details.tokens, details=details)
