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
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from operator import call
from pathlib import Path
from typing import TypeVar

from ..bounded_repr import bounded_repr, bounded_text
from ..engine.engine import Engine
from ..engine.engine_metrics import EngineCounters
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
from .drains import Drains
from .health import Health, Phase
from .inbox import Inbox
from .reload_result import ReloadResult
from .request_handle import RequestHandle
from .restart_policy import RestartPolicy
from .service_config import ServiceConfig

__all__ = ["StepThread"]

logger = logging.getLogger("stepgraph.runtime")

T = TypeVar("T")

MAX_REASON = 500
"""Characters of a failure in messages."""


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
        self.engine: Engine | None = None
        """The engine; None before the start, asleep, while it restarts, and at the end."""
        self.phase = Phase.STARTING
        self.failure: BaseException | None = None
        """Why the phase is `FAILED`."""
        self.num_restarts = 0
        """Engines that were started after a failure."""
        self.counted: tuple[Engine | None, EngineCounters] = (None, EngineCounters())
        """The engine, and the sum of the counters of the earlier ones. Replaced as one, so that
        any thread reads a sum that never decreases."""
        self.started: Future[None] = _future()
        """Done when the first engine serves, with the error if it could not start."""
        self.dispatcher = Dispatcher(config)
        self._start_engine = start_engine
        self._stall_seconds = config.stall_seconds
        self._inbox: Inbox[Callable[[], None]] = Inbox(call)
        self._drains = Drains()
        self._restarts = RestartPolicy(config.max_restarts, config.restart_window)
        self._restart_ns: int | None = None
        """When the engine is started again after a failure; None if it is not."""
        self._busy_since_ns: int | None = None
        self._last_step_ns = 0
        self._closing = False
        self._ended = False
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="stepgraph-steps", daemon=True)

    def start(self) -> None:
        """Start the thread, which first makes the engine. Does nothing if it was started.

        Raises:
            EngineClosedError: it was closed.
        """
        with self._starting:
            if self.phase is Phase.CLOSED:
                raise self._refusal(Phase.CLOSED)
            if self._thread.ident is None:
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
        engine = self.engine
        return self.check_serving() if engine is None else engine

    def watch(self, handle: RequestHandle) -> None:
        """Observe the deadlines of a request that will be admitted."""
        self._inbox.put(partial(self.dispatcher.watch, handle))

    def refusal(self) -> StepgraphError:
        """Return why a request cannot be prepared now, after the engine it was for has ended."""
        phase = self.phase
        return self._refusal(Phase.STARTING if phase is Phase.SERVING else phase)

    def admit(self, handle: RequestHandle) -> None:
        """Queue a prepared request, or end it with the reason why it is refused."""
        self._inbox.put(partial(self._admit, handle))

    def abort(self, handle: RequestHandle, reason: AbortReason = "abort") -> None:
        """End a request within one step. Finalizers may call it: it takes no lock."""
        self._inbox.put(lambda: self.dispatcher.abort(handle, self.engine, reason))

    def run(self, operation: Callable[[], T]) -> Future[T]:
        """Run a function between two steps; the future has its result or exception."""
        future: Future[T] = _future()
        self._inbox.put(partial(_run_into, future, operation))
        return future

    def drain(self, timeout: float | None) -> Future[bool]:
        """Refuse new requests from now on, and complete the present ones.

        After `timeout` seconds the rest is aborted. The result is whether every request ended by
        itself.
        """
        end_ns = None if timeout is None else time.perf_counter_ns() + int(timeout * 1e9)
        future: Future[bool] = _future()
        self._inbox.put(partial(self._begin_drain, end_ns, future))
        return future

    def sleep(self) -> Future[None]:
        """Close the engine, which has been drained. This frees its memory."""
        return self.run(self._sleep_drained)

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
        with self._starting:
            if self._thread.ident is None and self.phase is not Phase.CLOSED:
                self.phase, self._ended = Phase.CLOSED, True
                self.started.set_exception(self._refusal(Phase.CLOSED))
                self._inbox.end()
        self._inbox.put(self._close)

    def health(self) -> Health:
        """Return the present state."""
        phase, busy, failure = self.phase, self._busy_since_ns, self.failure
        age = None
        if busy is not None:
            age = (time.perf_counter_ns() - max(busy, self._last_step_ns)) / 1e9
        alive = self._thread.is_alive()
        reason = None
        if phase is not Phase.SERVING:
            reason = phase.value if failure is None else f"{phase.value}: {_shown(failure)}"
        elif not alive:
            reason = "the step thread has ended"
        elif age is not None and age > self._stall_seconds:
            reason = f"no step has ended for {age:.1f} s"
        live = alive and phase not in (Phase.FAILED, Phase.CLOSED)
        return Health(phase, live, reason is None, age, reason)

    # From here on only the step thread.

    def _run(self) -> None:
        try:
            self._serve()
            self._end(EngineClosedError("the engine was closed before the request ended"))
        except BaseException as error:  # it interrupted the handling of a failure
            logger.critical("the step thread failed", exc_info=error)
            self.phase, self.failure = Phase.FAILED, error
            self._end(_lost(error))
            if not self.started.done():
                self.started.set_exception(error)
        finally:
            self._ended = True
            self._inbox.end()

    def _serve(self) -> None:
        """Run turns until the engine is closed."""
        try:
            self._make_engine()
        except BaseException as error:
            self.phase, self.failure = Phase.FAILED, error
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
        """Run the actions that have arrived, then a step if there is work."""
        requests = self.dispatcher
        if self.engine is None or not requests.has_work:
            self._busy_since_ns = None
            self._inbox.wait(self._seconds_to_wait())
        self._inbox.run()
        if self._closing:
            return
        if self._restart_ns is not None and self._restart_ns <= time.perf_counter_ns():
            self._restart()
        engine = self.engine
        now = time.perf_counter_ns()
        requests.expire(engine, now)
        if engine is not None and requests.has_work:
            if self._busy_since_ns is None:
                self._busy_since_ns = now
            requests.fill_rows(engine, now)
            if requests.num_running:
                outputs = engine.step()
                self._last_step_ns = time.perf_counter_ns()
                requests.deliver(outputs, engine, self._last_step_ns)
        requests.end_unreadable(engine)
        self._drains.settle(requests, engine)
        if requests.flush():
            time.sleep(0)  # passes the interpreter lock to an event loop that has woken up

    def _seconds_to_wait(self) -> float | None:
        """Return when there is something to do without an action; None for never."""
        times = (self._restart_ns, self.dispatcher.deadlines.next_ns, self._drains.next_ns)
        due = min([ns for ns in times if ns is not None], default=None)
        return None if due is None else max(due - time.perf_counter_ns(), 0) / 1e9

    def _admit(self, handle: RequestHandle) -> None:
        engine, refusal = self.engine, self._refusal(self.phase)
        self.dispatcher.admit(handle, engine, refusal, time.perf_counter_ns())
        if self._ended:
            self.dispatcher.flush()

    def _make_engine(self) -> None:
        self.phase = Phase.STARTING
        self.engine = self._start_engine()
        self.counted = (self.engine, self.counted[1])
        self.phase = Phase.DRAINING if self._drains.active else Phase.SERVING

    def _refusal(self, phase: Phase) -> StepgraphError:
        """Return why requests are refused in a phase."""
        if phase is Phase.CLOSED:
            return EngineClosedError("the engine is closed: make a new one")
        failure = self.failure
        if phase is Phase.FAILED and failure is not None:
            error = EngineFailedError(
                f"the engine failed ({_shown(failure)}): close it and make a new one"
            )
            error.__cause__ = failure
            return error
        return EngineUnavailableError(f"the engine is {phase.value}, and takes no requests now")

    def _begin_drain(self, end_ns: int | None, future: Future[bool]) -> None:
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING
        self._drains.add(end_ns, future)
        if self._ended:
            self._drains.settle(self.dispatcher, None)

    def _sleep_drained(self) -> None:
        self._check_drained()
        self._sleep()

    def _sleep(self) -> None:
        self._restart_ns = None
        self._close_engine(EngineUnavailableError("the engine was put to sleep"))
        self._drains.end(complete=False)
        self.phase = Phase.ASLEEP

    def _wake(self) -> None:
        self._check_can_start()
        if self._restart_ns is not None:
            raise EngineUnavailableError("the engine failed and is restarting: wait until it runs")
        self._drains.end(complete=False)
        if self.engine is not None:
            self.phase = Phase.SERVING
            return
        try:
            self._make_engine()
        except BaseException:
            self._close_engine(None)
            self.phase = Phase.ASLEEP
            raise

    def _reload(self, source: str | Path, start_engine: Callable[[], Engine]) -> ReloadResult:
        self._check_drained()
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
        """Close the engine and start another one, or the old one again if that fails.

        One that was asleep is left asleep.
        """
        asleep = self.phase is Phase.ASLEEP
        self._sleep()
        before, self._start_engine = self._start_engine, start_engine
        try:
            self._wake()
        except BaseException:
            self._start_engine = before
            if not asleep:
                self._wake()
            raise

    def _check_can_start(self) -> None:
        if self.phase in (Phase.CLOSED, Phase.FAILED):
            raise self._refusal(self.phase)

    def _check_drained(self) -> None:
        """Refuse to end requests that were accepted since the drain."""
        self._check_can_start()
        if not self._drains.active and self.phase is not Phase.ASLEEP:
            raise EngineUnavailableError("the engine was woken or reloaded while it drained")

    def _close(self) -> None:
        self._closing = True  # an exception in a later action may change the phase
        self.phase = Phase.CLOSED

    def _end(self, error: StepgraphError) -> None:
        """End all requests and the engine."""
        if self._closing:
            self.phase = Phase.CLOSED
        self._busy_since_ns = None
        self._close_engine(error)
        self._drains.end(complete=False)

    def _fail(self, error: BaseException) -> None:
        """End the running requests; schedule a restart if the policy allows, or end the rest."""
        logger.error("the engine failed", exc_info=error)
        self._busy_since_ns = None
        running = self.engine is not None
        if running:
            self.phase = Phase.STARTING
            self._drains.note_loss()
        self.dispatcher.recover(_lost(error))
        if running:
            self._close_engine(None)
            _free_frames(error)
            self._schedule_restart(error)
        for handle in self.dispatcher.prepared():  # its action may have been interrupted
            self._admit(handle)
        self._drains.settle(self.dispatcher, self.engine)
        self.dispatcher.flush()

    def _schedule_restart(self, error: BaseException) -> None:
        """Start the engine again after a failure, or give up."""
        pause = self._restarts.pause(time.monotonic())
        if pause is None:
            self.phase, self.failure = Phase.FAILED, error
            self.dispatcher.lose_all(_lost(error))
        else:
            self._restart_ns = time.perf_counter_ns() + int(pause * 1e9)

    def _restart(self) -> None:
        try:
            self._make_engine()
        except BaseException as error:
            logger.exception("the engine could not be restarted")
            self._close_engine(None)
            _free_frames(error)
            self._restart_ns = None
            self._schedule_restart(error)
        else:
            self._restart_ns = None
            self.num_restarts += 1

    def _close_engine(self, error: StepgraphError | None) -> None:
        """Close the engine. First end all requests with `error`, if it is given."""
        # Without an engine first: a request that is prepared for it now is among those that end.
        engine, self.engine = self.engine, None
        if error is not None:
            self.dispatcher.lose_all(error)
        if engine is not None:
            try:
                self.counted = (None, self.counted[1].plus(engine.counters()))
                engine.close()
            except Exception:  # of a failed engine, whose memory is lost
                logger.exception("the engine could not be closed")


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


def _lost(error: BaseException) -> EngineFailedError:
    """Return the error of a request that was lost with its engine."""
    shown = bounded_text(error, MAX_REASON)
    lost = EngineFailedError(f"the engine failed, and the request was lost: {shown}")
    lost.__cause__ = error
    return lost


def _shown(error: BaseException) -> str:
    return bounded_repr(error, MAX_REASON)


def _free_frames(error: BaseException | None) -> None:
    """Free the local variables of the frames of a traceback: they hold the engine's memory."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
