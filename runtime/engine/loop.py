"""plan → launch → commit, with one step in flight. All request state changes here.

    step N     plan N    launch N    commit N-1         device:  ... N-1 | N .......... |
    step N+1   plan N+1  launch N+1  commit N           device:                N | N+1 ...

A request that stopped in step N-1 has one extra token in step N, which is discarded. On a CPU the
step runs synchronously, so each step is committed right after its launch. How many tokens a verify
step accepts is known when it is committed; until then requests count the most and the fewest
possible ones (see `Request.num_unsure`).

The launch of a step with outputs that follow a grammar is finished after the commit of the step
before (see `execution/runner.py`).

Requests join and leave between steps. `post_add` and `post` can be called by any thread; the next
step applies them first. The loop allocates no memory while no request joins, leaves or needs a new
block, except for texts and log-probabilities that requests ask for.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...profiling import ranges
from ...profiling.collector import CollectorWatch
from ...profiling.timeline import NOT_TIMED, Timeline
from ..errors import NonFiniteLogitsError, RankError, RequestError, StructuredOutputError
from ..execution.outputs import LaunchedStep, Sampled, Score
from ..execution.runner import Runner
from ..kernels.ops.batch import NON_FINITE
from ..request import AbortReason, FinishReason, Request, RequestGroup, RequestStatus
from ..scheduling.plan import StepPlan
from ..scheduling.scheduler import Scheduler
from ..scheduling.speculator import Speculator
from ..scheduling.step_budget import StepBudget
from ..scheduling.step_times import StepTimes
from .request_output import RequestOutput

logger = logging.getLogger("stepgraph.runtime")

_FINISHED = RequestStatus.FINISHED


class RequestTracker:
    """Queues requests, appends their tokens, ends them and creates their outputs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.groups: dict[str, RequestGroup] = {}
        """The requests of each prompt by id, until their last output has been returned."""
        names = ("requests", "finished", "output_tokens", "scored_prompt_tokens", "non_finite")
        self.counts = dict.fromkeys((*names, "preemptions", "failed_copies"), 0)
        """What happened so far; see `Engine.stats`. The loop counts preemptions and copies."""
        self.ready: list[RequestOutput] = []
        """Outputs that have not been returned yet, in order."""
        self._scheduler = scheduler
        self._group_of: dict[Request, RequestGroup] = {}
        self._changed: dict[RequestGroup, None] = {}  # changed since their last output, in order

    def add(self, group: RequestGroup) -> None:
        """Queue the requests of a group."""
        self.groups.setdefault(group.id, group)
        for request in group.requests:
            self._group_of[request] = group
            self._scheduler.add(request)
            self.counts["requests"] += 1

    def abort(self, group: RequestGroup, reason: AbortReason = "abort") -> None:
        """End the unfinished requests of a group. The next step returns their output."""
        for request in self._unfinished(group):
            self._finish(request, reason)

    def discard(self, group: RequestGroup) -> None:
        """End the requests of a group, if it is known, without an output."""
        self.abort(group)
        if self.groups.get(group.id) is group:
            self._changed.pop(group, None)
            del self.groups[group.id]

    def set_paused(self, group: RequestGroup, paused: bool) -> None:
        """Take the rows of the unfinished requests of a group, or let them run again."""
        for request in self._unfinished(group):
            if request.paused != paused:
                request.paused = paused
                self._scheduler.on_paused(request)

    def _unfinished(self, group: RequestGroup) -> list[Request]:
        """Return the requests of a group that are queued or running."""
        return [request for request in group.requests if request in self._group_of]

    def append(self, sampled: Iterable[Sampled], now_ns: int) -> None:
        """Append the tokens of a committed step to their requests, and end those that stop.

        Tokens of requests that have ended since the launch are discarded.
        """
        taken = 0
        for request, token_id, logprobs in sampled:
            if request is None or request.status is _FINISHED:
                continue
            request.num_pending -= 1
            if token_id == NON_FINITE:
                self._end_non_finite(request)
                continue
            if request.params.max_tokens == 0:
                self._finish(request, "length")
                continue
            taken += 1
            request.append_token(token_id, now_ns)
            if logprobs is not None:
                request.logprobs.append(logprobs)
            self._changed[self._group_of[request]] = None
            reason: FinishReason | None = None
            text, num_output = request.detokenizer, request.num_output
            stops = token_id in request.stop_token_ids and num_output > request.params.min_tokens
            if text is not None and (text.include_stop or not stops):
                reason = self._end_of_text(request, token_id)
            if reason is None and stops:
                reason = "stop"
            elif reason is None and num_output >= request.max_tokens:
                reason = "length"
            if reason is not None:
                self._finish(request, reason)
        self.counts["output_tokens"] += taken

    def append_scores(self, scores: Iterable[Score]) -> None:
        """Append the scores of prompt tokens of a committed step, before its tokens.

        Scores of requests that have ended since the launch are discarded.
        """
        for request, positions, logprobs, top_ids, top_logprobs in scores:
            if request.status is _FINISHED:
                continue
            assert request.prompt_logprobs is not None, "a request without prompt_logprobs"
            self.counts["scored_prompt_tokens"] += len(positions)
            if not request.prompt_logprobs.append(positions, logprobs, top_ids, top_logprobs):
                self._end_non_finite(request, "prompt_logprobs cannot be computed")

    def end_by_grammar(self, request: Request, error: StructuredOutputError | None) -> None:
        """End a request whose grammar allows no further token: it is complete, or has failed."""
        request.error = error
        self._finish(request, "stop" if error is None else "error")

    def collect(self) -> None:
        """Create the outputs of changed groups: in `ready`, or the last one for `deliver`."""
        outputs = [RequestOutput.of(group) for group in self._changed if group.deliver is None]
        if len(outputs) < len(self._changed):
            for group in self._changed:
                if group.deliver is not None and group.finished:
                    del self.groups[group.id]
                    group.deliver(RequestOutput.of(group))
        self.ready += outputs
        self._changed.clear()

    def take(self) -> list[RequestOutput]:
        """Return the outputs that are ready. The ids of ended requests are free from now on."""
        outputs, self.ready = self.ready, []
        for output in outputs:
            if output.finished:
                self.groups.pop(output.request_id, None)
        return outputs

    def clear(self) -> None:
        """Release all requests."""
        self.groups.clear()
        self._group_of.clear()
        self._changed.clear()
        self.ready = []

    @staticmethod
    def _end_of_text(request: Request, token_id: int) -> FinishReason | None:
        """Add the newest token of a request to its text; return a finish reason, or None."""
        assert request.detokenizer is not None
        try:
            request.detokenizer.push((token_id,))
            return None if request.detokenizer.stopped is None else "stop"
        except Exception as error:  # only this request fails
            logger.exception("request %s failed", request.id)
            request.error = error
            return "error"

    def _end_non_finite(
        self, request: Request, consequence: str = "no token can be chosen"
    ) -> None:
        """End a request with non-finite logits, and withdraw its unverified blocks."""
        request.error = NonFiniteLogitsError(
            f"request {request.id}: {consequence} after {request.num_tokens} tokens,"
            f" {request.num_output} of them output: its logits hold NaN or +inf, or its sampling"
            " parameters leave nothing but -inf; look for NaN in the weights, or choose bfloat16"
            " where float16 overflows"
        )
        self.counts["non_finite"] += 1
        self._scheduler.publisher.withdraw(request)
        self._finish(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.detokenizer is not None:
            request.detokenizer.finish()  # also after an error, before which its text is valid
        request.status = _FINISHED
        request.finish_reason = reason
        request.row = None
        request.siblings = []
        self._scheduler.remove(request)
        request.release_buffers()
        self._changed[self._group_of.pop(request)] = None
        self.counts["finished"] += 1


TIMELINE_STEPS = 65536
"""Capacity of the timeline, in steps (7 MiB)."""


class StepLoop:
    """Plans, launches and commits one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        in_flight: int,
        times: StepTimes | None = None,
        step_budget: StepBudget | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """Create a loop; at most `in_flight` steps are in flight when `step` returns.

        `times`, which `step_budget` and `speculator` read, learns from steps.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.group = runner.group
        """The processes of a tensor-parallel engine, which a failure ends."""
        self.timeline = Timeline(TIMELINE_STEPS, is_async_device=in_flight > 0)
        self.collector = CollectorWatch()
        self.requests = RequestTracker(scheduler)
        self.num_steps = 0
        self.counts = self.requests.counts
        self.intact = True
        """False while an operation changes the state, and for good if an exception interrupts it:
        requests and blocks are then inconsistent."""
        self._posted: deque[tuple[Any, ...]] = deque()
        self._in_flight = in_flight
        self.step_budget = step_budget
        self.speculator = speculator
        self._times = times
        self._arrived_ns = 0
        """When the last committed step arrived."""
        self._launched: deque[LaunchedStep] = deque()

    @property
    def has_unfinished(self) -> bool:
        """Whether the next step has work or outputs."""
        return bool(self.requests.groups or self.requests.ready or self._launched)

    @property
    def num_posted(self) -> int:
        """Posted requests that the next step will queue."""
        posted, add = tuple(self._posted), self.requests.add
        return sum(len(group.requests) for change, group, *_ in posted if change == add)

    def post_add(self, group: RequestGroup) -> None:
        """Queue the requests of a group in the next step. Any thread may call it at any time.

        Raises `RequestError` if the id of the group is in use.
        """
        try:
            if self.requests.groups.setdefault(group.id, group) is not group:
                raise RequestError(
                    f"request_id {group.id!r} is already in use until its last output has been"
                    " returned: choose another, or leave it out",
                    field="request_id",
                )
            self._posted.append((self.requests.add, group))
        except BaseException:
            self.post(self.requests.discard, group)
            raise

    def post(
        self, change: Callable[..., None], group: RequestGroup, *arguments: AbortReason | bool
    ) -> None:
        """Call a method of `requests` for a group before the next step. Any thread, any time."""
        self._posted.append((change, group, *arguments))

    def settle(self) -> None:
        """Apply what was posted."""
        self.intact = False
        while self._posted:
            change, *arguments = self._posted[0]
            change(*arguments)
            self._posted.popleft()
        self.intact = True

    def forget_contents(self, change: Callable[[], object] = lambda: None) -> None:
        """Clear the prefix cache, and exclude tokens computed so far from later sharing.

        `change` is a function that changes the weights before.
        """
        self.settle()
        self.intact = False
        change()
        self.scheduler.forget_contents()
        self.intact = True

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs of requests that changed since the last one."""
        self.advance()
        return self.requests.take()

    def advance(self) -> None:
        """Run one step; append the outputs of requests that changed to `requests.ready`."""
        if self._posted:
            self.settle()
        self.intact = False
        number = self.num_steps
        with ranges.span(ranges.STEP, number):
            collected = self.collector.total_ns
            started = began = time.perf_counter_ns()
            waited = 0
            if self.speculator is not None and self.speculator.waits:
                waited = self._commit_until(0)  # its tokens are what drafts continue
                started = time.perf_counter_ns()
            with ranges.span(ranges.PLAN, number):
                plan = self.scheduler.plan()
                if self.speculator is not None:
                    self._verify_drafts(plan, self.speculator)
            plan.timed, plan.started_ns = 1, began
            planned = time.perf_counter_ns()
            step = self._launch(plan)
            waited_in_launch = 0
            if step is not None:
                if step.unfinished is not None:
                    # Its token masks need the tokens of all earlier steps.
                    waited_in_launch = self._commit_until(1)
                    step = self._launched[-1] = self.runner.finish(self._launched[-1])
                if self.speculator is not None:
                    self.speculator.launched(plan)
                for request, error in step.ends:
                    self.requests.end_by_grammar(request, error)
            launched = time.perf_counter_ns() - waited_in_launch
            waited += waited_in_launch
            # Without a launch, commit all steps in flight: nothing else can make progress.
            most = 0 if step is None else self._in_flight
            waited += self._commit_until(most)
            self.requests.collect()
            if step is not None:
                self.timeline.record(
                    number,
                    len(plan.decode),
                    step.bucket,
                    plan.prefill_tokens if plan.prefill else 0,
                    started,
                    planned - started,
                    launched - planned - step.device_ns,
                    time.perf_counter_ns() - launched - waited,
                    waited,
                    step.device_ns or NOT_TIMED,
                    len(plan.admitted),
                    plan.blocks_in_use,
                    self.collector.total_ns - collected,
                )
        self.intact = True

    def score_step(
        self, request: Request, forced: Sequence[int], logits: list[torch.Tensor]
    ) -> None:
        """Run one step of the only request, and replace its token with the next of `forced`.

        Appends the logits to `logits`, float32 `[vocab_size]`, if the step samples. Posted requests
        are not applied, so that the request stays the only one.
        """
        self.intact = False
        step = self._launch(self.scheduler.plan())
        if step is None:  # preempted, to be computed again
            assert request.row is None, "a lone request with a row always has something to do"
            self.intact = True
            return
        ((lanes, output),) = step.parts
        if lanes[0] is not None:  # otherwise a chunk before the end of the prompt
            # Copied, because the next launch may overwrite these logits.
            logits.append(output.logits[0].to("cpu", torch.float32, copy=True))
        self._commit(self._launched.popleft())
        if lanes[0] is not None and request.row is not None:
            token_id = forced[len(logits) - 1]
            request.replace_last_token(token_id)
            self.runner.force_token(request.row, token_id)
        self.intact = True

    def close(self) -> None:
        """Release all requests and steps."""
        self.collector.close()
        self._launched.clear()
        self._posted.clear()
        self.requests.clear()
        self.runner.close()

    def check_integrity(self) -> None:
        """Assert that queues, rows, blocks and buffers are consistent and addresses unchanged."""
        self.scheduler.check_integrity()
        self.runner.check_integrity()
        cache = self.scheduler.cache
        if not self.requests.groups:
            assert cache.pool.num_free == cache.usable_blocks, "blocks were lost"

    def _launch(self, plan: StepPlan) -> LaunchedStep | None:
        """Launch the plan, unless it is empty."""
        for preemption in plan.preempted:
            request = preemption.request
            request.status = RequestStatus.WAITING
            request.row = None
            request.num_computed = request.num_unsure = request.num_drafts = 0
            request.decoding = False
            request.num_preemptions += 1
            self.counts["preemptions"] += 1
        if plan.preempted or plan.admitted:
            self._issue_copies(plan)
        for admission in plan.admitted:
            request = admission.request
            request.status = RequestStatus.RUNNING
            request.row = admission.row
            request.num_computed = admission.found.num_tokens
            found, counts = admission.found, self.scheduler.cache.counts
            if request.num_cached_tokens is None:  # later it finds what it has computed itself
                request.num_cached_tokens = found.num_tokens
                counts["queried_tokens"] += request.num_tokens
                counts["hit_tokens"] += found.num_tokens
            counts["forks"] += found.source == "fork"
            counts["copied_blocks"] += len(found.copies.blocks)
            counts["swapped_in"] += len(found.swap_in.blocks)
        if not (plan.prefill or plan.decode):
            return None
        pool = self.scheduler.cache.pool
        plan.blocks_in_use = pool.num_blocks - 1 - pool.num_free
        with ranges.span(ranges.LAUNCH, len(plan.decode) or plan.prefill_tokens):
            step = self.runner.launch(self.num_steps, plan)
        self.num_steps += 1
        self._launched.append(step)
        if plan.decode_counts:
            for request, count in zip(plan.decode, plan.decode_counts, strict=True):
                request.launched(count)
        else:
            for request in plan.decode:
                request.num_computed += 1
                request.num_pending += 1
        for chunk in plan.prefill:
            if chunk.samples:
                chunk.request.num_pending += 1
                chunk.request.decoding = True
            chunk.request.num_computed += chunk.count
            if chunk.request.prompt_logprobs is not None:
                chunk.request.prompt_logprobs.launch(chunk.scored)
        return step

    def _issue_copies(self, plan: StepPlan) -> None:
        """Issue the block copies of a plan. Where they fail, requests compute the tokens again.

        Admissions whose copies fail are taken out of the plan.
        """
        cache, blocks = self.scheduler.cache, self.runner.blocks
        try:
            blocks.swap_out(plan)
        except Exception as error:
            self._note_failed_copies("to the host", error)
            for preemption in plan.preempted:
                cache.drop_swapped(preemption.request.id)
        else:
            for preemption in plan.preempted:
                if preemption.swap_out is not None:
                    cache.counts["swapped_out"] += len(preemption.swap_out.blocks)
        try:
            blocks.copy_in(plan)
        except Exception as error:
            self._note_failed_copies("to admitted requests", error)
            for admission in tuple(plan.admitted):
                if admission.found.copies.total:
                    admission.request.may_fork = False
                if admission.found.copies.total or admission.found.swap_in.total:
                    self.scheduler.undo(plan, admission)

    def _note_failed_copies(self, where: str, error: Exception) -> None:
        if isinstance(error, AssertionError | RankError):  # a bug, or the other ranks are lost
            raise error
        self.counts["failed_copies"] += 1
        logger.error(
            "copying blocks %s failed: their tokens will be computed again",
            where,
            exc_info=error,
        )

    def _verify_drafts(self, plan: StepPlan, speculator: Speculator) -> None:
        """Let the rows of a plan verify drafts and get new ones, if that is expected to be faster.

        Not in a step with a chunk that a latency budget sizes.
        """
        drafts: Sequence[Sequence[int]] = ()
        if plan.decode and (self.step_budget is None or not plan.prefill):
            drafts = speculator.propose(plan.decode)
        else:
            speculator.begin_plan(plan.decode)
        if drafts or speculator.unread:
            self.scheduler.verify(plan, drafts, speculator.unread)
        drafter = self.runner.drafter
        if drafter is None:
            return
        if speculator.proposes:
            self.scheduler.propose(plan, speculator.proposes, drafter.group)
        if plan.prefill and self.step_budget is None:
            count = speculator.prompt_drafts(plan.prefill)
            if count:
                self.scheduler.propose_after_prompts(plan, count, drafter.group)

    def _commit_until(self, most: int) -> int:
        """Commit launched steps until `most` are in flight; return the nanoseconds waited."""
        waited = 0
        while len(self._launched) > most:
            waited += self._commit(self._launched.popleft())
        return waited

    def _commit(self, step: LaunchedStep) -> int:
        """Commit the tokens of a launched step; return the nanoseconds waited for them."""
        with ranges.span(ranges.COMMIT, step.number):
            is_async_device = step.arrived is not None
            started = time.perf_counter_ns() if is_async_device else 0
            sampled = self.runner.read(step)
            arrived = time.perf_counter_ns()
            if step.began is not None and step.arrived is not None:
                # The timeline has recorded this step already.
                device_ns = round(1e6 * float(step.began.elapsed_time(step.arrived)))
                self.timeline.set_device_ns(step.number, device_ns)
            # An asynchronous device begins a step when the previous one has ended.
            seconds = (arrived - max(self._arrived_ns, step.plan.started_ns)) / 1e9
            self._arrived_ns = arrived
            if self.step_budget is not None and step.plan.prefill and step.plan.decode:
                self.step_budget.observe(step.plan, seconds)
            took = 0.0
            if self._times is not None and step.plan.timed:
                took = self._times.learn(step.plan, seconds)
            if self.speculator is not None:
                self.speculator.committed(step.plan, step.advanced, took)
            if step.advanced is not None:
                self._take_back(step.plan, step.advanced)
            if step.plan.prefill and step.plan.scored_tokens:
                self.requests.append_scores(self.runner.read_scores(step))
            self.requests.append(sampled, arrived)
            if step.plan.proposes or step.plan.prompt_drafts:
                assert self.speculator is not None, "it has made the drafts"
                self.speculator.received(self.runner.read_drafts(step))
        return arrived - started if is_async_device else 0

    def _take_back(self, plan: StepPlan, advanced: Sequence[int]) -> None:
        """Advance each row of a verify step by its number of accepted tokens."""
        for request, count, accepted in zip(plan.decode, plan.decode_counts, advanced, strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            request.advanced(count, accepted)
            if accepted < count:
                self.scheduler.on_rejected_drafts(request)
