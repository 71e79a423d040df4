"""Step times by rows and tokens, and the drafts that pay. No torch.

    gain = mean over rows of log(expected tokens of the row) - log(time of the verify step)
           + log(time of the decode step)

A step verifies if this is positive: the geometric mean of the rows' speeds is then higher than with
plain decoding. So no row is slowed down much for the sake of others: in a batch of 8, one row that
gets 4 tokens justifies a step 1.19 times as long, and not 1.38 times as the sum of tokens would.
Nor may the mean time per token of the rows rise, as it can where a few rows gain much and the
others wait for them: here above 1.10 times.

Steps of most devices compute as many tokens for each row. Those without padding compute as many as
there are, so that each draft of each row has to be worth its time:

    chances of two rows     0.9  0.8  0.7      0.3  0.1
    raise the mean log by   .32  .18  .11      .13  .04
    drafts by their worth     1    2    4        3    5

The drafts that are worth most come first, and the step has as many of them as maximise the gain.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ...graphs.buckets import Buckets
from ..request import Request

__all__ = ["LARGEST_ERROR", "BatchCosts", "VerifyCosts"]

LEAST_GAIN = math.log(1.1)
"""Expected gains up to this one are not worth the risk."""

LEAST_CHANCE = 0.05
"""Drafts that are less likely to be accepted are not verified."""

DECODE_RATE = 0.1
"""Share of an error by which the time of decode steps is corrected."""

COMMON_RATE = 0.05
"""Share of an error by which the times of all verify steps of so many rows are corrected, at least:
longer contexts slow them down by another factor than decode steps. The first errors count more,
since what the host does for a verify step was not measured at the start."""

OWN_RATE = 0.1
"""Share of an error by which the time of the verify step itself is corrected in addition."""

LARGEST_ERROR = 0.75
"""Errors are clipped to this multiple of the expected time: steps that other processes disturb
count little."""

FADING = 5e-4
"""Share by which each step lowers the times of other verify steps, never below that of a decode
step: one that was taken for too slow is tried again."""

VERIFY_IN_A_ROW = 32
"""Verify steps after which a decode step is run, so that its time remains known."""


class _Times:
    """Of the steps of so many rows: the time of a decode step, and multiples of it."""

    def __init__(self, size: int, seconds: Mapping[int, float]) -> None:
        """`seconds` by tokens of the step; the fewest are those of the decode step."""
        self.size = size
        self.tokens = sorted(seconds)
        self.decode = seconds[self.tokens[0]]
        self.multiples = [max(seconds[n] / self.decode, 1.0) for n in self.tokens]
        self.verified = 0
        """Verify steps that corrected the multiples."""
        self.unfaded = 0
        """Decode steps since the multiples were lowered last."""

    def fade(self) -> None:
        """Lower the multiples for the decode steps since the last time."""
        if self.unfaded:
            factor = (1 - FADING) ** self.unfaded
            self.multiples = [max(multiple * factor, 1.0) for multiple in self.multiples]
            self.unfaded = 0

    def between(self, tokens: int) -> tuple[int, float]:
        """Return the first measured point of at least so many tokens, and its weight."""
        at = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        if at == 0:
            return 0, 1.0
        below, above = self.tokens[at - 1], self.tokens[at]
        return at, (min(tokens, above) - below) / (above - below)

    def multiple(self, tokens: int) -> float:
        """Return the time of a step as a multiple of that of a decode step."""
        at, weight = self.between(tokens)
        own = self.multiples
        return own[at] if weight == 1.0 else own[at] * weight + own[at - 1] * (1 - weight)


class VerifyCosts:
    """Seconds of decode and verify steps: measured before the first request, then corrected."""

    def __init__(
        self,
        rows: Buckets,
        seconds: Mapping[tuple[int, int], float],
        *,
        padded: bool = True,
    ) -> None:
        """Start with the seconds of each (rows, tokens per row); 1 token per row: decode steps.

        `padded`: whether all rows of a step have as many tokens, padding included.
        """
        self._padded = padded
        by_tokens: dict[int, dict[int, float]] = {}
        for (size, tokens_per_row), value in seconds.items():
            by_tokens.setdefault(size, {})[size * tokens_per_row] = value
        sizes = {size: _Times(size, own) for size, own in by_tokens.items()}
        self._times = {
            count: sizes[fitting]
            for count in range(1, rows.largest + 1)
            if (fitting := rows.fit(count))
        }
        self._in_a_row = 0

    def choose(self, chances: Sequence[Sequence[float]], otherwise: float = 1.0) -> list[int]:
        """Return the number of drafts of each row of the step with the largest gain.

        All numbers are 0 if drafts do not pay.

        Args:
            chances: of each row, the probability that each of its drafts is accepted.
            otherwise: the time of the step if it verifies nothing, in decode steps.
        """
        none = [0] * len(chances)
        if self._in_a_row >= VERIFY_IN_A_ROW or not any(chances):
            return none
        times = self._times[len(chances)]
        times.fade()
        least = LEAST_GAIN - math.log(otherwise)
        found = (self._even if self._padded else self._ragged)(chances, times, least)
        if found is None:
            return none
        drafts, multiple = found
        tokens = [1 + sum(own[:count]) for own, count in zip(chances, drafts, strict=True)]
        per_token = sum([multiple / count for count in tokens]) / len(tokens)
        return drafts if per_token <= otherwise else none

    def _even(
        self, chances: Sequence[Sequence[float]], times: _Times, least: float
    ) -> tuple[list[int], float] | None:
        """Return the drafts of the best step with as many tokens for each row, and its time."""
        rows, size = len(chances), times.size
        best, best_gain, best_multiple = 0, least, 1.0
        for tokens, multiple in zip(times.tokens[1:], times.multiples[1:], strict=True):
            drafts = tokens // size - 1
            expected = sum(math.log1p(sum(own[:drafts])) for own in chances if own) / rows
            gain = expected - math.log(multiple)
            if gain > best_gain:
                best, best_gain, best_multiple = drafts, gain, multiple
        if best == 0:
            return None
        kept = [sum(chance >= LEAST_CHANCE for chance in own[:best]) for own in chances]
        return kept, best_multiple

    def _ragged(
        self, chances: Sequence[Sequence[float]], times: _Times, least: float
    ) -> tuple[list[int], float] | None:
        """Return the drafts of the best step, see the top of this file, and its time.

        In a large batch, not every number of drafts is tried.
        """
        rows, size, log = len(chances), times.size, math.log
        most = sum([math.log1p(sum(own)) for own in chances if own]) / rows
        if most <= least + log(times.multiple(size + 1)):  # even if drafts cost no more
            return None
        worth: list[tuple[float, int]] = []
        for row, own in enumerate(chances):
            tokens = 1.0
            for chance in own:
                if chance < LEAST_CHANCE:
                    break
                worth.append((chance / tokens, row))  # falls with each draft of a row
                tokens += chance
        worth.sort(reverse=True)
        every, last = max(1, rows // 4), len(worth)
        best, best_gain, product = 0, least, 1.0
        for count, (value, _) in enumerate(worth, 1):
            product *= 1 + value
            if count % every and count != last:
                continue
            gain = log(product) / rows - log(times.multiple(size + count))
            if gain > best_gain:
                best, best_gain = count, gain
        if best == 0:
            return None
        drafts = [0] * rows
        for _, row in worth[:best]:
            drafts[row] += 1
        return drafts, times.multiple(size + best)

    def least_drafts(self, rows: int) -> float:
        """Return how many drafts of each row a step has to accept on average, at least, to gain."""
        times = self._times[rows]
        return math.exp(LEAST_GAIN) * min(times.multiples[1:], default=math.inf) - 1

    def decode_seconds(self, rows: int) -> float:
        """Return the time of a decode step of so many rows."""
        return self._times[rows].decode

    def verify_seconds(self, rows: int, tokens_per_row: int, tokens: int) -> float:
        """Return the time of a verify step; see `observe`."""
        times = self._times[rows]
        return times.decode * times.multiple(self._computed(times, rows, tokens_per_row, tokens))

    def _computed(self, times: _Times, rows: int, tokens_per_row: int, tokens: int) -> int:
        """Return the tokens that a verify step computes, padding included."""
        return times.size * tokens_per_row if self._padded else tokens + times.size - rows

    def count(self, tokens_per_row: int) -> None:
        """Count a step, with or without prefill."""
        self._in_a_row = self._in_a_row + 1 if tokens_per_row > 1 else 0

    def observe_decode(
        self, rows: int, seconds: float, steps: int = 1, rate: float = DECODE_RATE
    ) -> float:
        """Correct the time of a decode step by how long the last of `steps` took, and return it.

        Invalid times are ignored. `rate`: share of the error by which it is corrected.
        """
        times = self._times[rows]
        if 0 < seconds < math.inf:
            error = seconds / times.decode - 1
            times.decode *= 1 + rate * min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
            times.unfaded += steps
        return times.decode

    def observe(self, rows: int, tokens_per_row: int, tokens: int, seconds: float) -> None:
        """Correct the time of a verify step by how long one took. Invalid times are ignored.

        `tokens` are those of all rows, without padding.
        """
        if not 0 < seconds < math.inf:
            return
        times = self._times[rows]
        times.fade()
        computed = self._computed(times, rows, tokens_per_row, tokens)
        at, weight = times.between(computed)
        error = seconds / (times.decode * times.multiple(computed)) - 1
        error = min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
        own, common = times.multiples, max(COMMON_RATE, 1 / (2 + times.verified))
        times.verified += 1
        for point in range(1, len(own)):
            share = weight if point == at else 1 - weight if point == at - 1 else 0.0
            change = error * (common + OWN_RATE * share) - FADING * (share == 0.0)
            own[point] = max(own[point] * (1 + change), 1.0)

    def seconds(self) -> dict[str, float]:
        """Return the present times by "rows x tokens per row"."""
        return {
            f"{own.size}x{tokens // own.size}": own.decode * multiple
            for own in dict.fromkeys(self._times.values())
            for tokens, multiple in zip(own.tokens, own.multiples, strict=True)
        }


class BatchCosts:
    """The times of steps, of the greedy and of the full sampler."""

    def __init__(self, greedy: VerifyCosts, full: VerifyCosts) -> None:
        """`full`: of steps in which a request needs more than greedy tokens."""
        self.greedy, self.full = greedy, full
        self._batch: Sequence[Request] = ()
        self._costs = greedy

    def of(self, requests: Sequence[Request]) -> VerifyCosts:
        """Return the times of steps of these requests."""
        if requests is not self._batch:  # the same list until a request joins or leaves
            self._batch = requests
            is_full = any(request.params.needs_full_sampler for request in requests)
            self._costs = self.full if is_full else self.greedy
        return self._costs

    def stats(self) -> dict[str, dict[str, float]]:
        """Return the present times; see `VerifyCosts.seconds`."""
        return {
            "step_seconds": self.greedy.seconds(),
            "sampled_step_seconds": self.full.seconds(),
        }
