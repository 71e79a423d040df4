"""The computation of a step, as callables over tensors with fixed addresses.

The only host input of a decode step is the list of its rows. Newest tokens, positions and block
tables are state on the device. The step derives the write index from them, and writes the sampled
tokens back.

    decode   rows -> token, position -> slot -> forward -> sample -> token, position + 1
    verify   rows, drafts -> newest token and drafts -> slots -> forward -> sample at each of them
             -> accept the drafts that were sampled too -> token, position + 1 + accepted
             -> with a drafter: new drafts
    prefill  chunk -> slot -> forward -> sample at the last token of each chunk -> token, position

A step with token masks waits for these before it samples: the host computes them during the
forward pass. On a device that runs asynchronously it has two parts, between which the host copies
the masks:

    forward  as decode, verify or prefill, up to logits and positions, which it stores
    sample   stored logits, masks of the rows -> sample -> as above

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch

from ...graphs.compilation import StepCompilationError
from ..bounded_repr import bounded_text
from ..kernels import RaggedBatch
from ..kernels.cpu.drafted import (
    VerifyInputs,
    accept_drafts,
    drafted_inputs,
    verify_inputs,
)
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
from ..sampling.reference_sampler import drafted_lanes, sample_lanes
from ..sampling.sample_output import SampleOutput
from ..sampling.samplers import SAMPLERS, torch_sampler
from .inputs import DraftInputs, EmbedInputs, MaskState, RowState, StepInputs
from .step_key import StepKey, StepOutput
from .token_masks import TokenMasks

__all__ = [
    "CompiledParts",
    "DraftStep",
    "StepFunctions",
    "batch_of_slots",
    "compile_settings",
    "on_device",
    "ragged_batch",
]


# Where the tokens of a step read and write, from the state of their rows.


def ragged_batch(
    state: RowState,
    block_size: int,
    positions_T: torch.Tensor,
    token_rows_T: torch.Tensor,
    rows_R: torch.Tensor,
    read_blocks: int,
    *,
    tokens_per_row: int | None = None,
    query_start_loc: torch.Tensor | None = None,
    valid_T: torch.Tensor | None = None,
) -> RaggedBatch:
    """Return the batch of these tokens, with its write index; see `RaggedBatch` for the shapes.

    Token at position 37 of row 2, blocks of 16: it is written to slot
    `block_tables[group, 2, 37 // 16] * 16 + 37 % 16` in each layer group. Tokens that are not
    `valid_T` write to the null block.
    """
    block_tables = state.block_tables
    with operation("begin"):
        blocks_GT = block_tables[:, token_rows_T, positions_T // block_size]
        slots_GT = blocks_GT.to(torch.int64) * block_size + positions_T % block_size
        if valid_T is not None:
            slots_GT = torch.where(valid_T, slots_GT, 0)
        return batch_of_slots(
            *(state, block_size, positions_T, slots_GT, token_rows_T, rows_R, read_blocks),
            tokens_per_row=tokens_per_row,
            query_start_loc=query_start_loc,
        )


def batch_of_slots(
    state: RowState,
    block_size: int,
    positions_T: torch.Tensor,
    slots_GT: torch.Tensor,
    token_rows_T: torch.Tensor,
    rows_R: torch.Tensor,
    read_blocks: int,
    *,
    tokens_per_row: int | None = None,
    query_start_loc: torch.Tensor | None = None,
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


class CompiledParts:
    """Compiled code of methods by name; other methods run as they are."""

    def __init__(self, static: Iterable[torch.Tensor]) -> None:
        """`static`: tensors that the parts use and whose addresses and sizes never change."""
        self._static = tuple(static)
        self._compiled: dict[str, Callable[..., Any]] = {}

    def add(self, part: Callable[..., Any], *, few_tokens: bool = False) -> None:
        """Compile a bound method at its first call.

        With `few_tokens`, and on a CPU with few threads, its elementwise code runs in the calling
        thread: OpenMP's threads wait for each other after each loop, which takes longer than the
        work of few tokens, and many times as long where another process has their core.
        """
        for tensor in self._static:
            torch._dynamo.mark_static_address(tensor)
            # torch lets the sizes of other inputs vary.
            torch._dynamo.mark_static(tensor)
        few_threads = torch.get_num_threads() <= _FEW_THREADS
        self._compiled[part.__name__] = torch.compile(
            _own_code(part),
            fullgraph=True,
            dynamic=True,
            options={
                "guard_filter_fn": _guards_of_arguments,
                **({"cpp.threads": 1} if few_tokens or few_threads else {}),
            },
        )

    def compiles(self, part: Callable[..., Any]) -> bool:
        """Whether a part is compiled."""
        return part.__name__ in self._compiled

    def inputs(self, part: Callable[..., Any], *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the inputs of a part, as copies if it is compiled."""
        if not self.compiles(part):
            return tensors
        with operation("inputs"):
            return [tensor.clone() for tensor in tensors]

    def call(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part, or its compiled code within one profiler scope.

        Raises:
            StepCompilationError: the code cannot be compiled as one graph; names the line.
        """
        compiled = self._compiled.get(part.__name__)
        if compiled is None:
            return part(*arguments)
        with operation("compiled"):
            try:
                return compiled(*arguments)
            except RuntimeError as error:
                if not isinstance(error, torch._dynamo.exc.Unsupported):
                    raise
                refusal = _refusal(error)
        raise refusal

    def close(self) -> None:
        """Release compiled code, which references the object of the methods."""
        self._compiled, self._static = {}, ()


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
    with _one_at_a_time:
        before = floats.specialize_float, sizes.use_duck_shape
        floats.specialize_float, sizes.use_duck_shape = True, False
        try:
            yield
        finally:
            floats.specialize_float, sizes.use_duck_shape = before


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
        state: RowState,
        block_size: int,
        *,
        native: bool = False,
    ) -> None:
        """Bind the tensors.

        Args:
            drafter: proposes tokens.
            arena: of the drafter.
            state: of the rows, which a step has advanced when it proposes.
            block_size: slots of a block.
            native: whether the C++ operators of the CPU are loaded.
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
        self,
        rows_B: torch.Tensor,
        stops_B: torch.Tensor,
        key: StepKey,
        first: int,
        count: int,
    ) -> RaggedBatch:
        """See `NewestTokens.batch`. Positions without a slot read as the last one that has one."""
        if self._native:
            state, size = self._state, self._block_size
            inputs = drafted_inputs(
                *(rows_B, state.positions, stops_B, state.block_tables, size, first, count)
            )
            return batch_of_slots(
                *(state, size, inputs.positions, inputs.slots, inputs.token_rows, rows_B),
                key.read_blocks,
                tokens_per_row=count,
            )
        newest_B = self._state.positions[rows_B]
        offsets_N = torch.arange(first, first + count, device=rows_B.device)
        positions_BN = newest_B[:, None] + offsets_N
        valid_BN = (positions_BN >= 0) & (positions_BN < stops_B[:, None])
        positions_BN = torch.minimum(positions_BN, stops_B[:, None] - 1).clamp(min=0)
        return ragged_batch(
            self._state,
            self._block_size,
            positions_BN.flatten(),
            rows_B[:, None].expand(-1, count).contiguous().flatten(),
            rows_B,
            key.read_blocks,
            tokens_per_row=count,
            valid_T=valid_BN.flatten(),
        )

    def after_prefill(
        self,
        inputs: StepInputs[torch.Tensor],
        key: StepKey,
        sampled_P: torch.Tensor,
        features_TF: torch.Tensor | None,
        *,
        ragged: bool,
    ) -> Drafts | None:
        """Let the drafter follow the chunks of a prefill step, which has sampled these tokens.

        With `key.drafts`, return drafts of the rows that sample; other rows have 0.
        Where steps are `ragged`, there are none of padding.
        """
        with operation("draft"):
            size, samples_P = key.size, inputs.sample_rows != self._state.null_row
            last_P = (inputs.query_start_loc[1:] - 1).clamp(min=0)
            # The next token of rows that sample is 0 so far.
            new_P = torch.where(samples_P, sampled_P.clamp(min=0), 0)
            next_ids_T = inputs.next_ids[:size].index_add(0, last_P, new_P)
            batch = ragged_batch(
                self._state,
                self._block_size,
                inputs.positions[:size],
                inputs.token_rows[:size],
                inputs.prefill_rows,
                key.read_blocks,
                query_start_loc=inputs.query_start_loc,
            )
            token_ids_T = inputs.token_ids[:size]
            tokens = FollowedTokens(token_ids_T, next_ids_T, features_TF, batch, of_prompts=True)
        if not key.drafts:
            with operation("draft"):
                self._drafter.follow(tokens, self._arena)
            return None
        count = len(inputs.prefill_rows)
        if ragged:
            count = int((inputs.prefill_rows != self._state.null_row).sum())
        first_P = inputs.query_start_loc[:count].clamp(max=key.size - 1)
        rows_P = inputs.sample_rows[:count]
        drafts = self.propose(key, tokens, rows_P, first_P, inputs.draft_stops[:count])
        # The null row's drafts depend on which of its tokens was written last.
        unused_P1 = (rows_P == self._state.null_row)[:, None]
        return Drafts(drafts.token_ids.masked_fill(unused_P1, 0), drafts.probabilities)


