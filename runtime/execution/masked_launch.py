"""The launch of a step in which some outputs follow a grammar, in two halves.

    CPU      masks   . compute N ........ |                 in a thread of their own
             step    | forward N ........ | sample N |

    CUDA     device  | sample N-1 | forward N ........ | sample N |
             host    | launch forward N | commit N-1 | masks N | launch sample N | ...

The masks of step N need the tokens of step N-1. On a CPU these are known before the step. On CUDA
they arrive while the device runs the forward part of step N, so that one step stays in flight. A
step whose decode part has no such row decodes as usual, and the prefill part follows in two halves.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from ...graphs.library import StepLibrary
from ...profiling import ranges
from ..request import Request
from ..scheduling.plan import StepPlan
from .outputs import GrammarEnd, HostOutputs, LaunchedStep
from .prompt_scorer import LaunchedScores, PromptScorer
from .step_key import StepKey, StepOutput
from .step_sizes import StepSizes
from .token_masks import Lane, TokenMasks

if TYPE_CHECKING:
    import torch

__all__ = ["MaskedLaunch", "has_grammar", "needs_masks"]


def has_grammar(plan: StepPlan) -> bool:
    """Whether a chunk of a prompt samples a token that follows a grammar."""
    return any(chunk.samples and chunk.request.matcher is not None for chunk in plan.prefill)


class Runs(Protocol):
    """What a launch uses of a `Runner`."""

    outputs: HostOutputs | None
    sizes: StepSizes
    scorer: PromptScorer
    library: StepLibrary[StepKey, StepOutput]

    def run(self, key: StepKey, lanes: int = 0) -> StepOutput:
        """See `Runner.run`."""

    def copy_outputs(self, number: int, key: StepKey, output: StepOutput) -> StepOutput:
        """See `Runner.copy_outputs`."""


def needs_masks(plan: StepPlan) -> bool:
    """Whether a token of a plan follows a grammar."""
    return any(request.matcher is not None for request in plan.decode) or has_grammar(plan)


class MaskedLaunch:
    """Runs the parts of a plan, and stops before the first that needs token masks."""

    def __init__(
        self,
        runner: Runs,
        masks: TokenMasks,
        number: int,
        plan: StepPlan,
        decode: tuple[StepKey, Sequence[int], bool] | None,
        prefill_key: StepKey | None,
    ) -> None:
        """Prepare the launch of step `number`.

        Args:
            runner: whose inputs have been written.
            masks: of the runner.
            number: of the step.
            plan: of the step.
            decode: key and rows of the decode part, and whether a row of it has a grammar.
            prefill_key: key of the prefill part.
        """
        self._runner, self._masks = runner, masks
        self._number, self._plan = number, plan
        self._decode, self._prefill_key = decode, prefill_key
        self._lanes: list[Lane] = []
        if decode is not None:
            self._lanes += zip(decode[1], plan.decode, strict=True)
        self._lanes += [(chunk.row, chunk.request) for chunk in plan.prefill if chunk.samples]
        self._outputs: list[tuple[Sequence[Request | None], StepOutput]] = []
        self._scores: LaunchedScores | None = None
        self._launched_ns = self._worked_ns = 0
        self._rest = self._run()

    def begin(self, began: torch.cuda.Event | None) -> LaunchedStep:
        """Run everything before the first token mask is needed."""
        if self._runner.outputs is None:
            self._masks.begin(self._lanes)
        next(self._rest)
        key = self._prefill_key if self._decode is None else self._decode[0]
        assert key is not None
        return LaunchedStep(
            self._number,
            self._plan,
            key.size,
            self._launched_ns,
            (),
            None,
            0,
            began=began,
            unfinished=self,
        )

    def finish(self, step: LaunchedStep) -> tuple[LaunchedStep, list[GrammarEnd]]:
        """Compute the masks, or wait for them, and run the rest.

        All earlier steps have been committed. Returns the step, and the requests that end before
        its tokens.
        """
        outputs = self._runner.outputs
        with ranges.span(ranges.MASK, len(self._lanes)):
            if outputs is not None:
                self._masks.begin(self._lanes)
            ends = self._masks.finish()
        for _ in self._rest:  # the prefill part may stop for the same masks
            pass
        arrived = None if outputs is None else outputs.record_event(self._number, step.began)
        done = dataclasses.replace(
            step,
            parts=tuple(self._outputs),
            arrived=arrived,
            device_ns=self._worked_ns if outputs is None else 0,
            scores=self._scores,
            unfinished=None,
        )
        return done, ends

    def _run(self) -> Generator[None]:
        """Run the parts in order; yields before each use of the masks."""
        plan, runner, number = self._plan, self._runner, self._number
        if self._decode is not None:
            key, rows, masked = self._decode
            used = len(rows)
            span = ranges.step_span(
                ranges.REPLAY, number, used, key.size, used, plan.blocks_in_use, key.size - used
            )
            yield from self._part(key, used, masked, plan.decode, span)
            runner.library.record_padding(used, key.size)
        if self._prefill_key is not None:
            key, used = self._prefill_key, plan.prefill_tokens
            span = ranges.step_span(
                ranges.PREFILL, number, 0, key.size, used, plan.blocks_in_use, key.size - used
            )
            lanes = [chunk.request if chunk.samples else None for chunk in plan.prefill]
            yield from self._part(key, len(plan.prefill), has_grammar(plan), lanes, span)
            started = time.perf_counter_ns()
            self._scores = runner.scorer.launch(number, plan.prefill)
            self._worked_ns += time.perf_counter_ns() - started
            runner.library.record_padding(used, key.size)

    def _part(
        self,
        key: StepKey,
        used: int,
        masked: bool,
        lanes: Sequence[Request | None],
        span: AbstractContextManager[None],
    ) -> Generator[None]:
        """Run a decode or a prefill step, whole or in two parts."""
        runner = self._runner
        with span:
            started = time.perf_counter_ns()
            self._launched_ns = self._launched_ns or started
            if masked:
                runner.run(dataclasses.replace(key, full_sampler=False, part="forward"))
            else:
                output = runner.run(key, used)
            self._worked_ns += time.perf_counter_ns() - started
        if masked:
            yield
            started = time.perf_counter_ns()
            output = runner.run(runner.sizes.sample_key(key), used)
            self._worked_ns += time.perf_counter_ns() - started
        self._outputs.append((lanes, runner.copy_outputs(self._number, key, output)))
