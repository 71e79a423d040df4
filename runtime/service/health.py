"""The state of an `AsyncEngine` as values: `Phase`, `Health`, `ServiceSnapshot`, `ReloadResult`.

Does not import torch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ...profiling.timeline import Timeline
from ..engine.engine_stats import EngineCounters, EngineGauges


class Phase(enum.Enum):
    """What an `AsyncEngine` is doing."""

    NOT_STARTED = "not_started"
    """Waits for `start()`. No thread runs, so the process may fork."""
    STARTING = "starting"
    """Loads a model and prepares its steps."""
    SERVING = "serving"
    DRAINING = "draining"
    """Finishes its requests and refuses new ones."""
    ASLEEP = "asleep"
    """Holds no model and no device memory."""
    FAILED = "failed"
    """An exception has ended the engine: restart the process, or make a new one."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Health:
    """The state of an `AsyncEngine` at one moment."""

    phase: Phase
    live: bool
    """Whether the step thread runs and has not failed: if not, restart the process."""
    ready: bool
    """Whether new requests are served: it serves, and no step has taken too long."""
    step_age: float | None
    """Seconds since the last completed step, or since work arrived; None without work."""
    reason: str | None
    """Why it is not ready."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What `AsyncEngine.reload` did."""

    in_place: bool
    """Whether the running engine took the weights; else a new engine was started."""
    seconds: float
    """Duration without the drain."""
    reason: str | None = None
    """Why a new engine was started."""


class ServiceSnapshot(NamedTuple):
    """State and counters of an `AsyncEngine`, which may run steps meanwhile."""

    health: Health
    gauges: EngineGauges | None
    """None while there is no engine."""
    counters: EngineCounters
    """Of all its engines: `sleep` and `reload` lose nothing."""
    timeline: Timeline | None
    """None while there is no engine."""
    queued_requests: int
    """Requests that wait for a row, those being tokenised included."""
    queued_tokens: int
    """Their prompt tokens."""
    open_requests: int
    """Requests that have not ended."""
