"""Predicts how long steps take, for the latency budget of prefill and for the choice of drafts.

    decode step   decode[rows' bucket] + slope * attended
    with drafts   (decode[rows' bucket] + slope * attended) * multiple[tokens of the step]
    prefill       prefill[tokens' bucket] + slope * attended + scored prompt tokens
    mixed         the sum of both parts
    in one pass   prefill[bucket of all tokens] + attention of both

A step takes the time of its bucket, to which most are padded, plus the attention of its
tokens: a slope per attended position, the same for all buckets of a phase. `attended` is the number
of positions that the tokens of a step attend to, summed over tokens and layers.

Steps are measured before the first request, on padding (see `engine/startup.py`). These
measurements have no real contexts, no work of the host and no later load of the machine, so every
timed step corrects the prediction a little. The correction is normalised least mean squares (Widrow
& Hoff 1960; Nagumo & Noda 1967 for the normalisation), which needs no history. Errors are clipped,
so that one stalled step changes little. Does not import torch.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from ...graphs.buckets import Buckets
from ..request import Request
from .plan import StepPlan

GAIN = 0.2
"""Learning rate: share of the error by which the prediction for the same step changes."""

GAIN_EARLY = 0.05
"""Learning rate of prefill after a step that took less time. It is smaller, because a slow step
exceeds the latency budget and a fast one only costs throughput: the prediction for a step with
prefill is the 0.8 expectile, not the mean."""

LARGEST_ERROR = 0.5
"""Errors are clipped to this multiple of the predicted time of the updated part."""

RETURN = 0.02
"""Share by which every other bucket moves toward the value that the current step implies."""

ROUNDS = 5
"""Measurements of each step, interleaved with the others."""

SUM_EVERY = 16
"""Steps with the same rows between two sums of attended positions. Summing takes a call per row,
and a step advances a row by only one position."""

SHARE_AFTER = 16
"""Consecutive mixed steps (prefill and decode) after which an error is also attributed to the
decode part."""

SCORE_RATE = 0.5
"""Share of a step's error by which the time of scoring a prompt token is corrected."""

DRAFT_GAIN = 0.1
"""Share of an error by which the multiple of the kind of step with drafts that was run is
corrected."""

COMMON_GAIN = 0.05
"""Share of an error by which all multiples of that number of rows are corrected, at least: longer
contexts slow them down by another factor than decode steps. The first errors count more, since the
host's work for a step with drafts was not measured at the start."""

FADING = 5e-4
"""Share by which each step lowers the multiples of other steps with drafts, never below 1: one that
was taken for too slow is tried again."""

LEAST_SECONDS = 1e-9

Phase = Literal["decode", "prefill"]


def clipped(error: float, predicted: float) -> float:
    """Return the error of a prediction, clipped to `LARGEST_ERROR`."""
    largest = LARGEST_ERROR * predicted
    return min(max(error, -largest), largest)


