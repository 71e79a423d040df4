"""Sizes prefill chunks by predicted step time (`max_itl_ms`). Does not import torch.

A step with decoding rows takes as many prompt tokens as its predicted time allows. If even the
smallest prefill step does not fit, a chunk of that cost runs anyway: prompts make progress, and the
inter-token latency exceeds the budget.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from ...graphs.buckets import Buckets
from ..request import Request
from .plan import StepPlan

# Predicts step times, and corrects them with measured ones. Does not import torch.
#
#     step = decode[rows' bucket] + decode slope * attended  +  prefill[tokens' bucket] + ...
#
# A step is padded to its bucket, so it has the cost of the bucket, plus the attention of its
# tokens: a slope per attended position, the same for all buckets of a phase. `attended` is the
# number of positions that the tokens of a step attend to, summed over tokens and layers.
#
# Buckets are measured before the first request, on padding (see `engine/startup.py`). These
# measurements have no real contexts and no later load of the machine, so every timed step corrects
# the prediction a little. The correction is normalised least mean squares (Widrow & Hoff 1960;
# Nagumo & Noda 1967 for the normalisation), which needs no history. Errors are clipped, so that one
# stalled step changes little.

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


SUM_EVERY = 16
"""Steps with the same rows between two sums of attended positions. Summing takes a call per row,
and a step advances a row by only one position."""

SHARE_AFTER = 16
"""Consecutive mixed steps (prefill and decode) after which an error is also attributed to the
decode part."""

SCORE_RATE = 0.5
"""Share of a step's error by which the cost of scoring a prompt token is corrected."""

logger = logging.getLogger("stepgraph.runtime")


