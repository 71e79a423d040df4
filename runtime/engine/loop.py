"""plan → launch → commit, with one step in flight. All request state changes here.

    step N     plan N    launch N    commit N-1         device:  ... N-1 | N .......... |
    step N+1   plan N+1  launch N+1  commit N           device:                N | N+1 ...

While the device works on step N the host takes in the tokens of step N-1. A request that turns out
to have stopped there has a token too many in step N, which is discarded. On a device that is the
host itself nothing runs beside the host, so a step is committed as soon as it was launched.

With `steps_per_launch` what is planned, launched and committed may be several steps of decoding. A
request that stops in one of them has tokens too many in those behind it, too.

Requests come and go between steps: what any thread has posted (`post_add`, `post_abort`) is applied
at the beginning of the next step. `intact` is False while an operation changes the state, and stays
so if an exception cut it short: then requests and blocks are in an undefined state.

As long as nobody joins, leaves or begins a block, the loop takes no memory: plans show the same
list of requests, inputs stay as they are, tokens go where there is room for many. What a step
allocates while it runs is the device's matter, and text and log-probabilities grow because somebody
asked for them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ...profiling import ranges
from ...profiling.collector import CollectorWatch
from ...profiling.timeline import Timeline
from ..errors import NonFiniteLogitsError
from ..execution.outputs import LaunchedStep
from ..execution.runner import Runner
from ..kernels.ops.feedback import NON_FINITE
from ..request import FinishReason, Request, RequestGroup, RequestStatus
from ..scheduling.plan import StepPlan
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_budget import StepBudget
from .request_output import RequestOutput

__all__ = ["StepLoop"]

logger = logging.getLogger("stepgraph.runtime")

_FINISHED = RequestStatus.FINISHED

TIMELINE_STEPS = 65536
"""Steps whose times are kept (7 MiB)."""


class StepLoop:
    """Requests in, tokens out, a step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        in_flight: int,
        step_budget: StepBudget | None = None,
    ) -> None:
        """Run over a scheduler and a runner.

        Args:
            scheduler: decides.
            runner: carries out.
            in_flight: steps that may be under way when `step` returns: 1 where the device works
                beside the host, 0 where it is the host.
            step_budget: is told what every step took, if chunks are chosen by time.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.timeline = Timeline(TIMELINE_STEPS, is_async_device=in_flight > 0)
        self.collector = CollectorWatch()
        self.groups: dict[str, RequestGroup] = {}
        self.num_steps = 0
        self.counts = dict.fromkeys(
            (
                "requests",
                "finished",
                "output_tokens",
                "multi_step_launches",
                "preemptions",
                "failed_copies",
                "non_finite",
            ),
            0,
        )
        self.intact = True
        """Whether every operation so far ran to its end."""
        self.ready: list[RequestOutput] = []
        """Outputs that no call has taken, in order."""
        self.any_finished = False
        """Whether the last output of a request may be among them."""
        self._posted: deque[tuple[Callable[[RequestGroup], None], RequestGroup]] = deque()
        self._in_flight = in_flight
        self._step_budget = step_budget
        self._launched: deque[LaunchedStep] = deque()
        self._group_of: dict[Request, RequestGroup] = {}
        self._changed: dict[RequestGroup, None] = {}  # since the last outputs, in order

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self.groups or self._launched)

    @property
    def num_posted(self) -> int:
        """Requests that the next step will queue."""
        posted = tuple(self._posted)
        return sum(len(group.requests) for change, group in posted if change == self.add)

    def post_add(self, group: RequestGroup) -> None:
        """Let the next step queue the requests of a group. From any thread, at any time."""
        self._posted.append((self.add, group))

    def post_abort(self, group: RequestGroup) -> None:
        """Let the next step end the requests of a group and report it; as `post_add`."""
        self._posted.append((self.abort, group))

    def post_discard(self, group: RequestGroup) -> None:
        """Let the next step end the requests of a group without an output; as `post_add`."""
        self._posted.append((self.discard, group))

    def settle(self) -> None:
        """Apply what was posted."""
        self.intact = False
        while self._posted:
            change, group = self._posted[0]
            change(group)
            self._posted.popleft()
        self.intact = True

    def add(self, group: RequestGroup) -> None:
        """Queue the requests of a group."""
        self.groups[group.id] = group
        for request in group.requests:
            self._group_of[request] = group
            self.scheduler.add(request)
            self.counts["requests"] += 1

    def abort(self, group: RequestGroup) -> None:
        """End the requests of a group, unless they have ended; the next step reports it."""
        if self.groups.get(group.id) is not group or group.finished:
            return
        for request in group.requests:
            if request.status is not _FINISHED:
                self._finish(request, "abort")
        self._changed[group] = None

    def discard(self, group: RequestGroup) -> None:
        """End the requests of a group, if it is known, and report none of them."""
        self.abort(group)
        if self.groups.get(group.id) is group:
            self._changed.pop(group, None)
            del self.groups[group.id]

    def forget_contents(self) -> None:
        """Let nothing that has been computed so far be shared, now or later."""
        self.settle()
        self.intact = False
        self.scheduler.forget_contents()
        self.intact = True

    def step(self) -> list[RequestOutput]:
        """Run one step and return what changed since the last one."""
        self.advance()
        outputs, self.ready, self.any_finished = self.ready, [], False
        return outputs

    def advance(self) -> None:
        """Run one step; what changed since the last one is added to `ready`."""
        if self._posted:
            self.settle()
        self.intact = False
        number = self.num_steps
        with ranges.span(ranges.STEP, number):
            collected = self.collector.total_ns
            started = time.perf_counter_ns()
            with ranges.span(ranges.PLAN, number):
                plan = self.scheduler.plan()
            planned = time.perf_counter_ns()
            step = self._launch(plan)
            launched = time.perf_counter_ns()
            # Without a new step, what is in flight is all that can move things on.
            most = 0 if step is None else self._in_flight
            waited = 0
            while len(self._launched) > most:
                waited += self._commit(self._launched.popleft())
            self._collect()
            if step is not None:
                self.timeline.record(
                    number,
                    len(plan.decode),
                    step.bucket,
                    plan.prefill_tokens,
                    started,
                    planned - started,
                    launched - planned - step.device_ns,
                    time.perf_counter_ns() - launched - waited,
                    waited,
                    step.device_ns or None,
                    plan.steps,
                    len(plan.admitted),
                    plan.blocks_in_use,
                    self.collector.total_ns - collected,
                )
        self.intact = True

    def score_step(
        self, request: Request, forced: Sequence[int], logits: list[torch.Tensor]
    ) -> None:
        """Run one step of a lone request, and put the next of `forced` in the place of its token.

        Appends the logits to `logits`, float32 `[vocab_size]`, if the step samples. What has been
        posted has to wait, or it would not be alone.
        """
        self.intact = False
        step = self._launch(self.scheduler.plan(single=True))
        assert step is not None, "a lone request always has something to do"
        ((lanes, output),) = step.parts
        if lanes[0] is not None:  # else a chunk of the prompt that does not reach its end
            # A copy: the next launch may overwrite what this one leaves.
            logits.append(output.logits[0].to("cpu", torch.float32, copy=True))
        self._commit(self._launched.popleft())
        if lanes[0] is not None and request.row is not None:
            token_id = forced[len(logits) - 1]
            request.replace_last_token(token_id)
            self.runner.force_token(request.row, token_id)
        self.intact = True

    def close(self) -> None:
        """Let go of all requests and steps."""
        self.collector.close()
        self._launched.clear()
        self._posted.clear()
        self.groups.clear()
        self._group_of.clear()
        self._changed.clear()
        self.ready = []
        self.runner.close()

    def check_integrity(self) -> None:
        """Assert that queues, rows, blocks and buffers agree, and that no address has changed."""
        self.scheduler.check_integrity()
        self.runner.check_integrity()
        cache = self.scheduler.cache
        if not self.groups:
            assert cache.num_free_blocks == cache.usable_blocks, "blocks were lost"

    def _launch(self, plan: StepPlan) -> LaunchedStep | None:
        """Start a step, unless there is nothing to start."""
        for preemption in plan.preempted:
            request = preemption.request
            request.status = RequestStatus.WAITING
            request.row = None
            request.num_computed = request.num_unsure = 0
            request.decoding = False
            request.num_preemptions += 1
            self.counts["preemptions"] += 1
        self._copy_blocks(plan)
        for admission in plan.admitted:
            request = admission.request
            request.status = RequestStatus.RUNNING
            request.row = admission.row
            request.num_computed = admission.found.num_tokens
            first = request.num_cached_tokens is None
            if first:
                request.num_cached_tokens = admission.found.num_tokens
            self.scheduler.cache.count_admission(admission.found, request.num_tokens, first=first)
        if plan.is_empty:
            return None
        plan.blocks_in_use = self.scheduler.cache.num_held_blocks
        with ranges.span(ranges.LAUNCH, len(plan.decode) or plan.prefill_tokens):
            step = self.runner.launch(self.num_steps, plan)
        self.num_steps += 1
        self._launched.append(step)
        steps = plan.steps
        if plan.decode_counts:
            for request, count in zip(plan.decode, plan.decode_counts, strict=True):
                request.launched(count)
        else:
            for request in plan.decode:
                request.num_computed += steps
                request.num_pending += steps
        self.counts["multi_step_launches"] += steps > 1
        for chunk in plan.prefill:
            if chunk.samples:
                chunk.request.num_pending += 1
                chunk.request.decoding = True
            chunk.request.num_computed += chunk.count
        return step

    def _copy_blocks(self, plan: StepPlan) -> None:
        """Make the copies that a plan takes. If they fail, those who need them compute instead."""
        cache = self.scheduler.cache
        try:
            self.runner.swap_out(plan)
        except Exception as error:
            self._note_failed_copies("to the host", error)
            for preemption in plan.preempted:
                cache.forget_swapped(preemption.request.id)
        else:
            for preemption in plan.preempted:
                cache.count_swapped_out(len(preemption.swap_out or ()))
        try:
            self.runner.copy_in(plan)
        except Exception as error:
            self._note_failed_copies("to admitted requests", error)
            for admission in tuple(plan.admitted):
                if admission.found.copies:
                    admission.request.may_fork = False
                if admission.found.copies or admission.found.swap_in:
                    self.scheduler.undo(plan, admission)

    def _note_failed_copies(self, where: str, error: Exception) -> None:
        if isinstance(error, AssertionError):  # a mistake of ours, and no copy was made
            raise error
        self.counts["failed_copies"] += 1
        logger.error(
            "copying blocks %s failed: their tokens will be computed again",
            where,
            exc_info=error,
        )

    def _commit(self, step: LaunchedStep) -> int:
        """Take in the tokens of a launched step; return the nanoseconds waited for them."""
        with ranges.span(ranges.COMMIT, step.number):
            is_async_device = step.arrived is not None
            started = time.perf_counter_ns() if is_async_device else 0
            sampled = self.runner.read(step)
            arrived = time.perf_counter_ns()
            elapsed = step.elapsed_ns()
            if elapsed is not None:  # written down already: this step was recorded when launched
                self.timeline.set_device_ns(step.number, elapsed)
            if self._step_budget is not None:
                self._step_budget.observe(step.plan, step.launched_ns, arrived)
            if step.advanced is not None:
                self._take_back(step.plan, step.advanced)
            taken = 0
            for request, token_id, logprobs in sampled:
                if request is None or request.status is _FINISHED:
                    continue
                request.num_pending -= 1
                if token_id == NON_FINITE:
                    self._end_non_finite(request)
                    continue
                taken += 1
                request.append_token(token_id, arrived)
                if logprobs is not None:
                    request.logprobs.append(logprobs)
                self._changed[self._group_of[request]] = None
                if token_id in request.stop_token_ids and (
                    request.num_output > request.params.min_tokens
                ):
                    self._finish(request, "stop")
                    continue
                if request.detokenizer is not None:
                    reason = self._end_of_text(request, token_id)
                    if reason is not None:
                        self._finish(request, reason)
                        continue
                if request.num_output >= request.max_tokens:
                    self._finish(request, "length")
            self.counts["output_tokens"] += taken
        return arrived - started if is_async_device else 0

    def _take_back(self, plan: StepPlan, advanced: Sequence[int]) -> None:
        """Correct how far the rows of a verify step have come: each by as many as accepted."""
        for request, count, accepted in zip(plan.decode, plan.decode_counts, advanced, strict=True):
            if request.status is _FINISHED:
                continue
            request.advanced(count, accepted)
            if accepted < count:
                self.scheduler.fell_short(request)

    def _end_of_text(self, request: Request, token_id: int) -> FinishReason | None:
        """Add the newest token of a request to its text; return why this ends it, if it does."""
        assert request.detokenizer is not None
        try:
            request.detokenizer.push((token_id,))
            return None if request.detokenizer.stopped is None else "stop"
        except Exception as error:  # of its text alone: the others go on
            logger.exception("request %s failed", request.id)
            request.error = error
            return "error"

    def _end_non_finite(self, request: Request) -> None:
        """End a request whose newest logits are not a distribution; nothing of them is shared."""
        request.error = NonFiniteLogitsError(
            f"request {request.id}: no token can be chosen after {request.num_tokens} tokens,"
            f" {request.num_output} of them output: its logits hold NaN or +inf, or its sampling"
            " parameters leave nothing but -inf; look for NaN in the weights, or choose bfloat16"
            " where float16 overflows"
        )
        self.counts["non_finite"] += 1
        self._changed[self._group_of[request]] = None
        self.scheduler.withdraw(request)
        if request.detokenizer is not None:
            request.detokenizer.finish()
        self._finish(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.detokenizer is not None and reason != "error":
            request.detokenizer.finish()
        request.status = _FINISHED
        request.finish_reason = reason
        request.row = None
        request.siblings = []
        self.scheduler.remove(request)
        request.shed()
        del self._group_of[request]
        self.counts["finished"] += 1

    def _collect(self) -> None:
        """Make outputs of what changed, and forget the groups that are finished."""
        outputs = [RequestOutput.of(group) for group in self._changed]
        self._changed.clear()
        for output in outputs:
            if output.finished:
                del self.groups[output.request_id]
                self.any_finished = True
        self.ready += outputs
