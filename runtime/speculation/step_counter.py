"""Counts the drafts that steps verify and accept, and tells how long each step took. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..request import Request
from ..scheduling.plan import StepPlan

__all__ = ["StepCounter", "full_sampler"]


class StepCounter:
    """Follows the steps of a loop from launch to commit."""

    def __init__(self, most_drafts: int) -> None:
        """Count drafts of a row by their number, up to `most_drafts`."""
        self._launched: deque[tuple[StepPlan, int]] = deque()
        self._arrived_ns = 0
        self._verify_steps = 0
        self._drafted = [0] * most_drafts
        self._accepted = [0] * most_drafts

    def launched(self, plan: StepPlan, started_ns: int) -> None:
        """Note when the loop began with a step that was launched."""
        self._launched.append((plan, started_ns))

    def committed(
        self, plan: StepPlan, advanced: Sequence[int] | None, arrived_ns: int
    ) -> float | None:
        """Count a step; return the seconds it took, or None if its launch was not noted."""
        began, self._arrived_ns = self._arrived_ns, arrived_ns
        if advanced is not None:
            self._verify_steps += 1
            for drafts, count in zip(plan.drafts, advanced, strict=True):
                for index in range(len(drafts)):
                    self._drafted[index] += 1
                    self._accepted[index] += index < count - 1
        if not (self._launched and self._launched[0][0] is plan):  # of `score`, or with token masks
            return None
        _, started = self._launched.popleft()
        # An asynchronous device begins a step when the previous one has ended.
        return (arrived_ns - max(began, started)) / 1e9

    @property
    def counts(self) -> dict[str, int]:
        """Verify steps, and the drafts that they verified and accepted."""
        return {
            "verify_steps": self._verify_steps,
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


def full_sampler(requests: Sequence[Request]) -> bool:
    """Whether a step of these requests needs more than greedy tokens."""
    return any(request.params.needs_full_sampler for request in requests)
