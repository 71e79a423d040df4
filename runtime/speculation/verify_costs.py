"""Step times by rows and tokens per row, and the tokens per row that pay. No torch.

    gain = mean over rows of log(expected tokens of the row) - log(time of the verify step)
           + log(time of the decode step)

A step verifies if this is positive: the geometric mean of the rows' speeds is then higher than with
plain decoding. So no row is slowed down much for the sake of others: in a batch of 8, one row that
gets 4 tokens justifies a step 1.19 times as long, and not 1.38 times as the sum of tokens would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...graphs.buckets import Buckets

__all__ = ["VerifyCosts"]

LEAST_GAIN = math.log(1.03)
"""Expected gains up to this one are not worth the risk."""

COMMON_RATE = 0.075
"""Share of an error by which the times of all steps of so many rows are corrected: longer contexts
and a busy machine slow all of them down."""

OWN_RATE = 0.025
"""Share of an error by which the time of the step itself is corrected in addition."""

LARGEST_ERROR = 0.5
"""Errors are clipped to this multiple of the expected time: steps that other processes disturb
count little."""

FADING = 2e-4
"""Share by which each step lowers the times of other verify steps, never below that of a decode
step: one that was taken for too slow is tried again."""

VERIFY_IN_A_ROW = 64
"""Verify steps after which a decode step is run, so that its time remains known."""


class VerifyCosts:
    """Seconds of decode and verify steps: measured before the first request, then corrected."""

    def __init__(self, rows: Buckets, seconds: Mapping[tuple[int, int], float]) -> None:
        """Start with the seconds of each (rows, tokens per row); 1 token per row: decode steps."""
        self._rows = rows
        self._seconds: dict[int, dict[int, float]] = {}
        for (size, tokens_per_row), value in seconds.items():
            self._seconds.setdefault(size, {})[tokens_per_row] = value
        self._in_a_row = 0

    def choose(self, chances: Sequence[Sequence[float]]) -> int:
        """Return the tokens per row of the step with the largest gain; 1: drafts do not pay.

        `chances` has, for each row, the probability that each of its drafts is accepted.
        """
        if self._in_a_row >= VERIFY_IN_A_ROW:
            return 1
        rows = len(chances)
        seconds = self._seconds[self._bucket(rows)]
        best, best_gain = 1, LEAST_GAIN
        plain = math.log(seconds[1])
        for tokens_per_row, time in seconds.items():
            if tokens_per_row == 1:
                continue
            drafts = tokens_per_row - 1
            expected = sum(math.log1p(sum(own[:drafts])) for own in chances if own) / rows
            gain = expected - math.log(time) + plain
            if gain > best_gain:
                best, best_gain = tokens_per_row, gain
        return best

    def count(self, tokens_per_row: int) -> None:
        """Count a step, with or without prefill."""
        self._in_a_row = self._in_a_row + 1 if tokens_per_row > 1 else 0

    def observe(self, rows: int, tokens_per_row: int, seconds: float) -> None:
        """Correct the time of a step by how long one took. Invalid times are ignored."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        times = self._seconds[self._bucket(rows)]
        error = seconds / times[tokens_per_row] - 1
        error = min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
        for other in times:
            times[other] *= 1 + COMMON_RATE * error
        times[tokens_per_row] *= 1 + OWN_RATE * error
        for other in times:
            if other != tokens_per_row:
                times[other] = max(times[other] * (1 - FADING), times[1])

    def seconds(self) -> dict[str, float]:
        """Return the present times by "rows x tokens per row"."""
        return {
            f"{size}x{n}": value for size, own in self._seconds.items() for n, value in own.items()
        }

    def _bucket(self, rows: int) -> int:
        size = self._rows.fit(rows)
        assert size is not None, f"{rows} rows, the largest bucket is {self._rows.largest}"
        return size
