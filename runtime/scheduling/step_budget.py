"""Sizes prefill chunks by predicted step time (`max_itl_ms`). Does not import torch.

A step with decoding rows takes as many prompt tokens as its predicted time allows. If even the
smallest prefill step does not fit, a chunk of that cost runs anyway: prompts make progress, and the
inter-token latency exceeds the budget.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from ..request import Request
from .plan import StepPlan
from .step_costs import LARGEST_ERROR, StepCosts

__all__ = ["StepBudget"]

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
        self.learn(plan, (arrived_ns - began) / 1e9 / plan.steps)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update the costs with the time of a step. Invalid times are ignored and counted.

        For a launch of several decode steps, `seconds` is the time of one of them.

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
        self._rows_steps += plan.steps
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
        seconds = plan.steps * self._decode_seconds(plan) if plan.decode else 0.0
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
