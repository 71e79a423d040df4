"""`EngineSupervisor`: starts, replaces, restarts and closes the engine of a step thread."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path

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
from .dispatcher import Dispatcher
from .drains import Drains
from .health import Phase
from .reload_result import ReloadResult
from .restart_policy import RestartPolicy
from .service_config import ServiceConfig

__all__ = ["HOW_TO_START", "EngineSupervisor"]

logger = logging.getLogger("stepgraph.runtime")

HOW_TO_START = (
    "enter it with `async with engine:` in the lifespan of the application that serves it (the"
    " lifespan of a mounted application does not run), or call engine.start()"
)
MAX_REASON = 500
"""Characters of a failure in messages."""


class EngineSupervisor:
    """Holds the engine of a step thread, or the reason why there is none.

    The step thread changes it. Any thread may read its attributes and call `check_serving`,
    `check_started` and `refusal`.
    """

    def __init__(
        self,
        start_engine: Callable[[], Engine],
        config: ServiceConfig,
        requests: Dispatcher,
        drains: Drains,
    ) -> None:
        """Begin without an engine; `start` makes it.

        Args:
            start_engine: makes the engine: at the start, after `sleep`, and for a restart.
            config: has the policy of restarts.
            requests: end with an engine that closes or fails.
            drains: end with `sleep` and `wake`.
        """
        self.engine: Engine | None = None
        """The engine; None before the start, asleep, while it restarts, and at the end."""
        self.phase = Phase.NOT_STARTED
        self.failure: BaseException | None = None
        """Why the phase is `FAILED`."""
        self.num_restarts = 0
        """Engines that were started after a failure."""
        self.restart_ns: int | None = None
        """When the engine is started again after a failure; None if it is not."""
        self.counted: tuple[Engine | None, EngineCounters] = (None, EngineCounters())
        """The engine, and the sum of the counters of the earlier ones. Replaced as one, so that
        any thread reads a sum that never decreases."""
        self._start_engine = start_engine
        self._requests = requests
        self._drains = drains
        self._restarts = RestartPolicy(config.max_restarts, config.restart_window)

    def check_serving(self) -> Engine:
        """Return the engine for a new request.

        Raises:
            EngineNotStartedError: nothing has started it.
            EngineUnavailableError: it starts, drains, sleeps or restarts.
            EngineFailedError, EngineClosedError: it will not serve again.
        """
        engine, phase = self.engine, self.phase
        if phase is Phase.SERVING and engine is not None:
            return engine
        raise self.refusal(phase)

    def check_started(self) -> Engine:
        """Return the engine, also while it drains. Raises as `check_serving`."""
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
            error = EngineFailedError(
                f"the engine failed ({shown(failure)}): close it and make a new one"
            )
            error.__cause__ = failure
            return error
        if phase is Phase.SERVING:  # the engine was replaced meanwhile
            phase = Phase.STARTING
        return EngineUnavailableError(f"the engine is {phase.value} and accepts no requests now")

    def start(self) -> None:
        """Make the engine."""
        self.phase = Phase.STARTING
        self.engine = self._start_engine()
        self.counted = (self.engine, self.counted[1])
        self.phase = Phase.DRAINING if self._drains.active else Phase.SERVING

    def begin_drain(self) -> None:
        """Refuse new requests."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def sleep(self) -> None:
        """Close the engine, which has been drained."""
        self._check_drained()
        self._sleep()

    def wake(self) -> None:
        """Serve again after `begin_drain` or `sleep`."""
        self._check_can_start()
        if self.restart_ns is not None:
            raise EngineUnavailableError("the engine failed and is restarting: wait until it runs")
        self._drains.end(complete=False)
        if self.engine is not None:
            self.phase = Phase.SERVING
            return
        try:
            self.start()
        except BaseException:
            self.close_engine(None)
            self.phase = Phase.ASLEEP
            raise

    def reload(self, source: str | Path, start_engine: Callable[[], Engine]) -> ReloadResult:
        """Take other weights into the engine, which has been drained, or start a new engine.

        Args:
            source: of the weights.
            start_engine: makes an engine of this source. The old one is started again if it fails.
        """
        self._check_drained()
        began = time.perf_counter()
        reason = self._reload_weights(source)
        if reason is None:
            self._start_engine = start_engine
            self.wake()
        else:
            self._replace_engine(start_engine)
        return ReloadResult(reason is None, time.perf_counter() - began, reason)

    def fail(self, error: BaseException) -> None:
        """End the running requests after an exception of the step thread.

        An engine is closed, and restarted if the policy allows; otherwise all requests end.
        """
        logger.error("the engine failed", exc_info=error)
        running = self.engine is not None
        if running:
            self._schedule_restart(error)  # first: clients may read it before the rest is done
            self._drains.note_loss()
        self._requests.recover(lost(error))
        if running:
            self._close_failed(error)

    def restart(self) -> None:
        """Start the engine again after a failure."""
        try:
            self.start()
        except BaseException as error:
            logger.exception("the engine could not be restarted")
            self._schedule_restart(error)
            self._close_failed(error)
        else:
            self.restart_ns = None
            self.num_restarts += 1

    def close_engine(self, error: StepgraphError | None) -> None:
        """Close the engine. First end all requests with `error`, if it is given."""
        # Without an engine first: a request that is prepared for it now is among those that end.
        engine, self.engine = self.engine, None
        if error is not None:
            self._requests.lose_all(error)
        if engine is not None:
            try:
                self.counted = (None, self.counted[1].plus(engine.counters()))
                engine.close()
            except Exception:  # of a failed engine, whose memory is lost
                logger.exception("the engine could not be closed")

    def _schedule_restart(self, error: BaseException) -> None:
        """Decide whether the engine is started again after a failure, and when."""
        pause = self._restarts.pause(time.monotonic())
        if pause is None:
            self.failure, self.restart_ns = error, None
            self.phase = Phase.FAILED
        else:
            self.phase = Phase.STARTING
            self.restart_ns = time.perf_counter_ns() + int(pause * 1e9)

    def _close_failed(self, error: BaseException) -> None:
        """Close a failed engine, and end the requests that wait if no other will be started."""
        self.close_engine(None)
        _free_frames(error)
        if self.phase is Phase.FAILED:
            self._requests.lose_all(lost(error))

    def _sleep(self) -> None:
        self.restart_ns = None
        self.close_engine(EngineUnavailableError("the engine was put to sleep"))
        self._drains.end(complete=False)
        self.phase = Phase.ASLEEP

    def _reload_weights(self, source: str | Path) -> str | None:
        """Take other weights into the engine; return why a new engine is needed instead."""
        if self.engine is None:
            return f"the engine was {self.phase.value}"
        try:
            self.engine.reload_weights(source)
        except (ConfigError, RequestError, EngineFailedError) as error:
            return bounded_text(error)
        except BaseException:
            self.wake()  # with the weights that it has
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
            self.wake()
        except BaseException:
            self._start_engine = before
            if not asleep:
                self.wake()
            raise

    def _check_can_start(self) -> None:
        if self.phase in (Phase.CLOSED, Phase.FAILED):
            raise self.refusal()

    def _check_drained(self) -> None:
        """Refuse to end requests that were accepted since the drain."""
        self._check_can_start()
        if not self._drains.active and self.phase is not Phase.ASLEEP:
            raise EngineUnavailableError("the engine was woken or reloaded while it drained")


def lost(error: BaseException) -> EngineFailedError:
    """Return the error of a request that was lost with its engine."""
    reason = bounded_text(error, MAX_REASON)
    made = EngineFailedError(f"the engine failed, and the request was lost: {reason}")
    made.__cause__ = error
    return made


def shown(error: BaseException) -> str:
    """Return a failure for messages, with its type and of bounded length."""
    return bounded_repr(error, MAX_REASON)


def _free_frames(error: BaseException | None) -> None:
    """Free the local variables of the frames of a traceback: they hold the engine's memory."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
