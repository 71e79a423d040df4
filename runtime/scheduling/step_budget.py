"""Sizes prefill chunks by predicted step time (`max_itl_ms`). Does not import torch.

A step with decoding rows takes as many prompt tokens as its predicted time allows. If even the
smallest prefill step does not fit, a chunk of that cost runs anyway: prompts make progress, and the
inter-token latency exceeds the budget.
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
        """Start with calibrated times, of prefill too."""
        self.max_itl_ms = max_itl_ms
        self.times = times
        self._forced = 0
        self._steps = 0
        self._over = 0
        self._predicted = 0.0
        self._observed = 0.0
        self._errors = 0.0

    def fit(self, plan: StepPlan, request: Request, start: int, count: int) -> int:
        """Return how many of a request's `count` tokens from `start` fit into the plan's budget.

        0 if no time is left. The first chunk of a plan fills at least the smallest bucket, because
        fewer tokens cost the same, or ends its prompt. If no row decodes, all tokens fit.
        """
        if not plan.decode:
            return count
        left = self.max_itl_ms / 1e3 - self.times.decode_seconds(plan.decode)

        def with_chunk(more: int) -> list[RowSpan]:
            scored = request.unscored(start, start + more)
            return [*plan.prefill, RowSpan(request, -1, start, more, False, scored)]

        def seconds(more: int) -> float:
            return self.times.prefill_seconds(with_chunk(more))

        if seconds(count) <= left:
            return count
        least = bisect_right(range(1, count), left, key=seconds)  # the most tokens that fit
        prefill = self.times.of_prefill(with_chunk(count))
        if plan.prefill or least >= min(count, prefill.sizes.sizes[0]):
            return least
        if not self._forced:
            logger.warning(
                "max_itl_ms=%g leaves %.2f ms for prefill in a step with decoding rows, less than"
                " the smallest prefill step takes. Such steps run anyway and exceed the budget;"
                " raise it to avoid this (logged once; `stats` counts these steps)",
                self.max_itl_ms,
                1e3 * max(left, 0.0),
            )
        self._forced += 1
        return min(count, prefill.least_lanes)

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
