"""The thread that owns the engine of an `AsyncEngine` and runs its steps.

    any thread ── actions ──▶ inbox ──▶ step thread: actions → deadlines → admission → step → news
    consumers  ◀── mailboxes ◀─────────────────────────────────────────────────────────────┘

Everything that changes the requests or the engine is an action, which the step thread runs between
two steps: there is no lock that a consumer could hold while a step is due. With nothing to do the
thread waits for the next action without using the CPU.
"""

from __future__ import annotations

import logging
import threading
import time
from _queue import Empty, SimpleQueue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..bounded_repr import bounded_text
from ..engine.engine import Engine
from ..errors import (
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    EngineUnavailableError,
    RequestError,
    StepgraphError,
)
from ..request import AbortReason
from .dispatcher import Dispatcher
from .health import Health, Phase
from .reload_result import ReloadResult
from .request_handle import RequestHandle
from .service_config import ServiceConfig

__all__ = ["StepThread"]

logger = logging.getLogger("stepgraph.runtime")

T = TypeVar("T")


@dataclass(slots=True)
class _Drain:
    """A call that waits until no request is left."""

    end_ns: int | None
    future: Future[bool]
    complete: bool = True
    """Whether no request was aborted for it."""


class StepThread:
    """Owns an engine, and runs its steps while there are requests.

    The public methods may be called by any thread, also by a callback of the step thread.
    """

    def __init__(
        self,
        start_engine: Callable[[], Engine],
        config: ServiceConfig,
        on_ended: Callable[[RequestHandle], None],
    ) -> None:
        """Prepare the thread; `start` runs it.

        Args:
            start_engine: makes the engine: at the start, after `sleep`, and for a restart.
            config: limits and policies.
            on_ended: called by the step thread for each request that has ended; never raises.
        """
        self.engine: Engine | None = None
        """The engine; None before the start, asleep, while it restarts, and at the end."""
        self.phase = Phase.STARTING
        self.failure: BaseException | None = None
        """Why the phase is `FAILED`."""
        self.num_restarts = 0
        self.started: Future[None] = _future()
        """Done when the first engine serves, with the error if it could not start."""
        self.dispatcher = Dispatcher(config, on_ended)
        self._start_engine = start_engine
        self._config = config
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._drains: list[_Drain] = []
        self._failures: deque[float] = deque(maxlen=config.max_restarts + 1)
        self._busy_since_ns: int | None = None
        self._last_step_ns = 0
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="stepgraph-steps", daemon=True)

    def start(self) -> None:
        """Start the thread, which first makes the engine."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, if it was started. Does nothing in the thread itself."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def check_serving(self) -> Engine:
        """Return the engine for a new request.

        Raises:
            EngineUnavailableError: it starts, drains, sleeps or restarts.
            EngineFailedError, EngineClosedError: it will not serve again.
        """
        engine, phase = self.engine, self.phase
        if phase is Phase.SERVING and engine is not None:
            return engine
        raise self._refusal(phase)

    def check_started(self) -> Engine:
        """Return the engine, also while it drains. Raises as `check_serving`."""
        return self.check_serving() if self.engine is None else self.engine

    def admit(self, handle: RequestHandle) -> None:
        """Queue a prepared request, or end it with the reason why it is refused."""
        self._put(lambda: self.dispatcher.admit(handle, self.engine, self._refusal(self.phase)))

    def abort(self, handle: RequestHandle, reason: AbortReason = "abort") -> None:
        """End a request within one step. Finalizers may call it: it takes no lock."""
        self._put(lambda: self.dispatcher.abort(handle, self.engine, reason))

    def run(self, operation: Callable[[], T]) -> Future[T]:
        """Run a function between two steps; the future has its result or exception."""
        future: Future[T] = _future()
        self._put(partial(_run_into, future, operation))
        return future

    def drain(self, timeout: float | None) -> Future[bool]:
        """Refuse new requests from now on, and complete the present ones.

        After `timeout` seconds the rest is aborted. The result is whether none was.
        """
        end_ns = None if timeout is None else time.perf_counter_ns() + int(timeout * 1e9)
        future: Future[bool] = _future()
        self._put(lambda: self._begin_drain(_Drain(end_ns, future)))
        return future

    def sleep(self) -> Future[None]:
        """Close the engine, which has been drained. This frees its memory."""
        return self.run(self._sleep)

    def wake(self) -> Future[None]:
        """Serve again after `drain` or `sleep`."""
        return self.run(self._wake)

    def reload(
        self, source: str | Path, start_engine: Callable[[], Engine]
    ) -> Future[ReloadResult]:
        """Take other weights into the engine, which has been drained, or start a new engine.

        Args:
            source: of the weights.
            start_engine: makes an engine of this source. The old one is started again if it fails.
        """
        return self.run(lambda: self._reload(source, start_engine))

    def close(self) -> None:
        """End all requests with `EngineClosedError`, then the engine and the thread."""
        self._put(self._close)

    def health(self) -> Health:
        """Return the present state."""
        phase, busy = self.phase, self._busy_since_ns
        age = None
        if busy is not None:
            age = (time.perf_counter_ns() - max(busy, self._last_step_ns)) / 1e9
        alive = self._thread.is_alive()
        reason = None
        if phase is not Phase.SERVING:
            reason = phase.value if self.failure is None else f"{phase.value}: {self.failure!r}"
        elif not alive:
            reason = "the step thread has ended"
        elif age is not None and age > self._config.stall_seconds:
            reason = f"no step has ended for {age:.1f} s"
        live = alive and phase not in (Phase.FAILED, Phase.CLOSED)
        return Health(phase, live, reason is None, age, reason)

    def _put(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        if self._finished:
            self._run_actions()  # the thread runs no more

    # From here on only the step thread.

    def _run(self) -> None:
        try:
            self._make_engine()
        except BaseException as error:
            self.phase, self.failure = Phase.FAILED, error
            self.started.set_exception(error)
        else:
            self.started.set_result(None)
        while self.phase is not Phase.CLOSED:
            try:
                self._turn()
            except BaseException as error:
                self._fail(error)
        self._finished = True
        self._run_actions()

    def _turn(self) -> None:
        """Run the actions that have arrived, then a step if there is work."""
        requests = self.dispatcher
        if self.engine is None or not requests.has_work:
            self._busy_since_ns = None
            self._settle_drains()
            self._wait()
        self._run_actions()
        engine = self.engine
        if engine is None or not requests.has_work:
            return
        now = time.perf_counter_ns()
        if self._busy_since_ns is None:
            self._busy_since_ns = now
        requests.expire(engine, now)
        requests.fill_rows(engine, now)
        if requests.num_running:
            outputs = engine.step()
            self._last_step_ns = time.perf_counter_ns()
            requests.deliver(outputs, engine, self._last_step_ns)
        requests.flush(engine)
        self._settle_drains()

    def _wait(self) -> None:
        """Wait for the next action, or until a drain aborts its requests."""
        ends = [drain.end_ns for drain in self._drains if drain.end_ns is not None]
        timeout = max(min(ends) - time.perf_counter_ns(), 0) / 1e9 if ends else None
        try:
            action = self._inbox.get(timeout=timeout)
        except Empty:
            return
        action()

    def _run_actions(self) -> None:
        """Run the actions that have arrived, and wake the consumers they concern."""
        while True:
            try:
                action = self._inbox.get_nowait()
            except Empty:
                break
            action()
        self.dispatcher.flush(self.engine)

    def _make_engine(self) -> None:
        self.phase = Phase.STARTING
        self.engine = self._start_engine()
        self.phase = Phase.SERVING

    def _refusal(self, phase: Phase) -> StepgraphError:
        """Return why requests are refused in a phase."""
        if phase is Phase.CLOSED:
            return EngineClosedError("the engine is closed: make a new one")
        if phase is Phase.FAILED:
            error = EngineFailedError(
                f"the engine failed ({self.failure!r}): close it and make a new one"
            )
            error.__cause__ = self.failure
            return error
        return EngineUnavailableError(f"the engine is {phase.value}, and takes no requests now")

    def _begin_drain(self, drain: _Drain) -> None:
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING
        self._drains.append(drain)

    def _settle_drains(self) -> None:
        """Complete the drains if no request is left; abort the rest when their time is over."""
        if not self._drains:
            return
        if self.engine is None or self.dispatcher.is_empty:
            for drain in self._drains:
                drain.future.set_result(drain.complete)
            self._drains.clear()
            return
        now = time.perf_counter_ns()
        for drain in self._drains:
            if drain.end_ns is not None and drain.end_ns <= now:
                drain.end_ns, drain.complete = None, False
                self.dispatcher.abort_all(self.engine)

    def _sleep(self) -> None:
        self._check_can_start()
        self._lose_requests(EngineUnavailableError("the engine was put to sleep"))
        self._close_engine()
        self.phase = Phase.ASLEEP

    def _wake(self) -> None:
        self._check_can_start()
        if self.engine is not None:
            self.phase = Phase.SERVING
            return
        try:
            self._make_engine()
        except BaseException:
            self.phase = Phase.ASLEEP
            raise

    def _reload(self, source: str | Path, start_engine: Callable[[], Engine]) -> ReloadResult:
        self._check_can_start()
        began = time.perf_counter()
        reason = self._reload_weights(source)
        if reason is None:
            self._start_engine = start_engine
            self._wake()
        else:
            self._replace_engine(start_engine)
        return ReloadResult(reason is None, time.perf_counter() - began, reason)

    def _reload_weights(self, source: str | Path) -> str | None:
        """Take other weights into the engine; return why a new engine is needed instead."""
        if self.engine is None:
            return f"the engine was {self.phase.value}"
        try:
            self.engine.reload_weights(source)
        except (ConfigError, RequestError, EngineFailedError) as error:
            return bounded_text(error)
        except BaseException:
            self._wake()  # with the weights that it has
            raise
        return None

    def _replace_engine(self, start_engine: Callable[[], Engine]) -> None:
        """Close the engine and start another one, or the old one again if that fails."""
        self._sleep()
        before, self._start_engine = self._start_engine, start_engine
        try:
            self._wake()
        except BaseException:
            self._start_engine = before
            self._wake()
            raise

    def _check_can_start(self) -> None:
        if self.phase in (Phase.CLOSED, Phase.FAILED):
            raise self._refusal(self.phase)

    def _close(self) -> None:
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.CLOSED
        self._lose_requests(EngineClosedError("the engine was closed before the request ended"))
        for drain in self._drains:
            drain.future.set_result(False)
        self._drains.clear()
        self._close_engine()

    def _fail(self, error: BaseException) -> None:
        """End the running requests; restart the engine if the policy allows, or end the rest."""
        logger.error("the engine failed", exc_info=error)
        self._busy_since_ns = None
        lost = EngineFailedError(f"the engine failed, and the request was lost: {error}")
        lost.__cause__ = error
        self.dispatcher.lose_running(lost)
        self.phase = Phase.STARTING
        self._close_engine()
        self._failures.append(time.monotonic())
        recent = self._failures[-1] - self._failures[0] <= self._config.restart_window
        if len(self._failures) <= self._config.max_restarts or not recent:
            self.num_restarts += 1
            try:
                self._make_engine()
                return
            except BaseException as second:
                logger.exception("the engine could not be restarted")
                error = second
        self.phase, self.failure = Phase.FAILED, error
        self._lose_requests(lost)

    def _lose_requests(self, error: Exception) -> None:
        self.dispatcher.lose_running(error)
        self.dispatcher.lose_queued(error)
        self.dispatcher.flush(None)

    def _close_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                engine.close()
            except Exception:  # of a failed engine, whose memory is lost
                logger.exception("the engine could not be closed")


def _future() -> Future[T]:
    """Return a future that cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _run_into(future: Future[T], operation: Callable[[], T]) -> None:
    try:
        future.set_result(operation())
    except BaseException as error:
        future.set_exception(error)