class StepBudget:
    """Sizes chunks by `StepCosts`, and updates it with measured step times."""

    def __init__(
        self, max_itl_ms: float, costs: StepCosts, *, calibration_seconds: float = 0.0
    ) -> None:
        """Start with calibrated costs; `calibration_seconds` is the duration of calibration."""
        self.max_itl_ms = max_itl_ms
        self.costs = costs
        self.calibration_seconds = calibration_seconds
        self._arrived_ns = 0
        self._forced = 0
        self._ignored = 0
        self._steps = 0
        self._over = 0
        self._predicted = 0.0
        self._observed = 0.0
        self._errors = 0.0
        self._score_seconds = 0.0  # for one position scored for prompt_logprobs, as learned
        self._mixed = 0  # mixed steps since the last decode-only step
        # Positions that the rows of the latest plans attend to; whether one needs the full sampler.
        self._rows: list[Request] = []
        self._rows_attended = 0
        self._rows_full = False
        self._rows_steps = 0  # since the last sum

    def fit(self, plan: StepPlan, request: Request, start: int, count: int) -> int:
        """Return how many of a request's `count` tokens from `start` fit into the plan's budget.

        0 if no time is left. The first chunk of a plan fills at least the smallest bucket, because
        fewer tokens cost the same, or ends its prompt. If no row decodes, all tokens fit.
        """
        if not plan.decode:
            return count
        left = self.max_itl_ms / 1e3 - self._decode_seconds(plan)
        full = request.params.needs_full_sampler or _full_sampler(plan)
        prefill, used = self.costs.prefill[full], plan.prefill_tokens
        attended = self._attended(plan)

        def fits(more: int) -> bool:
            total = attended + self.costs.attended(start, more)
            scored = plan.scored_tokens + len(request.unscored(start, start + more))
            return prefill.predict(used + more, total) + scored * self._score_seconds <= left

        if fits(count):
            return count
        least, most = 0, count  # `least` fits or is 0, `most` does not
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(middle) else (least, middle)
        if plan.prefill or least >= min(count, prefill.sizes.sizes[0]):
            return least
        self._force(left)
        return min(count, prefill.least_lanes)

    def observe(self, plan: StepPlan, launched_ns: int, arrived_ns: int) -> None:
        """Record when a step was launched and when its tokens arrived; once for every step.

        An asynchronous device begins a step when the previous one has ended.
        """
        began = max(launched_ns, self._arrived_ns)
        self._arrived_ns = arrived_ns
        self.learn(plan, (arrived_ns - began) / 1e9)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update the costs with the time of a step. Invalid times are ignored and counted.

        A mixed step updates the prefill cost, because decode-only steps determine the decode part.
        After many mixed steps without a decode-only step, both parts share the error.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            self._ignored += 1
            return
        decode = self._decode_seconds(plan) if plan.decode else 0.0
        attended = self._attended(plan)
        prefill = self._prefill_seconds(plan, attended) if plan.prefill else 0.0
        predicted = decode + prefill
        error = seconds - predicted
        self._rows_steps += 1
        if plan.scored_tokens:  # its error is attributed to scoring, which nothing calibrates
            error = SCORE_RATE * error / plan.scored_tokens
            self._score_seconds = max(0.0, self._score_seconds + error)
            return
        if not plan.prefill:
            self._mixed = 0
            if plan.decode:
                self._correct_decode(plan, _clip(error, decode))
            return
        if plan.decode:
            self._mixed += 1
            self._steps += 1
            self._over += seconds > self.max_itl_ms / 1e3
            self._predicted += predicted
            self._observed += seconds
            self._errors += abs(error)
            if self._mixed > SHARE_AFTER:
                self._correct_decode(plan, _clip(error * decode / predicted, decode))
                error *= prefill / predicted
        costs = self.costs.prefill[_full_sampler(plan)]
        costs.correct(plan.prefill_tokens, attended, _clip(error, prefill))

    def predict(self, plan: StepPlan) -> float:
        """Return the predicted seconds of a plan."""
        seconds = self._decode_seconds(plan) if plan.decode else 0.0
        if plan.prefill:
            seconds += self._prefill_seconds(plan, self._attended(plan))
        return seconds

    def stats(self) -> dict[str, Any]:
        """Return the costs and the prediction errors as plain numbers; see `Engine.stats`."""
        n = self._steps
        greedy = {"decode": self.costs.decode[False], "prefill": self.costs.prefill[False]}
        return {
            "max_itl_ms": self.max_itl_ms,
            "calibration_seconds": self.calibration_seconds,
            "n": n,
            "predicted_ms": 1e3 * self._predicted / n if n else None,
            "observed_ms": 1e3 * self._observed / n if n else None,
            "mean_error_ms": 1e3 * self._errors / n if n else None,
            "over_budget": self._over,
            "forced": self._forced,
            "ignored": self._ignored,
            "costs": {
                phase: {
                    "sizes": list(costs.sizes),
                    "ms": [1e3 * seconds for seconds in costs.seconds],
                    "seen": list(costs.seen),
                    "ns_per_position": 1e9 * costs.slope,
                }
                for phase, costs in greedy.items()
            },
        }

    def _decode_seconds(self, plan: StepPlan) -> float:
        self._sum_rows(plan.decode)
        costs = self.costs.decode[self._rows_full]
        return costs.predict(len(plan.decode), self._rows_attended)

    def _prefill_seconds(self, plan: StepPlan, attended: int) -> float:
        prefill = self.costs.prefill[_full_sampler(plan)].predict(plan.prefill_tokens, attended)
        return prefill + plan.scored_tokens * self._score_seconds

    def _correct_decode(self, plan: StepPlan, error: float) -> None:
        """Update the decode part. `_decode_seconds` must have been called for this plan."""
        costs = self.costs.decode[self._rows_full]
        costs.correct(len(plan.decode), self._rows_attended, error)

    def _sum_rows(self, decode: list[Request]) -> None:
        """Sum the attended positions of the rows, if the rows changed or the sum is old.

        Plans contain the same list object while the same rows decode. A planned and a launched step
        differ by one position per row, less than the steps between two sums.
        """
        if decode is self._rows and self._rows_steps < SUM_EVERY:
            return
        reach = self.costs.reach
        self._rows = decode
        self._rows_steps = 0
        self._rows_attended = sum(reach(request.num_computed + 1) for request in decode)
        self._rows_full = any(request.params.needs_full_sampler for request in decode)

    def _attended(self, plan: StepPlan) -> int:
        return sum(self.costs.attended(chunk.start, chunk.count) for chunk in plan.prefill)

    def _force(self, left: float) -> None:
        if not self._forced:
            logger.warning(
                "max_itl_ms=%g leaves %.2f ms for prefill in a step with decoding rows, less than"
                " the smallest prefill step takes. Such steps run anyway and exceed the budget;"
                " raise it to avoid this (logged once; `stats` counts these steps)",
                self.max_itl_ms,
                1e3 * max(left, 0.0),
            )
        self._forced += 1


def _full_sampler(plan: StepPlan) -> bool:
    """Whether the prefill of a plan needs the full sampler."""
    return any(chunk.request.params.needs_full_sampler for chunk in plan.prefill)


def _clip(error: float, predicted: float) -> float:
    """Return the error of a part of a step, clipped to `LARGEST_ERROR`."""
    largest = LARGEST_ERROR * predicted
    return min(max(error, -largest), largest)
