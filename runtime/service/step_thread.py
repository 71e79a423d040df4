"""The thread that owns the engine of an `AsyncEngine` and runs its steps.

    any thread ── actions ──▶ inbox ──▶ step thread: actions → deadlines → admission → step → news
    consumers  ◀── event loops ◀───────────────────────────────────────────────────────────┘

Everything that changes the requests or the engine is an action, which the step thread runs between
two steps: there is no lock that a consumer could hold while a step is due. With nothing to do the
thread waits for the next action without using the CPU. News are flushed once a turn, so an event
loop is woken at most once a step.

An exception of a step or an action ends the engine: all requests end with `EngineFailedError`, the
memory is freed, and the thread ends. Actions after that run in the thread that adds them. Actions
can be repeated: one that an exception interrupts runs once more.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TypeVar

from ..bounded_repr import bounded_repr, bounded_text
from ..engine.engine import Engine
from ..engine.engine_stats import EngineCounters
from ..errors import (
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    EngineNotStartedError,
    EngineUnavailableError,
    RequestError,
    StepgraphError,
)
from .admission import Dispatcher
from .health import Health, Phase, ReloadResult
from .request_handle import RequestHandle
from .service_config import ServiceConfig

logger = logging.getLogger("stepgraph.runtime")

HOW_TO_START = (
    "enter it with `async with engine:` in the lifespan of the application that serves it (the"
    " lifespan of a mounted application does not run), or call engine.start()"
)
MAX_REASON = 500
"""Characters of a failure in messages."""
_RANK_CHECK_SECONDS = 1.0
"""How often an idle engine looks at its other processes."""

T = TypeVar("T")


class Inbox:
    """Actions for one thread. Once that thread has ended, the thread that puts one runs it.

    An action leaves the inbox after it has run. If an exception interrupts it, it runs once more,
    so actions must be idempotent.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._items: deque[Callable[[], None]] = deque()
        self._begun: Callable[[], None] | None = None  # the last action that was called
        self._wake = threading.Lock()  # locked: no item has arrived since the last wait
        self._wake.acquire()
        self._handling = threading.Lock()
        self._ended = False

    def put(self, item: Callable[[], None]) -> None:
        """Add an action. Any thread and any finalizer may call it: it does not block."""
        self._items.append(item)
        if self._ended:
            self.end()
        else:
            with suppress(RuntimeError):  # released already
                self._wake.release()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for an action, at most `timeout` seconds. It may return early."""
        if not self._items:
            self._wake.acquire(timeout=-1 if timeout is None else min(timeout, TIMEOUT_MAX))

    def run(self) -> None:
        """Run the actions that have arrived. For the one thread."""
        while self._items:
            item = self._items[0]
            second = item is self._begun
            if second:
                self._items.popleft()  # there is no third attempt
            self._begun = item
            item()
            if not second:
                self._items.popleft()
            self._begun = None

    def end(self) -> None:
        """Let other threads run what arrives from now on. The one thread calls it last."""
        self._ended = True
        while self._items and self._handling.acquire(blocking=False):  # else another thread does
            try:
                self.run()
            finally:
                self._handling.release()


class StepThread:
    """Owns an engine, or the reason why there is none, and runs its steps while there are requests.

    Any thread may call the methods before `_run`, also a callback of the step thread.
    """

    def __init__(self, start_engine: Callable[[], Engine], config: ServiceConfig) -> None:
        """Prepare the thread; `start_engine` makes the engine, at the start and after `sleep`."""
        self.started: Future[None] = _future()
        """Done when the first engine serves, with the error if it could not start."""
        self.dispatcher = Dispatcher(config, self.refusal)
        self.phase = Phase.NOT_STARTED
        self.failure: BaseException | None = None
        """Why the phase is `FAILED`."""
        self.counted: tuple[Engine | None, EngineCounters] = (None, EngineCounters())
        """The engine, and the sum of the counters of the earlier ones. Replaced as one, so that
        any thread reads a sum that never decreases."""
        self._start_engine = start_engine
        self._draining = False  # from the first drain until the engine is woken or put to sleep
        self._stall_seconds = config.stall_seconds
        self._inbox = Inbox()
        self._busy_since_ns: int | None = None
        self._last_step_ns = 0
        self._starting = threading.Lock()
        self._thread = threading.Thread()

    @property
    def engine(self) -> Engine | None:
        """The engine; None before the start, asleep, and at the end."""
        return self.dispatcher.engine

    def start(self) -> None:
        """Start the thread, which first makes the engine. Does nothing if it was started."""
        with self._starting:
            if self.phase is Phase.CLOSED:
                raise self.refusal()
            if self._thread.ident is None:
                self.phase = Phase.STARTING
                self._thread = threading.Thread(
                    target=self._run, name="stepgraph-steps", daemon=True
                )
                self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, if it was started. Does nothing in the thread itself."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def check_serving(self) -> Engine:
        """Return the engine for a new request; raise a `refusal` unless it serves."""
        engine, phase = self.engine, self.phase
        if phase is Phase.SERVING and engine is not None:
            return engine
        raise self.refusal(phase)

    def check_started(self) -> Engine:
        """Return the engine, also while it drains; raise a `refusal` without one."""
        engine = self.engine
        return self.check_serving() if engine is None else engine

    def refusal(self, phase: Phase | None = None) -> StepgraphError:
        """Return why requests are refused in a phase; None for the present one."""
        phase = self.phase if phase is None else phase
        if phase is Phase.CLOSED:
            return EngineClosedError("the engine is closed: make a new one")
        if phase is Phase.NOT_STARTED:
            return EngineNotStartedError(f"the engine was not started: {HOW_TO_START}")
        failure = self.failure
        if phase is Phase.FAILED and failure is not None:
            shown = bounded_repr(failure, MAX_REASON)
            error = EngineFailedError(f"the engine failed ({shown}): close it and make a new one")
            error.__cause__ = failure
            return error
        if phase is Phase.SERVING:  # the engine was replaced meanwhile
            phase = Phase.STARTING
        return EngineUnavailableError(f"the engine is {phase.value} and accepts no requests now")

    def watch(self, handle: RequestHandle) -> None:
        """Observe the deadlines of a request that will be admitted."""
        self._inbox.put(partial(self.dispatcher.watch, handle))

    def admit(self, handle: RequestHandle) -> None:
        """Queue a prepared request, or end it with the reason why it is refused."""
        self._inbox.put(lambda: self.dispatcher.admit(handle, time.perf_counter_ns()))

    def abort(self, handle: RequestHandle) -> None:
        """End a request within one step. Does not wait."""
        self._inbox.put(partial(self.dispatcher.abort, handle, "abort"))

    def resume(self, handle: RequestHandle) -> None:
        """Let a paused request run again, since its consumer has read."""
        self._inbox.put(partial(self.dispatcher.resume, handle))

    def run(self, operation: Callable[[], T]) -> Future[T]:
        """Run a function between two steps; the future has its result or exception."""
        if self.phase is Phase.NOT_STARTED:
            raise self.refusal()
        future: Future[T] = _future()
        self._inbox.put(partial(_run_into, future, operation))
        return future

    def close(self) -> None:
        """End all requests with `EngineClosedError`, then the engine and the thread."""
        with self._starting:
            if self._thread.ident is None and self.phase is not Phase.CLOSED:
                self.phase = Phase.CLOSED
                self.started.set_exception(self.refusal())
                self._inbox.end()
        self._inbox.put(self._close)

    def health(self) -> Health:
        """Return the present state."""
        busy, failure, phase = self._busy_since_ns, self.failure, self.phase
        age = None
        if busy is not None:
            age = (time.perf_counter_ns() - max(busy, self._last_step_ns)) / 1e9
        alive = self._thread.is_alive()
        reason = None
        if phase is not Phase.SERVING:
            cause = HOW_TO_START if phase is Phase.NOT_STARTED else None
            if failure is not None:
                cause = bounded_repr(failure, MAX_REASON)
            reason = phase.value if cause is None else f"{phase.value}: {cause}"
        elif not alive:
            reason = "the step thread has ended"
        elif age is not None and age > self._stall_seconds:
            reason = f"no step has ended for {age:.1f} s"
        live = alive and phase not in (Phase.FAILED, Phase.CLOSED)
        return Health(phase, live, reason is None, age, reason)

    # From here on only the step thread, and after its end whoever runs an action.

    def _run(self) -> None:
        try:
            try:
                self._make_engine()
                self.started.set_result(None)
                while self.phase is not Phase.CLOSED:
                    self._turn()
            except BaseException as error:
                if self.started.done():  # else `start` raises it
                    logger.error("the engine failed", exc_info=error)
                self._fail(error)
            else:
                self._end(EngineClosedError("the engine was closed before the request ended"))
        except BaseException as error:  # it interrupted the handling of a failure
            logger.critical("the step thread failed", exc_info=error)
            self._fail(error)
        finally:
            self._inbox.end()
            if not self.started.done():
                self.started.set_exception(self.failure or self.refusal())

    def _turn(self) -> None:
        """Run the actions that have arrived, then a step if there is work."""
        requests = self.dispatcher
        engine = requests.engine
        if engine is None or not requests.has_work:
            self._busy_since_ns = None
            self._inbox.wait(self._seconds_to_wait())
            if engine is not None and engine.has_ranks:
                engine.check_ranks()
        self._inbox.run()
        if self.phase is Phase.CLOSED:
            return
        engine = requests.engine
        now = time.perf_counter_ns()
        requests.expire(now)
        if engine is not None and requests.has_work:
            if self._busy_since_ns is None:
                self._busy_since_ns = now
            requests.fill_rows(engine, now)
            if requests.has_rows:
                outputs = engine.step()
                self._last_step_ns = time.perf_counter_ns()
                requests.deliver(outputs, engine, self._last_step_ns)
        requests.end_unreadable()
        if requests.flush():
            time.sleep(0)  # passes the interpreter lock to an event loop that has woken up

    def _seconds_to_wait(self) -> float | None:
        """Return when there is something to do without an action; None for never."""
        requests = self.dispatcher
        times = [requests.next_deadline_ns, requests.send_timeout_ns]
        due = min([ns for ns in times if ns is not None], default=None)
        seconds = None if due is None else max(due - time.perf_counter_ns(), 0) / 1e9
        if self.engine is None or not self.engine.has_ranks:
            return seconds
        return _RANK_CHECK_SECONDS if seconds is None else min(seconds, _RANK_CHECK_SECONDS)

    def _close(self) -> None:
        self.phase = Phase.CLOSED

    def _fail(self, error: BaseException) -> None:
        """End all requests and the engine after an exception."""
        self.failure = error
        if self.phase is not Phase.CLOSED:
            self.phase = Phase.FAILED  # first: clients may read it before the rest is done
        reason = bounded_text(error, MAX_REASON)
        lost = EngineFailedError(f"the engine failed, and the request was lost: {reason}")
        lost.__cause__ = error
        self._end(lost)
        _free_frames(error)

    def _end(self, error: StepgraphError) -> None:
        """End all requests and the engine."""
        self._busy_since_ns = None
        self._close_engine(error)
        self._draining = False

    def _make_engine(self) -> None:
        self.phase = Phase.STARTING
        self.dispatcher.engine = engine = self._start_engine()
        self.counted = (engine, self.counted[1])
        self.phase = Phase.DRAINING if self._draining else Phase.SERVING

    def _close_engine(self, error: StepgraphError | None) -> None:
        """Close the engine. First end all requests with `error`, if it is given."""
        # Without an engine first: a request that is prepared for it now is among those that end.
        engine, self.dispatcher.engine = self.engine, None
        if error is not None:
            self.dispatcher.lose_all(error)
        if engine is not None:
            try:
                self.counted = (None, self.counted[1].plus(engine.counters()))
                engine.close()
            except Exception:  # of a failed engine, whose memory is lost
                logger.exception("the engine could not be closed")

    def begin_drain(self) -> None:
        """Refuse new requests from now on, until `wake`."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING
        self._draining = True

    def _check_drained(self) -> None:
        """Refuse to end requests that were accepted since the drain."""
        self._check_can_start()
        if not self._draining and self.phase is not Phase.ASLEEP:
            raise EngineUnavailableError("the engine was woken or reloaded while it drained")

    def sleep(self) -> None:
        """Close the engine, which has been drained. This frees its memory."""
        self._check_drained()
        self._close_engine(EngineUnavailableError("the engine was put to sleep"))
        self._draining = False
        self.phase = Phase.ASLEEP

    def _check_can_start(self) -> None:
        if self.phase in (Phase.CLOSED, Phase.FAILED):
            raise self.refusal()

    def wake(self) -> None:
        """Serve again after `drain` or `sleep`."""
        self._check_can_start()
        self._draining = False
        if self.engine is not None:
            self.phase = Phase.SERVING
            return
        try:
            self._make_engine()
        except BaseException:
            self._close_engine(None)
            self.phase = Phase.ASLEEP
            raise

    def reload(self, source: str | Path, start_engine: Callable[[], Engine]) -> ReloadResult:
        """Take other weights into the engine, which has been drained, or start a new engine.

        If `start_engine`, which makes an engine of these weights, fails, the old one is started.
        """
        self._check_drained()
        began = time.perf_counter()
        if self.engine is None:
            reason = f"the engine was {self.phase.value}"
        else:
            try:
                self.engine.reload_weights(source)
                self._start_engine = start_engine
                self.wake()
                return ReloadResult(True, time.perf_counter() - began)
            except (ConfigError, RequestError, EngineFailedError) as error:
                reason = bounded_text(error)
            except BaseException:
                self.wake()  # with the weights that it has
                raise
        asleep = self.phase is Phase.ASLEEP
        self.sleep()
        before, self._start_engine = self._start_engine, start_engine
        try:
            self.wake()
        except BaseException:
            self._start_engine = before
            if not asleep:
                self.wake()
            raise
        return ReloadResult(False, time.perf_counter() - began, reason)


def _future() -> Future[T]:
    """Return a future that cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _run_into(future: Future[T], operation: Callable[[], T]) -> None:
    if future.done():  # this was interrupted after it
        return
    try:
        result = operation()
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        future.set_result(result)


def _free_frames(error: BaseException | None) -> None:
    """Free the local variables of the frames of a traceback: they hold the engine's memory."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
