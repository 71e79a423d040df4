"""Where things go in a picture: columns of pixels, bins of a histogram, labels beside each other.

Standard library only.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .series import Gap, Mark

__all__ = ["Column", "bin_edges", "columns_of", "histogram", "spread", "thinned"]


@dataclass(frozen=True, slots=True)
class Column:
    """What one column of pixels shows of the gaps that ended in it.

    Attributes:
        seconds: the middle of the column on the axis.
        low, median, high: of its gaps, in milliseconds.
        n: how many those are.
    """

    seconds: float
    low: float
    median: float
    high: float
    n: int


def columns_of(gaps: Sequence[Gap], seconds: float, count: int) -> list[Column]:
    """Return `count` columns at most over an axis of `seconds`: those that a gap ended in.

    The longest gap of all is the highest of a column, and the shortest the lowest of one.
    """
    members: dict[int, list[float]] = {}
    for gap in gaps:
        members.setdefault(_column(gap.seconds, seconds, count), []).append(gap.ms)
    return [
        Column((index + 0.5) * seconds / count, min(ms), statistics.median(ms), max(ms), len(ms))
        for index, ms in sorted(members.items())
    ]


def thinned(marks: Sequence[Mark], seconds: float, count: int) -> list[Mark]:
    """Return the marks that can be told apart on an axis of `count` columns.

    Of those in one column it is the one of the largest amount.
    """
    largest: dict[int, Mark] = {}
    for mark in marks:
        column = _column(mark.seconds, seconds, count)
        if column not in largest or mark.amount > largest[column].amount:
            largest[column] = mark
    return list(largest.values())


def _column(at: float, seconds: float, count: int) -> int:
    return min(int(at / seconds * count), count - 1) if seconds > 0 else 0


def bin_edges(low: float, high: float, count: int, *, log: bool) -> list[float]:
    """Return the edges of `count` bins from `low` to `high`, equally wide in value or logarithm."""
    if log:
        ratio = math.log(high / low)
        inner = [low * math.exp(ratio * index / count) for index in range(1, count)]
    else:
        inner = [low + (high - low) * index / count for index in range(1, count)]
    return [low, *inner, high]


def histogram(values: Iterable[float], edges: Sequence[float]) -> list[int]:
    """Return how many values fall into each bin; what lies outside is in the first or last one."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    return counts


def spread(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Return places near the `wanted` ones, at least `distance` apart, in [low, high] if they fit.

    They keep the order of what is wanted. Where there is no room for all, they share what there is.
    """
    if not wanted:
        return []
    distance = min(distance, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    places = [0.0] * len(wanted)
    least = low
    for index in order:  # upwards, none below the one before it
        places[index] = max(wanted[index], least)
        least = places[index] + distance
    most = high
    for index in reversed(order):  # and down again from the upper end
        places[index] = min(places[index], most)
        most = places[index] - distance
    return places
