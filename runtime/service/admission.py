"""Requests between their consumers and the engine: admission, deadlines, delivery of outputs.

All methods belong to the step thread, except `Dispatcher.register` and the methods of its `limits`.

Requests wait in a bounded queue and enter the engine only when it has a row for them. The next one
is taken from the smallest priority; within it from the tenant that has received the least service
relative to its weight, in the order of arrival. Service is counted in tokens: prompt tokens when a
request leaves the queue, output tokens as they are generated (virtual token counter, Sheng et al.
2024, "Fairness in Serving Large Language Models"). A tenant that returns from idleness starts at
the least counter of the waiting tenants, so that idleness earns no credit.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from ..bounded_repr import bounded_repr
from ..engine.engine import Engine
from ..engine.request_output import RequestOutput
from ..errors import DeadlineUnreachableError, OverloadedError, RequestError, SendTimeoutError
from ..request import AbortReason, RequestGroup
from .request_handle import ConsumerLoop, HandleState, RequestHandle, wake
from .service_config import ServiceConfig

OUTPUT_WEIGHT = 2
"""Service of an output token, in prompt tokens; the ratio of the paper's evaluation."""

MAX_IDLE_TENANTS = 1024
"""Tenants without a waiting request whose counters are kept."""

MEASURED_SHARE = 0.05
"""Weight of a new observation in a mean: about the last twenty count."""

STALE_SECONDS = 1.0
"""Age of the last measured prefill above which an idle engine serves a request to measure again.
Otherwise one slow step could make it refuse all requests for ever."""


