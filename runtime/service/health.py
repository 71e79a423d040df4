"""`Health`: whether an `AsyncEngine` is live and ready. Does not import torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Health", "Phase"]


class Phase(enum.Enum):
    """What an `AsyncEngine` is doing."""

    NOT_STARTED = "not_started"
    """Waits for `start()`. No thread runs, so the process may fork."""
    STARTING = "starting"
    """Loads a model and prepares its steps, for the first time or after a failure."""
    SERVING = "serving"
    DRAINING = "draining"
    """Finishes its requests and refuses new ones."""
    ASLEEP = "asleep"
    """Holds no model and no device memory."""
    FAILED = "failed"
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
