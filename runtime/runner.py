"""Carries out a plan: writes what changed, launches the steps, reads their tokens back.

Nothing here waits for the device except `read`, and that waits for the tokens of one step only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch

from ..cache.arena import Arena
from ..graphs.buckets import (
    Buckets,
    default_row_buckets,
    default_token_buckets,
    default_width_buckets,
)
from ..graphs.buffers import StaticBuffers
from ..graphs.library import StepLibrary
from ..graphs.steps import CapturedStep, CompiledStep, CudaGraphCapturer, EagerStep, Step
from ..profiling import ranges
from .batch import Int64Array, StepInputs, write_decode_rows, write_prefill, write_table_updates
from .config import ResolvedConfig, max_prefill_rows
from .kernels import Kernels
from .models.decoder import Decoder
from .request import Request, TokenLogprobs
from .rows import RowState
from .scheduler import StepPlan, TableUpdate
from .step_functions import StepFunctions, StepKey, StepOutput

__all__ = ["Launch", "Runner", "Sampled", "StepSizes"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that a step sampled for a request."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Launch:
    """A step under way: who gets a token, and where the tokens will be."""

    number: int
    plan: StepPlan
    bucket: int
    """Rows of the decode step, or tokens of the prefill step where nobody decodes."""
    parts: tuple[tuple[Sequence[Request | None], StepOutput], ...]
    """The request of each lane (None: padding, or a chunk that does not sample) and the output,
    on the host or on its way there."""
    arrived: torch.cuda.Event | None
    """Recorded behind the copies to the host; None where the device is the host."""
    device_ns: int
    """What the launching thread itself worked as the device; 0 where that is another processor."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that steps are prepared for."""

    rows: Buckets
    tokens: Buckets
    read_blocks: Buckets

    @classmethod
    def choose(cls, config: ResolvedConfig, kernels: Kernels, prefill_tokens: int) -> StepSizes:
        """Choose the buckets; `prefill_tokens` is the largest chunk of a step."""
        user = config.user
        max_blocks_per_row = -(-config.max_model_len // user.block_size)
        return cls(
            rows=default_row_buckets(user.max_rows)
            if user.buckets is None
            else Buckets((*user.buckets, user.max_rows)),
            tokens=default_token_buckets(prefill_tokens),
            # Kernels that stop at a row's own length read no more for a wider table.
            read_blocks=Buckets([max_blocks_per_row])
            if kernels.bounded_by_length
            else default_width_buckets(max_blocks_per_row, user.block_size),
        )

    def keys(self) -> list[StepKey]:
        """Return the key of every step there will be."""
        variants = [(width, full) for width in self.read_blocks for full in (False, True)]
        return [
            *(StepKey("prefill", size, *variant) for size in self.tokens for variant in variants),
            *(StepKey("decode", size, *variant) for size in self.rows for variant in variants),
        ]

    def decode_key(self, rows: int, read_blocks: int, full_sampler: bool) -> StepKey:
        """Return the key of the smallest decode step that fits."""
        size = _fit(self.rows, rows)
        return StepKey("decode", size, _fit(self.read_blocks, read_blocks), full_sampler)

    def prefill_key(self, tokens: int, read_blocks: int, full_sampler: bool) -> StepKey:
        """Return the key of the smallest prefill step that fits."""
        size = _fit(self.tokens, tokens)
        return StepKey("prefill", size, _fit(self.read_blocks, read_blocks), full_sampler)


def _fit(buckets: Buckets, n: int) -> int:
    size = buckets.fit(n)
    assert size is not None, f"the plan has {n}, the largest bucket is {buckets.largest}"
    return size


class Runner:
    """Owns everything that lives on the device but the model: row state, inputs, steps."""

    def __init__(
        self, model: Decoder, config: ResolvedConfig, arena: Arena, prefill_tokens: int
    ) -> None:
        """Allocate buffers for steps of at most `prefill_tokens` prompt tokens."""
        user, device = config.user, config.device
        self.device = device
        self.block_size = user.block_size
        self.max_prefill_rows = max_prefill_rows(user.max_rows)
        max_blocks_per_row = -(-config.max_model_len // user.block_size)
        self.state = RowState.allocate(
            user.max_rows, max_blocks_per_row, model.config.vocab_size, device
        )
        self.null_row = self.state.null_row
        self.inputs = StaticBuffers.allocate(
            StepInputs[torch.Tensor],
            StepInputs.layout(
                max_rows=user.max_rows,
                prefill_tokens=prefill_tokens,
                prefill_rows=self.max_prefill_rows,
                # Every decoding row takes a block at most, and a prompt as many as it has.
                table_updates=user.max_rows + max_blocks_per_row,
            ),
            device,
        )
        self._host: StepInputs[Int64Array] = self.inputs.arrays(StepInputs[Int64Array])
        self._decode_rows: list[int] = []  # as last written
        self._arena = arena
        self._addresses = self.addresses()
        self.sizes = StepSizes.choose(config, model.kernels, prefill_tokens)
        bind = partial(
            StepFunctions, model, arena.tensor, user.block_size, self.state, self.inputs.device
        )
        compiled = config.mode == "compile" or (config.mode == "graph" and user.compile)
        self._functions = bind(compiled=compiled)
        self.library = _library(config, self._functions, bind(compiled=False), self.sizes.keys())

    @property
    def nbytes(self) -> int:
        """Bytes of row state and inputs."""
        return self.state.nbytes + self.inputs.nbytes

    def addresses(self) -> dict[str, int]:
        """Return the device address of everything that captured steps read or write."""
        return {
            "arena": self._arena.address,
            **{f"inputs.{k}": v for k, v in self.inputs.addresses().items()},
            **{f"state.{k}": v for k, v in self.state.addresses().items()},
        }

    def check_integrity(self) -> None:
        """Assert that no address has changed and that the null row is still nobody's."""
        assert self.addresses() == self._addresses, "a static tensor has moved"
        self.inputs.check_integrity()
        assert int(self.state.positions[self.null_row]) == 0
        assert not self.state.block_tables[self.null_row].any()

    def prepare(self, progress: Callable[[int, int, StepKey], None] | None = None) -> None:
        """Compile and capture every step before there is a request."""
        self.library.prepare(progress)

    def close(self) -> None:
        """Let go of all steps and of what was compiled for them."""
        self.library.close()
        self._functions.close()

    def launch(self, number: int, plan: StepPlan) -> Launch:
        """Start the step `number`; returns without waiting for it, unless the device is the host.

        Decoding goes first: nobody's next token waits for somebody's prompt.
        """
        with ranges.span(ranges.PREPARE, len(plan.admitted)):
            for admission in plan.admitted:
                self._take_row(admission.request, admission.row)
        self._bring_inputs(plan)
        parts: list[tuple[Sequence[Request | None], StepOutput]] = []
        started = time.perf_counter_ns()
        bucket = 0
        if plan.decode:
            key = self._decode_key(plan)
            bucket = key.size
            with ranges.span(ranges.REPLAY, len(plan.decode)):
                parts.append((plan.decode, self._outward(self.library.launch(key))))
            self.library.record_padding(len(plan.decode), key.size)
        if plan.prefill:
            key = self._prefill_key(plan)
            bucket = bucket or key.size
            with ranges.span(ranges.PREFILL, plan.prefill_tokens):
                output = self._outward(self.library.launch(key))
            self.library.record_padding(plan.prefill_tokens, key.size)
            parts.append(([c.request if c.samples else None for c in plan.prefill], output))
        worked = time.perf_counter_ns() - started
        if self.device.type == "cpu":
            return Launch(number, plan, bucket, tuple(parts), None, worked)
        arrived = torch.cuda.Event()
        arrived.record()
        return Launch(number, plan, bucket, tuple(parts), arrived, 0)

    def read(self, launch: Launch) -> list[Sampled]:
        """Return the tokens of a launch; waits for them, and for nothing after them."""
        if launch.arrived is not None:
            launch.arrived.synchronize()
        sampled: list[Sampled] = []
        for lanes, output in launch.parts:
            tokens: list[int] = output.tokens.tolist()
            for lane, request in enumerate(lanes):
                if request is not None:
                    details = _logprobs(request, output, lane)
                    sampled.append(Sampled(request, tokens[lane], details))
        return sampled

    def _outward(self, output: StepOutput) -> StepOutput:
        """Send an output on its way to the host, before another launch can overwrite it."""
        return output if self.device.type == "cpu" else _to_host(output)

    def force_token(self, row: int, token_id: int) -> None:
        """Put another token in the place of the one that was sampled last for a row."""
        self.state.token_ids[row] = token_id

    def _take_row(self, request: Request, row: int) -> None:
        """Write the sampling parameters of a request over those of the row's last owner."""
        self.state.sampling.write_row(
            row,
            request.params,
            seed=request.seed,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
            stop_token_ids=sorted(request.stop_token_ids),
        )

    def _bring_inputs(self, plan: StepPlan) -> None:
        """Write what changed into the mirror and copy it over, or do nothing if nothing changed."""
        rows = [request.row for request in plan.decode if request.row is not None]
        assert len(rows) == len(plan.decode), "a request that decodes holds a row"
        updates = plan.table_updates
        if not (updates or plan.prefill or rows != self._decode_rows):
            return
        most = self._host.table_updates.shape[0]
        while len(updates) > most:
            self._copy_updates(updates[:most])
            updates = updates[most:]
        with ranges.span(ranges.PREPARE, len(rows)):
            self.inputs.begin_write()
            if rows != self._decode_rows:
                write_decode_rows(rows, self.null_row, self._host)
                self._decode_rows = rows
            if plan.prefill:
                bucket = self._prefill_key(plan).size
                write_prefill(plan.prefill, self.null_row, bucket, self._host)
        if updates:
            self._copy_updates(updates)
        else:
            self._copy()

    def _copy_updates(self, updates: Sequence[TableUpdate]) -> None:
        self.inputs.begin_write()
        write_table_updates(updates, self.null_row, self._host)
        self._copy()
        self.state.update_tables(self.inputs.device.table_updates)

    def _copy(self) -> None:
        with ranges.span(ranges.COPY, self.inputs.nbytes):
            self.inputs.copy_to_device()

    def _decode_key(self, plan: StepPlan) -> StepKey:
        longest = max(request.num_computed for request in plan.decode) + 1
        full = any(request.params.needs_full_sampler for request in plan.decode)
        return self.sizes.decode_key(len(plan.decode), -(-longest // self.block_size), full)

    def _prefill_key(self, plan: StepPlan) -> StepKey:
        longest = max(chunk.start + chunk.count for chunk in plan.prefill)
        full = any(chunk.request.params.needs_full_sampler for chunk in plan.prefill)
        return self.sizes.prefill_key(plan.prefill_tokens, -(-longest // self.block_size), full)


def _library(
    config: ResolvedConfig,
    functions: StepFunctions,
    eager: StepFunctions,
    keys: Sequence[StepKey],
) -> StepLibrary[StepKey, StepOutput]:
    """Return the unprepared library of the mode. A key it lacks runs as plain PyTorch code."""
    capturer = CudaGraphCapturer(config.device) if config.mode == "graph" else None

    def make_step(key: StepKey) -> Step[StepOutput]:
        if config.mode == "eager":
            return EagerStep(eager.bind(key), str(key))
        if capturer is None:
            return CompiledStep(functions.bind(key), str(key))
        return CapturedStep(functions.bind(key), str(key), capturer)

    def make_fallback(key: StepKey) -> Step[StepOutput]:
        return EagerStep(eager.bind(key), str(key))

    return StepLibrary(make_step, keys, lambda key: key.size, make_fallback)


def _to_host(output: StepOutput) -> StepOutput:
    """Return the output on its way into pinned memory.

    The copies stand in the stream before the next launch: captured steps share their memory, so
    any of them may overwrite the outputs of another. The host memory comes from torch's cache of
    pinned memory, which gives a piece out again only after the copies into it are done.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    details = output.details
    if details is not None:
        details = type(details)(**{f.name: copy(getattr(details, f.name)) for f in fields(details)})
    return StepOutput(copy(output.tokens), output.logits, details)


def _logprobs(request: Request, output: StepOutput, lane: int) -> TokenLogprobs | None:
    """Return what `SamplingParams.logprobs` asks for, of one lane."""
    count = request.params.logprobs
    if count is None:
        return None
    assert output.details is not None, "log-probabilities come from the full sampler"
    ids = output.details.top_ids[lane, :count].tolist()
    values = output.details.top_logprobs[lane, :count].tolist()
    return TokenLogprobs(
        token_id=int(output.details.tokens[lane]),
        logprob=float(output.details.logprob[lane]),
        top=dict(zip(ids, values, strict=True)),
    )
