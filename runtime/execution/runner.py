"""Executes plans: writes changed inputs, launches steps, reads their tokens back.

Only `read` waits for a step. Writing inputs waits until the previous copy of inputs has been made.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from ...cache.arena import Arena, CopyKind, HostArena, StateMemory
from ...cache.blocks import NULL_BLOCK
from ...cache.row_states import Copies
from ...cache.spec import LayerGroup
from ...graphs.steps import CudaGraphCapturer, Step, StepLibrary
from ...profiling import ranges
from ..distributed.rank_group import RankGroup
from ..errors import RankError
from ..kernels.cpu import threads as operator_threads
from ..models.drafters.drafter import Drafter
from ..models.resolved_config import ResolvedConfig
from ..models.transformers.decoder import DecoderModel
from ..progress import progress_bar
from ..request import Request
from ..sampling.sampling_state import RowParameters
from ..sampling_params import MAX_LOGPROBS
from ..scheduling.plan import Admission, StepPlan, TableUpdate
from .inputs import DeviceRows, InputWriter, PrefillChunk
from .outputs import (
    HostOutputs,
    LaunchedStep,
    PromptScorer,
    Sampled,
    prompt_scores,
    proposed_drafts,
    report_token_ids,
    sampled_tokens,
)
from .step_functions import DraftStep, StepFunctions
from .step_key import PlannedPart, StepKey, StepOutput, StepSizes
from .token_masks import TokenMasks

if TYPE_CHECKING:
    from ..kernels.triton.precompile import CompiledKernels

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class DrafterCache:
    """The drafter of an engine, and arenas of its own for the keys and values it stores.

    A block id means the same block in both arenas: whatever happens to a block of the target's
    cache (shared, copied, swapped, freed) happens to the drafter's too.
    """

    drafter: Drafter
    arena: Arena
    host: HostArena | None
    """For swapped requests; None: no swapping."""
    group: int
    """The layer group of the target whose block tables it uses."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks, in all layers, so that nothing of their last request is left."""
        pinned = self.arena.tensor.is_cuda  # see `Arena.copy_blocks`
        ids = torch.tensor(blocks, pin_memory=pinned)
        self.arena.tensor.index_fill_(2, ids.to(self.arena.tensor.device, non_blocking=True), 0)


class BlockCopies:
    """Copies blocks of preempted and admitted requests, in the cache and in a drafter's, on all
    ranks: within the device, to the host and back.

    Blocks that rows get are zeroed in the cache of a drafter, before the drafter or a copy reads
    them next: while the drafter is paused, decode steps do not pay for it.
    """

    def __init__(
        self,
        arena: Arena,
        host: HostArena | None,
        drafter: DrafterCache | None,
        states: StateMemory | None,
        send: Callable[..., None],
    ) -> None:
        """Copy blocks of these arenas; see `Runner`. `send`: to the other ranks, on rank 0."""
        self.states = states
        self.arenas = [(arena, host)]
        """Each with the arena for swapped requests; None: no swapping."""
        if drafter is not None:
            self.arenas.append((drafter.arena, drafter.host))
        self._drafter, self._send = drafter, send
        self._new: dict[int, None] = {}
        """Blocks to be zeroed in the cache of the drafter."""

    def add_new(self, plan: StepPlan, group: int, block_size: int) -> None:
        """Note the blocks of a layer group that a plan gives to rows and that hold nothing yet."""
        kept = {admission.row: admission.found.num_tokens for admission in plan.admitted}
        self._new |= {
            update.block: None
            for update in plan.table_updates
            if update.group == group
            and update.block != NULL_BLOCK
            and update.column * block_size >= kept.get(update.row, 0)
        }

    def zero_new(self) -> None:
        """Issue the zeroing of all blocks noted, on all ranks."""
        if self._new:
            blocks = list(self._new)
            self._new.clear()
            self._send("clear_drafter", blocks)
            self.clear_drafter(blocks)

    def clear_drafter(self, blocks: Sequence[int]) -> None:
        """Zero blocks of the drafter's cache on this rank."""
        assert self._drafter is not None, "steps propose nothing"
        self._drafter.clear(blocks)

    def swap_out(self, plan: StepPlan) -> None:
        """Issue the copies of preempted requests to the host, before any write to the blocks."""
        self._copy_all("to_host", [preemption.swap_out for preemption in plan.preempted])

    def copy_in(self, plan: StepPlan) -> None:
        """Issue the copies for admitted requests: forked blocks, and blocks from the host."""
        self._copy_all("within", [admission.found.copies for admission in plan.admitted])
        self._copy_all("from_host", [admission.found.swap_in for admission in plan.admitted])

    def _copy_all(self, kind: CopyKind, copies: Iterable[Copies | None]) -> None:
        merged = Copies.none()
        for each in copies:
            if each is not None:
                for pairs, own in zip(merged, each, strict=True):
                    pairs.extend(own)
        if merged.total:
            name = ranges.FORK if kind == "within" else ranges.SWAP
            with ranges.span(name, merged.total):
                self.zero_new()
                self._send("copy_blocks", kind, merged)
                self.copy(kind, merged)

    def copy(self, kind: CopyKind, copies: Copies) -> None:
        """Issue the copies on this rank."""
        if self.states is not None:
            self.states.copy(kind, copies)
        pairs = copies.blocks
        for arena, host in self.arenas:
            if kind == "within":
                arena.copy_blocks(pairs)
                continue
            assert host is not None, "requests are swapped without a host arena"
            if kind == "to_host":
                host.swap_out(pairs)
            else:
                host.swap_in(pairs)


