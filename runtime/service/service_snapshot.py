"""`ServiceSnapshot`: the state of an `AsyncEngine` at one moment. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...profiling.timeline import Timeline
from ..engine.engine_stats import EngineCounters, EngineGauges
from ..errors import EngineClosedError
from .health import Health

if TYPE_CHECKING:  # it needs torch
    from .step_thread import StepThread

__all__ = ["ServiceSnapshot"]


class ServiceSnapshot(NamedTuple):
    """State and counters of an `AsyncEngine`, which may run steps meanwhile."""

    health: Health
    gauges: EngineGauges | None
    """None while there is no engine."""
    counters: EngineCounters
    """Of all its engines: restarts, `sleep` and `reload` lose nothing."""
    timeline: Timeline | None
    """None while there is no engine."""
    queued_requests: int
    """Requests that wait for a row, those being tokenised included."""
    queued_tokens: int
    """Their prompt tokens."""
    oldest_wait: float
    """Seconds that the oldest of them has waited; 0 without any."""
    restarts: int
    """Restarts after failures."""
    open_requests: int
    """Requests that have not ended."""

    @classmethod
    def of(cls, thread: StepThread) -> ServiceSnapshot:
        """Read the state of a step thread, which may run steps meanwhile."""
        supervisor, limits = thread.supervisor, thread.dispatcher.limits
        engine, past = supervisor.counted
        gauges = timeline = None
        counters = past
        if engine is not None:
            try:
                gauges, timeline = engine.gauges(), engine.timeline()
                counters = past.plus(engine.counters())
            except EngineClosedError:  # meanwhile, and counted
                gauges = timeline = None
                _, counters = supervisor.counted
        return cls(
            thread.health(),
            gauges,
            counters,
            timeline,
            limits.num_requests,
            limits.num_tokens,
            limits.oldest_wait(),
            supervisor.num_restarts,
            len(thread.dispatcher.handles),
        )
