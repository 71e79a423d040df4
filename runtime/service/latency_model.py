"""Predicts when a new request gets its first token, from measured rates. Does not import torch.

    first token = wait for a row, or prefill of the prompts ahead  +  prefill of its own prompt

Rates are ratios of decayed sums, so that long intervals weigh more than short ones and old ones
fade. Before anything has been measured a rate counts as zero: nothing is refused on a guess. An
idle engine measures nothing, so `is_stale` says when its rates are too old to refuse requests:
otherwise one slow step could make it refuse all requests for ever.
"""

from __future__ import annotations

__all__ = ["LatencyModel"]

DECAY = 0.95
"""Factor of the sums for each new observation: about the last twenty count."""

STALE_SECONDS = 1.0
"""Age of the last measured prefill above which an idle engine serves a request to measure again."""


class _Rate:
    """Seconds per unit over the recent observations."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def observe(self, seconds: float, units: float) -> None:
        self._seconds = DECAY * self._seconds + seconds
        self._units = DECAY * self._units + units

    @property
    def seconds(self) -> float:
        """Seconds per unit; 0 before the first observation."""
        return self._seconds / self._units if self._units else 0.0


class LatencyModel:
    """Measured rates of an engine, and predictions from them. One thread observes, any predicts."""

    def __init__(self) -> None:
        self._prefill = _Rate()  # of a prompt token
        self._request = _Rate()  # of a request, in seconds times rows
        self._prefilled_ns = 0

    def observe_prefill(self, seconds: float, num_tokens: int, ended_ns: int) -> None:
        """Learn from a step that prefilled tokens, its decoding rows included.

        `ended_ns` is on the clock of `time.perf_counter_ns`.
        """
        self._prefill.observe(seconds, num_tokens)
        self._prefilled_ns = ended_ns

    def is_stale(self, now_ns: int) -> bool:
        """Whether no prefill was measured for `STALE_SECONDS`."""
        return now_ns - self._prefilled_ns > STALE_SECONDS * 1e9

    def observe_request(self, seconds: float, num_rows: int) -> None:
        """Learn how long a request held how many rows."""
        self._request.observe(seconds * num_rows, 1)

    def prefill_seconds(self, num_tokens: int) -> float:
        """Predict the seconds to prefill tokens, with as many decoding rows as recently."""
        return num_tokens * self._prefill.seconds

    def row_seconds(self, position: int, num_rows: int) -> float:
        """Predict the wait for a row of the request at a position, from 1, of the queue.

        `num_rows` rows are all in use; each is free after the same time on average.
        """
        return max(position, 0) * self._request.seconds / num_rows

    def first_token_seconds(
        self,
        num_tokens: int,
        *,
        requests_ahead: int,
        tokens_ahead: int,
        num_rows: int,
        free_rows: int,
    ) -> float:
        """Predict the time to the first token of a new request of `num_tokens` prompt tokens.

        Prompts ahead are prefilled while it waits for a row, so the longer of both counts.
        """
        position = requests_ahead + 1 - free_rows
        wait = max(self.row_seconds(position, num_rows), self.prefill_seconds(tokens_ahead))
        return wait + self.prefill_seconds(num_tokens)
