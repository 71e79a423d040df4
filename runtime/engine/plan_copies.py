"""Issues the block copies of plans, and makes up for those that fail."""

from __future__ import annotations

import logging

from ..errors import RankError
from ..execution.block_copies import BlockCopies
from ..scheduling.plan import StepPlan
from ..scheduling.scheduler import Scheduler

__all__ = ["PlanCopies"]

logger = logging.getLogger("stepgraph.runtime")


class PlanCopies:
    """Copies blocks before a plan is launched. If it fails, requests compute the tokens again."""

    def __init__(self, scheduler: Scheduler, blocks: BlockCopies) -> None:
        """Copy blocks for the plans of a scheduler."""
        self._scheduler, self._blocks = scheduler, blocks
        self.num_failed = 0

    def issue(self, plan: StepPlan) -> None:
        """Issue the copies of a plan. Admissions whose copies fail are taken out of it."""
        cache = self._scheduler.cache
        try:
            self._blocks.swap_out(plan)
        except Exception as error:
            self._note_failure("to the host", error)
            for preemption in plan.preempted:
                cache.forget_swapped(preemption.request.id)
        else:
            for preemption in plan.preempted:
                cache.count_swapped_out(len(preemption.swap_out or ()))
        try:
            self._blocks.copy_in(plan)
        except Exception as error:
            self._note_failure("to admitted requests", error)
            for admission in tuple(plan.admitted):
                if admission.found.copies:
                    admission.request.may_fork = False
                if admission.found.copies or admission.found.swap_in:
                    self._scheduler.undo(plan, admission)

    def _note_failure(self, where: str, error: Exception) -> None:
        if isinstance(error, AssertionError | RankError):  # a bug, or the other ranks are lost
            raise error
        self.num_failed += 1
        logger.error(
            "copying blocks %s failed: their tokens will be computed again",
            where,
            exc_info=error,
        )
