"""How much prefill a step may do beside decoding rows, by time. No torch.

With `max_itl_ms` a step takes as many prompt tokens as leave its predicted time within the budget.
Where not even the smallest prefill step fits, one that costs no more than that runs all the same:
prompts go on, slowly, and whoever decodes waits a little longer than was asked for.
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
"""Steps of the same rows after which it is asked again what they attend to: a call for each row in
each step adds up where there are hundreds, and a step moves a row by one position only."""

SHARE_AFTER = 16
"""Steps that prefill beside rows, none between them that only decodes, after which an error may as
well be the decode part's."""

logger = logging.getLogger("stepgraph.runtime")


class StepBudget:
    """Chooses chunks by `StepCosts`, and teaches it what the steps took."""

    def __init__(
        self, max_itl_ms: float, costs: StepCosts, *, calibration_seconds: float = 0.0
    ) -> None:
        """Begin with calibrated costs; `calibration_seconds` is what that took."""
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
        self._mixed = 0  # steps that prefilled beside rows since the last that only decoded
        # What the rows of the latest plans attend to, and whether one needs the full sampler.
        self._rows: list[Request] = []
        self._rows_attended = 0
        self._rows_full = False
        self._rows_steps = 0  # since they were summed

    def fit(self, plan: StepPlan, request: Request, start: int, count: int) -> int:
        """Return how many of `count` tokens of a request from `start` the plan has time for.

        0 if there is none left, but the first chunk of a plan fills at least the smallest bucket,
        which is what fewer tokens would cost too, or ends its prompt. Where nobody decodes nobody
        waits, and there is time for all.
        """
        if not plan.decode:
            return count
        left = self.max_itl_ms / 1e3 - self._decode_seconds(plan)
        full = request.params.needs_full_sampler or _full_sampler(plan)
        prefill, used = self.costs.prefill[full], plan.prefill_tokens
        attended = self._attended(plan)

        def fits(more: int) -> bool:
            total = attended + self.costs.attended(start, more)
            return prefill.predict(used + more, total) <= left

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
        """Take in when a step was launched and when its tokens were there; once for every step.

        A device that works beside the host begins a step when the one before it has ended.
        """
        began = max(launched_ns, self._arrived_ns)
        self._arrived_ns = arrived_ns
        self.learn(plan, (arrived_ns - began) / 1e9 / plan.steps)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take in what a step took. A time that cannot be is ignored, and counted.

        Of several decode steps that were launched together, `seconds` is what one of them took.

        A step that decodes and prefills teaches the cost of prefill: steps that only decode have
        told what the rest of it takes. If none has for long, each part learns its share.
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
        """Return the seconds that a plan will take."""
        seconds = plan.steps * self._decode_seconds(plan) if plan.decode else 0.0
        if plan.prefill:
            seconds += self._prefill_seconds(plan, self._attended(plan))
        return seconds

    def stats(self) -> dict[str, Any]:
        """Return the model and how well it does, as plain numbers; see `Engine.stats`."""
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
        return self.costs.prefill[_full_sampler(plan)].predict(plan.prefill_tokens, attended)

    def _correct_decode(self, plan: StepPlan, error: float) -> None:
        """Teach the decode part; `_decode_seconds` of this plan has just been asked for."""
        costs = self.costs.decode[self._rows_full]
        costs.correct(len(plan.decode), self._rows_attended, error)

    def _sum_rows(self, decode: list[Request]) -> None:
        """Ask rows what they attend to, if they are others than before or it is long ago.

        Plans show the same list as long as the same rows decode. Whether a step is planned or has
        been launched already is a position a row, less than what the steps between sums are.
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
                "max_itl_ms=%g leaves %.2f ms for prompts beside the rows that decode, less than"
                " the smallest prefill step takes: prompts go on in such steps all the same, and"
                " tokens come later than asked for (said once, counted in `stats`)",
                self.max_itl_ms,
                1e3 * max(left, 0.0),
            )
        self._forced += 1


def _full_sampler(plan: StepPlan) -> bool:
    """Whether the prefill of a plan needs the full sampler."""
    return any(chunk.request.params.needs_full_sampler for chunk in plan.prefill)


def _clip(error: float, predicted: float) -> float:
    """Return an error of a part of a step, as large as it counts."""
    largest = LARGEST_ERROR * predicted
    return min(max(error, -largest), largest)
