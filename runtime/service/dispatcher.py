"""Requests between their consumers and the engine: admission, deadlines, delivery of outputs.

All methods belong to the step thread, except those of `limits`.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import time
from collections.abc import Callable, Sequence

from ..engine.engine import Engine
from ..engine.request_output import RequestOutput
from ..errors import DeadlineUnreachableError
from ..request import AbortReason
from .admission_queue import AdmissionQueue
from .latency_model import LatencyModel
from .queue_limits import QueueLimits
from .request_handle import HandleState, Mailbox, RequestHandle
from .service_config import ServiceConfig

__all__ = ["Dispatcher"]


class Dispatcher:
    """The requests that are queued or running."""

    def __init__(self, config: ServiceConfig, on_ended: Callable[[RequestHandle], None]) -> None:
        """Start without requests; `on_ended` gets each request that has ended, and never raises."""
        self.limits = QueueLimits(
            config.max_queued_requests, config.max_queued_tokens, self._retry_after
        )
        self.latency = LatencyModel()
        self._on_ended = on_ended
        self._queue = AdmissionQueue(config.tenant_weights)
        self._running: dict[str, RequestHandle] = {}
        self._deadlines: list[tuple[int, int, bool, RequestHandle]] = []  # a heap by time
        self._deadline_numbers = itertools.count()
        self._unstarted: dict[RequestHandle, None] = {}  # running, without a first token
        self._unstarted_tokens = 0
        self._num_rows = 1
        self._news: set[Mailbox] = set()

    @property
    def num_queued(self) -> int:
        """Requests that wait for a row."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests in the engine."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        return bool(self._running) or len(self._queue) > 0

    @property
    def is_empty(self) -> bool:
        """Whether no request is queued, running or being prepared."""
        return not self.has_work and not self.limits.num_requests

    def admit(self, handle: RequestHandle, engine: Engine | None, refusal: Exception) -> None:
        """Queue a prepared request, or end it with the reason why it is refused.

        Args:
            handle: has its group, or the error of its preparation.
            engine: runs it; None if there is none.
            refusal: why there is no engine.
        """
        if handle.error is not None:
            self._refuse(handle, handle.error)
        elif engine is None:
            self._refuse(handle, refusal)
        elif handle.abort_reason is not None:
            self.limits.leave(handle.num_prompt_tokens)
            self._end_unqueued(handle, handle.abort_reason)
        elif (late := self._predict_delay(handle, engine)) > 0:
            self._refuse(
                handle,
                DeadlineUnreachableError(
                    f"request {handle.id}: its first token is predicted {late:.3g} s after the"
                    " deadline: try again later, or give it more time",
                    retry_after=late,
                ),
            )
        else:
            handle.state = HandleState.QUEUED
            self._queue.push(handle)
            self._post(handle)
            self._watch(handle, handle.deadline_ns, first_token=False)
            self._watch(handle, handle.first_token_deadline_ns, first_token=True)

    def fill_rows(self, engine: Engine, now_ns: int) -> None:
        """Move queued requests into the engine, as many as it has rows for."""
        load = engine.load
        self._num_rows, free = load.rows, load.free_rows
        while free > 0 and len(self._queue):
            handle = self._queue.pop()
            self.limits.leave(handle.num_prompt_tokens)
            assert handle.group is not None
            due = handle.first_token_deadline_ns
            tokens = self._unstarted_tokens + handle.num_prompt_tokens
            if due is not None and now_ns + 1e9 * self.latency.prefill_seconds(tokens) > due:
                self._end_unqueued(handle, "deadline")
                continue
            engine.queue(handle.group)
            handle.state = HandleState.RUNNING
            handle.started_ns = now_ns
            self._running[handle.id] = handle
            self._unstarted[handle] = None
            self._unstarted_tokens += handle.num_prompt_tokens
            free -= len(handle.group.requests)

    def expire(self, engine: Engine, now_ns: int) -> None:
        """End the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, _, first_token, handle = heapq.heappop(self._deadlines)
            if not (first_token and handle.has_first_token):
                self.abort(handle, engine, "deadline")

    def deliver(self, outputs: Sequence[RequestOutput], engine: Engine, now_ns: int) -> None:
        """Store the outputs of a step for their consumers."""
        if self._unstarted:
            record = engine.timeline().latest()
            if record is not None and record.prefill_tokens:
                seconds = (record.ended_ns - record.started_ns) / 1e9
                self.latency.observe_prefill(seconds, record.prefill_tokens)
        for output in outputs:
            handle = self._running[output.request_id]
            handle.output = output
            tokens = sum([completion.num_tokens for completion in output.completions])
            self._queue.charge(handle, tokens)
            if tokens:
                self._note_started(handle)
            if output.finished:
                assert handle.started_ns is not None
                held = (now_ns - handle.started_ns) / 1e9
                self.latency.observe_request(held, len(output.completions))
                self._end(handle)
            elif handle.streams:
                self._post(handle)

    def abort(self, handle: RequestHandle, engine: Engine | None, reason: AbortReason) -> None:
        """End a request; the next step returns the output of one that is running."""
        if handle.ended or handle.abort_reason is not None:
            return
        handle.abort_reason = reason
        if handle.state is HandleState.QUEUED:
            self._queue.remove(handle)
            self.limits.leave(handle.num_prompt_tokens)
            self._end_unqueued(handle, reason)
        elif handle.state is HandleState.RUNNING and engine is not None:
            engine.abort(handle.id, reason)

    def abort_all(self, engine: Engine | None) -> None:
        """End all requests that are queued or running."""
        for handle in (*self._running.values(), *self._queue):
            self.abort(handle, engine, "abort")

    def lose_running(self, error: Exception) -> None:
        """End the running requests with an error."""
        for handle in tuple(self._running.values()):
            self._end(handle, _copy(error))

    def lose_queued(self, error: Exception) -> None:
        """End the queued requests with an error."""
        for handle in tuple(self._queue):
            self._queue.remove(handle)
            self._refuse(handle, _copy(error))

    def flush(self, engine: Engine | None) -> None:
        """Wake the consumers that have news; end the requests of closed event loops."""
        for mailbox in self._news:
            mailbox.flush()
        closed = [mailbox for mailbox in self._news if mailbox.closed]
        self._news.clear()
        for handle in (*self._running.values(), *self._queue) if closed else ():
            if handle.mailbox in closed:
                self.abort(handle, engine, "abort")

    def check_integrity(self) -> None:
        """Assert that queue, running requests and sums agree."""
        self._queue.check_integrity()
        assert all(h.state is HandleState.RUNNING for h in self._running.values())
        assert self._unstarted.keys() <= set(self._running.values())
        assert self._unstarted_tokens == sum(h.num_prompt_tokens for h in self._unstarted)
        assert self.limits.num_requests >= len(self._queue)

    def _watch(self, handle: RequestHandle, due_ns: int | None, *, first_token: bool) -> None:
        if due_ns is not None:
            entry = (due_ns, next(self._deadline_numbers), first_token, handle)
            heapq.heappush(self._deadlines, entry)

    def _predict_delay(self, handle: RequestHandle, engine: Engine) -> float:
        """Predict by how many seconds a first token is late; negative if it is in time."""
        due = [ns for ns in (handle.deadline_ns, handle.first_token_deadline_ns) if ns is not None]
        if not due:
            return -1.0
        requests, tokens = self._queue.ahead_of(handle.tenant, handle.priority)
        predicted = self.latency.first_token_seconds(
            handle.num_prompt_tokens,
            requests_ahead=requests,
            tokens_ahead=tokens + self._unstarted_tokens,
            load=engine.load,
        )
        return predicted - (min(due) - time.perf_counter_ns()) / 1e9

    def _refuse(self, handle: RequestHandle, error: BaseException) -> None:
        """End a request that did not enter the engine."""
        self.limits.leave(handle.num_prompt_tokens)
        self._end(handle, error)

    def _end_unqueued(self, handle: RequestHandle, reason: AbortReason) -> None:
        """End a request that did not enter the engine, with an output without tokens."""
        assert handle.group is not None
        handle.group.end(reason)
        handle.output = RequestOutput.of(handle.group)
        self._end(handle)

    def _end(self, handle: RequestHandle, error: BaseException | None = None) -> None:
        self._running.pop(handle.id, None)
        self._note_started(handle)
        handle.error = error
        handle.state = HandleState.ENDED
        self._post(handle)
        self._on_ended(handle)

    def _note_started(self, handle: RequestHandle) -> None:
        """Note that a request has its first token, or will have none."""
        if handle in self._unstarted:
            del self._unstarted[handle]
            self._unstarted_tokens -= handle.num_prompt_tokens

    def _post(self, handle: RequestHandle) -> None:
        handle.mailbox.post(handle)
        self._news.add(handle.mailbox)

    def _retry_after(self) -> float:
        """Predict the seconds until a queued request gets a row."""
        return self.latency.row_seconds(1, self._num_rows) or 1.0


def _copy(error: Exception) -> Exception:
    """Return a copy to raise: raising changes the traceback of an exception."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied
