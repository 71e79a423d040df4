"""What a step computes, as callables over tensors whose addresses never change.

The decode step takes nothing from the host but the list of its rows: newest tokens, positions and
block tables are state on the device, the write index is derived from them, and the sampled tokens
go back into the state.

    decode   rows -> token, position -> slot -> forward -> sample -> token, position + 1
    prefill  chunk -> slot -> forward -> sample at the last token of each chunk -> token, position

A step is two parts, the forward pass with the head, and the sampler. A part that kernels do as a
whole is called as it is: there is nothing left that a compiler could join, and calling compiled
code costs the checks of its guards. The others are compiled. Decode and prefill share them, so all
buckets run the same two pieces of code: compiled once for any number of tokens, and once more for
a single one, which torch specialises. For that, what they get must differ in nothing but its
length: inputs are small copies, since torch compiles anew for a view of another buffer, and for two
arguments that are the same tensor.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch

from .batch import EmbedInputs, StepInputs
from .kernels import DecodeStep
from .kernels.gpu.dependent import dependent_launch
from .models.decoder import AttentionInputs, Decoder
from .naming import operation
from .rows import RowState
from .sampling import SampleOutput, fused_sampler, torch_sampler

P = ParamSpec("P")
R = TypeVar("R")

_serial = itertools.count()

__all__ = ["StepFunctions", "StepKey", "StepOutput"]


@dataclass(frozen=True, slots=True)
class StepKey:
    """Every host scalar that a captured step froze."""

    phase: Literal["decode", "prefill"]
    size: int
    """The bucket: rows of a decode step, tokens of a prefill step."""
    read_blocks: int
    """Columns of the block tables that attention may read."""
    full_sampler: bool
    """Whether more than the greedy token is asked for by anybody in the step."""
    steps: int = 1
    """Decode steps that are run one after the other; 1 for a prefill step."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step leaves on the device, B = rows of a decode step, or chunks of a prefill step.

    A launch of several decode steps leaves tokens and details of each, `[steps, B]` for `[B]`.
    """

    tokens: torch.Tensor
    """int64 `[B]`: sampled tokens; those of padded lanes mean nothing."""
    logits: torch.Tensor
    """`[B, vocab_size]` in the model's dtype: what they were sampled from, in the last step."""
    details: SampleOutput | None
    """Log-probabilities, from the full sampler only."""