class RankPlan(NamedTuple):
    """What every rank runs of a plan, as plain data."""

    joined: list[tuple[int, int, int, RowParameters]]
    """Of each request that gets a row: the row, the rope length, the last column of recurrent state
    that is stored, and the sampling parameters."""
    rows: list[int]
    """The rows that decode."""
    table_updates: Sequence[TableUpdate]
    chunks: Sequence[PrefillChunk]
    decode_counts: Sequence[int]
    drafts: Sequence[Sequence[int]]
    draft_stops: Sequence[int]
    parts: list[PlannedPart]
    blocks_in_use: int


class PlanParts:
    """Chooses the smallest step for each part of a plan; keeps the decode part while it is valid.

    Plans are given in the order of their launches.
    """

    def __init__(self, sizes: StepSizes, *, ragged: bool, mixed: bool) -> None:
        """Choose from the steps of `sizes`.

        `ragged`: see `StepFunctions`. `mixed`: see `Runner`.
        """
        self._sizes, self._ragged, self._mixed = sizes, ragged, mixed
        self._requests: list[Request] = []
        self.decode_rows: list[int] = []
        """The rows that the last plan decodes, in their order."""
        self._full_sampler = self._masked = False
        self._longest: Request | None = None
        self._changed = False
        """Whether another row may be longest: in the step after a verify step, and while the host
        does not know how many tokens one has accepted."""
        self._part: PlannedPart | None = None

    def of(self, plan: StepPlan) -> list[PlannedPart]:
        """Return the parts in the order of their launch: decode, then prefill; or both in one."""
        decode, parts = plan.decode, []
        if decode is not self._requests:
            self._requests, self._changed = decode, True
            self.decode_rows = [request.row for request in decode if request.row is not None]
            assert len(self.decode_rows) == len(decode), "a request that decodes holds a row"
            self._full_sampler = any(request.params.needs_full_sampler for request in decode)
            self._masked = any(request.matcher is not None for request in decode)
        if self._changed:
            self._longest = max(decode, key=attrgetter("num_computed"), default=None)
            self._changed = any(request.num_unsure for request in decode)
            self._part = None
        if self._longest is not None:
            part, stop = self._part, self._longest.num_computed + 1
            if plan.decode_counts or plan.proposes:
                counts = plan.decode_counts or repeat(1)
                stop = max(r.num_computed + n for r, n in zip(decode, counts, strict=False))
                part, self._changed = None, True
            if part is None or stop > part.key.read_blocks * self._sizes.block_size:
                key = self._sizes.key(
                    *("decode", len(decode), stop, self._full_sampler),
                    max(plan.decode_counts, default=1),
                    drafts=plan.proposes,
                    masked=self._masked,
                )
                tokens, room = plan.decode_tokens, key.tokens_per_row * key.size
                if self._ragged:
                    room = tokens + key.size - len(decode)
                name = ranges.VERIFY if key.tokens_per_row > 1 or key.drafts else ranges.REPLAY
                part = self._part = PlannedPart(name, key, decode, tokens, room)
            parts.append(part)
        if chunks := plan.prefill:
            requests = [chunk.request if chunk.samples else None for chunk in chunks]
            tokens, stop = plan.prefill_tokens, max(chunk.start + chunk.count for chunk in chunks)
            full = any(chunk.request.params.needs_full_sampler for chunk in chunks)
            masked = any(c.samples and c.request.matcher is not None for c in chunks)
            if parts and self._mixed and not (plan.decode_counts or plan.proposes):
                assert self._longest is not None, "the longest row that decodes"
                requests, tokens = [*decode, *requests], len(decode) + tokens
                stop = max(stop, self._longest.num_computed + 1)
                full, masked = full or self._full_sampler, masked or self._masked
                parts = []
            key = self._sizes.key(
                *("prefill", tokens, stop, full), drafts=plan.prompt_drafts, masked=masked
            )
            room = tokens if self._ragged else key.size
            parts.append(PlannedPart(ranges.PREFILL, key, requests, tokens, room))
        return parts