# The steps.


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Forward(NamedTuple):
    """A forward pass and, in a greedy step, its tokens. B: lanes, which sample a token each.

    A verify step has a lane for each of its tokens, row by row.
    """

    logits: torch.Tensor
    """`[B, vocab_size]`, or the columns of the rank's own tokens."""
    positions: torch.Tensor
    """int64 `[B]`: the positions after which tokens are sampled."""
    tokens: torch.Tensor | None = None
    """int64 `[B]`: greedy tokens; None: not sampled yet."""
    features: torch.Tensor | None = None
    """`[T, F]`: the hidden states that the drafter reads, of all tokens of the step."""
    rows: torch.Tensor | None = None
    """int64 `[B]`: the rows that sample; the null row for padding."""
    token_ids: torch.Tensor | None = None
    """int64 `[rows, tokens per row]`, or `[B]` without padding: the tokens of a verify step. None:
    each lane advances its row by the token that it samples."""
    slots: torch.Tensor | None = None
    """int64 `[G, B]`: the write index of a verify step."""
    mask_rows: torch.Tensor | None = None
    """int64 `[B]`: the row of each lane's mask in `MaskState.bits`; None: steps have no masks."""


_NO_TOKEN = -2

"""Differs from every token, and from `NON_FINITE`."""


class StepFunctions:
    """The steps of one model over one arena and one set of buffers.

    Each step reads its inputs, runs the model, samples, and advances its rows. `ragged` steps do so
    on the C++ operators of a CPU without padding between rows. Other steps pad: `_forward` computes
    logits, and in greedy steps tokens; what samples and advances rows follows.
    """

    def __init__(
        self,
        model: DecoderModel,
        arena: torch.Tensor,
        block_size: int,
        state: RowState,
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
        `drafting` proposes them on the device. Whole steps with token masks let `masks_thread`
        compute these.
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
        """Whether decode and verify steps have no padding between rows: on the C++ operators, whose
        sizes are not captured."""
        self._drafting = drafting
        self._aux_layers = () if drafting is None else drafting.aux_layers
        self._masks_thread = masks_thread
        self._sampler = SAMPLERS[model.kernels.sampler]
        lanes = len(inputs.decode_rows)
        self._no_drafts = inputs.decode_rows.new_zeros((lanes, 0))
        self._ones = inputs.decode_rows.new_ones(lanes)
        static = (arena, *state.tensors().values(), *(() if hidden is None else (hidden,)))
        self._parts = CompiledParts(static)
        if not compiled:
            return
        if model.stack is None:
            if model.kernels.sampler == "triton":
                self._sampler = SAMPLERS["torch"]  # torch.compile cannot trace Triton launches
            self._parts.add(self._decode_parts, few_tokens=True)
            self._parts.add(self._prefill_parts)
            if drafts is not None:
                self._parts.add(self._verify_parts)
        if self._sampler is torch_sampler:
            self._parts.add(self._drawn if drafts is None else self._drawn_lanes)
            if state.masks is not None:
                self._parts.add(self._masked_logits)
                self._parts.add(self._greedy_tokens)

    def close(self) -> None:
        """Release compiled code, which references this object."""
        self._parts.close()

    def has_own_code(self, key: StepKey) -> bool:
        """Whether a step may compile what the same step without masks does not."""
        return not (key.masked and self._sampler.takes_masks)

    def bind(self, key: StepKey) -> Callable[[], StepOutput]:
        """Return the step of a key as a callable without arguments."""
        step: Callable[[StepKey], StepOutput] = self._padded
        if key.part == "sample":
            step = self._sample_part
        elif self.ragged and key.phase == "decode" and key.part == "whole":
            step = self._unpadded
        device, kernels = self.arena.device, self.model.kernels

        def run() -> StepOutput:
            with torch.inference_mode(False), torch.no_grad():
                return step(key)

        def run_kernels() -> StepOutput:
            with on_device(device), dependent_launch(kernels.dependent_launch):
                return run()

        return run_kernels if kernels.library is None else run

    # Steps with padding.

    def _padded(self, key: StepKey) -> StepOutput:
        """Run a decode, verify or prefill step, up to the logits if it is a forward part."""
        if key.masked and self._masks_thread is not None:
            self._masks_thread.start()
        forward = self._forward(key)
        if key.part == "forward":
            return self._forward_part(key, forward)
        if key.masked:
            if self._masks_thread is not None:
                self._masks_thread.wait()
            forward = self._with_masks(key, forward)
        output = self._advanced(key, forward)
        if key.phase == "prefill" and self._drafting is not None:
            drafts = self._drafting.after_prefill(
                self.inputs, key, output.tokens, forward.features, ragged=self.ragged
            )
            if key.drafts:
                return dataclasses.replace(output, drafts=drafts)
        return output

    def _forward_part(self, key: StepKey, forward: Forward) -> StepOutput:
        """Store the logits of a step; `_sample_part` continues."""
        masks = self._masks
        if key.phase == "prefill" and self._drafting is not None:
            # The drafter takes the most probable token for the one that the grammar will allow.
            assert forward.rows is not None
            lanes = forward.logits, forward.rows, forward.positions
            likely_P = self._greedy_tokens(*lanes, False, self.model.vocabulary)
            self._drafting.after_prefill(
                self.inputs, key, likely_P, forward.features, ragged=self.ragged
            )
        with operation("outputs"):
            masks.store(forward.logits, forward.positions)
        count = len(forward.positions)
        return StepOutput(masks.positions[:count], masks.logits[:count], None)

    def _sample_part(self, key: StepKey) -> StepOutput:
        """Sample from the logits of the last forward part, and update the rows' state."""
        lanes, masks, part = key.size * key.tokens_per_row, self._masks, self._masked_logits
        (logits_TV,) = self._parts.inputs(part, masks.logits[:lanes])
        forward = Forward(logits_TV, masks.positions[:lanes])
        return self._advanced(key, self._with_masks(key, forward))

    def _forward(self, key: StepKey) -> Forward:
        """Run a step up to the logits, or to greedy tokens."""
        parts = self._parts
        if key.phase == "prefill":
            return self._prefill_forward(key)
        if key.tokens_per_row > 1 or key.drafts:
            rows_B, drafts_BK, counts_B = self._drafts(key)
            token_ids_BN = self._with_newest(rows_B, drafts_BK)
            part = self._verify_parts
            rows_B, counts_B = parts.inputs(part, rows_B, counts_B)
            constants = key.read_blocks, self._greedy(part, key)
            verified: Forward = parts.call(part, rows_B, token_ids_BN, counts_B, *constants)
            return verified._replace(token_ids=token_ids_BN)
        rows_B = self.inputs.decode_rows[: key.size]
        state, greedy = self.state, self._greedy(self._decode_parts, key)
        if self.model.decode_step is not None:  # its kernels read the state of the rows
            hidden_BD, positions_B = self.model.decode_step(
                *(rows_B, state.token_ids, state.positions, state.block_tables),
                *(self.arena, key.read_blocks, self.block_size),
            )
            forward = self._with_logits(hidden_BD, rows_B, positions_B, greedy)
            if key.full_sampler and not self._sampler.full_step:
                rows_B = rows_B.clone()
            return forward._replace(rows=rows_B)
        (rows_B,) = parts.inputs(self._decode_parts, rows_B)
        decoded: Forward = parts.call(self._decode_parts, rows_B, key.read_blocks, greedy)
        return decoded._replace(rows=rows_B)

    def _prefill_forward(self, key: StepKey) -> Forward:
        inputs, size, part = self.inputs, key.size, self._prefill_parts
        tensors = self._parts.inputs(
            part,
            inputs.token_ids[:size],
            inputs.positions[:size],
            inputs.token_rows[:size],
            inputs.prefill_rows,
            inputs.query_start_loc,
            inputs.sample_rows,
        )
        embeds: Sequence[torch.Tensor] = ()
        if self.embeds is not None:
            given = self.embeds.embeds[:size], self.embeds.mask[:size]
            embeds = self._parts.inputs(part, *given)
        constants = key.read_blocks, self._greedy(part, key)
        forward: Forward = self._parts.call(part, *tensors, *constants, *embeds)
        return forward._replace(rows=tensors[-1])

    def _decode_parts(self, rows_B: torch.Tensor, read_blocks: int, greedy: bool) -> Forward:
        """A decode step of the rows `[B]`, int64; with `greedy`, it samples."""
        with operation("inputs"):
            positions_B, token_ids_B = self.state.positions[rows_B], self.state.token_ids[rows_B]
        batch = ragged_batch(
            *(self.state, self.block_size, positions_B, rows_B, rows_B, read_blocks),
            tokens_per_row=1,
        )
        with operation("begin"):
            x_BD = self.model.embed(token_ids_B)
        hidden_BD = self.model.decode(x_BD, self.arena, batch)
        return self._with_logits(hidden_BD, rows_B, positions_B, greedy)

    def _prefill_parts(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        token_rows_T: torch.Tensor,
        rows_R: torch.Tensor,
        query_start_loc: torch.Tensor,
        sample_rows_R: torch.Tensor,
        read_blocks: int,
        greedy: bool,
        *embeds: torch.Tensor,
    ) -> Forward:
        """A prefill step; with `greedy`, it samples after the last token of each chunk."""
        batch = ragged_batch(
            *(self.state, self.block_size, positions_T, token_rows_T, rows_R, read_blocks),
            query_start_loc=query_start_loc,
        )
        hidden_TD, features_TF = self._forward_pass(token_ids_T, batch, *embeds)
        with operation("last_tokens"):
            if self.hidden is not None:
                self.hidden[: hidden_TD.shape[0]].copy_(hidden_TD)
            # Rows of padding have no tokens; clamp their index, which can be -1.
            last_R = (query_start_loc[1:] - 1).clamp(min=0)
            hidden_RD, positions_R = hidden_TD[last_R], positions_T[last_R]
        forward = self._with_logits(hidden_RD, sample_rows_R, positions_R, greedy)
        return Forward(*forward[:3], features_TF)  # torch 2.11 cannot trace `_replace`

    def _verify_parts(
        self,
        rows_B: torch.Tensor,
        token_ids_BN: torch.Tensor,
        counts_B: torch.Tensor,
        read_blocks: int,
        greedy: bool,
    ) -> Forward:
        """A verify step. `counts_B` tokens of each row are valid: the newest one and its drafts.

        The other tokens, and rows of padding, write to the null block. They have the row's last
        position, so that they read only slots that the row reads.
        """
        state, n = self.state, token_ids_BN.shape[1]
        with operation("inputs"):
            step_N = torch.arange(n, device=rows_B.device)
            valid_BN = step_N < counts_B[:, None]
            steps_BN = torch.minimum(step_N, counts_B[:, None] - 1)
            positions_T = (state.positions[rows_B][:, None] + steps_BN).flatten()
            token_rows_BN = rows_B[:, None].expand(-1, n).contiguous()
        batch = ragged_batch(
            *(state, self.block_size, positions_T, token_rows_BN.flatten(), rows_B, read_blocks),
            tokens_per_row=n,
            valid_T=valid_BN.flatten(),
        )
        hidden_TD, features_TF = self._forward_pass(token_ids_BN.flatten(), batch)
        rows_T = torch.where(valid_BN, token_rows_BN, state.null_row).flatten()
        forward = self._with_logits(hidden_TD, rows_T, positions_T, greedy, advance=False)
        return Forward(*forward[:3], features_TF, rows_T, None, batch.slots)

    def _with_logits(
        self,
        hidden_TD: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        greedy: bool,
        *,
        advance: bool = True,
    ) -> Forward:
        """Compute logits, and with `greedy` sample; see `_greedy_tokens`."""
        logits_TV = self.model.own_logits(hidden_TD)
        tokens_T, lanes = None, (logits_TV, rows_T, positions_T)
        if greedy:
            tokens_T = self._greedy_tokens(*lanes, advance, self.model.vocabulary)
        return Forward(logits_TV, positions_T, tokens_T)

    def _greedy(self, part: Callable[..., object], key: StepKey) -> bool:
        """Whether a part samples greedy tokens; compiled ones always do, to be one version."""
        later = key.full_sampler or key.masked or key.part == "forward"
        return self._parts.compiles(part) or not later

    def _forward_pass(
        self,
        token_ids_T: torch.Tensor,
        batch: RaggedBatch,
        embeds_TD: torch.Tensor | None = None,
        embed_mask_T: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the final hidden states `[T, hidden_size]`, and what a drafter reads of them."""
        with operation("begin"):
            x_TD = self.model.embed(token_ids_T)
            if embeds_TD is not None and embed_mask_T is not None:
                x_TD = torch.where(embed_mask_T[:, None], embeds_TD.to(x_TD.dtype), x_TD)
        if not self._aux_layers:
            return self.model.decode(x_TD, self.arena, batch), None
        assert isinstance(self.model, Decoder), "drafters for other models are refused"
        return self.model.decode_with_aux_layers(x_TD, self.arena, batch, self._aux_layers)

    # Sampling.

    def _advanced(self, key: StepKey, forward: Forward) -> StepOutput:
        """Sample, and advance the rows of a step with padding by the tokens that they get.

        A verify step samples after the newest token of each row, and after each of its drafts. A
        draft is accepted if all drafts before it are, and if it is the token that is sampled in its
        place. So the accepted tokens, and the one sampled after them, are those that decode steps
        would sample one by one.
        """
        output = self._sample(key, forward)
        return (
            _packed(output) if forward.token_ids is None else self._accepted(key, forward, output)
        )

    def _sample(self, key: StepKey, forward: Forward) -> StepOutput:
        """Sample the token of each lane, which advances its row except in a verify step."""
        token_ids, tokens_T = forward.token_ids, forward.tokens
        advance = token_ids is None
        assert forward.rows is not None
        if not (key.full_sampler or key.masked):
            if tokens_T is None:
                lanes = forward.logits, forward.rows, forward.positions
                tokens_T = self._greedy_tokens(*lanes, advance, self.model.vocabulary)
            return StepOutput(tokens_T, forward.logits, None)
        logits_TV, masks = self._apply(forward.logits, forward.mask_rows)
        lanes = logits_TV, forward.rows, forward.positions
        if not key.full_sampler:
            tokens_T = self._parts.call(self._greedy_tokens, *lanes, advance, None, masks)
            return StepOutput(tokens_T, logits_TV, None)
        output: StepOutput = self._parts.call(self._drawn, *lanes, token_ids, masks)
        return output

    def _with_masks(self, key: StepKey, forward: Forward) -> Forward:
        """Return the lanes of a step whose masks are ready, without drafts that it has lost."""
        token_ids_BN, positions_T = None, forward.positions
        if key.tokens_per_row > 1:
            rows_B, drafts_BK, counts_B = self._drafts(key)
            token_ids_BN = self._with_newest(rows_B, drafts_BK)
            with operation("inputs"):
                step_N = torch.arange(key.tokens_per_row, device=rows_B.device)
                mask_rows_T = (rows_B[:, None] + self.state.token_ids.shape[0] * step_N).flatten()
                valid_BN = step_N < counts_B[:, None]
                rows_T = torch.where(valid_BN, rows_B[:, None], self.state.null_row).flatten()
        else:
            rows_T = self.inputs.decode_rows if key.phase == "decode" else self.inputs.sample_rows
            mask_rows_T = rows_T = rows_T[: len(positions_T)]
        lanes = self._parts.inputs(self._masked_logits, rows_T, positions_T, mask_rows_T)
        rows_T, positions_T, mask_rows_T = lanes
        return forward._replace(
            rows=rows_T, positions=positions_T, mask_rows=mask_rows_T, token_ids=token_ids_BN
        )

    def _masked_logits(self, logits_BV: torch.Tensor, mask_rows_B: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary with the masks of their lanes."""
        with operation("mask"):
            return mask_logits(logits_BV, LaneMasks(self._masks.bits, mask_rows_B))

    def _apply(
        self, logits_BV: torch.Tensor, mask_rows_B: torch.Tensor | None
    ) -> tuple[torch.Tensor, LaneMasks | None]:
        """Return the logits of the whole vocabulary, and the masks that the sampler is to apply.

        Samplers that cannot apply masks receive masked logits, so one compiled version serves both
        cases.
        """
        if self.model.vocabulary is not None:
            with operation("sample"):
                logits_BV = self.model.vocabulary.gather(logits_BV)
        if mask_rows_B is None:
            return logits_BV, None
        if self._sampler.takes_masks:
            return logits_BV, LaneMasks(self._masks.bits, mask_rows_B)
        masked_BV: torch.Tensor = self._parts.call(self._masked_logits, logits_BV, mask_rows_B)
        return masked_BV, None

    @property
    def _masks(self) -> MaskState:
        assert self.state.masks is not None, "these steps were made without token masks"
        return self.state.masks

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
        sampler, own = self._sampler, () if masks is None else (masks,)
        with operation("greedy"):
            if vocabulary is not None:
                tokens_T = vocabulary.greedy(logits_TV, sampler.greedy)
            elif advance and sampler.greedy_step is not None:
                return sampler.greedy_step(logits_TV, self._feedback(rows_T, positions_T), *own)
            else:
                tokens_T = sampler.greedy(logits_TV, *own)
            if advance:
                self._feedback(rows_T, positions_T).store(tokens_T)
            return tokens_T

    def _drawn(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        masks: LaneMasks | None = None,
    ) -> StepOutput:
        """Draw the token of each lane; without `token_ids` of a verify step, advance its row."""
        sampler, state, own = self._sampler, self.state.sampling, () if masks is None else (masks,)
        feedback = self._feedback(rows_T, positions_T)
        with operation("sample"):
            if token_ids is None and sampler.full_step is not None:
                details = sampler.full_step(logits_TV, state, feedback, *own)
                return StepOutput(details.tokens, logits_TV, details)
            if self._parts.compiles(self._drawn_lanes):
                tokens_BN = rows_T.new_zeros(len(rows_T), 1) if token_ids is None else token_ids
                tokens_TN = drafted_lanes(tokens_BN)
                arguments = logits_TV, rows_T, positions_T, *tokens_TN
                details = self._parts.call(self._drawn_lanes, *arguments)
            elif token_ids is None:
                details = sampler.full(logits_TV, state, rows_T, positions_T + 1, *own)
            else:
                lanes = rows_T, positions_T + 1, token_ids
                details = sampler.drafted(logits_TV, state, *lanes, *own)
            if token_ids is None:
                feedback.store(details.tokens)
            return StepOutput(details.tokens, logits_TV, details)

    def _feedback(self, rows_T: torch.Tensor, positions_T: torch.Tensor) -> Feedback:
        return Feedback(rows_T, positions_T, self.state.token_ids, self.state.positions)

    def _drawn_lanes(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        tokens_TN: torch.Tensor,
        place_T: torch.Tensor,
    ) -> SampleOutput:
        """Compiled code of the full sampler that steps with and without drafts share."""
        lanes = rows_T, positions_T + 1, tokens_TN, place_T
        return sample_lanes(logits_TV, self.state.sampling, *lanes)

    # Drafts.

    def _drafts(self, key: StepKey) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows of a verify step, their drafts and how many tokens are valid."""
        assert self.drafts is not None, "these steps were made without room for drafts"
        assert key.phase == "decode"
        size, drafts = key.size, self.drafts
        rows_B = self.inputs.decode_rows[:size]
        with operation("inputs"):
            sent_BK = drafts.token_ids[:size, : key.tokens_per_row - 1]
            return rows_B, self.state.chosen_drafts(rows_B, sent_BK), drafts.counts[:size]

    def _with_newest(self, rows_B: torch.Tensor, drafts_BK: torch.Tensor) -> torch.Tensor:
        """Return the tokens `[B, 1 + K]` of a verify step: the newest of each row and its drafts.

        Compiled parts get these rather than drafts: torch has a version for each size of 1, and so
        for a single draft.
        """
        with operation("inputs"):
            return torch.cat((self.state.token_ids[rows_B][:, None], drafts_BK), dim=1)

    def _accepted(self, key: StepKey, forward: Forward, output: StepOutput) -> StepOutput:
        """Advance the rows of a verify step by their accepted drafts and the token after them.

        Returns the output by position, and new drafts if the step proposes any.
        """
        assert self.drafts is not None, "these steps were made without room for drafts"
        assert forward.token_ids is not None
        shape, proposed, drafts_BK = (key.size, key.tokens_per_row), None, forward.token_ids[:, 1:]
        rows_B, counts_B = self.inputs.decode_rows[: key.size], self.drafts.counts[: key.size]
        with operation("accept"):
            tokens_BN = output.tokens.view(shape)
            number_K = torch.arange(1, 1 + drafts_BK.shape[1], device=rows_B.device)
            equal_BK = (tokens_BN[:, :-1] == drafts_BK) & (number_K < counts_B[:, None])
            self.state.accept(rows_B, tokens_BN, 1 + equal_BK.cumprod(dim=1).sum(dim=1))
        if key.drafts:
            assert forward.slots is not None
            token_rows_T = rows_B[:, None].expand(-1, key.tokens_per_row).contiguous().flatten()
            batch = batch_of_slots(
                *(self.state, self.block_size, forward.positions, forward.slots),
                *(token_rows_T, rows_B, key.read_blocks),
                tokens_per_row=key.tokens_per_row,
            )
            followed = forward.token_ids.flatten(), output.tokens, forward.features, batch
            first_B = torch.arange(key.size, device=rows_B.device) * key.tokens_per_row
            proposed = self._proposed(key, FollowedTokens(*followed), first_B)
        with operation("outputs"):
            logits_NBV = output.logits.unflatten(0, shape).transpose(0, 1)
            if output.details is None:
                return StepOutput(tokens_BN.T.contiguous(), logits_NBV, None, proposed)
            details = output.details.by_position(*shape)
            return _packed(StepOutput(details.tokens, logits_NBV, details, proposed))

    def _proposed(self, key: StepKey, tokens: FollowedTokens, first_B: torch.Tensor) -> Drafts:
        """Let the drafter continue the rows of a step; `first_B`: their first tokens.

        The rows have advanced already. They keep the drafts.
        """
        assert self._drafting is not None, "these steps were made without a drafter"
        assert self.drafts is not None, "a drafter needs room for its drafts"
        rows_B, stops_B = tokens.batch.rows, self.drafts.stops[: key.size]
        return self._drafting.propose(key, tokens, rows_B, first_B, stops_B)

    # Steps without padding between rows, see `kernels/cpu/drafted.py`.

    def _unpadded(self, key: StepKey) -> StepOutput:
        """Run a decode or verify step on the C++ operators of a CPU.

        Rows have as many tokens as drafts that they verify, and one more.
        """
        state, rows_B = self.state, self.inputs.decode_rows[: key.size]
        drafts_BK, counts_B = self._no_drafts[: key.size], self._ones[: key.size]
        verifies = key.tokens_per_row > 1 or key.drafts > 0
        if verifies:
            _, drafts_BK, counts_B = self._drafts(key)
        kept_B = counts_B
        if key.masked:
            counts_B = counts_B.clone()  # waiting for masks may take drafts out of the inputs
        with operation("inputs"):
            inputs = verify_inputs(
                *(rows_B, drafts_BK, counts_B, state.token_ids, state.positions),
                *(state.block_tables, self.block_size),
            )
            batch = batch_of_slots(
                *(state, self.block_size, inputs.positions, inputs.slots, inputs.token_rows),
                *(rows_B, key.read_blocks),
                query_start_loc=inputs.query_start_loc,
            )
        with operation("begin"):
            x_TD = self.model.embed(inputs.token_ids)
        if key.masked and self._masks_thread is not None:
            self._masks_thread.start()  # not earlier: the thread needs Python's lock to start
        features_TF = None
        if key.drafts and self._aux_layers:
            assert isinstance(self.model, Decoder), "drafters for other models are refused"
            hidden_TD, features_TF = self.model.decode_with_aux_layers(
                x_TD, self.arena, batch, self._aux_layers
            )
        else:
            hidden_TD = self.model.decode(x_TD, self.arena, batch)
        forward = Forward(
            *(self.model.own_logits(hidden_TD), inputs.positions, None, features_TF),
            *(inputs.token_rows, inputs.token_ids),
        )
        if key.masked:
            if self._masks_thread is not None:
                self._masks_thread.wait()
            with operation("inputs"):
                forward, drafts_BK = self._kept_lanes(forward, inputs, counts_B, kept_B, drafts_BK)
        output = self._sample(key, forward)
        with operation("accept"):
            lanes_NB = accept_drafts(
                output.tokens, rows_B, drafts_BK, counts_B, state.token_ids, state.positions
            )
        if not verifies:
            return output
        proposed = None
        if key.drafts:
            tokens = FollowedTokens(inputs.token_ids, output.tokens, features_TF, batch)
            proposed = self._proposed(key, tokens, lanes_NB[0])
        if output.details is None:
            return StepOutput(output.tokens.take(lanes_NB), output.logits, None, proposed)
        details = output.details.at(lanes_NB)
        return StepOutput(details.tokens, output.logits, details, proposed)

    def _kept_lanes(
        self,
        forward: Forward,
        inputs: VerifyInputs,
        counts_B: torch.Tensor,
        kept_B: torch.Tensor,
        drafts_BK: torch.Tensor,
    ) -> tuple[Forward, torch.Tensor]:
        """Return the lanes of a step whose masks are ready, and its drafts.

        Of `counts_B` tokens of each row `kept_B` are left. After the others the null row samples,
        and no token is equal to their drafts.
        """
        rows_T = inputs.token_rows
        if not drafts_BK.shape[1]:
            return forward._replace(mask_rows=rows_T), drafts_BK
        first_T = inputs.query_start_loc[:-1].repeat_interleave(counts_B)
        step_T = torch.arange(len(rows_T)) - first_T
        mask_rows_T = rows_T + self.state.token_ids.shape[0] * step_T
        kept_T = step_T < kept_B.repeat_interleave(counts_B)
        number_K = torch.arange(1, 1 + drafts_BK.shape[1])
        drafts_BK = torch.where(number_K < kept_B[:, None], drafts_BK, _NO_TOKEN)
        rows_T = torch.where(kept_T, rows_T, self.state.null_row)
        return forward._replace(rows=rows_T, mask_rows=mask_rows_T), drafts_BK


def _packed(output: StepOutput) -> StepOutput:
    """Put the details of an output on CUDA in one buffer, so that one copy transfers them."""
    if output.details is None or not output.logits.is_cuda:
        return output
    details = output.details.pack()
    return StepOutput(details.tokens, output.logits, details, output.drafts)