class StepFunctions:
    """The steps of one model over one arena and one set of buffers."""

    def __init__(
        self,
        model: Decoder,
        arena: torch.Tensor,
        block_size: int,
        state: RowState,
        inputs: StepInputs[torch.Tensor],
        embeds: EmbedInputs[torch.Tensor] | None,
        compiled: bool,
    ) -> None:
        """Bind the tensors; with `compiled`, parts are compiled at their first call.

        `embeds` are read by prefill steps, where prompts may have embeddings.
        """
        self.model = model
        self.arena = arena
        self.block_size = block_size
        self.state = state
        self.inputs = inputs
        self.embeds = embeds
        fused_sampling = model.kernels.fused_sampling
        self._sampler = fused_sampler if fused_sampling else torch_sampler
        self._compiled: dict[str, Callable[..., Any]] = {}
        if compiled and model.stack is None:
            self._compile(self._forward_pass)
        if compiled and not fused_sampling:
            self._compile(self._greedy)
            self._compile(self._full)

    @property
    def compiles(self) -> bool:
        """Whether parts of the steps are compiled; until `close`."""
        return bool(self._compiled)

    def _compile(self, part: Callable[..., Any]) -> None:
        for tensor in (self.arena, *self.state.tensors().values()):
            torch._dynamo.mark_static_address(tensor)
        code = torch.compile(_own_code(part), fullgraph=True, dynamic=True)
        self._compiled[part.__name__] = code

    def bind(self, key: StepKey) -> Callable[[], StepOutput]:
        """Return the step of a key as a callable without arguments."""
        step = self.decode if key.phase == "decode" else self.prefill

        def run() -> StepOutput:
            with (
                _current(self.arena.device),
                dependent_launch(self.model.kernels.dependent_launch),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                return step(key)

        return run

    def decode(self, key: StepKey) -> StepOutput:
        """One token for each of `decode_rows`, or `key.steps`, each from the one before it.

        A step takes nothing from the host but the rows, so several are the same as one after the
        other by several launches.
        """
        if key.steps == 1:
            return self._decode_step(key)
        tokens: list[torch.Tensor] = []
        details: list[SampleOutput] = []
        for _ in range(key.steps):
            output = self._decode_step(key)
            tokens.append(output.tokens)
            if output.details is not None:
                details.append(output.details)
        with operation("outputs"):
            stacked = SampleOutput.stack(details) if details else None
            if stacked is None:
                return StepOutput(torch.stack(tokens), output.logits, None)
            return StepOutput(stacked.tokens, output.logits, stacked)

    def _decode_step(self, key: StepKey) -> StepOutput:
        if self.model.decode_step is not None:
            return self._decode_fused(self.model.decode_step, key)
        with operation("inputs"):
            rows = self.inputs.decode_rows[: key.size].clone()
            positions = self.state.positions[rows]
            token_ids, table_rows = self.state.token_ids[rows], rows.clone()
        hidden = self._forward(token_ids, positions, rows, table_rows, key.read_blocks)
        return self._sample(key, self.model.logits(hidden), rows, positions)

    def _decode_fused(self, decode_step: DecodeStep, key: StepKey) -> StepOutput:
        """As `_decode_step`, by kernels that begin with the state and, if greedy, end with it."""
        state, rows_B = self.state, self.inputs.decode_rows[: key.size]
        result = decode_step.run(
            rows_B,
            state.token_ids,
            state.positions,
            state.block_tables,
            self.arena,
            key.read_blocks,
            self.block_size,
        )
        if key.full_sampler:
            with operation("inputs"):
                rows_B = rows_B.clone()
            return self._sample(key, result.logits, rows_B, result.positions)
        tokens = decode_step.pick(result, rows_B, state.token_ids, state.positions)
        return StepOutput(tokens, result.logits, None)

    def prefill(self, key: StepKey) -> StepOutput:
        """The keys and values of the chunks, and a token for each chunk that samples."""
        inputs, size = self.inputs, key.size
        with operation("inputs"):
            token_ids, positions = inputs.token_ids[:size].clone(), inputs.positions[:size].clone()
            token_rows, rows = inputs.token_rows[:size].clone(), inputs.prefill_rows.clone()
            embeds = self._embeds(size)
        hidden = self._forward(token_ids, positions, token_rows, rows, key.read_blocks, *embeds)
        with operation("last_tokens"):
            last, sample_rows = inputs.sample_index, inputs.sample_rows.clone()
            hidden, positions = hidden[last], positions[last]
        return self._sample(key, self.model.logits(hidden), sample_rows, positions)

    def _embeds(self, size: int) -> tuple[torch.Tensor, ...]:
        """Return embeddings and mask of a prefill step, or nothing where there are never any."""
        if self.embeds is None:
            return ()
        return self.embeds.embeds[:size].clone(), self.embeds.mask[:size].clone()

    def _forward(self, *arguments: Any) -> torch.Tensor:
        """Run `_forward_pass`, or what it was compiled to, which has no scopes of its own."""
        compiled = self._compiled.get(self._forward_pass.__name__)
        if compiled is None:
            return self._forward_pass(*arguments)
        with operation("forward"):
            hidden: torch.Tensor = compiled(*arguments)
            return hidden

    def _forward_pass(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        token_rows_T: torch.Tensor,
        rows_R: torch.Tensor,
        read_blocks: int,
        embeds_TD: torch.Tensor | None = None,
        embed_mask_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the final hidden states `[T, hidden_size]`.

        Token at position 37 of row 2, blocks of 16: it is written to slot
        `block_tables[group, 2, 37 // 16] * 16 + 37 % 16` in each layer group.
        """
        block_tables = self.state.block_tables
        with operation("begin"):
            blocks_GT = block_tables[:, token_rows_T, positions_T // self.block_size]
            slots_GT = blocks_GT.to(torch.int64) * self.block_size + positions_T % self.block_size
            x_TD = self.model.embed(token_ids_T)
            if embeds_TD is not None and embed_mask_T is not None:
                x_TD = torch.where(embed_mask_T[:, None], embeds_TD.to(x_TD.dtype), x_TD)
        inputs = AttentionInputs(
            positions=positions_T,
            slots=slots_GT,
            token_rows=token_rows_T,
            rows=rows_R,
            block_tables=block_tables,
            read_blocks=read_blocks,
            block_size=self.block_size,
        )
        return self.model.decode(x_TD, self.arena, inputs)

    def _sample(
        self,
        key: StepKey,
        logits_BV: torch.Tensor,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
    ) -> StepOutput:
        sampler = self._part(self._full if key.full_sampler else self._greedy)
        with operation("sample" if key.full_sampler else "greedy"):
            return sampler(logits_BV, rows_B, positions_B)

    def _part(self, part: Callable[P, R]) -> Callable[P, R]:
        """Return a part of a step, compiled if there is a compiled one."""
        return self._compiled.get(part.__name__, part)

    def close(self) -> None:
        """Let go of compiled code, which refers back to this object."""
        self._compiled = {}

    def _greedy(
        self, logits_BV: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor
    ) -> StepOutput:
        tokens = self._sampler.greedy(logits_BV)
        self._feed_back(tokens, rows_B, positions_B + 1)
        return StepOutput(tokens, logits_BV, None)

    def _full(
        self, logits_BV: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor
    ) -> StepOutput:
        details = self._sampler.full(logits_BV, self.state.sampling, rows_B, positions_B + 1)
        self._feed_back(details.tokens, rows_B, positions_B + 1)
        return StepOutput(details.tokens, logits_BV, details)

    def _feed_back(
        self, tokens_B: torch.Tensor, rows_B: torch.Tensor, positions_B: torch.Tensor
    ) -> None:
        """Make the sampled tokens the rows' newest. The null row stays at position 0 for ever."""
        state = self.state
        positions_B = torch.where(rows_B == state.null_row, 0, positions_B)
        state.token_ids.index_put_((rows_B,), tokens_B)
        state.positions.index_put_((rows_B,), positions_B)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _own_code(bound: Callable[..., Any]) -> MethodType:
    """Return the method with a code object of its own.

    torch keeps what it compiled with the code object, and stops compiling after a few times: the
    engines of a process would use up each other's share, and hold on to each other's code.
    """
    method = cast(MethodType, bound)
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_serial)}")
    own = FunctionType(
        code, function.__globals__, argdefs=function.__defaults__, closure=function.__closure__
    )
    return MethodType(own, method.__self__)
