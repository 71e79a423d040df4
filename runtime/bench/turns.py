"""Repetitions that take turns, and how far they lie apart."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["SPREAD_LIMIT", "spread", "take_turns"]

SPREAD_LIMIT = 0.05
"""A case whose repetitions lie further apart is warned about."""


def take_turns(
    sides: Sequence[Callable[[], None]], repetitions: int, seconds: float = math.inf
) -> None:
    """Run each side so many times: every round runs all of them, each round in reverse of the last.

    So what makes a machine slower for a while meets all sides, a drift from the first round to the
    last adds as much to one side as to another, and nobody always comes behind the same one.

    Args:
        sides: to be run, in the order of the first round.
        repetitions: of each side.
        seconds: a side that would take longer, by its last run, is run no more; once in any case.
    """
    taken, last = [0.0] * len(sides), [0.0] * len(sides)
    order = range(len(sides))
    for number in range(repetitions):
        for i in order if number % 2 == 0 else reversed(order):
            if taken[i] + last[i] <= seconds:
                began = time.perf_counter()
                sides[i]()
                last[i] = time.perf_counter() - began
                taken[i] += last[i]


def spread(medians: Sequence[float]) -> float | None:
    """Return (max - min) / median of the repetitions' medians; None of a single repetition."""
    if len(medians) < 2:
        return None
    return (max(medians) - min(medians)) / statistics.median(medians)