def _on_all_ranks(
    method: Callable[Concatenate[Runner, P], T],
) -> Callable[Concatenate[Runner, P], T]:
    """Let calls on rank 0 run a method on the other ranks too."""

    @wraps(method)
    def call(self: Runner, /, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "messages have positional arguments"
        self.send(method.__name__, *arguments)
        return method(self, *arguments, **named)

    return call


# The launch of a step: its decode part, so that prefill does not delay its tokens, then the rest.
# The C++ operators of a CPU compute both in one forward pass, which reads the weights once, unless
# the step verifies drafts.
#
# Masks of step N, of rows whose output follows a grammar, need the tokens of step N-1:
#
#     CPU      masks   | N ......... |                 in a thread of their own
#              step    | forward N ........ | sample N |
#
#     CUDA     device  | sample N-1 | forward N ........ | sample N |
#              host    | launch forward N | commit N-1 | masks N | launch sample N | ...
#
# On a CPU these tokens are known before the step, which waits for the masks before it samples. On
# CUDA they arrive while the device runs the forward part of step N, so that one step stays in
# flight: the launch stops before the first part that needs masks, and `finish` runs the rest.


class Runner:
    """Owns the device state except the model: row state, inputs, steps."""

    times_device = False
    """Whether device events time the next steps, on a device that runs asynchronously: two timed
    events each, instead of one untimed event."""

    def __init__(
        self,
        model: DecoderModel,
        config: ResolvedConfig,
        arena: Arena,
        groups: Sequence[LayerGroup],
        host: HostArena | None = None,
        group: RankGroup | None = None,
        drafter: DrafterCache | None = None,
        states: StateMemory | None = None,
    ) -> None:
        """Allocate row state and input buffers of the sizes of `config`.

        Swapped requests go to the arena `host`. Without a `drafter`, steps propose nothing.
        `states` is the memory of recurrent state, if the model has any.
        """
        device = config.device
        self.device = device
        self.group = group
        self.state = DeviceRows.of(config, model.config, len(groups), device, states)
        self.null_row = self.state.null_row
        self._writer = InputWriter(
            config, len(self.state.block_tables), model.config.hidden_size, self.state
        )
        self.masks: TokenMasks | None = None
        if self.state.masks is not None:
            self.masks = TokenMasks(
                self.state.masks,
                self.null_row + 1,
                self._writer.write_drafts,
                group,
                is_async=config.is_async_device,
            )
        self.inputs, self.embeds = self._writer.inputs, self._writer.embeds
        self.drafts = self._writer.drafts
        self.scorer = PromptScorer(
            model, self.inputs.device.next_ids, max_num_seqs=config.user.max_num_seqs
        )
        self.threads = None if model.kernels.library is None else config.threads
        self.own_threads: AbstractContextManager[None] = ranges.NOTHING
        """Block in which torch uses no more threads than this rank has: others would spin on the
        cores of other ranks. Code of `torch.compile` keeps the number that it was compiled with."""
        if group is not None and group.rank == 0 and device.type == "cpu":
            self.own_threads = operator_threads.TorchThreads(config.threads)
        self.outputs: HostOutputs | None = None
        if config.is_async_device:
            sizes = HostOutputs.sizes(config, model.config.vocab_size)
            self.outputs = HostOutputs(sizes, device)
        self.arena = arena
        self.drafter = drafter
        # Not a method of the runner, which would be in a cycle and outlive its engine.
        send = (lambda *_: None) if group is None else group.send
        self.blocks = BlockCopies(arena, host, drafter, states, send)
        self._addresses = self.addresses()
        self.sizes = StepSizes.choose(config, model.kernels)
        make_functions = partial(
            StepFunctions,
            model,
            arena.tensor,
            config.user.block_size,
            self.state,
            self.inputs.device,
            None if self.embeds is None else self.embeds.device,
            drafts=None if self.drafts is None else self.drafts.device,
            hidden=self.scorer.hidden,
            drafting=None
            if drafter is None
            else DraftStep(
                drafter.drafter,
                drafter.arena.tensor,
                self.state,
                config.user.block_size,
                native=model.kernels.library is not None,
            ),
            masks_thread=None if config.is_async_device else self.masks,
        )
        self._keys = self.sizes.keys()
        self.functions = functions = make_functions(config.compiled)
        self._eager = eager = make_functions(False)
        self._capturer = capturer = CudaGraphCapturer(device) if config.mode == "graph" else None

        def make_step(key: StepKey) -> Step[StepOutput]:  # without a reference to the runner
            if config.mode == "eager":
                return Step("eager", eager.bind(key), str(key))
            if capturer is None:
                has_own_code = functions.has_own_code(key)
                return Step("compile" if has_own_code else "eager", functions.bind(key), str(key))
            identity = key.phase, key.size, key.full_sampler
            return Step("graph", functions.bind(key), str(key), capturer, identity)

        # Keys without a prepared step run as plain PyTorch.
        self.library = StepLibrary(make_step, self._keys, lambda key: key.size, eager.bind)
        self.mixed = functions.ragged and config.mixed_rows > 0
        """Whether one forward pass computes the decoding rows and the chunks of a step, unless the
        rows verify drafts."""
        self._parts = PlanParts(self.sizes, ragged=functions.ragged, mixed=self.mixed)
        self._launched: tuple[LaunchedStep, RankPlan] | None = None
        """A launch that is unfinished."""
        self._sent: RankPlan | None = None
        self._packed = b""

    @property
    def nbytes(self) -> int:
        """Bytes of row state, inputs and buffers for scoring."""
        return self.state.nbytes + self._writer.nbytes + self.scorer.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of host buffers for an asynchronous device: input mirrors and outputs."""
        outputs = 0 if self.outputs is None else self.outputs.nbytes
        masks = 0 if self.masks is None else self.masks.nbytes
        return self._writer.nbytes + outputs + masks

    @property
    def host_cache_nbytes(self) -> int:
        """Bytes of the arenas for swapped requests."""
        states = 0 if self.state.memory is None else self.state.memory.host_nbytes
        return states + sum(host.nbytes for _, host in self.blocks.arenas if host is not None)

    def addresses(self) -> dict[str, int]:
        """Return the address of everything that captured steps and copies read or write."""
        tensors = self.state.tensors() | {"hidden": self.scorer.hidden}
        found = self._writer.addresses() | {k: t.data_ptr() for k, t in tensors.items()}
        for number, (arena, host) in enumerate(self.blocks.arenas):
            found[f"arena {number}"] = arena.tensor.data_ptr()
            if host is not None:
                found[f"host arena {number}"] = host.address
        if self.state.memory is not None:
            found["snapshots"] = self.state.memory.snapshots.data_ptr()
            found["state inputs"] = self.state.memory.inputs.data_ptr()
        return found

    def check_integrity(self) -> None:
        """Assert that no address has changed and that the null row is unused."""
        assert self.addresses() == self._addresses, "a static tensor has moved"
        assert int(self.state.positions[self.null_row]) == 0
        assert not self.state.block_tables[:, self.null_row].any()

    def close(self) -> None:
        """Release all steps and their compiled code, the drafter and memory of the host."""
        drafter = None if self.drafter is None else self.drafter.drafter
        hosts = [self.state.memory, *(host for _, host in self.blocks.arenas)]
        for part in (self.masks, drafter, *hosts):
            if part is not None:
                part.close()
        self.library.close()
        self.functions.close()

    def compile_kernels(self, *, progress: bool = False) -> CompiledKernels:
        """Compile the Triton kernels of all steps in parallel, before they are prepared."""
        from ..kernels.triton.precompile import compile_kernels  # it needs triton

        # The plain PyTorch sampler has no Triton kernels, and run eagerly it exceeds the planned
        # memory of its compiled form.
        native = self._eager.model.kernels.sampler == "triton"
        needed = dict.fromkeys(
            key._replace(full_sampler=native and key.full_sampler) for key in self._keys
        )
        steps = [(str(key), self._eager.bind(key)) for key in needed]
        with progress_bar("compiling kernels", shown=progress) as report:
            if self._capturer is None:
                return compile_kernels(steps, report=report)
            # Libraries keep a workspace per stream, so use the stream that captures need anyway.
            compiled: list[CompiledKernels] = []
            self._capturer.warm_up(lambda: compiled.append(compile_kernels(steps, report=report)))
        return compiled[0]

    def send(self, name: str, *arguments: object) -> None:
        """Rank 0: let the other ranks, if there are any, call a method; see `follow`."""
        if self.group is not None and self.group.rank == 0:
            self.group.send(name, *arguments)

    @_on_all_ranks
    def run(self, key: StepKey) -> StepOutput:
        """Run the step for `key` on all ranks, without a plan; return its output."""
        if self.threads is not None:
            operator_threads.limit_threads(self.threads)
        with self.own_threads:
            return self.library.run(key)

    def launch(self, number: int, plan: StepPlan) -> LaunchedStep:
        """Launch step `number`; returns without waiting for it, except on a CPU.

        On an asynchronous device, a step with rows whose output follows a grammar is launched up
        to their masks; `finish` runs the rest.
        """
        if self.drafter is not None:
            if plan.table_updates:
                self.blocks.add_new(plan, self.drafter.group, self.sizes.block_size)
            if plan.prefill or plan.proposes:
                self.blocks.zero_new()
        parts = self._parts.of(plan)
        work = RankPlan(
            [*map(self._joined, plan.admitted)],
            self._parts.decode_rows,
            plan.table_updates,
            [PrefillChunk.of(span) for span in plan.prefill] if plan.prefill else (),
            plan.decode_counts,
            plan.drafts,
            plan.draft_stops,
            parts,
            plan.blocks_in_use,
        )
        if self.group is not None:
            changes = work.joined or work.chunks or work.table_updates
            is_steady, last = not (changes or work.decode_counts or work.draft_stops), self._sent
            # Packed once while rows only decode: such a plan has the same part.
            if not (
                is_steady
                and last is not None
                and parts[0] is last.parts[0]
                and work.blocks_in_use == last.blocks_in_use
            ):
                blind = [part._replace(requests=(None,) * len(part.requests)) for part in parts]
                self._packed = pickle.dumps(work._replace(parts=blind))
                self._sent = work if is_steady else None
            self.group.send("execute_packed", number, self._packed)
        return self.execute(number, work, plan)

    def execute_packed(self, number: int, packed: bytes) -> LaunchedStep:
        """Run the plan that rank 0 has packed, on another rank."""
        if packed != self._packed or self._sent is None:
            self._packed, self._sent = packed, pickle.loads(packed)
        assert self._sent is not None
        return self.execute(number, self._sent)

    def execute(self, number: int, work: RankPlan, plan: StepPlan | None = None) -> LaunchedStep:
        """Run the plan of a launch on this rank; see `launch`. Only rank 0 has the whole plan."""
        if self.threads is not None and self.threads != operator_threads.limit:
            operator_threads.limit_threads(self.threads)  # another engine has set its own
        if work.joined:
            with ranges.span(ranges.PREPARE, len(work.joined)):
                for *joined, parameters in work.joined:
                    self.state.take_row(*joined)
                    self.state.sampling.store_row(joined[0], parameters)
        parts, writer = work.parts, self._writer
        if work.table_updates or work.chunks or work.rows != writer.decode_rows:
            mixed = bool(work.rows and work.chunks) and len(parts) == 1
            size = parts[-1].key.size
            writer.write(work.rows, work.table_updates, work.chunks, size, mixed=mixed)
        if work.decode_counts or work.draft_stops:
            writer.write_drafts(work.decode_counts, work.drafts, work.draft_stops)
        runs: list[tuple[StepKey, PlannedPart]] = []
        outputs = self.outputs
        step = LaunchedStep(number, plan or StepPlan(), parts[0].key.size, unfinished=runs)
        self._launched = step, work
        for part in parts:
            if part.key.masked:
                step.masked = True
                runs += [(key, part) for key in self.sizes.parts(part.key)]
            else:
                runs.append((part.key, part))
        if outputs is not None:
            step.began = outputs.begin(number) if self.times_device else None
        elif step.masked:
            self._token_masks.prepare(step.plan)
        self._run_parts(step, work, with_masks=outputs is None)
        return step

    def finish(self, step: LaunchedStep) -> LaunchedStep:
        """Run the rest of a launch that is `unfinished`; all earlier steps have been committed."""
        self._token_masks.prepare(step.plan)
        self._token_masks.wait()
        self.run_rest()
        return step

    @_on_all_ranks
    def run_rest(self) -> None:
        """Run the rest of the last launch, whose masks have been written."""
        assert self._launched is not None
        step, work = self._launched
        assert step.unfinished, "the step was launched as a whole"
        self._run_parts(step, work, with_masks=True)

    def write_masks(self, *update: Any) -> None:
        """Write token masks that rank 0 has computed; see `TokenMasks.write`."""
        self._token_masks.write(*update)

    def _run_parts(self, step: LaunchedStep, work: RankPlan, *, with_masks: bool) -> None:
        """Run what remains of a launch, without masks up to the first part that needs them."""
        number, runs = step.number, step.unfinished
        outputs, clock, worked_ns = self.outputs, time.perf_counter_ns, 0
        while runs:
            key, part = runs[0]
            if key.phase == "sample" and not with_masks:
                return
            del runs[0]
            phase, requests, tokens = part.key.phase, part.requests, part.tokens
            is_cut = bool(runs) and runs[0][0].phase == "sample"
            if key.phase == "sample":
                span: AbstractContextManager[None] = nullcontext()
            else:
                rows, blocks = len(work.rows) if part is work.parts[0] else 0, work.blocks_in_use
                span = ranges.step_span(
                    *(part.name, number, rows, key.size, tokens, blocks, part.room - tokens)
                )
            with span:
                started = clock()
                with self.own_threads:
                    output = self.library.run(key)
                if not is_cut:
                    if output.details is not None:
                        report_token_ids(requests, output)
                    if outputs is not None:  # before another launch can overwrite it
                        output = outputs.copy_async(number, phase, output)
                    if phase == "prefill":
                        first = len(requests) - len(work.chunks)
                        step.scores = self.scorer.launch(work.chunks, first)
                        if step.scores is not None and outputs is not None:
                            step.scores = outputs.copy_async(number, "scores", step.scores)
                    step.parts.append((requests, output))
                    self.library.record_padding(tokens, part.room)
                worked_ns += clock() - started
        step.unfinished = self._launched = None  # it need not keep logits until the next launch
        if outputs is None:
            step.device_ns = worked_ns
        else:
            step.arrived = outputs.record_event(number, step.began)
        if step.masked:
            step.ends = self._token_masks.ends

    @property
    def _token_masks(self) -> TokenMasks:
        assert self.masks is not None, "this engine has no token masks"
        return self.masks

    def read(self, step: LaunchedStep) -> Iterable[Sampled]:
        """Wait for the tokens of a launch and return them. Later work is not waited for.

        Raises:
            RankError: a rank of the tensor-parallel group has failed.
        """
        group = self.group
        if group is not None:
            if step.arrived is not None:
                late = time.monotonic() + group.timeout
                while not step.arrived.query():  # a step whose peers have died may never end
                    group.check()
                    if time.monotonic() > late:
                        group.check_messages_taken()
                    time.sleep(0)  # releases the interpreter's lock, which `query` does not
            group.check_in(self.checked_tokens(step))
        elif step.arrived is not None:
            step.arrived.synchronize()
        if step.plan.decode_counts:
            accepted = step.parts[0][1].accepted
            assert accepted is not None, "the step verifies drafts"
            step.advanced = accepted[: len(step.plan.decode)].tolist()
        return sampled_tokens(step)

    def checked_tokens(self, step: LaunchedStep) -> bytes:
        """Return what ranks compare of a step whose outputs have arrived.

        Where rows keep their drafts on the device, each rank verifies its own: these are compared
        too. Otherwise all ranks verify the drafts that rank 0 sends.
        """
        found = b""
        for lanes, output in step.parts:
            found += output.tokens.numpy()[..., : len(lanes)].tobytes()
            if output.drafts is not None and self.state.drafts is not None:
                found += output.drafts.token_ids.numpy()[: len(lanes)].tobytes()
        return found

    read_drafts = staticmethod(proposed_drafts)
    read_scores = staticmethod(prompt_scores)

    @_on_all_ranks
    def force_token(self, row: int, token_id: int) -> None:
        """Replace the last sampled token of a row."""
        self.state.token_ids[row] = token_id

    def _joined(self, admission: Admission) -> tuple[int, int, int, RowParameters]:
        """Return what the row of an admitted request gets; see `RankPlan.joined`."""
        request = admission.request
        parameters = self.state.sampling.row_parameters(
            request.params,
            seed=request.seed,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
            stop_token_ids=sorted(request.stop_token_ids),
        )
        return admission.row, request.rope_length, admission.found.stored, parameters

    @_on_all_ranks
    def place_drafts(self, rows: int, drafts: int) -> None:
        """Give each of the first `rows` rows of verify steps this many drafts of token 0."""
        self._writer.write_drafts([1 + drafts] * rows, [[0] * drafts] * rows)

    @_on_all_ranks
    def score_largest_slice(self) -> None:
        """Score a whole slice of padding, which needs as much memory as scoring ever does."""
        self.scorer.run([0], self.scorer.slice_tokens, MAX_LOGPROBS)

    @_on_all_ranks
    def limit_waits(self, seconds: float) -> None:
        """Let no rank wait for another one longer than `seconds` from now on."""
        assert self.group is not None
        self.group.serve(seconds)

    @_on_all_ranks
    def place_padding(self, null_position: int, start: int, count: int, last: int) -> None:
        """Move the padding of steps, for measurements; zeros put it back.

        Args:
            null_position: position of the null row.
            start: position of the first padded token of prefill steps.
            count: tokens that get positions from `start` on; others get position 0.
            last: the largest position of these tokens.
        """
        self.state.positions[self.null_row] = null_position
        positions = self.inputs.device.positions.zero_()
        positions[:count] = torch.arange(start, start + count, device=self.device).clamp(max=last)


def follow(runner: Runner, reload: Callable[[str], None]) -> None:
    """Run on another rank what rank 0 runs, until it closes its engine.

    Raises:
        RankError: the group has failed, or this rank's tokens differ from rank 0's.
    """
    group, launched = runner.group, deque[LaunchedStep]()
    assert group is not None
    methods: dict[str, Callable[..., object]] = {
        "copy_blocks": runner.blocks.copy,
        "clear_drafter": runner.blocks.clear_drafter,
        "reload": reload,
    }
    while True:
        steps, checksum, (name, *arguments) = group.receive()
        runs = name == "execute_packed"
        # Rank 0 waits for this rank's part of the step, so earlier tokens are compared after it,
        # unless their buffers are written again.
        if runs and runner.outputs is None:
            launched.append(runner.execute_packed(*arguments))
        while group.steps < steps:  # rank 0 has read these
            step = launched.popleft()
            if step.arrived is not None:
                step.arrived.synchronize()
            group.check_in(runner.checked_tokens(step))
        if group.checksum != checksum:
            raise RankError(
                f"its tokens differ from rank 0's at step {steps}: checksum"
                f" {group.checksum:08x}, and {checksum:08x} on rank 0"
            )
        if name == "close":
            return
        if runs and runner.outputs is not None:
            launched.append(runner.execute_packed(*arguments))
        elif not runs:
            (methods.get(name) or getattr(runner, name))(*arguments)
