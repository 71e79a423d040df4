"""What a step will take, learned from what steps took. No torch: times come from outside.

    step = decode[rows' bucket] + decode slope * attended  +  prefill[tokens' bucket] + ...

A step is padded to its bucket, so it costs what the bucket costs, and beside that the attention of
its tokens: a slope for each attended position, the same for all buckets of a phase. `attended` is
the sum over the tokens of a step of the positions that they attend to, over all layers.

Buckets are measured before the first request, on padding (see `calibration.py`). That shows no real
contexts, and no neighbour on the machine, so every step that was timed corrects the prediction a
little: by normalised least mean squares (Widrow & Hoff 1960; Nagumo & Noda 1967 for the
normalisation), which needs no history, and with errors clipped, so that one stalled step moves next
to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ...graphs.buckets import Buckets

__all__ = ["LARGEST_ERROR", "PhaseCosts", "StepCosts", "TimeStep", "calibrate"]

GAIN_LATE = 0.2
"""Share of an error that the next prediction of the same step takes up, after a step that took
longer than predicted."""

GAIN_EARLY = 0.05
"""The same after a step that took less. Early costs some throughput and late is late, so what is
predicted is not the mean: with these shares (an expectile of 0.8) most steps come before it."""

LARGEST_ERROR = 0.5
"""Of what is predicted of the part that learns: what is further off counts as this far off."""

RETURN = 0.02
"""Share of the way back to what the step just seen says of it, that every other bucket goes."""

ROUNDS = 5
"""Times that each bucket is measured, in turns with the others."""

LEAST_SECONDS = 1e-9

Phase = Literal["decode", "prefill"]

TimeStep = Callable[[Phase, int, int], float]
"""(phase, bucket, positions before its tokens) -> seconds of one such step."""


class PhaseCosts:
    """Seconds of the steps of one phase, by bucket and attended positions."""

    def __init__(
        self, sizes: Buckets, seconds: Sequence[float], slope: float, usual_reach: float
    ) -> None:
        """Begin with what was measured.

        Args:
            sizes: the buckets.
            seconds: of each, without attention.
            slope: seconds for each attended position.
            usual_reach: positions that one token attends to in a context of ordinary length: what
                says whether an error lies with the bucket or with the slope.
        """
        assert len(sizes) == len(seconds)
        assert usual_reach > 0
        self.sizes = sizes
        self.slope = max(slope, 0.0)
        self.seen = [0] * len(sizes)
        """Steps of each bucket that corrected it."""
        self._usual_reach = usual_reach
        # A bucket that seemed slower than a larger one was disturbed while it was measured.
        falling = accumulate(reversed(seconds), min)
        self._measured = [max(value, LEAST_SECONDS) for value in falling][::-1]
        self._bases = list(self._measured)
        self._table: list[float] = []
        self._tabulate()

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of a step of each bucket as predicted now, without attention; they do not fall."""
        return tuple(self._table)

    @property
    def least_lanes(self) -> int:
        """The largest bucket that costs no more than the smallest one, attention apart."""
        return max(
            size
            for size, seconds in zip(self.sizes, self._table, strict=True)
            if seconds <= self._table[0]
        )

    def copy(self) -> PhaseCosts:
        """Return a copy that learns on its own."""
        return PhaseCosts(self.sizes, self._bases, self.slope, self._usual_reach)

    def predict(self, lanes: int, attended: float) -> float:
        """Return the seconds of a step of `lanes` tokens or rows. Rises in both arguments."""
        return self._table[self._index(lanes)] + self.slope * attended

    def correct(self, lanes: int, attended: float, error: float) -> None:
        """Learn that such a step took `error` seconds more than predicted.

        The step of the least mean squares: the bucket's own time and the slope share the
        correction by how much each of them weighs in this step. Other buckets follow: one that no
        step has used yet is as much slower or faster than measured as this one, and one that was
        used goes a little of the way there, so that what a noisy moment taught of a bucket is
        forgotten although no step uses it because of that. No smaller bucket is slower.
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
        """Derive what is predicted: no bucket is faster than a smaller one."""
        self._table = list(accumulate(self._bases, max))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of both phases, each with the greedy and with the full sampler."""

    decode: tuple[PhaseCosts, PhaseCosts]
    """Indexed by whether the full sampler runs."""
    prefill: tuple[PhaseCosts, PhaseCosts]
    reach: Callable[[int], int]
    """Context -> positions that the newest token of it attends to, over all layers."""

    def attended(self, start: int, count: int) -> int:
        """Return the positions that `count` tokens from position `start` attend to."""
        return count * self.reach(start + (count + 1) // 2)  # as many as the middle one, each


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

    Every bucket is measured at position 0 and one of each phase behind `context` positions, in
    turns, several rounds; the fastest round counts, which a busy machine disturbs least. What took
    far more than `useful_seconds` twice is measured no more: no such step will run beside rows that
    decode. What a chunk attends to of itself is taken off the time of its bucket, for predictions
    count it among what its tokens attend to.
    Steps with the full sampler begin as those without.
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
