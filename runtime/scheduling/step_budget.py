"""Sizes prefill chunks by predicted step time (`max_itl_ms`). Does not import torch.

A step with decoding rows takes as many prompt tokens as its predicted time allows. If even the
smallest prefill step does not fit, a chunk of that cost runs anyway: prompts make progress, and the
inter-token latency exceeds the budget. If that is so from the start on, a warning says it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import Any

from ..request import Request
from .plan import RowSpan, StepPlan
from .step_times import StepTimes

logger = logging.getLogger("stepgraph.runtime")


class StepBudget:
    """Sizes chunks by `StepTimes`, and counts how long the steps take."""

    def __init__(self, max_itl_ms: float, times: StepTimes) -> None:
        """Start with calibrated times, of prefill too. Warns of a budget that is too small."""
        self.max_itl_ms = max_itl_ms
        self.times = times
        self._forced = 0
        self._steps = 0
        self._over = 0
        self._predicted = 0.0
        self._observed = 0.0
        self._errors = 0.0
        least_ms = 1e3 * times.least_mixed_seconds
        if least_ms > max_itl_ms:
            logger.warning(
                "max_itl_ms=%g is less than the %.2f ms of the smallest step with %d decoding rows"
                " and a prompt. Such steps run anyway and exceed the budget (`stats` counts them):"
                " raise max_itl_ms to %.2f, or lower max_num_seqs",
                *(max_itl_ms, least_ms, times.decode[False].sizes.largest - 1, least_ms),
            )

    def fit(self, plan: StepPlan, request: Request, start: int, count: int) -> int:
        """Return how many of a request's `count` tokens from `start` fit into the plan's budget.

        0 if no time is left. The first chunk of a plan fills at least the smallest bucket, because
        fewer tokens cost the same, or ends its prompt. If no row decodes, all tokens fit.
        """
        if not plan.decode:
            return count
        times, limit = self.times, self.max_itl_ms / 1e3

        def seconds(more: int) -> float:
            scored = request.unscored(start, start + more)
            chunk = RowSpan(request, -1, start, more, False, scored)
            return times.predict(StepPlan(decode=plan.decode, prefill=[*plan.prefill, chunk]))

        if seconds(count) <= limit:
            return count
        most = bisect_right(range(1, count), limit, key=seconds)
        if plan.prefill or most >= min(count, times.least_chunk):
            return most
        self._forced += 1
        return min(count, times.largest_chunk_at_least_cost(len(plan.decode)))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Count the time of a step with prefill and decoding rows, before `StepTimes.learn`."""
        if plan.scored_tokens:
            return
        predicted = self.times.predict(plan)
        self._steps += 1
        self._over += seconds > self.max_itl_ms / 1e3
        self._predicted += predicted
        self._observed += seconds
        self._errors += abs(seconds - predicted)

    def stats(self) -> dict[str, Any]:
        """Return the times and the prediction errors as plain numbers; see `Engine.stats`."""
        n, times = self._steps, self.times
        assert times.prefill is not None
        greedy = {"decode": times.decode[False], "prefill": times.prefill[False]}
        return {
            "max_itl_ms": self.max_itl_ms,
            "calibration_seconds": times.calibration_seconds,
            "n": n,
            "predicted_ms": 1e3 * self._predicted / n if n else None,
            "observed_ms": 1e3 * self._observed / n if n else None,
            "mean_error_ms": 1e3 * self._errors / n if n else None,
            "over_budget": self._over,
            "forced": self._forced,
            "ignored": times.ignored,
            "costs": {
                phase: {
                    "sizes": list(own.sizes),
                    "ms": [1e3 * seconds for seconds in own.seconds],
                    "seen": list(own.seen),
                    "ns_per_position": 1e9 * own.slope,
                }
                for phase, own in greedy.items()
            },
        }
