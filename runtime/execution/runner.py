"""Executes plans: writes changed inputs, launches steps, reads their tokens back.

Only `read` waits for a step. Writing inputs waits until the previous copy of inputs has been made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter

import torch

from ...cache.arena import Arena, HostArena
from ...cache.spec import LayerGroup
from ...profiling import ranges
from ..errors import RankError
from ..kernels.cpu.threads import TorchThreads, limit_threads
from ..models.decoder_model import DecoderModel
from ..models.plan import plan_of
from ..request import Request
from ..resolved_config import ResolvedConfig
from ..sampling.sampling_state import RowParameters
from ..scheduling.plan import StepPlan
from .draft_step import DraftStep
from .drafter_cache import DrafterCache, new_blocks
from .host_masks import FollowedMasks, HostMasks
from .input_writer import InputWriter
from .mask_state import MaskSizes
from .outputs import (
    OUTPUT_SETS,
    HostOutputs,
    LaunchedStep,
    Proposed,
    Sampled,
    accepted_counts,
    checked_tokens,
    proposed_drafts,
    sampled_tokens,
)
from .prepared_steps import PreparedSteps
from .prompt_scorer import PromptScorer, Score
from .rank_commands import BlockCopy, CommandSender
from .row_state import RowState
from .step_functions import StepFunctions
from .step_key import StepKey, StepOutput
from .step_launch import PlannedPart, StepLaunch
from .step_sizes import StepSizes
from .token_masks import TokenMasks

__all__ = ["Runner"]


class Runner:
    """Owns the device state except the model: row state, inputs, steps."""

    def __init__(
        self,
        model: DecoderModel,
        config: ResolvedConfig,
        arena: Arena,
        groups: Sequence[LayerGroup],
        host: HostArena | None = None,
        commands: CommandSender | None = None,
        drafter: DrafterCache | None = None,
    ) -> None:
        """Allocate row state and input buffers of the sizes of `config`.

        Args:
            model: what steps run.
            config: of the engine.
            arena: the cache.
            groups: its layer groups.
            host: the arena for swapped requests; None: no swapping.
            commands: sends all changes and steps to the other ranks of a tensor-parallel group;
                None: there are none, or this is one of them.
            drafter: proposes tokens on the device; None: steps propose nothing.
        """
        device = config.device
        self.device = device
        self.commands = commands
        self._collectives = model.kernels.collectives
        self.block_size = config.block_size
        self.max_prefill_rows = config.max_prefill_rows
        self.state = RowState.allocate(
            config.max_num_seqs,
            len(groups),
            config.max_blocks_per_row,
            model.config.vocab_size,
            device,
            rope_by_length=plan_of(model.config).rope_by_length,
            masked=MaskSizes.of(config, model.config),
            drafts=config.kept_drafts,
        )
        self.masks: TokenMasks | None = None
        self.followed_masks: FollowedMasks | None = None
        """Those of a rank above 0."""
        self._host_masks: HostMasks | None = None
        if self.state.masks is not None:
            self._host_masks = host_masks = HostMasks(
                self.state.masks, self.state.null_row + 1, is_async=config.is_async_device
            )
            if model.vocabulary is not None and commands is None:
                self.followed_masks = FollowedMasks(host_masks)
            else:
                self.masks = TokenMasks(
                    host_masks,
                    lambda drafts: self._writer.write_drafts(drafts, ()),
                    commands,
                    in_thread=not config.is_async_device,
                )
        self.null_row = self.state.null_row
        self.scorer = PromptScorer(
            model,
            prefill_tokens=config.prefill_chunk,
            max_num_seqs=config.max_num_seqs,
            host_sets=OUTPUT_SETS if config.is_async_device else 0,
            commands=commands,
        )
        self._writer = InputWriter(
            config, len(groups), model.config.hidden_size, self.state, self.scorer, commands
        )
        self.inputs, self.embeds = self._writer.inputs, self._writer.embeds
        self.drafts = self._writer.drafts
        self.threads = None if model.kernels.library is None else config.threads
        self.own_threads: TorchThreads | None = None
        """Block in which torch uses no more threads than this rank has: others would spin on the
        cores of other ranks. Code of `torch.compile` keeps the number that it was compiled with."""
        if commands is not None and device.type == "cpu":
            self.own_threads = TorchThreads(config.threads)
        self._decoding = _Decoding([])
        self.outputs: HostOutputs | None = None
        if config.is_async_device:
            self.outputs = HostOutputs(
                config.max_num_seqs,
                self.max_prefill_rows,
                model.config.vocab_size,
                max(config.steps_per_launch, *config.tokens_per_row, 1),
                drafts=config.proposed_drafts,
                device=device,
            )
        self._arena = arena
        self.host_arena = host
        self.drafter = drafter
        self._addresses = self.addresses()
        self.sizes = StepSizes.choose(config, model.kernels)
        make_functions = partial(
            StepFunctions,
            model,
            arena.tensor,
            config.block_size,
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
                config.block_size,
                native=model.kernels.library is not None,
            ),
            masks_thread=None if config.is_async_device else self.masks or self.followed_masks,
        )
        self.steps = PreparedSteps(config, self.sizes.keys(), make_functions)
        self.library = self.steps.library

    @property
    def num_blocks(self) -> int:
        """Blocks of the arena, null block included."""
        return self._arena.tensor.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of row state, inputs and buffers for scoring."""
        return self.state.nbytes + self._input_nbytes + self.scorer.nbytes

    @property
    def _input_nbytes(self) -> int:
        buffers = (self.inputs, self.embeds, self.drafts)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host buffers for an asynchronous device: input mirrors and outputs."""
        outputs = 0 if self.outputs is None else self.outputs.nbytes
        masks = 0 if self._host_masks is None else self._host_masks.nbytes
        return self._input_nbytes + outputs + masks + self.scorer.host_nbytes

    @property
    def host_cache_nbytes(self) -> int:
        """Bytes of the arenas for swapped requests."""
        own = 0 if self.host_arena is None else self.host_arena.nbytes
        return own if self.drafter is None else own + self.drafter.host_nbytes

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
            **(
                {}
                if self.drafts is None
                else {f"drafts.{k}": v for k, v in self.drafts.addresses().items()}
            ),
            **({} if self.drafter is None else self.drafter.addresses()),
            **self.scorer.addresses(),
        }

    def check_integrity(self) -> None:
        """Assert that no address has changed and that the null row is unused."""
        assert self.addresses() == self._addresses, "a static tensor has moved"
        self.inputs.check_integrity()
        assert int(self.state.positions[self.null_row]) == 0
        assert not self.state.block_tables[:, self.null_row].any()

    def close(self) -> None:
        """Release all steps and their compiled code."""
        if self.masks is not None:
            self.masks.close()
        if self.drafter is not None:
            self.drafter.close()
        self.steps.close()

    def swap_out(self, plan: StepPlan) -> None:
        """Issue the copies of preempted requests to the host, before any write to the blocks."""
        if not plan.preempted:
            return
        pairs = [pair for preemption in plan.preempted for pair in preemption.swap_out or ()]
        if pairs:
            with ranges.span(ranges.SWAP, len(pairs)):
                self.copy_blocks("to_host", pairs)

    def copy_in(self, plan: StepPlan) -> None:
        """Issue the copies for admitted requests: forked blocks, and blocks from the host."""
        if not plan.admitted:
            return
        copies = [pair for admission in plan.admitted for pair in admission.found.copies]
        if copies:
            with ranges.span(ranges.FORK, len(copies)):
                self.copy_blocks("within", copies)
        pairs = [pair for admission in plan.admitted for pair in admission.found.swap_in]
        if pairs:
            with ranges.span(ranges.SWAP, len(pairs)):
                self.copy_blocks("from_host", pairs)

    def copy_blocks(self, copy: BlockCopy, pairs: Sequence[tuple[int, int]]) -> None:
        """Issue the copies of (source, destination) blocks, on all ranks."""
        if self.commands is not None:
            self.commands.copy_blocks(copy, pairs)
        arenas = [(self._arena, self.host_arena)]
        if self.drafter is not None:
            arenas.append((self.drafter.arena, self.drafter.host))
        for arena, host in arenas:
            if copy == "within":
                arena.copy_blocks(pairs)
                continue
            assert host is not None, "requests are swapped without a host arena"
            if copy == "to_host":
                host.swap_out(pairs)
            else:
                host.swap_in(pairs)

    def clear_drafter(self, blocks: Sequence[int]) -> None:
        """Zero blocks of the drafter's cache, on all ranks."""
        if not blocks:
            return
        if self.commands is not None:
            self.commands.clear_drafter(blocks)
        assert self.drafter is not None, "steps propose nothing"
        self.drafter.clear(blocks)

    def run(self, key: StepKey, lanes: int = 0) -> StepOutput:
        """Run the step for `key` on all ranks, and return its output.

        Ranks compare the first `lanes` tokens; see `read`.
        """
        if self.commands is not None:
            awaits_masks = key.masked and self.masks is not None and self.masks.pending
            self.commands.run(key, lanes, awaits_masks=awaits_masks)
        if self.own_threads is None:
            return self.library.run(key)
        with self.own_threads:
            return self.library.run(key)

    def launch(self, number: int, plan: StepPlan) -> LaunchedStep:
        """Launch step `number`; returns without waiting for it, except on a CPU.

        On an asynchronous device, a step with rows whose output follows a grammar is launched up
        to their masks; `finish` runs the rest.
        """
        if self.threads is not None:
            limit_threads(self.threads)
        if plan.admitted:
            with ranges.span(ranges.PREPARE, len(plan.admitted)):
                for admission in plan.admitted:
                    self._take_row(admission.request, admission.row)
        prefill_key = self._prefill_key(plan) if plan.prefill else None
        if self.drafter is not None and plan.table_updates:
            self.clear_drafter(new_blocks(plan, self.drafter.group, self.block_size))
        self._write_inputs(plan, prefill_key)
        parts = []
        if plan.decode:
            key = self._verify_key(plan) if plan.drafting else self._decode_key(plan.steps)
            rows = len(plan.decode)
            name, tokens, room = ranges.REPLAY, plan.steps * rows, plan.steps * key.size
            if plan.drafting:
                name, tokens = ranges.VERIFY, plan.decode_tokens
                room = key.tokens_per_row * key.size
                if self.steps.functions.ragged:  # only rows are padded
                    room = tokens + key.size - rows
            parts.append(PlannedPart(name, key, plan.decode, tokens, room))
        if prefill_key is not None:
            requests = [chunk.request if chunk.samples else None for chunk in plan.prefill]
            tokens, room = plan.prefill_tokens, prefill_key.size
            parts.append(PlannedPart(ranges.PREFILL, prefill_key, requests, tokens, room))
        return StepLaunch(self, number, plan, parts).begin()

    def finish(self, step: LaunchedStep) -> LaunchedStep:
        """Run the rest of a launch that is `unfinished`; all earlier steps have been committed."""
        assert step.unfinished is not None, "the step was launched as a whole"
        return step.unfinished.finish(step)

    @property
    def times_device(self) -> bool:
        """Whether steps are timed by device events; always False on a CPU."""
        return self.outputs is not None and self.outputs.timed

    @times_device.setter
    def times_device(self, enabled: bool) -> None:
        if self.outputs is not None:
            self.outputs.timed = enabled

    def read(self, step: LaunchedStep) -> Iterable[Sampled]:
        """Wait for the tokens of a launch and return them. Later work is not waited for.

        Raises:
            RankError: a rank of the tensor-parallel group has failed.
        """
        if self.commands is not None:
            group = self.commands.group
            if step.arrived is not None:
                late = time.monotonic() + group.timeout
                while not step.arrived.query():  # a step whose peers have died may never end
                    group.check()
                    if time.monotonic() > late:
                        group.check_commands_taken()
                    time.sleep(0)  # releases the interpreter's lock, which `query` does not
                self.check_peers()
            for lanes, output in step.parts:
                group.check_in(self.checked_tokens(output, len(lanes)))
        elif step.arrived is not None:
            step.arrived.synchronize()
        if step.advanced is not None:
            step.advanced.extend(accepted_counts(step))
        return sampled_tokens(step)

    def checked_tokens(self, output: StepOutput, lanes: int) -> bytes:
        """Return what ranks compare of an output that has arrived, of the first `lanes` lanes."""
        return checked_tokens(output, lanes, keeps_drafts=self.state.drafts is not None)

    def check_peers(self) -> None:
        """Raise `RankError` if a kernel of an ended step waited in vain for another rank."""
        failure = getattr(self._collectives, "failure", None)
        if failure is not None:
            raise RankError(str(failure))

    def read_drafts(self, step: LaunchedStep) -> Proposed | None:
        """Return what a launch proposed for each row that decodes, after `read`; None: nothing."""
        return proposed_drafts(step)

    def read_scores(self, step: LaunchedStep) -> Iterable[Score]:
        """Return the scores of prompt tokens of a launch, after `read`."""
        return () if step.scores is None else step.scores.read()

    def copy_outputs(self, number: int, key: StepKey, output: StepOutput) -> StepOutput:
        """Issue the copy of an output to the host, before another launch can overwrite it."""
        return (
            output if self.outputs is None else self.outputs.copy_async(number, key.phase, output)
        )

    def force_token(self, row: int, token_id: int) -> None:
        """Replace the last sampled token of a row."""
        if self.commands is not None:
            self.commands.force_token(row, token_id)
        self.state.token_ids[row] = token_id

    def _take_row(self, request: Request, row: int) -> None:
        """Overwrite the row's sampling parameters and rope length with those of a request."""
        parameters = self.state.sampling.row_parameters(
            request.params,
            seed=request.seed,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
            stop_token_ids=sorted(request.stop_token_ids),
        )
        if self.commands is not None:
            self.commands.row(row, request.rope_length, parameters)
        self.assign_row(row, request.rope_length, parameters)

    def assign_row(self, row: int, rope_length: int, parameters: RowParameters) -> None:
        """Overwrite a row's sampling parameters and rope length, and forget its drafts."""
        self.state.forget_drafts(row)
        if self.state.rope_lengths is not None:
            self.state.rope_lengths[row] = rope_length
        self.state.sampling.store_row(row, parameters)

    def place_drafts(self, rows: int, drafts: int) -> None:
        """Let each of the first `rows` rows of verify steps have so many drafts of token 0."""
        self._writer.write_drafts([[0] * drafts] * rows, ())

    def place_padding(self, null_position: int, start: int, count: int, last: int) -> None:
        """Move the padding of steps, for measurements; zeros put it back.

        Args:
            null_position: position of the null row.
            start: position of the first padded token of prefill steps.
            count: tokens that get positions from `start` on; 0: all get position 0.
            last: the largest position of these tokens.
        """
        if self.commands is not None:
            self.commands.padding(null_position, start, count, last)
        self.state.positions[self.null_row] = null_position
        positions = self.inputs.device.positions
        if count:
            place = torch.arange(start, start + count, device=self.device)
            positions[:count] = place.clamp(max=last)
        else:
            positions.zero_()

    def _write_inputs(self, plan: StepPlan, prefill_key: StepKey | None) -> None:
        """Write changed inputs to the mirror and copy them to the device, if any changed."""
        rows = self._writer.decode_rows
        if plan.decode is self._decoding.requests:
            if self._decoding.changed:
                self._decoding.find_longest()
        else:
            rows = [request.row for request in plan.decode if request.row is not None]
            assert len(rows) == len(plan.decode), "a request that decodes holds a row"
            self._decoding = _Decoding(plan.decode)
        if plan.table_updates or plan.prefill or rows != self._writer.decode_rows:
            self._writer.write(plan, rows, prefill_key)
        if plan.drafting:
            self._writer.write_drafts(plan.drafts, plan.draft_stops)

    def _decode_key(self, steps: int) -> StepKey:
        """Return the key of the decode step: the last one while it is valid."""
        decoding = self._decoding
        assert decoding.longest is not None, "the plan has no decoding row"
        positions, key = decoding.longest.num_computed + steps, decoding.key
        if key is None or key.steps != steps or positions > key.read_blocks * self.block_size:
            read_blocks = -(-positions // self.block_size)
            key = decoding.key = self.sizes.decode_key(
                len(decoding.requests),
                read_blocks,
                decoding.full_sampler,
                steps,
                masked=decoding.masked,
            )
        return key

    def _verify_key(self, plan: StepPlan) -> StepKey:
        """Return the key of the verify step of a plan, after which another row may be longest."""
        decoding = self._decoding
        assert decoding.longest is not None, "the plan has no decoding row"
        counts = plan.decode_counts or repeat(1, len(plan.decode))
        stop = max(r.num_computed + n for r, n in zip(plan.decode, counts, strict=True))
        if plan.proposes:  # the newest token and all drafts may follow
            stop += 1 + plan.proposes
        stop = min(stop, self.state.block_tables.shape[2] * self.block_size)
        decoding.changed = True
        return self.sizes.decode_key(
            len(plan.decode),
            -(-stop // self.block_size),
            decoding.full_sampler,
            tokens_per_row=plan.tokens_per_row,
            drafts=plan.proposes,
            masked=decoding.masked,
        )

    def _prefill_key(self, plan: StepPlan) -> StepKey:
        longest = max(chunk.start + chunk.count for chunk in plan.prefill)
        full = any(chunk.request.params.needs_full_sampler for chunk in plan.prefill)
        masked = any(chunk.samples and chunk.request.matcher is not None for chunk in plan.prefill)
        return self.sizes.prefill_key(
            plan.prefill_tokens, -(-longest // self.block_size), full, masked=masked
        )


class _Decoding:
    """The decoding requests, and values derived from them while none joins or leaves."""

    __slots__ = ("changed", "full_sampler", "key", "longest", "masked", "requests")

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.full_sampler = any(request.params.needs_full_sampler for request in requests)
        self.masked = any(request.matcher is not None for request in requests)
        self.key: StepKey | None = None
        self.find_longest()

    def find_longest(self) -> None:
        """Find the longest row, after verify steps too, which advance rows differently."""
        self.longest = max(self.requests, key=attrgetter("num_computed"), default=None)
        self.changed = any(request.num_unsure for request in self.requests)
        """Whether another row may be longest: in the step after a verify step, and while the host
        does not know how many tokens one has accepted."""
        self.key = None