class AdmissionQueue:
    """Handles that wait, by priority and tenant. For one thread."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start empty; tenants that `weights` does not name have weight 1."""
        self._weights = dict(weights)
        self._queues: dict[tuple[int, str], deque[RequestHandle]] = {}
        """By priority and tenant; none is empty."""
        self._served: dict[str, float] = {}  # tokens of service over weight; oldest tenants first
        self._floor = 0.0  # the largest counter at which a tenant was served

    def __bool__(self) -> bool:
        """Whether a request waits."""
        return bool(self._queues)

    def __len__(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[RequestHandle]:
        """The waiting requests, in no particular order."""
        return chain.from_iterable(self._queues.values())

    def push(self, handle: RequestHandle) -> None:
        """Append a request to the queue of its priority and tenant."""
        tenant, waiting = handle.tenant, self._waiting()
        if tenant not in waiting:
            least = min((self._served[other] for other in waiting), default=self._floor)
            self._served[tenant] = max(self._served.pop(tenant, 0.0), least)
        self._queues.setdefault((handle.priority, tenant), deque()).append(handle)

    def pop(self) -> RequestHandle:
        """Remove and return the next request, and charge its prompt to its tenant."""
        first = min(self._queues, key=lambda key: (key[0], self._served[key[1]]))
        handle = self._queues[first][0]
        self._floor = max(self._floor, self._served[handle.tenant])
        self._served[handle.tenant] += handle.num_prompt_tokens / self._weight(handle.tenant)
        self.remove(handle)
        return handle

    def remove(self, handle: RequestHandle) -> None:
        """Remove a waiting request."""
        key = (handle.priority, handle.tenant)
        self._queues[key].remove(handle)
        if not self._queues[key]:
            del self._queues[key]
            self._forget_idle()

    def clear(self) -> None:
        """Remove all requests, and keep the service of their tenants."""
        self._queues.clear()
        self._forget_idle()

    def charge(self, handle: RequestHandle, num_output: int) -> None:
        """Charge the output tokens of a running request to its tenant, `num_output` so far."""
        gained = num_output - handle.num_charged
        handle.num_charged = num_output
        if handle.tenant in self._served:
            self._served[handle.tenant] += OUTPUT_WEIGHT * gained / self._weight(handle.tenant)

    def ahead_of(self, tenant: str, priority: int) -> tuple[int, int]:
        """Estimate the waiting requests, and their prompt tokens, served before a new one.

        Of its own priority these are its tenant's, and what other tenants receive meanwhile.
        """
        urgent = [handle for handle in self if handle.priority < priority]
        equal = [handle for handle in self if handle.priority == priority]
        requests, tokens = len(urgent), sum(handle.num_prompt_tokens for handle in urgent)
        if equal:
            tenants = {tenant, *(handle.tenant for handle in equal)}
            own = len(self._queues.get((priority, tenant), ()))
            turn = (own + 1) * sum(map(self._weight, tenants)) / self._weight(tenant)
            ahead = min(len(equal), turn - 1)
            requests += round(ahead)
            tokens += round(sum(h.num_prompt_tokens for h in equal) * ahead / len(equal))
        return requests, tokens

    def check_integrity(self) -> None:
        """Assert that no queue is empty, and that all waiting tenants have a counter."""
        assert all(self._queues.values())
        waiting = self._waiting()
        assert waiting <= self._served.keys()
        assert len(self._served) - len(waiting) <= MAX_IDLE_TENANTS

    def _waiting(self) -> set[str]:
        """Return the tenants with a waiting request."""
        return {tenant for _, tenant in self._queues}

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_idle(self) -> None:
        """Drop the oldest idle counters above the limit."""
        if len(self._served) > MAX_IDLE_TENANTS:
            waiting = self._waiting()
            idle = [tenant for tenant in self._served if tenant not in waiting]
            for tenant in idle[: max(len(idle) - MAX_IDLE_TENANTS, 0)]:
                del self._served[tenant]


class _Mean:
    """Seconds per unit of the recent observations, a ratio of decayed sums. 0 before the first."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def observe(self, seconds: float, units: float) -> None:
        self._seconds += seconds - MEASURED_SHARE * self._seconds
        self._units += units - MEASURED_SHARE * self._units

    @property
    def seconds(self) -> float:
        return self._seconds / self._units if self._units else 0.0


class QueueLimits:
    """Counts waiting requests, those being prepared included. For any thread."""

    def __init__(self, config: ServiceConfig, retry_after: Callable[[], float]) -> None:
        """Start at zero; `retry_after` predicts the seconds until a request leaves."""
        self._max_requests, self._max_tokens = config.max_queued_requests, config.max_queued_tokens
        self._retry_after = retry_after
        self._lock = threading.Lock()
        self._tokens: dict[RequestHandle, int] = {}  # of the waiting requests
        self.num_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return len(self._tokens)

    def enter(self, handle: RequestHandle) -> None:
        """Count a request; raise `OverloadedError` if there are `max_requests` already."""
        with self._lock:
            if len(self._tokens) < self._max_requests:
                self._tokens[handle] = 0
                return
        raise OverloadedError(
            f"{self._max_requests} requests wait already (max_queued_requests): try again later",
            retry_after=self._retry_after(),
        )

    def add_tokens(self, handle: RequestHandle, num_tokens: int) -> None:
        """Count prompt tokens, or raise `OverloadedError`. Too long a prompt may wait alone."""
        with self._lock:
            if not self.num_tokens or self.num_tokens + num_tokens <= self._max_tokens:
                self._tokens[handle] += num_tokens
                self.num_tokens += num_tokens
                return
        raise OverloadedError(
            f"{self.num_tokens} prompt tokens wait already, and {num_tokens} more exceed"
            f" max_queued_tokens={self._max_tokens}: try again later",
            retry_after=self._retry_after(),
        )

    def leave(self, handle: RequestHandle) -> None:
        """Count a request out, with its tokens. Does nothing if it is not counted."""
        with self._lock:
            self.num_tokens -= self._tokens.pop(handle, 0)


class Dispatcher:
    """The requests that are prepared, queued or running."""

    def __init__(self, config: ServiceConfig, refusal: Callable[[], Exception]) -> None:
        """Start without requests; `refusal` returns why there is no engine."""
        self.engine: Engine | None = None
        self._refusal = refusal
        self.limits = QueueLimits(config, self._retry_after)
        self._prefill_seconds = _Mean()  # of a prompt token
        self._row_seconds = _Mean()  # that a request holds a row, times its rows
        self._prefilled_ns = 0  # when prefill was measured last
        self.handles: dict[str, RequestHandle] = {}  # those that have not ended, by id
        self.next_deadline_ns: int | None = None  # no watched request has an earlier one
        self.on_ended: Callable[[RequestHandle], None] = lambda handle: None
        """Called for each request that has ended. It must not raise or wait."""
        self._ending: RequestHandle | None = None  # the one that `_end` is ending
        self._queue = AdmissionQueue(config.tenant_weights)
        self._running: dict[str, RequestHandle] = {}
        self._paused: dict[RequestHandle, None] = {}  # running, without a row
        self._pausing = False  # the next step takes the row of one of them
        self._max_unread = config.max_unread_tokens
        self._send_timeout = config.send_timeout
        self._num_rows = 1
        self._has_news = False  # a request has, posted already or not
        self._news: dict[ConsumerLoop, list[RequestHandle]] = {}
        self._loops: set[ConsumerLoop] = set()  # of requests, as long as it is open

    @property
    def num_queued(self) -> int:
        """Requests that wait for a row."""
        return len(self._queue)

    @property
    def has_rows(self) -> bool:
        """Whether the engine has a request to run, or to pause."""
        return len(self._running) > len(self._paused) or self._pausing

    @property
    def has_work(self) -> bool:
        """Whether a request is queued, or running and not paused."""
        return self.has_rows or bool(self._queue)

    @property
    def send_timeout_ns(self) -> int | None:
        """When the first paused request ends if it is not read; None without any."""
        unread = [h.unread_ns for h in self._paused if h.unread_ns is not None]
        return min(unread) + int(1e9 * self._send_timeout) if unread else None

    def register(self, handle: RequestHandle) -> None:
        """Count a new request, or raise `OverloadedError` or `RequestError`. For any thread."""
        self.limits.enter(handle)
        if self.handles.setdefault(handle.id, handle) is not handle:
            self.limits.leave(handle)
            raise RequestError(
                f"request_id {bounded_repr(handle.id)} is in use: choose another",
                field="request_id",
            )

    def watch(self, handle: RequestHandle) -> None:
        """Observe the deadlines of a request from now on."""
        due = handle.due_ns
        if due is not None and (self.next_deadline_ns is None or due < self.next_deadline_ns):
            self.next_deadline_ns = due

    def admit(self, handle: RequestHandle, now_ns: int) -> None:
        """Queue a prepared request, or end it with the reason why it is refused."""
        if handle.ended:
            self.limits.leave(handle)
            return
        error, group = handle.failure, handle.group
        if handle.state is not HandleState.PREPARING or (group is None and error is None):
            return
        if error is None and self.engine is None:
            error = self._refusal()
        due = handle.due_ns
        if error is None and group is not None:
            handle.num_prompt_tokens = len(group.prompt_ids)
            if due is not None and due <= now_ns:
                self.limits.leave(handle)
                self.abort(handle, "deadline")
                return
            late = 0.0 if due is None else self._predict_delay(handle, group, due, now_ns)
            if late > 0:
                error = DeadlineUnreachableError(
                    f"request {handle.id}: its first token is predicted {late:.3g} s after the"
                    " deadline: try again later, or give it more time",
                    retry_after=late,
                )
        if error is not None:
            self.limits.leave(handle)
            self._end(handle, error)
            self.flush()  # it does not wait for the step that follows
            return
        handle.state = HandleState.QUEUED
        self._loops.add(handle.loop)
        self._queue.push(handle)
        self._post(handle)

    def fill_rows(self, engine: Engine, now_ns: int) -> None:
        """Move queued requests into the engine, as many as it has rows for."""
        if not self._queue:
            return
        gauges = engine.gauges()
        self._num_rows, free = gauges.rows, gauges.free_rows
        while free > 0 and self._queue:
            handle = self._queue.pop()
            self.limits.leave(handle)
            handle.state = HandleState.RUNNING
            handle.started_ns = now_ns
            self._running[handle.id] = handle
            assert handle.group is not None
            engine.queue(handle.group)
            free -= len(handle.group.requests)

    def expire(self, now_ns: int) -> None:
        """End the requests that are late, and paused ones that nobody reads for too long."""
        for handle in tuple(self._paused):
            self._end_if_unread(handle, now_ns)
        if self.next_deadline_ns is None or now_ns < self.next_deadline_ns:
            return
        self.next_deadline_ns = None
        for handle in tuple(self.handles.values()):
            due = handle.due_ns
            if due is not None and due <= now_ns:
                self.abort(handle, "deadline")
            else:
                self.watch(handle)

    def resume(self, handle: RequestHandle) -> None:
        """Let a paused request run again."""
        if handle not in self._paused:
            return
        del self._paused[handle]
        handle.paused = False
        assert self.engine is not None
        self.engine.resume(handle.id)

    def end_unreadable(self) -> None:
        """End the requests of closed event loops."""
        closed = {loop for loop in self._loops if loop.is_closed()}
        if closed:
            for handle in tuple(self.handles.values()):
                if handle.loop in closed:
                    self.abort(handle, "abort")
            self._loops -= closed

    def deliver(self, outputs: Sequence[RequestOutput], engine: Engine, now_ns: int) -> None:
        """Store the outputs of a step for their consumers."""
        self._pausing = False
        record = engine.timeline().latest()
        if record is not None and record.prefill_tokens:
            seconds = (record.ended_ns - record.started_ns) / 1e9
            self._prefill_seconds.observe(seconds, record.prefill_tokens)
            self._prefilled_ns = record.ended_ns
        for output in outputs:
            handle = self._running[output.request_id]
            num_read = handle.num_read
            if num_read is not None and handle.unread_ns is None:
                handle.unread_ns = now_ns  # first: once the output is read, it is None
            handle.output = output
            tokens = sum([completion.num_tokens for completion in output.completions])
            self._queue.charge(handle, tokens)
            if output.finished:
                assert handle.started_ns is not None
                held = (now_ns - handle.started_ns) / 1e9
                if not handle.num_pauses:
                    self._row_seconds.observe(held * len(output.completions), 1)
                self._end(handle, handle.failure)
            elif handle.streams:
                self._post(handle)
                if num_read is not None:
                    self._limit_unread(handle, tokens - num_read, engine, now_ns)

    def abort(self, handle: RequestHandle, reason: AbortReason) -> None:
        """End a request; the next step returns the output of one that is running.

        Does nothing for one that was never registered: its id may belong to another.
        """
        if self.handles.get(handle.id) is not handle or handle.abort_reason is not None:
            return
        if handle.state is HandleState.RUNNING:
            assert self.engine is not None
            handle.abort_reason = reason
            self._paused.pop(handle, None)
            self.engine.abort(handle.id, reason)
            return
        if handle.state is HandleState.QUEUED:
            self._queue.remove(handle)
            self.limits.leave(handle)
        group = handle.placeholder() if handle.group is None else handle.group
        if not group.finished:
            group.end(reason)
        handle.output = RequestOutput.of(group)
        handle.abort_reason = reason
        self._end(handle)
        self.flush()

    def abort_all(self) -> None:
        """End all requests."""
        for handle in tuple(self.handles.values()):
            self.abort(handle, "abort")

    def lose_all(self, error: Exception) -> None:
        """End all requests with an error, or with their last output if they have it."""
        ending = self._ending
        if ending is not None and ending.ended:  # perhaps not reported to its consumer
            self.limits.leave(ending)
            self._end(ending, ending.error)
        for handle in tuple(self.handles.values()):
            if handle.state is not HandleState.PREPARING:  # else counted until it is prepared
                self.limits.leave(handle)
            own = None
            if handle.output is None or not handle.output.finished:
                own = copy.copy(error)  # raising changes the traceback of an exception
                own.__cause__ = error.__cause__
            self._end(handle, own)
        self._queue.clear()
        self._loops.clear()
        self.next_deadline_ns = None
        self._running.clear()
        self._paused.clear()
        self._pausing = False
        self.flush()

    def flush(self) -> bool:
        """Wake the consumers that have news, each event loop once; return whether any has."""
        had_news, self._has_news = self._has_news, False
        for loop, handles in self._news.items():
            try:
                loop.call_soon_threadsafe(wake, tuple(handles))
            except RuntimeError:
                if not loop.is_closed():
                    raise
        self._news.clear()  # last: after an exception they are woken once more
        return had_news

    def check_integrity(self) -> None:
        """Assert that what is derived from the states of the requests agrees with them."""
        states: dict[HandleState, set[RequestHandle]] = {state: set() for state in HandleState}
        for handle in self.handles.values():
            states[handle.state].add(handle)
        self._queue.check_integrity()
        assert set(self._queue) == states[HandleState.QUEUED]
        assert set(self._running.values()) == states[HandleState.RUNNING]
        assert not states[HandleState.ENDED]
        assert self._paused.keys() <= states[HandleState.RUNNING]
        assert all(handle.paused for handle in self._paused)
        served = [h for h in self._running.values() if h.abort_reason is None]
        assert {handle.loop for handle in served} <= self._loops
        assert self.limits.num_requests >= len(self._queue)

    def _predict_delay(
        self, handle: RequestHandle, group: RequestGroup, due_ns: int, now_ns: int
    ) -> float:
        """Predict by how many seconds a first token is late; negative if it is in time.

        Prompts ahead are prefilled while it waits for a row, so the longer of both counts.
        """
        seconds, engine = 0.0, self.engine
        assert engine is not None
        if self.has_work or now_ns - self._prefilled_ns <= STALE_SECONDS * 1e9:
            requests, tokens = self._queue.ahead_of(handle.tenant, handle.priority)
            unstarted = [h for h in self._running.values() if h.output is None]
            gauges = engine.gauges()
            position = max(requests + 1 - gauges.free_rows, 0)
            a_token = self._prefill_seconds.seconds
            seconds = max(
                position * self._row_seconds.seconds / gauges.rows,
                (tokens + sum(h.num_prompt_tokens for h in unstarted)) * a_token,
            )
            to_prefill = handle.num_prompt_tokens - engine.num_cached_tokens(group)
            seconds += a_token * to_prefill
        return seconds - (due_ns - now_ns) / 1e9

    def _end(self, handle: RequestHandle, error: BaseException | None = None) -> None:
        self._running.pop(handle.id, None)
        self._paused.pop(handle, None)
        handle.error = error
        self._ending = handle
        handle.state = HandleState.ENDED
        if self.handles.get(handle.id) is handle:  # before its consumer may use the id again
            del self.handles[handle.id]
        self._post(handle)
        self._ending = None
        self.on_ended(handle)

    def _limit_unread(
        self, handle: RequestHandle, num_unread: int, engine: Engine, now_ns: int
    ) -> None:
        """Pause a request that has much output that its consumer has not read, or end it.

        The consumer reads in another thread meanwhile: it stores what it has read, then looks
        whether it is paused; here it is the reverse, so that one of the two sees the other.
        """
        if num_unread > self._max_unread and handle not in self._paused:
            handle.paused = True
            if handle.unread_ns is None or handle.num_read is None:  # it has just been read
                handle.paused = False
                return
            self._paused[handle] = None
            self._pausing = True
            handle.num_pauses += 1
            engine.pause(handle.id)
        self._end_if_unread(handle, now_ns)

    def _end_if_unread(self, handle: RequestHandle, now_ns: int) -> None:
        since = handle.unread_ns
        if since is None or now_ns - since < 1e9 * self._send_timeout:
            return
        if handle.abort_reason is None:
            handle.failure = SendTimeoutError(
                f"request {handle.id}: its client has read nothing for {self._send_timeout:g} s"
                " (send_timeout): read the stream to its end, or close it"
            )
        self.abort(handle, "abort")

    def _post(self, handle: RequestHandle) -> None:
        self._has_news = True
        if not handle.posted:
            self._news.setdefault(handle.loop, []).append(handle)
            handle.posted = True  # last: after an exception before it, it is posted again

    def _retry_after(self) -> float:
        """Predict the seconds until a queued request gets a row."""
        return self._row_seconds.seconds / self._num_rows or 1.0
