"""The launch of a step: its decode part, so that prefill does not delay its tokens, then the rest.

Masks of step N, of rows whose output follows a grammar, need the tokens of step N-1:

    CPU      masks   | N ......... |                 in a thread of their own
             step    | forward N ........ | sample N |

    CUDA     device  | sample N-1 | forward N ........ | sample N |
             host    | launch forward N | commit N-1 | masks N | launch sample N | ...

On a CPU these tokens are known before the step, which waits for the masks before it samples. On
CUDA they arrive while the device runs the forward part of step N, so that one step stays in flight:
the launch stops before the first part that needs masks, and `finish` runs the rest.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ...graphs.library import StepLibrary
from ...profiling import ranges
from ..request import Request
from ..scheduling.plan import StepPlan
from .outputs import HostOutputs, LaunchedStep, report_token_ids
from .plan_parts import PlannedPart
from .prompt_scorer import LaunchedScores, PromptScorer
from .step_key import StepKey, StepOutput
from .step_sizes import StepSizes
from .token_masks import TokenMasks

__all__ = ["StepLaunch"]


class Runs(Protocol):
    """What a launch uses of a `Runner`."""

    outputs: HostOutputs | None
    sizes: StepSizes
    scorer: PromptScorer
    library: StepLibrary[StepKey, StepOutput]
    masks: TokenMasks | None

    def run(self, key: StepKey, lanes: int = 0) -> StepOutput:
        """See `Runner.run`."""

    def copy_outputs(self, number: int, key: StepKey, output: StepOutput) -> StepOutput:
        """See `Runner.copy_outputs`."""


class StepLaunch:
    """Runs the parts of a plan, whose inputs have been written."""

    def __init__(
        self, runner: Runs, number: int, plan: StepPlan, parts: Sequence[PlannedPart]
    ) -> None:
        """Prepare the launch of step `number`."""
        self._runner, self._number, self._plan = runner, number, plan
        self._masked = any(part.key.masked for part in parts)
        self._bucket = parts[0].key.size
        self._runs = [(key, part) for part in parts for key in runner.sizes.parts(part.key)]
        self._outputs: list[tuple[Sequence[Request | None], StepOutput]] = []
        self._scores: LaunchedScores | None = None
        self._launched_ns = self._worked_ns = 0

    def begin(self) -> LaunchedStep:
        """Run everything before the first masks that have to be waited for."""
        runner, is_async_device = self._runner, self._runner.outputs is not None
        began = None if runner.outputs is None else runner.outputs.begin(self._number)
        if self._masked and not is_async_device:
            self._masks.prepare(self._plan)
        finished = self._run(with_masks=not is_async_device)
        step = LaunchedStep(
            self._number,
            self._plan,
            self._bucket,
            self._launched_ns,
            (),
            None,
            0,
            [] if self._plan.drafts else None,
            began=began,
            unfinished=self,
        )
        return self._completed(step) if finished else step

    def finish(self, step: LaunchedStep) -> LaunchedStep:
        """Compute the masks and run the rest. All earlier steps have been committed."""
        self._masks.prepare(self._plan)
        self._masks.wait()
        self._run(with_masks=True)
        return self._completed(step)

    def _run(self, with_masks: bool) -> bool:
        """Run what remains, without masks up to the first part that needs them; whether all did."""
        plan, runner, number, clock = self._plan, self._runner, self._number, time.perf_counter_ns
        while self._runs:
            key, part = self._runs[0]
            if key.part == "sample" and not with_masks:
                return False
            del self._runs[0]
            decodes = key.phase == "decode"
            requests, tokens, padding = part.requests, part.tokens, part.room - part.tokens
            if key.part == "sample":
                span: AbstractContextManager[None] = nullcontext()
            else:
                rows, blocks = len(requests) if decodes else 0, plan.blocks_in_use
                span = ranges.step_span(part.name, number, rows, key.size, tokens, blocks, padding)
            with span:
                started = clock()
                self._launched_ns = self._launched_ns or started
                output = runner.run(key, 0 if key.part == "forward" else len(requests))
                if key.part != "forward":
                    if output.details is not None and any(
                        request is not None and request.params.logprob_token_ids
                        for request in requests
                    ):
                        report_token_ids(requests, output)
                    output = runner.copy_outputs(number, key, output)
                    if not decodes:
                        self._scores = runner.scorer.launch(number, plan.prefill)
                    self._outputs.append((requests, output))
                    runner.library.record_padding(tokens, part.room)
                self._worked_ns += clock() - started
        return True

    def _completed(self, step: LaunchedStep) -> LaunchedStep:
        """Return a step whose parts have all been launched."""
        outputs = self._runner.outputs
        return dataclasses.replace(
            step,
            parts=tuple(self._outputs),
            arrived=None if outputs is None else outputs.record_event(self._number, step.began),
            device_ns=self._worked_ns if outputs is None else 0,
            scores=self._scores,
            ends=self._masks.ends if self._masked else (),
            unfinished=None,
        )

    @property
    def _masks(self) -> TokenMasks:
        assert self._runner.masks is not None, "this engine has no token masks"
        return self._runner.masks
