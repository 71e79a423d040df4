"""Predicts step times, and corrects them with measured ones. Does not import torch.

    step = decode[rows' bucket] + decode slope * attended  +  prefill[tokens' bucket] + ...

A step is padded to its bucket, so it has the cost of the bucket, plus the attention of its tokens:
a slope per attended position, the same for all buckets of a phase. `attended` is the number of
positions that the tokens of a step attend to, summed over tokens and layers.

Buckets are measured before the first request, on padding (see `calibration.py`). These measurements
have no real contexts and no later load of the machine, so every timed step corrects the prediction
a little. The correction is normalised least mean squares (Widrow & Hoff 1960; Nagumo & Noda 1967
for the normalisation), which needs no history. Errors are clipped, so that one stalled step changes
little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ...graphs.buckets import Buckets

__all__ = ["LARGEST_ERROR", "PhaseCosts", "StepCosts", "TimeStep", "calibrate"]

GAIN_LATE = 0.2
"""Learning rate after a step that took longer than predicted: share of the error by which the
prediction for the same step changes."""

GAIN_EARLY = 0.05
"""Learning rate after a step that took less time. It is smaller, because a slow step exceeds the
budget and a fast one only costs throughput: the prediction is the 0.8 expectile, not the mean."""

LARGEST_ERROR = 0.5
"""Errors are clipped to this multiple of the predicted time of the updated part."""

RETURN = 0.02
"""Share by which every other bucket moves toward the value that the current step implies."""

ROUNDS = 5
"""Measurements of each bucket, interleaved with the others."""

LEAST_SECONDS = 1e-9

Phase = Literal["decode", "prefill"]

TimeStep = Callable[[Phase, int, int], float]
"""(phase, bucket, positions before its tokens) -> seconds of one such step."""


class PhaseCosts:
    """Seconds of the steps of one phase, by bucket and attended positions."""

    def __init__(
        self, sizes: Buckets, seconds: Sequence[float], slope: float, usual_reach: float
    ) -> None:
        """Start with measured costs.

        Args:
            sizes: the buckets.
            seconds: time of each bucket, without attention.
            slope: seconds per attended position.
            usual_reach: positions that one token attends to in a context of ordinary length; the
                scale that divides an error between the bucket and the slope.
        """
        assert len(sizes) == len(seconds)
        assert usual_reach > 0
        self.sizes = sizes
        self.slope = max(slope, 0.0)
        self.seen = [0] * len(sizes)
        """Number of timed steps of each bucket."""
        self._usual_reach = usual_reach
        # A bucket measured slower than a larger one was disturbed during its measurement.
        falling = accumulate(reversed(seconds), min)
        self._measured = [max(value, LEAST_SECONDS) for value in falling][::-1]
        self._bases = list(self._measured)
        self._table: list[float] = []
        self._tabulate()

    @property
    def seconds(self) -> tuple[float, ...]:
        """Predicted seconds of each bucket, without attention, non-decreasing."""
        return tuple(self._table)

    @property
    def least_lanes(self) -> int:
        """The largest bucket that costs no more than the smallest one, without attention."""
        return max(
            size
            for size, seconds in zip(self.sizes, self._table, strict=True)
            if seconds <= self._table[0]
        )

    def copy(self) -> PhaseCosts:
        """Return an independent copy."""
        return PhaseCosts(self.sizes, self._bases, self.slope, self._usual_reach)

    def predict(self, lanes: int, attended: float) -> float:
        """Return the predicted seconds for `lanes` tokens or rows; non-decreasing in both."""
        return self._table[self._index(lanes)] + self.slope * attended

    def correct(self, lanes: int, attended: float, error: float) -> None:
        """Correct the prediction for a step that took `error` seconds longer than predicted.

        One step of least mean squares: bucket time and slope share the correction by their weight
        in this step. A bucket that no step has used is scaled by the same factor. A used bucket
        moves a little toward that value, so that a disturbed measurement is forgotten even if the
        bucket is avoided because of it. No smaller bucket becomes slower than a larger one.
        """
        index = self._index(lanes)
        usual = self.sizes.sizes[index] * self._usual_reach
        weight = attended / usual
        gain = GAIN_LATE if error > 0 else GAIN_EARLY
        step = gain * error / (1 + weight * weight)
        base = max(self._table[index] + step, LEAST_SECONDS)
        self.slope = max(self.slope + step * weight / usual, 0.0)
        self.seen[index] += 1
        factor = base / self._measured[index]
        for other, measured in enumerate(self._measured):
            share = RETURN if self.seen[other] else 1.0
            self._bases[other] += share * (measured * factor - self._bases[other])
            if other < index:
                self._bases[other] = min(self._bases[other], base)
        self._bases[index] = base
        self._tabulate()

    def _index(self, lanes: int) -> int:
        size = self.sizes.fit(lanes)
        assert size is not None, f"{lanes} lanes, the largest bucket is {self.sizes.largest}"
        return self.sizes.sizes.index(size)

    def _tabulate(self) -> None:
        """Compute the predictions: no bucket is faster than a smaller one."""
        self._table = list(accumulate(self._bases, max))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of both phases, each with the greedy and with the full sampler."""

    decode: tuple[PhaseCosts, PhaseCosts]
    """Indexed by whether the full sampler runs."""
    prefill: tuple[PhaseCosts, PhaseCosts]
    reach: Callable[[int], int]
    """Context length -> positions that its newest token attends to, summed over layers."""

    def attended(self, start: int, count: int) -> int:
        """Return the positions that `count` tokens from position `start` attend to."""
        return count * self.reach(start + (count + 1) // 2)  # approximated by the middle token


def calibrate(
    time_step: TimeStep,
    *,
    rows: Buckets,
    tokens: Buckets,
    reach: Callable[[int], int],
    context: int,
    useful_seconds: float,
) -> StepCosts:
    """Return the costs of prepared steps, measured on padding.

    Every bucket is measured at position 0, and one bucket of each phase after `context` positions,
    in several interleaved rounds. The fastest round counts, because load on the machine disturbs it
    least. Buckets that twice took far longer than `useful_seconds` are skipped: no such step runs
    with decoding rows. The attention of a chunk to itself is subtracted from its bucket's time,
    because predictions count it as attended positions. Steps with the full sampler start with the
    costs of greedy steps.
    """
    points: list[tuple[Phase, int, int]] = []
    far: dict[Phase, tuple[Phase, int, int]] = {}
    phases: tuple[tuple[Phase, Buckets], ...] = (("decode", rows), ("prefill", tokens))
    for phase, sizes in phases:
        points += [(phase, size, 0) for size in sizes]
        # The middle one: large enough to show attention, and cheap to measure.
        far[phase] = (phase, sizes.sizes[len(sizes) // 2], context)
        points.append(far[phase])
    fastest = dict.fromkeys(points, float("inf"))
    for number in range(ROUNDS):
        for point in points:
            if number < 2 or fastest[point] <= 2 * useful_seconds:
                fastest[point] = min(fastest[point], time_step(*point))

    def costs(phase: Phase, sizes: Buckets) -> tuple[PhaseCosts, PhaseCosts]:
        def attended(size: int, behind: int) -> int:
            return size * reach(behind + (1 if phase == "decode" else (size + 1) // 2))

        _, middle, behind = far[phase]
        further = attended(middle, behind) - attended(middle, 0)
        more = fastest[far[phase]] - fastest[phase, middle, 0]
        slope = max(more / further, 0.0) if further > 0 else 0.0
        for size in sizes:  # noise over few positions must not leave a step nothing but attention
            if itself := attended(size, 0):
                slope = min(slope, fastest[phase, size, 0] / (2 * itself))
        greedy = PhaseCosts(
            sizes,
            [fastest[phase, size, 0] - slope * attended(size, 0) for size in sizes],
            slope,
            max(reach(behind), 1),
        )
        return greedy, greedy.copy()

    return StepCosts(costs("decode", rows), costs("prefill", tokens), reach)