class PhaseTimes:
    """Seconds of the decode or prefill parts of steps, by bucket and attended positions."""

    def __init__(
        self,
        sizes: Buckets,
        seconds: Sequence[float],
        slope: float,
        usual_reach: float,
        gain_early: float = GAIN,
    ) -> None:
        """Start with measured times.

        Args:
            sizes: the buckets.
            seconds: time of each bucket, without attention.
            slope: seconds per attended position.
            usual_reach: positions that one token attends to in a context of ordinary length; the
                scale that divides an error between the bucket and the slope.
            gain_early: learning rate after a step that took less time than predicted.
        """
        assert len(sizes) == len(seconds)
        assert usual_reach > 0
        self.sizes = sizes
        self.slope = max(slope, 0.0)
        self.seen = [0] * len(sizes)
        """Number of timed steps of each bucket."""
        self._usual_reach, self._gain_early = usual_reach, gain_early
        # A bucket measured slower than a larger one was disturbed during its measurement.
        falling = accumulate(reversed(seconds), min)
        self._measured = [max(value, LEAST_SECONDS) for value in falling][::-1]
        self._bases, self.seconds = list(self._measured), list(self._measured)
        """Predicted seconds of each bucket, without attention, non-decreasing."""

    def lanes_at_cost_of(self, lanes: int) -> int:
        """Return the largest bucket that takes no longer than `lanes` do, without attention."""
        return self.sizes.sizes[bisect_right(self.seconds, self.predict(lanes, 0)) - 1]

    def predict(self, lanes: int, attended: float) -> float:
        """Return the predicted seconds for `lanes` tokens or rows; non-decreasing in both."""
        return self.seconds[bisect_left(self.sizes.sizes, lanes)] + self.slope * attended

    def correct(self, lanes: int, attended: float, error: float) -> None:
        """Correct the prediction for a step that took `error` seconds longer than predicted.

        One step of least mean squares: bucket time and slope share the correction by their weight
        in this step. A bucket that no step has used is scaled by the same factor. A used bucket
        moves a little toward that value, so that a disturbed measurement is forgotten even if the
        bucket is avoided because of it. No smaller bucket becomes slower than a larger one.
        """
        index = bisect_left(self.sizes.sizes, lanes)
        usual = self.sizes.sizes[index] * self._usual_reach
        weight = attended / usual
        error = clipped(error, self.seconds[index] + self.slope * attended)
        step = (GAIN if error > 0 else self._gain_early) * error / (1 + weight * weight)
        base = max(self.seconds[index] + step, LEAST_SECONDS)
        self.slope = max(self.slope + step * weight / usual, 0.0)
        self.seen[index] += 1
        factor = base / self._measured[index]
        for other, measured in enumerate(self._measured):
            share = RETURN if self.seen[other] else 1.0
            self._bases[other] += share * (measured * factor - self._bases[other])
            if other < index:
                self._bases[other] = min(self._bases[other], base)
        self._bases[index] = base
        self.seconds = list(accumulate(self._bases, max))  # no bucket is faster than a smaller one


class DraftTimes:
    """Times of steps of one number of rows that verify or propose drafts, in decode steps."""

    def __init__(self, size: int, multiples: Mapping[int, float], *, padded: bool) -> None:
        """Start with measured times.

        Args:
            size: rows of the steps.
            multiples: time by tokens per row; 1 token per row: a step that verifies nothing.
            padded: whether all rows of a step have as many tokens, padding included.
        """
        self.size, self.padded = size, padded
        self.tokens = [size * tokens_per_row for tokens_per_row in sorted(multiples)]
        """Of the measured steps, ascending."""
        self.multiples = [max(multiples[n], 1.0) for n in sorted(multiples)]
        """Time of each of them, as a multiple of a decode step's."""
        self.most_drafts = max(multiples) - 1
        """That steps verify of a row."""
        self._corrected = 0

    def multiple(self, tokens: int) -> float:
        """Return the predicted time of a step of so many tokens, padding included."""
        at, weight = self._between(tokens)
        return self.multiples[at] * weight + self.multiples[at - 1] * (1 - weight)

    def correct(self, plan: StepPlan, multiple: float) -> float:
        """Correct the prediction for a step that took this multiple of a decode step's time.

        Returns the multiple, or where a step took far longer than predicted, the largest one that
        counts.
        """
        at, weight = self._between(self.computed(plan))
        predicted = self.multiples[at] * weight + self.multiples[at - 1] * (1 - weight)
        error = clipped(multiple / predicted - 1, 1.0)
        common = max(COMMON_GAIN, 1 / (2 + self._corrected))
        self._corrected += 1
        for point, before in enumerate(self.multiples):
            share = weight if point == at else 1 - weight if point == at - 1 else 0.0
            change = error * (common + DRAFT_GAIN * share) - FADING * (share == 0.0)
            self.multiples[point] = max(before * (1 + change), 1.0)
        return min(multiple, predicted * (1 + LARGEST_ERROR))

    def fade(self, steps: int) -> None:
        """Lower the times for a number of decode steps."""
        factor = (1 - FADING) ** steps
        self.multiples = [max(multiple * factor, 1.0) for multiple in self.multiples]

    def computed(self, plan: StepPlan) -> int:
        """Return the tokens that a step computes, padding included."""
        if self.padded:
            tokens = self.size * max(plan.decode_counts, default=1)
            return self.tokens[bisect_left(self.tokens, tokens)]
        return plan.decode_tokens + self.size - len(plan.decode)

    def _between(self, tokens: int) -> tuple[int, float]:
        """Return the first measured point of at least `tokens`, and its weight."""
        at = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        if at == 0:
            return 0, 1.0
        below, above = self.tokens[at - 1], self.tokens[at]
        return at, (min(tokens, above) - below) / (above - below)


