"""Which requests run in the next step: admission, chunked prefill, priorities, preemption.

A plan is made of two launches. Every request whose prompt is in the cache decodes one token; what
is left of the step's token budget goes to chunks of prompts. Requests are served by `(priority,
arrival)`. Blocks for all known tokens are taken when a request is admitted, so only decoding takes
more; when none are left, the running request that would be served last loses its blocks and its
row, and computes its sequence anew when there is room (preemption by recomputation).
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from ..cache.kv_cache import KVCache
from .request import Request, RequestStatus

__all__ = ["Admission", "PrefillChunk", "Scheduler", "StepPlan", "TableUpdate"]

_order = attrgetter("order")


def _is_alive(request: Request) -> bool:
    return request.status is not RequestStatus.FINISHED


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request that gets a row."""

    request: Request
    row: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`count` known tokens of a request from position `start`: their keys and values come next."""

    request: Request
    row: int
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that the next one is sampled.

        To be asked before the step is committed, which makes one more token known.
        """
        return self.start + self.count == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Write `block` into column `column` of a row's block table."""

    row: int
    column: int
    block: int


@dataclass(slots=True)
class StepPlan:
    """What the next step does. Made by `Scheduler.plan`, read by the runner and the engine."""

    preempted: list[Request] = field(default_factory=list)
    """Requests that lost their row and blocks; they wait again."""
    admitted: list[Admission] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    """Blocks that rows got, in any order; no (row, column) occurs twice."""
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not (self.prefill or self.decode)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.count for chunk in self.prefill)


class Scheduler:
    """Owns the queue, the rows and, through `KVCache`, the blocks. Reads requests, changes none."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_rows: int,
        max_batch_tokens: int,
        prefill_chunk: int,
        max_prefill_rows: int,
    ) -> None:
        assert max_batch_tokens > max_rows >= 1
        assert prefill_chunk >= 1
        assert max_prefill_rows >= 1
        self.cache = cache
        self.max_rows = max_rows
        self.max_batch_tokens = max_batch_tokens
        self.prefill_chunk = prefill_chunk
        self.max_prefill_rows = max_prefill_rows
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # a heap
        self._num_waiting = 0  # the heap also holds removed requests until they surface
        self._running: list[Request] = []  # by order
        self._rows: dict[Request, int] = {}
        self._free_rows = list(range(max_rows))  # a heap: low rows first

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a new request, one that fits into the cache when it runs alone."""
        heapq.heappush(self._waiting, (request.order, request))
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """Forget a request that ended; its row and blocks are free at once.

        The engine has set its status to `FINISHED`. Launched steps may still write to the blocks:
        whoever gets them next is launched after those.
        """
        assert request.status is RequestStatus.FINISHED
        if request in self._rows:
            self._leave(request)
            return
        self._num_waiting -= 1
        if len(self._waiting) > 2 * self._num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if _is_alive(entry[1])]
            heapq.heapify(self._waiting)

    def plan(self) -> StepPlan:
        """Decide the next step.

        Rows and blocks are given and taken here; requests are left as they are, until the engine
        makes the plan true.
        """
        plan = StepPlan()
        self._plan_decode(plan)
        self._plan_prefill(plan)
        return plan

    def _plan_decode(self, plan: StepPlan) -> None:
        for request in tuple(self._running):
            if request not in self._rows or not request.decoding or request.reached_max_tokens:
                continue
            while not self._grow(plan, request, request.num_computed + 1):
                victim = self._running[-1]
                self._leave(victim)
                heapq.heappush(self._waiting, (victim.order, victim))
                self._num_waiting += 1
                plan.preempted.append(victim)
                if victim is request:
                    break
            else:
                plan.decode.append(request)

    def _plan_prefill(self, plan: StepPlan) -> None:
        budget = min(self.prefill_chunk, self.max_batch_tokens - len(plan.decode))
        for request in self._running:
            if not request.decoding:
                budget = self._add_chunk(plan, request, request.num_computed, budget)
        if plan.preempted:  # they would be admitted again with the blocks they just lost
            return
        while self._free_rows and budget > 0 and len(plan.prefill) < self.max_prefill_rows:
            head = self._head()
            if head is None or not self._has_room_for(head):
                break
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            row = heapq.heappop(self._free_rows)
            self._rows[head] = row
            insort(self._running, head, key=_order)
            grown = self._grow(plan, head, head.num_tokens)
            assert grown, "room was checked before admission"
            plan.admitted.append(Admission(head, row))
            budget = self._add_chunk(plan, head, 0, budget)

    def _add_chunk(self, plan: StepPlan, request: Request, start: int, budget: int) -> int:
        """Plan as much of a prompt as the budget allows; return what is left of the budget."""
        count = min(request.num_tokens - start, budget)
        if count <= 0:
            return budget
        plan.prefill.append(PrefillChunk(request, self._rows[request], start, count))
        return budget - count

    def _head(self) -> Request | None:
        """Return the waiting request to be served first."""
        while self._waiting:
            request = self._waiting[0][1]
            if _is_alive(request):
                return request
            heapq.heappop(self._waiting)
        return None

    def _has_room_for(self, request: Request) -> bool:
        """Whether all known tokens fit, and every running request can still take one more block.

        Without that headroom the newcomer would be the first to be preempted, a step later.
        """
        headroom = len(self._running)
        needed = self.cache.blocks_for(request.num_tokens)
        return needed + headroom <= self.cache.num_free_blocks

    def _grow(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Take the blocks that `num_tokens` tokens need; return whether there were enough."""
        grown = self.cache.grow(request.id, num_tokens)
        if grown is None:
            return False
        (blocks,) = grown
        if blocks:
            row = self._rows[request]
            first = len(self.cache.block_table(request.id)) - len(blocks)
            plan.table_updates += [TableUpdate(row, first + i, b) for i, b in enumerate(blocks)]
        return True

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        heapq.heappush(self._free_rows, self._rows.pop(request))
        self.cache.release(request.id)

    def check_integrity(self) -> None:
        """Assert that rows, queues and blocks agree with each other."""
        self.cache.check_integrity()
        rows = sorted(self._rows.values())
        assert sorted(rows + self._free_rows) == list(range(self.max_rows))
        assert len(self._rows) == len(self._running)
        assert all(request in self._rows for request in self._running)
        assert [r.order for r in self._running] == sorted(r.order for r in self._running)
        alive = [r for _, r in self._waiting if _is_alive(r)]
        assert len(alive) == self._num_waiting
        assert not any(request in self._rows for request in alive)
