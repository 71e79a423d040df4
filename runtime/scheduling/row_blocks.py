"""The blocks of running requests, and when each of them needs others. No torch.

Most decoding requests need no work per step. The earliest step at which a request can need a
block, publish one or sample its last token is known in advance, so its next event is scheduled for
that step.
"""

from __future__ import annotations

from ...cache.kv_cache import KVCache, TableChange
from ..request import Request
from .headroom import Headroom
from .next_events import NextEvents
from .plan import StepPlan, TableUpdate
from .publishing import Publishing
from .running import RunningRequests

__all__ = ["RowBlocks"]


class RowBlocks:
    """Allocates and frees blocks of requests with a row, and writes the changes into plans."""

    def __init__(
        self,
        cache: KVCache,
        running: RunningRequests,
        events: NextEvents,
        publishing: Publishing,
        headroom: Headroom,
    ) -> None:
        """Change the blocks of `running`, and what the others derive from these."""
        self._cache, self._running, self._events = cache, running, events
        self._publishing, self._headroom = publishing, headroom

    def admit(self, plan: StepPlan, request: Request) -> int:
        """Give an admitted request a row, with the blocks that it has; return the row."""
        row = self._running.join(request)
        self._publishing.admit(request)
        self._headroom.update(request)
        self._update_tables(plan, request, self._cache.table_of(request.id))
        return row

    def leave(self, request: Request) -> None:
        """Take the row of a request, whose blocks the caller frees."""
        self._running.leave(request)
        self._events.cancel(request)
        self._headroom.forget(request)
        self._publishing.leave(request)

    def grow(self, plan: StepPlan, request: Request, stop: int) -> bool:
        """Allocate the blocks of tokens up to `stop`, if so many are free."""
        grown = self._cache.grow(request.id, stop)
        if grown is None:
            return False
        self._update_tables(plan, request, grown)
        self._headroom.update(request)
        return True

    def grow_decoding(self, plan: StepPlan, request: Request, tokens: int, count: int) -> bool:
        """Allocate the blocks of a decoding request's next `tokens`, if so many are free.

        This step computes `count` of them.
        """
        stop = request.num_computed + tokens
        if self._cache.lacking(request.id, stop) > self._cache.num_free_blocks:
            return False
        self._events.cancel(request)
        grown = self.grow(plan, request, stop)
        assert grown, "there were enough blocks"
        self.schedule_next(request, count=count)
        return True

    def slide(self, plan: StepPlan, request: Request) -> None:
        """Free the blocks that the request's next and later tokens do not read."""
        dropped = self._cache.slide(request.id, request.least_computed)
        self._update_tables(plan, request, dropped)

    def schedule_next(self, request: Request, least: int = 1, *, count: int = 1) -> None:
        """Schedule the next event of a request that decodes from this step on.

        It needs nothing during the first `least` steps. This step computes `count` of its tokens if
        all drafts are accepted, and each later one a token, unless it verifies drafts too.
        """
        tokens = min(self._quiet_until(request) - request.num_computed, request.num_unsampled)
        self._events.schedule(request, self._events.num_steps + max(least, tokens - count + 1))

    def check_integrity(self) -> None:
        """Assert that events are in time, and that exactly the decoding requests have one."""
        self._events.check_integrity()
        events, ending = self._events.all(), self._running.ending
        for request in ending:
            assert request.decoding
            assert request.reached_max_tokens == (request not in events)
        assert events.keys() - ending == set(self._running.decoding())
        for request, number in events.items():
            tokens = number - self._events.num_steps - 1  # decoded before, if no step verifies
            assert 0 <= tokens <= request.num_unsampled
            last = request.num_computed + tokens - 1
            assert tokens == 0 or last < self._quiet_until(request)

    def _quiet_until(self, request: Request) -> int:
        """First position whose token requires a change of the request's blocks."""
        return min(
            self._cache.quiet_until(request.id),
            self._publishing.next_at(request),
            request.outgrown_at,
        )

    def _update_tables(self, plan: StepPlan, request: Request, changes: list[TableChange]) -> None:
        if changes:
            row = self._running.rows[request]
            for group, column, block in changes:
                plan.table_updates.append(TableUpdate(group, row, column, block))