class StepTimes:
    """The times of all steps of an engine. Pairs are of the greedy and of the full sampler."""

    def __init__(
        self,
        decode: tuple[PhaseTimes, PhaseTimes],
        reach: Callable[[int], int],
        *,
        prefill: tuple[PhaseTimes, PhaseTimes] | None = None,
        drafts: Sequence[Sequence[DraftTimes]] = (),
        one_pass: bool = False,
        calibration_seconds: float = 0.0,
    ) -> None:
        """Start with measured times.

        Args:
            decode: of decode steps.
            reach: context length -> positions that its newest token attends to, summed over layers.
            prefill: None: prefill is not predicted.
            drafts: of each sampler and bucket of `decode`; empty without speculation.
            one_pass: whether decoding rows and chunks are computed in one forward pass.
            calibration_seconds: how long the measurements took.
        """
        self.decode, self.prefill, self.drafts = decode, prefill, drafts
        self.one_pass = one_pass
        self.calibration_seconds = calibration_seconds
        self.ignored = 0
        """Invalid times of steps."""
        self._reach = reach
        self._score_seconds = 0.0  # for one position scored for prompt_logprobs, as learned
        self._mixed = 0  # mixed steps since the last decode-only step
        # Positions that the rows of the latest plans attend to; whether one needs the full sampler.
        self._rows: Sequence[Request] = ()
        self._attended = 0
        self._full = False
        self._steps = 0  # since the last sum

    def decode_seconds(self, requests: Sequence[Request]) -> float:
        """Return the predicted seconds of a decode step of these requests."""
        if requests is not self._rows or self._steps >= SUM_EVERY:
            self._look_at(requests)
        return self.decode[self._full].predict(len(requests), self._attended)

    def with_drafts(self, requests: Sequence[Request]) -> DraftTimes:
        """Return the times of steps of these requests that verify or propose drafts."""
        if requests is not self._rows:
            self._look_at(requests)
        return self.drafts[self._full][bisect_left(self.decode[0].sizes.sizes, len(requests))]

    def predict(self, plan: StepPlan) -> float:
        """Return the predicted seconds of a plan without drafts."""
        return sum(self._parts(plan))

    def largest_chunk_at_least_cost(self, rows: int) -> int:
        """Return the most tokens of a chunk that take no longer than the smallest bucket, without
        attention, in a step with this number of decoding rows."""
        prefill, rows = self._prefill[False], rows if self.one_pass else 0
        tokens = min(rows + self.least_chunk, prefill.sizes.largest)
        return prefill.lanes_at_cost_of(tokens) - rows

    @property
    def least_chunk(self) -> int:
        """Tokens of the smallest prefill step."""
        return self._prefill[False].sizes.sizes[0]

    @property
    def least_mixed_seconds(self) -> float:
        """Predicted seconds of the smallest chunk in a step where all other rows decode, without
        attention; 0.0 if there is only one row."""
        decode, prefill = self.decode[False], self._prefill[False]
        rows, tokens = decode.sizes.largest - 1, self.least_chunk
        if not rows:
            return 0.0
        if self.one_pass:
            return prefill.predict(min(rows + tokens, prefill.sizes.largest), 0)
        return decode.predict(rows, 0) + prefill.predict(tokens, 0)

    def learn(self, plan: StepPlan, seconds: float) -> float:
        """Correct the predictions by the time of a step. Invalid times are ignored and counted.

        Returns the time of its decoding rows in decode steps: of a step with drafts and prefill, as
        predicted. Of what it took longer than predicted, at most `LARGEST_ERROR` counts. 0.0 if the
        time is invalid.

        A mixed step corrects the prefill part, because decode-only steps determine the decode part.
        After many mixed steps without a decode-only step, both parts share the error, unless they
        are one pass. Steps with drafts correct what these take longer; with prefill too, nothing.
        """
        if not 0 < seconds < math.inf:
            self.ignored += 1
            return 0.0
        decode = self.decode_seconds(plan.decode) if plan.decode else 0.0
        self._steps += plan.timed
        if plan.decode_counts or plan.proposes:
            times = self.with_drafts(plan.decode)
            if plan.prefill:
                return times.multiple(times.computed(plan))
            return times.correct(plan, seconds / decode)
        if not plan.prefill:
            self._mixed = 0
            self.decode[self._full].correct(len(plan.decode), self._attended, seconds - decode)
            if self.drafts:
                self.with_drafts(plan.decode).fade(plan.timed)
            return min(seconds / decode, 1 + LARGEST_ERROR)
        if self.prefill is None:
            return 1.0
        decode, prefill = self._parts(plan)
        error = seconds - decode - prefill
        if plan.scored_tokens:  # its error is attributed to scoring, which nothing calibrates
            error = SCORE_RATE * error / plan.scored_tokens
            self._score_seconds = max(0.0, self._score_seconds + error)
            return 1.0
        if plan.decode and not self.one_pass:
            self._mixed += 1
            if self._mixed > SHARE_AFTER:
                part = error * decode / (decode + prefill)
                self.decode[self._full].correct(len(plan.decode), self._attended, part)
                error -= part
        self._times_of_chunks(plan).correct(*self._computed_by(plan), error)
        return 1.0

    def seconds_with_drafts(self) -> list[dict[str, float]]:
        """Return the present times by "rows x tokens per row", for each sampler."""
        return [
            {
                f"{own.size}x{tokens // own.size}": seconds * (multiple if number else 1.0)
                for own, seconds in zip(times, decode.seconds, strict=True)
                for number, (tokens, multiple) in enumerate(
                    zip(own.tokens, own.multiples, strict=True)
                )
            }
            for times, decode in zip(self.drafts, self.decode, strict=True)
        ]

    def _look_at(self, requests: Sequence[Request]) -> None:
        """Sum the attended positions of the rows, because the rows changed or the sum is old.

        Plans contain the same list object while the same rows decode. A planned and a launched step
        differ by one position per row, less than the steps between two sums.
        """
        self._rows, self._steps = requests, 0
        self._attended = sum(self._reach(request.num_computed + 1) for request in requests)
        self._full = any(request.params.needs_full_sampler for request in requests)

    @property
    def _prefill(self) -> tuple[PhaseTimes, PhaseTimes]:
        assert self.prefill is not None, "prefill has not been measured"
        return self.prefill

    def _parts(self, plan: StepPlan) -> tuple[float, float]:
        """Return the predicted seconds of the decoding rows and of the chunks of a plan.

        In one pass, only the attention of the rows counts as theirs, and they are tokens of the
        chunks otherwise. 0.0 for chunks if prefill has not been measured.
        """
        rows = self.decode_seconds(plan.decode) if plan.decode else 0.0
        if not plan.prefill or self.prefill is None:
            return rows, 0.0
        if plan.decode and self.one_pass:
            rows = self.decode[self._full].slope * self._attended
        chunks = self._times_of_chunks(plan).predict(*self._computed_by(plan))
        return rows, chunks + plan.scored_tokens * self._score_seconds

    def _times_of_chunks(self, plan: StepPlan) -> PhaseTimes:
        full = any(chunk.request.params.needs_full_sampler for chunk in plan.prefill)
        return self._prefill[full or bool(plan.decode and self.one_pass and self._full)]

    def _computed_by(self, plan: StepPlan) -> tuple[int, int]:
        """Return the tokens that one pass computes with the chunks of a plan, and the positions
        that prompt tokens attend to.

        The middle token of a chunk stands for all of them.
        """
        middle = ((c.count, c.start + (c.count + 1) // 2) for c in plan.prefill)
        attended = sum(count * self._reach(context) for count, context in middle)
        return plan.prefill_tokens + (len(plan.decode) if self.one_pass else 0), attended


# Measurements before the first request.


class Point(NamedTuple):
    """A step that is measured on padding."""

    phase: Phase
    size: int
    """Rows of a decode step, tokens of a prefill step."""
    context: int = 0
    """Positions before its tokens."""
    tokens_per_row: int = 1
    drafts: int = 0
    """That each row proposes."""
    full_sampler: bool = False


def calibrate(
    time_step: Callable[[Point], float],
    *,
    rows: Buckets,
    reach: Callable[[int], int],
    context: int,
    useful_seconds: float,
    tokens: Buckets | None = None,
    verifying: Callable[[int], Sequence[int]] | None = None,
    proposing: Callable[[int], int] = lambda rows: 0,
    padded: bool = True,
    one_pass: bool = False,
) -> StepTimes:
    """Return the times of prepared steps, measured on padding.

    Every bucket is measured at position 0, and one bucket of each phase after `context` positions,
    in several interleaved rounds. The fastest round counts, because load on the machine disturbs it
    least. The attention of a chunk to itself is subtracted from its bucket's time, because
    predictions count it as attended positions. The full sampler is measured in decode steps, and
    takes as long for each token of a verify step; prefill steps start with the times of greedy
    ones.

    Args:
        time_step: runs a step and returns its seconds.
        rows: buckets of decode steps.
        reach: see `StepTimes`.
        context: positions before the tokens of steps that measure the time of attention.
        useful_seconds: steps that twice took far longer are measured twice only.
        tokens: buckets of prefill steps; None: these are not measured.
        verifying: number of rows -> tokens per row of verify steps; None: without speculation.
        proposing: number of rows -> drafts that steps with drafts propose.
        padded: see `DraftTimes`.
        one_pass: see `StepTimes`.
    """
    phases: dict[Phase, Buckets] = {"decode": rows}
    if tokens is not None:
        phases["prefill"] = tokens
    # The middle bucket: large enough to show attention, and cheap to measure.
    far = {p: Point(p, sizes.sizes[len(sizes) // 2], context) for p, sizes in phases.items()}
    drafted = {size: (1, *verifying(size)) for size in rows} if verifying is not None else {}
    began = time.perf_counter()
    fastest = dict.fromkeys(
        (
            *(Point(phase, size) for phase, sizes in phases.items() for size in sizes),
            *far.values(),
            *(Point("decode", size, full_sampler=True) for size in rows),
            *(
                Point("decode", size, 0, n, proposing(size))
                for size, counts in drafted.items()
                for n in counts
            ),
        ),
        math.inf,
    )
    for number in range(ROUNDS):
        for point, least in fastest.items():
            if number < 2 or least <= 2 * useful_seconds:
                fastest[point] = min(least, time_step(point))
    calibration_seconds = time.perf_counter() - began

    def extra(size: int) -> float:
        """Return what the full sampler takes longer than the greedy one."""
        greedy, full = (fastest[Point("decode", size, full_sampler=full)] for full in (False, True))
        return max(full - greedy, 0.0)

    def times_of(phase: Phase, gain_early: float) -> tuple[PhaseTimes, PhaseTimes]:
        sizes = phases[phase]

        def attended(size: int, behind: int) -> int:
            return size * reach(behind + (1 if phase == "decode" else (size + 1) // 2))

        middle = far[phase].size
        further = attended(middle, context) - attended(middle, 0)
        more = fastest[far[phase]] - fastest[Point(phase, middle)]
        slope = max(more / further, 0.0) if further > 0 else 0.0
        for size in sizes:  # noise over few positions must not leave a step nothing but attention
            if itself := attended(size, 0):
                slope = min(slope, fastest[Point(phase, size)] / (2 * itself))
        bases = [fastest[Point(phase, size)] - slope * attended(size, 0) for size in sizes]
        full = bases
        if phase == "decode":
            full = [base + extra(size) for base, size in zip(bases, sizes, strict=True)]
        usual = max(reach(context), 1)
        greedy = PhaseTimes(sizes, bases, slope, usual, gain_early)
        return greedy, PhaseTimes(sizes, full, slope, usual, gain_early)

    def draft_times(size: int, sampled: float) -> DraftTimes:
        """Return the times with a sampler that takes so many more seconds for each token."""
        decode = fastest[Point("decode", size)] + sampled
        multiples = {
            n: (fastest[Point("decode", size, 0, n, proposing(size))] + n * sampled) / decode
            for n in drafted[size]
        }
        return DraftTimes(size, multiples, padded=padded)

    drafts = [[draft_times(size, full * extra(size)) for size in drafted] for full in (False, True)]
    return StepTimes(
        times_of("decode", GAIN),
        reach,
        prefill=None if tokens is None else times_of("prefill", GAIN_EARLY),
        drafts=drafts if drafted else (),
        one_pass=one_pass,
        calibration_seconds=calibration_seconds,
    )
