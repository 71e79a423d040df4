"""Counts drafts that steps verify and accept, and measures the time of each step. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..scheduling.plan import StepPlan

__all__ = ["StepCounter", "StepTime"]


class StepTime(NamedTuple):
    """How long a step took."""

    seconds: float
    look_seconds: float
    """That the host has looked for drafts before; not part of the time."""


class StepCounter:
    """Follows the steps of a loop from launch to commit."""

    def __init__(self, most_drafts: int) -> None:
        """Count drafts of a row by their number, up to `most_drafts`."""
        self._launched: deque[tuple[StepPlan, int, float]] = deque()
        self._arrived_ns = 0
        self._verify_steps = self._verified_rows = 0
        self._drafted = [0] * most_drafts
        self._accepted = [0] * most_drafts

    def launched(self, plan: StepPlan, started_ns: int, look_seconds: float = 0.0) -> None:
        """Note when the loop began with a step, and how long it had looked for drafts before."""
        self._launched.append((plan, started_ns, look_seconds))

    def committed(
        self, plan: StepPlan, advanced: Sequence[int] | None, arrived_ns: int
    ) -> StepTime | None:
        """Count a step; return how long it took, or None if its launch was not noted."""
        began, self._arrived_ns = self._arrived_ns, arrived_ns
        if advanced is not None:
            self._verify_steps += 1
            for drafts, count in zip(plan.drafts, advanced, strict=True):
                self._verified_rows += len(drafts) > 0
                for index in range(len(drafts)):
                    self._drafted[index] += 1
                    self._accepted[index] += index < count - 1
        if not (self._launched and self._launched[0][0] is plan):  # of `score`
            return None
        _, started, look_seconds = self._launched.popleft()
        # An asynchronous device begins a step when the previous one has ended.
        return StepTime((arrived_ns - max(began, started)) / 1e9, look_seconds)

    @property
    def counts(self) -> dict[str, int]:
        """Verify steps, their rows with drafts, and the drafts that they verified and accepted."""
        return {
            "verify_steps": self._verify_steps,
            "verified_rows": self._verified_rows,
            "drafted": sum(self._drafted),
            "accepted": sum(self._accepted),
        }

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Accepted drafts by their number in the draft of a row, the first one first."""
        return tuple(self._accepted)

    def stats(self) -> dict[str, Any]:
        """Return the counts, in total and by position."""
        return {
            **self.counts,
            "drafted_by_position": list(self._drafted),
            "accepted_by_position": list(self._accepted),
        }
