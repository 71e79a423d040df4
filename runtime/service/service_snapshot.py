"""`ServiceSnapshot`: the state of an `AsyncEngine` at one moment. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from ...profiling.timeline import Timeline
from ..engine.engine_metrics import EngineCounters, EngineGauges
from .health import Health

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
    restarts: int
    """Restarts after failures."""
