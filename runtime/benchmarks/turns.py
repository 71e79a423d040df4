"""Repetitions that take turns, and how far they lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

__all__ = ["SPREAD_LIMIT", "spread", "take_turns"]

SPREAD_LIMIT = 0.05
"""A case whose repetitions lie further apart is warned about."""


def take_turns(sides: Sequence[Callable[[], None]], repetitions: int) -> None:
    """Run each side so many times: every round runs all of them, each round in reverse of the last.

    So what makes a machine slower for a while meets all sides, a drift from the first round to the
    last adds as much to one side as to another, and nobody always comes behind the same one.
    """
    for number in range(repetitions):
        for side in sides if number % 2 == 0 else reversed(sides):
            side()


def spread(medians: Sequence[float]) -> float | None:
    """Return (max - min) / median of the repetitions' medians; None of a single repetition."""
    if len(medians) < 2:
        return None
    return (max(medians) - min(medians)) / statistics.median(medians)
