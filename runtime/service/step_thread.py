"""The thread that owns the engine of an `AsyncEngine` and runs its steps.

    any thread ── actions ──▶ inbox ──▶ step thread: actions → deadlines → admission → step → news
    consumers  ◀── mailboxes ◀─────────────────────────────────────────────────────────────┘

Everything that changes the requests or the engine is an action, which the step thread runs between
two steps: there is no lock that a consumer could hold while a step is due. With nothing to do the
thread waits for the next action without using the CPU. News are flushed once a turn, so an event
loop is woken at most once a step.

Actions can be repeated: if an exception interrupts one, it runs again after the recovery.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from operator import call
from pathlib import Path
from typing import TypeVar

from ..engine.engine import Engine
from ..errors import EngineClosedError, StepgraphError
from ..request import AbortReason
from .dispatcher import Dispatcher
from .drains import Drains
from .engine_supervisor import HOW_TO_START, EngineSupervisor, lost, shown
from .health import Health, Phase
from .inbox import Inbox
from .reload_result import ReloadResult
from .request_handle import RequestHandle
from .service_config import ServiceConfig

__all__ = ["StepThread"]

logger = logging.getLogger("stepgraph.runtime")

_RANK_CHECK_SECONDS = 1.0
"""How often an idle engine looks at its other processes."""

T = TypeVar("T")


class StepThread:
    """Owns an engine, and runs its steps while there are requests.

    The public methods may be called by any thread, also by a callback of the step thread.
    """

    def __init__(self, start_engine: Callable[[], Engine], config: ServiceConfig) -> None:
        """Prepare the thread; `start` runs it.

        Args:
            start_engine: makes the engine: at the start, after `sleep`, and for a restart.
            config: limits and policies.
        """
        self.started: Future[None] = _future()
        """Done when the first engine serves, with the error if it could not start."""
        self.dispatcher = Dispatcher(config)
        self._drains = Drains()
        self.supervisor = EngineSupervisor(start_engine, config, self.dispatcher, self._drains)
        self._stall_seconds = config.stall_seconds
        self._inbox: Inbox[Callable[[], None]] = Inbox(call)
        self._busy_since_ns: int | None = None
        self._last_step_ns = 0
        self._closing = False
        self._ended = False
        self._starting = threading.Lock()
        self._thread = self._make_thread()

    @property
    def engine(self) -> Engine | None:
        """The engine, if there is one."""
        return self.supervisor.engine

    def start(self) -> None:
        """Start the thread, which first makes the engine. Does nothing if it was started.

        Raises:
            EngineClosedError: it was closed.
        """
        with self._starting:
            if self.supervisor.phase is Phase.CLOSED:
                raise self.supervisor.refusal()
            if self._thread.ident is None:
                self.supervisor.phase = Phase.STARTING
                self._thread = self._make_thread()  # threads made before a fork count as stopped
                self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, if it was started. Does nothing in the thread itself."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def watch(self, handle: RequestHandle) -> None:
        """Observe the deadlines of a request that will be admitted."""
        self._inbox.put(partial(self.dispatcher.watch, handle))

    def admit(self, handle: RequestHandle) -> None:
        """Queue a prepared request, or end it with the reason why it is refused."""
        self._inbox.put(partial(self._admit, handle))

    def abort(self, handle: RequestHandle, reason: AbortReason = "abort") -> None:
        """End a request within one step. Does not wait."""
        self._inbox.put(lambda: self.dispatcher.abort(handle, self.engine, reason))

    def resume(self, handle: RequestHandle) -> None:
        """Let a paused request run again, since its consumer has read."""
        self._inbox.put(lambda: self.dispatcher.resume(handle, self.engine))

    def run(self, operation: Callable[[], T]) -> Future[T]:
        """Run a function between two steps; the future has its result or exception.

        Raises:
            EngineNotStartedError: there is no thread that could run it.
        """
        self._check_started()
        future: Future[T] = _future()
        self._inbox.put(partial(_run_into, future, operation))
        return future

    def drain(self, timeout: float | None) -> Future[bool]:
        """Refuse new requests from now on, and complete the present ones.

        After `timeout` seconds the rest is aborted. The result is whether every request ended by
        itself. Raises as `run`.
        """
        self._check_started()
        end_ns = None if timeout is None else time.perf_counter_ns() + int(timeout * 1e9)
        future: Future[bool] = _future()
        self._inbox.put(partial(self._begin_drain, end_ns, future))
        return future

    def sleep(self) -> Future[None]:
        """Close the engine, which has been drained. This frees its memory."""
        return self.run(self.supervisor.sleep)

    def wake(self) -> Future[None]:
        """Serve again after `drain` or `sleep`."""
        return self.run(self.supervisor.wake)

    def reload(
        self, source: str | Path, start_engine: Callable[[], Engine]
    ) -> Future[ReloadResult]:
        """Serve another model; see `EngineSupervisor.reload`."""
        return self.run(partial(self.supervisor.reload, source, start_engine))

    def close(self) -> None:
        """End all requests with `EngineClosedError`, then the engine and the thread."""
        supervisor = self.supervisor
        with self._starting:
            if self._thread.ident is None and supervisor.phase is not Phase.CLOSED:
                supervisor.phase, self._ended = Phase.CLOSED, True
                self.started.set_exception(supervisor.refusal())
                self._inbox.end()
        self._inbox.put(self._close)

    def health(self) -> Health:
        """Return the present state."""
        busy, failure = self._busy_since_ns, self.supervisor.failure
        phase = self.supervisor.phase
        age = None
        if busy is not None:
            age = (time.perf_counter_ns() - max(busy, self._last_step_ns)) / 1e9
        alive = self._thread.is_alive()
        reason = None
        if phase is not Phase.SERVING:
            reason = phase.value if failure is None else f"{phase.value}: {shown(failure)}"
            if phase is Phase.NOT_STARTED:
                reason = f"{reason}: {HOW_TO_START}"
        elif not alive:
            reason = "the step thread has ended"
        elif age is not None and age > self._stall_seconds:
            reason = f"no step has ended for {age:.1f} s"
        live = alive and phase not in (Phase.FAILED, Phase.CLOSED)
        return Health(phase, live, reason is None, age, reason)

    def _check_started(self) -> None:
        if self.supervisor.phase is Phase.NOT_STARTED:
            raise self.supervisor.refusal()

    def _make_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="stepgraph-steps", daemon=True)

    # From here on only the step thread.

    def _run(self) -> None:
        try:
            self._serve()
            self._end(EngineClosedError("the engine was closed before the request ended"))
        except BaseException as error:  # it interrupted the handling of a failure
            logger.critical("the step thread failed", exc_info=error)
            self.supervisor.failure = error
            self.supervisor.phase = Phase.FAILED
            self._end(lost(error))
            if not self.started.done():
                self.started.set_exception(error)
        finally:
            self._ended = True
            self._inbox.end()

    def _serve(self) -> None:
        """Run turns until the engine is closed."""
        try:
            self.supervisor.start()
        except BaseException as error:
            self.supervisor.failure = error
            self.supervisor.phase = Phase.FAILED
            self.started.set_exception(error)
        else:
            self.started.set_result(None)
        while True:
            try:
                while not self._closing:
                    self._turn()
                return
            except BaseException as error:
                failure = error
            self._fail(failure)

    def _turn(self) -> None:
        """Run the actions that have arrived, then a step if there is work.

        Raises:
            RankError: a process of a tensor-parallel engine has failed, if there is no work.
        """
        requests = self.dispatcher
        if self.engine is None or not requests.has_work:
            self._busy_since_ns = None
            self._inbox.wait(self._seconds_to_wait())
            if self.engine is not None and self.engine.has_ranks:
                self.engine.check_ranks()
        self._inbox.run()
        if self._closing:
            return
        restart_ns = self.supervisor.restart_ns
        if restart_ns is not None and restart_ns <= time.perf_counter_ns():
            self.supervisor.restart()
        engine = self.engine
        now = time.perf_counter_ns()
        requests.expire(engine, now)
        requests.end_unread(engine, now)
        if engine is not None and requests.has_work:
            if self._busy_since_ns is None:
                self._busy_since_ns = now
            requests.fill_rows(engine, now)
            if requests.has_rows:
                outputs = engine.step()
                self._last_step_ns = time.perf_counter_ns()
                requests.deliver(outputs, engine, self._last_step_ns)
        requests.end_unreadable(engine)
        self._drains.settle(requests, engine)
        if requests.flush():
            time.sleep(0)  # passes the interpreter lock to an event loop that has woken up

    def _seconds_to_wait(self) -> float | None:
        """Return when there is something to do without an action; None for never."""
        times = (
            self.supervisor.restart_ns,
            self.dispatcher.deadlines.next_ns,
            self.dispatcher.send_timeout_ns,
            self._drains.next_ns,
        )
        due = min([ns for ns in times if ns is not None], default=None)
        seconds = None if due is None else max(due - time.perf_counter_ns(), 0) / 1e9
        if self.engine is None or not self.engine.has_ranks:
            return seconds
        return _RANK_CHECK_SECONDS if seconds is None else min(seconds, _RANK_CHECK_SECONDS)

    def _admit(self, handle: RequestHandle) -> None:
        supervisor = self.supervisor

        def refusal() -> StepgraphError | None:
            return None if supervisor.restart_ns is not None else supervisor.refusal()

        self.dispatcher.admit(handle, self.engine, refusal, time.perf_counter_ns())
        if self._ended:
            self.dispatcher.flush()

    def _begin_drain(self, end_ns: int | None, future: Future[bool]) -> None:
        self.supervisor.begin_drain()
        self._drains.add(end_ns, future)
        if self._ended:
            self._drains.settle(self.dispatcher, None)

    def _close(self) -> None:
        self._closing = True  # an exception in a later action may change the phase
        self.supervisor.phase = Phase.CLOSED

    def _end(self, error: StepgraphError) -> None:
        """End all requests and the engine."""
        if self._closing:
            self.supervisor.phase = Phase.CLOSED
        self._busy_since_ns = None
        self.supervisor.close_engine(error)
        self._drains.end(complete=False)

    def _fail(self, error: BaseException) -> None:
        """Recover from an exception of a turn."""
        self._busy_since_ns = None
        self.supervisor.fail(error)
        for handle in self.dispatcher.prepared():  # its action may have been interrupted
            self._admit(handle)
        self._drains.settle(self.dispatcher, self.engine)
        self.dispatcher.flush()


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
