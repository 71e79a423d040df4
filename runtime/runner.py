"""Carries out a plan: writes what changed, launches the steps, reads their tokens back.

Nothing here waits for the device except `read`, and that waits for the tokens of one step only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..cache.arena import Arena, HostArena
from ..cache.spec import LayerGroup
from ..graphs.buffers import StaticBuffers
from ..graphs.library import StepLibrary
from ..graphs.steps import CapturedStep, CompiledStep, CudaGraphCapturer, EagerStep, Step
from ..profiling import ranges
from .batch import (
    EmbedInputs,
    Int64Array,
    StepInputs,
    write_decode_rows,
    write_embeds,
    write_prefill,
    write_table_updates,
)
from .config import ResolvedConfig, max_prefill_rows
from .launch import Launch, Sampled, sampled_tokens, to_host
from .models.decoder import Decoder
from .plan import StepPlan, TableUpdate
from .request import Request
from .rows import RowState
from .step_functions import StepFunctions, StepKey, StepOutput
from .step_sizes import StepSizes, most_table_updates

__all__ = ["Runner"]


class Runner:
    """Owns everything that lives on the device but the model: row state, inputs, steps."""

    def __init__(
        self,
        model: Decoder,
        config: ResolvedConfig,
        arena: Arena,
        groups: Sequence[LayerGroup],
        prefill_tokens: int,
        host: HostArena | None = None,
    ) -> None:
        """Allocate buffers for steps of at most `prefill_tokens` prompt tokens.

        `host` is where requests are swapped to, if they are.
        """
        user, device = config.user, config.device
        self.device = device
        self.block_size = user.block_size
        self.max_prefill_rows = max_prefill_rows(user.max_rows)
        max_blocks_per_row = -(-config.max_model_len // user.block_size)
        self.state = RowState.allocate(
            user.max_rows, len(groups), max_blocks_per_row, model.config.vocab_size, device
        )
        self.null_row = self.state.null_row
        self.inputs = StaticBuffers.allocate(
            StepInputs[torch.Tensor],
            StepInputs.layout(
                max_rows=user.max_rows,
                prefill_tokens=prefill_tokens,
                prefill_rows=self.max_prefill_rows,
                table_updates=most_table_updates(config, len(groups)),
            ),
            device,
        )
        self._host: StepInputs[Int64Array] = self.inputs.arrays(StepInputs[Int64Array])
        self.embeds: StaticBuffers[EmbedInputs[torch.Tensor]] | None = None
        if user.prompt_embeds:
            self.embeds = StaticBuffers.allocate(
                EmbedInputs[torch.Tensor],
                EmbedInputs.layout(
                    prefill_tokens=prefill_tokens, hidden_size=model.config.hidden_size
                ),
                device,
            )
        self._embeds_shown = False  # by the last prefill step
        self._decode_rows: list[int] = []  # as last written
        self._arena = arena
        self.host_arena = host
        self._addresses = self.addresses()
        self.sizes = StepSizes.choose(config, model.kernels, prefill_tokens)
        bind = partial(
            StepFunctions,
            model,
            arena.tensor,
            user.block_size,
            self.state,
            self.inputs.device,
            None if self.embeds is None else self.embeds.device,
        )
        compiled = config.mode == "compile" or (config.mode == "graph" and user.compile)
        self._functions = bind(compiled=compiled)
        self.library = _library(config, self._functions, bind(compiled=False), self.sizes.keys())

    @property
    def num_blocks(self) -> int:
        """Blocks of the arena, null block included."""
        return self._arena.tensor.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of row state and inputs."""
        embeds = 0 if self.embeds is None else self.embeds.nbytes
        return self.state.nbytes + self.inputs.nbytes + embeds

    def addresses(self) -> dict[str, int]:
        """Return the device address of everything that captured steps read or write."""
        return {
            "arena": self._arena.address,
            **({} if self.host_arena is None else {"host arena": self.host_arena.address}),
            **{f"inputs.{k}": v for k, v in self.inputs.addresses().items()},
            **{f"state.{k}": v for k, v in self.state.addresses().items()},
            **(
                {}
                if self.embeds is None
                else {f"embeds.{k}": v for k, v in self.embeds.addresses().items()}
            ),
        }

    def check_integrity(self) -> None:
        """Assert that no address has changed and that the null row is still nobody's."""
        assert self.addresses() == self._addresses, "a static tensor has moved"
        self.inputs.check_integrity()
        assert int(self.state.positions[self.null_row]) == 0
        assert not self.state.block_tables[:, self.null_row].any()

    def prepare(self, progress: Callable[[int, int, StepKey], None] | None = None) -> None:
        """Compile and capture every step before there is a request."""
        self.library.prepare(progress)

    def close(self) -> None:
        """Let go of all steps and of what was compiled for them."""
        self.library.close()
        self._functions.close()

    def swap_out(self, plan: StepPlan) -> None:
        """Queue the copies of preempted requests to the host; before anything writes blocks."""
        pairs = [pair for preemption in plan.preempted for pair in preemption.swap_out or ()]
        if pairs:
            assert self.host_arena is not None, "requests are swapped without a host arena"
            with ranges.span(ranges.SWAP, len(pairs)):
                self.host_arena.swap_out(pairs)

    def copy_in(self, plan: StepPlan) -> None:
        """Queue the copies that admitted requests begin with: a batch of blocks, and the host's."""
        copies = [pair for admission in plan.admitted for pair in admission.found.copies]
        if copies:
            with ranges.span(ranges.FORK, len(copies)):
                self._arena.copy_blocks(copies)
        pairs = [pair for admission in plan.admitted for pair in admission.found.swap_in]
        if pairs:
            assert self.host_arena is not None, "requests are swapped without a host arena"
            with ranges.span(ranges.SWAP, len(pairs)):
                self.host_arena.swap_in(pairs)

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
            return Launch(number, plan, bucket, started, tuple(parts), None, worked)
        arrived = torch.cuda.Event()
        arrived.record()
        return Launch(number, plan, bucket, started, tuple(parts), arrived, 0)

    def read(self, launch: Launch) -> list[Sampled]:
        """Return the tokens of a launch; waits for them, and for nothing after them."""
        if launch.arrived is not None:
            launch.arrived.synchronize()
        return sampled_tokens(launch)

    def _outward(self, output: StepOutput) -> StepOutput:
        """Send an output on its way to the host, before another launch can overwrite it."""
        return output if self.device.type == "cpu" else to_host(output)

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
                self._bring_embeds(plan)
        if updates:
            self._copy_updates(updates)
        else:
            self._copy()

    def _bring_embeds(self, plan: StepPlan) -> None:
        """Copy over the embeddings that chunks show, or that none does after some did."""
        if self.embeds is None:
            return
        shown = any(chunk.request.embeds for chunk in plan.prefill)
        if shown or self._embeds_shown:
            self.embeds.begin_write()
            write_embeds(plan.prefill, self.embeds.host)
            self.embeds.copy_to_device()
        self._embeds_shown = shown

    def _copy_updates(self, updates: Sequence[TableUpdate]) -> None:
        self.inputs.begin_write()
        write_table_updates(updates, self._host)
        self._copy()
        self.state.update_tables(self.inputs.device.table_updates[: len(updates)])

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
            return CompiledStep(functions.bind(key), str(key), compiles=functions.compiles)
        return CapturedStep(functions.bind(key), str(key), capturer)

    def make_fallback(key: StepKey) -> Step[StepOutput]:
        return EagerStep(eager.bind(key), str(key))

    return StepLibrary(make_step, keys, lambda key: key.size, make_fallback)
