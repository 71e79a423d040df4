"""Executes plans: writes changed inputs, launches steps, reads their tokens back.

Only `read` waits for a step. Writing inputs waits until the previous copy of inputs has been made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

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
from ..scheduling.plan import Proposed, StepPlan
from .block_copies import BlockCopies
from .draft_step import DraftStep
from .drafter_cache import DrafterCache, new_blocks
from .host_masks import FollowedMasks, HostMasks
from .input_writer import InputWriter
from .mask_state import MaskSizes
from .outputs import (
    OUTPUT_SETS,
    HostOutputs,
    LaunchedStep,
    Sampled,
    accepted_counts,
    checked_tokens,
    proposed_drafts,
    sampled_tokens,
)
from .plan_parts import PlanParts
from .prepared_steps import PreparedSteps
from .prompt_scorer import PromptScorer, Score
from .rank_commands import CommandSender
from .row_state import RowState
from .step_functions import StepFunctions
from .step_key import StepKey, StepOutput
from .step_launch import StepLaunch
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
        self.input_buffers = {**self._writer.buffers, "scores": self.scorer.inputs}
        self.threads = None if model.kernels.library is None else config.threads
        self.own_threads: TorchThreads | None = None
        """Block in which torch uses no more threads than this rank has: others would spin on the
        cores of other ranks. Code of `torch.compile` keeps the number that it was compiled with."""
        if commands is not None and device.type == "cpu":
            self.own_threads = TorchThreads(config.threads)
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
        self.blocks = BlockCopies(arena, host, drafter, commands)
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
        self._parts = PlanParts(
            self.sizes,
            config.block_size,
            config.max_blocks_per_row * config.block_size,
            ragged=self.steps.functions.ragged,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the arena, null block included."""
        return self._arena.tensor.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of row state, inputs and buffers for scoring."""
        return self.state.nbytes + self._writer.nbytes + self.scorer.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of host buffers for an asynchronous device: input mirrors and outputs."""
        outputs = 0 if self.outputs is None else self.outputs.nbytes
        masks = 0 if self._host_masks is None else self._host_masks.nbytes
        return self._writer.nbytes + outputs + masks + self.scorer.host_nbytes

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
            **self._writer.addresses(),
            **{f"state.{k}": v for k, v in self.state.addresses().items()},
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
        if self.drafter is not None:
            if plan.table_updates:
                self.blocks.add_new(new_blocks(plan, self.drafter.group, self.block_size))
            if plan.prefill or plan.proposes:
                self.blocks.zero_new()
        parts, writer = self._parts.of(plan), self._writer
        rows = self._parts.decode_rows
        if plan.table_updates or plan.prefill or rows != writer.decode_rows:
            writer.write(plan, rows, parts[-1].key if plan.prefill else None)
        if plan.drafting:
            writer.write_drafts(plan.drafts, plan.draft_stops)
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

    def read_drafts(self, step: LaunchedStep) -> Iterable[Proposed]:
        """Return what a launch proposed, after `read`."""
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
