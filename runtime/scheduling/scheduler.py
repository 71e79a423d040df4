"""Scheduler: admission, chunked prefill, priorities and preemption.

A plan has a decode part and a prefill part. Every request whose prompt is cached decodes one token.
The remaining token budget of the step goes to prefill chunks. Requests are served in the order of
`(priority, arrival)`. Admission allocates the blocks of all known tokens (in sliding-window layers
those of the next chunk), so most later allocations are for decoding. If no block is free, the
running request that is last in the order of service is preempted: its blocks are swapped to the
host, or its tokens are recomputed later (see `preemption.py`).

Most decoding requests need no work per step. The earliest step at which a request can need a
block, publish one or sample its last token is known in advance, so its next event is scheduled for
that step. A step processes only the requests with a due event, prefilling requests, and the head of
the queue.

With `tokens_per_row` = 1 + k every row verifies up to k drafts per step. The number of accepted
tokens is known when the step is committed. Until then blocks are allocated for the largest possible
number, and freed or shared for the smallest. A request that may have sampled all of its tokens is
not planned; it decodes again if the commit rejects drafts (`fell_short`).

With `steps_per_launch` a plan decodes that many tokens per row if no request prefills, every row
has that many tokens to go, and the blocks for them are free. Otherwise it decodes one token per
row. So the last tokens of a request are decoded one per launch, and no request is preempted for
tokens of later steps. Waiting requests do not prevent such launches. They wait longer, because a
row that ends within a launch is freed only after it.

An admitted request reuses what is cached: its own swapped blocks, the prompt of a sibling, or
blocks with the same content (see `cache/kv_cache.py`).
"""

from __future__ import annotations

import heapq
from bisect import insort
from operator import attrgetter

from ...cache.kv_cache import KVCache, TableChange
from ..request import Request, RequestStatus
from .headroom import Headroom
from .next_events import NextEvents
from .plan import Admission, Preemption, RowSpan, StepPlan, TableUpdate
from .preemption import PreemptionPolicy
from .publishing import Publishing
from .step_budget import StepBudget
from .waiting import WaitingQueue

__all__ = ["Scheduler"]

_order = attrgetter("order")


class Scheduler:
    """Owns the queue, the rows and, through `KVCache`, the blocks.

    Does not change requests, except for their cached block hashes.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        prefill_chunk: int,
        max_prefill_rows: int,
        preemption: PreemptionPolicy | None = None,
        step_budget: StepBudget | None = None,
        steps_per_launch: int = 1,
        tokens_per_row: int = 1,
    ) -> None:
        """Plan decode steps of one token per row, or verify steps of up to `tokens_per_row`."""
        assert max_batch_tokens > max_num_seqs * tokens_per_row
        assert max_num_seqs >= 1
        assert tokens_per_row >= 1
        assert tokens_per_row == 1 or steps_per_launch == 1, "a verify step is launched alone"
        assert prefill_chunk >= 1
        assert max_prefill_rows >= 1
        assert steps_per_launch >= 1
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.prefill_chunk = prefill_chunk
        self.max_prefill_rows = max_prefill_rows
        self.preemption = preemption or PreemptionPolicy()
        self.steps_per_launch = steps_per_launch
        self.tokens_per_row = tokens_per_row
        self._step_budget = step_budget
        self._waiting = WaitingQueue()
        # In the order of service: requests with a row; the prefilling and the decoding ones.
        self._running: list[Request] = []
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        # Requests whose launched steps may have sampled all of their tokens.
        self._ending: set[Request] = set()
        self._decode: list[Request] | None = []  # `_decoding` as a list, until it changes
        self._num_steps = 0  # planned so far; counts each decode step of a launch
        self._next_events = NextEvents()
        self._headroom = Headroom(cache)
        self._rows: dict[Request, int] = {}
        self._free_rows = list(range(max_num_seqs))  # a heap: low rows first
        self._publishing = Publishing(cache)
        # The request that was refused last, with the state at that time: siblings to fork from,
        # prompts published, headroom released, free blocks.
        self._refused: tuple[Request, int, int, int, int] | None = None

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a new request. Alone it must fit into the cache."""
        self._waiting.push(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ended, and free its row and blocks.

        The engine has set its status to `FINISHED`. Launched steps may still write to the blocks;
        steps of the next owner are launched after them.
        """
        assert request.status is RequestStatus.FINISHED
        if request in self._rows:
            self._leave(request)
            return
        self.cache.forget_swapped(request.id)
        self._waiting.drop_ended()

    def plan(self, *, single: bool = False) -> StepPlan:
        """Return the plan of the next launch, with one decode step if `single`.

        Allocates and frees rows and blocks. Requests do not change until the engine launches the
        plan.
        """
        plan = StepPlan()
        self._num_steps += 1
        due = self._next_events.pop_due(self._num_steps)
        if due is not None or self._prefilling:
            self._look_at(plan, due or {})
        plan.decode = self._those_that_decode()
        self._plan_prefill(plan)
        if plan.preempted:
            plan.decode = self._those_that_decode()
        if self.steps_per_launch > 1 and not single:
            self._plan_several_steps(plan)
        if self.tokens_per_row > 1 and not single:
            plan.tokens_per_row = self.tokens_per_row
            plan.decode_counts = [self._next_count(request) for request in plan.decode]
        return plan

    def fell_short(self, request: Request) -> None:
        """Handle a committed step that advanced a running request by less than was launched.

        Its next event is now earlier than necessary, which is harmless. If the launched steps could
        have sampled all of its tokens, it decodes again from the next plan on.
        """
        if request in self._ending and not request.reached_max_tokens:
            self._next_events.cancel(request)
            self._next_events.schedule(request, self._num_steps + 1)

    def undo(self, plan: StepPlan, admission: Admission) -> None:
        """Undo an admission of the current plan whose copies failed; the request waits again.

        Its swapped and copied blocks are dropped. After its next admission it recomputes its tokens
        or shares valid blocks.
        """
        request, row = admission.request, admission.row
        plan.admitted.remove(admission)
        plan.prefill = [chunk for chunk in plan.prefill if chunk.request is not request]
        plan.table_updates = [update for update in plan.table_updates if update.row != row]
        self._give_up_row(request)
        self.cache.release(request.id)
        self._waiting.push(request)

    def forget_contents(self) -> None:
        """Clear the prefix cache, and exclude tokens computed so far from later sharing."""
        self.cache.forget_contents()
        self._publishing.forget_contents()
        for request in (*self._running, *self._waiting):
            request.prefix_hashes = None

    def withdraw(self, request: Request) -> None:
        """Withdraw the blocks that a request's non-finite logits may come from.

        The request is about to end, and may have been preempted. See `publishing.py`.
        """
        self._publishing.withdraw(request)

    def _look_at(self, plan: StepPlan, due: dict[Request, None]) -> None:
        """Process the due events of decoding requests, and add requests that begin to decode."""
        joining = [request for request in self._prefilling if request.decoding]
        for request in (*due, *self._prefilling):
            if request.least_computed >= self._publishing.next_at(request):
                self._publishing.publish(request)
        if joining:
            self._prefilling = [request for request in self._prefilling if not request.decoding]
        for request in sorted((*due, *joining), key=_order):
            if request not in self._rows:  # preempted for an earlier request
                continue
            if request.reached_max_tokens:
                if request in due and request not in self._ending:
                    self._stop_decoding(request)
                self._ending.add(request)
                continue
            stop = request.num_computed + self._next_count(request)
            if self._make_room(plan, request, stop, may_leave=True):
                if request not in due or request in self._ending:
                    self._ending.discard(request)
                    insort(self._decoding, request, key=_order)
                    self._decode = None
                self._schedule_next_event(request)

    def _plan_several_steps(self, plan: StepPlan) -> None:
        """Decode `steps_per_launch` tokens per row if possible; see the top of this file.

        A request without an event before the end of these steps has enough tokens and blocks.
        """
        steps = self.steps_per_launch
        if not plan.decode or plan.prefill or self._prefilling:
            return
        soon = self._next_events.between(self._num_steps + 1, self._num_steps + steps)
        lacking = 0
        for request in soon:
            if request.num_unsampled < steps:
                return
            lacking += self.cache.lacking(request.id, request.num_computed + steps)
        if lacking > self.cache.num_free_blocks:
            return
        for request in soon:
            self._next_events.cancel(request)
            grown = self.cache.grow(request.id, request.num_computed + steps)
            assert grown is not None, "there were enough blocks"
            self._update_tables(plan, request, grown)
            self._headroom.update(request)
            self._schedule_next_event(request, steps)
        plan.steps = steps
        self._num_steps += steps - 1

    def _schedule_next_event(self, request: Request, least: int = 1) -> None:
        """Schedule the next event of a request that decodes from this step on.

        It needs nothing during the first `least` steps. The event is at the earliest possible step,
        because rows may advance by less than `tokens_per_row`.
        """
        tokens = min(self._quiet_until(request) - request.num_computed, request.num_unsampled)
        steps = tokens // self.tokens_per_row
        self._next_events.schedule(request, self._num_steps + max(least, steps))

    def _next_count(self, request: Request) -> int:
        """Return the number of tokens in the next span of a decoding request."""
        return min(self.tokens_per_row, request.num_unsampled)

    def _quiet_until(self, request: Request) -> int:
        """First position whose token requires a change of the request's blocks."""
        return min(self.cache.quiet_until(request.id), self._publishing.next_at(request))

    def _stop_decoding(self, request: Request) -> None:
        self._decoding.remove(request)
        self._decode = None

    def _those_that_decode(self) -> list[Request]:
        """Return `_decoding` as a list: the same object until `_decoding` changes.

        Steps in flight keep the list that they were launched with.
        """
        if self._decode is None:
            self._decode = self._decoding.copy()
        return self._decode

    def _plan_prefill(self, plan: StepPlan) -> None:
        budget = min(
            self.prefill_chunk, self.max_batch_tokens - len(plan.decode) * self.tokens_per_row
        )
        for request in tuple(self._prefilling):
            if budget <= 0 or len(plan.prefill) == self.max_prefill_rows:
                break
            if request not in self._rows:
                continue
            stop = min(request.num_tokens, request.num_computed + budget)
            if self._make_room(plan, request, stop, may_leave=False):
                budget = self._add_chunk(plan, request, request.num_computed, budget)
        if plan.preempted:  # would readmit them with the blocks they just lost
            return
        aside: list[Request] = []
        while self._free_rows and budget > 0 and len(plan.prefill) < self.max_prefill_rows:
            head = self._waiting.head()
            if head is None:
                break
            if self._waits_for_sibling(head):  # does not block later requests
                self._waiting.pop()
                aside.append(head)
                continue
            if not self._admit(plan, head, budget):
                break
            budget = self._add_chunk(plan, head, plan.admitted[-1].found.num_tokens, budget)
        for request in aside:
            self._waiting.push(request)

    def _admit(self, plan: StepPlan, head: Request, budget: int) -> bool:
        """Admit the first waiting request if a row and enough blocks are available.

        Running requests that are served before it must still be able to allocate the next block
        that they may need. Otherwise it would be preempted one step later. No block is reserved for
        requests that are served after it, because they are preempted first.
        """
        siblings = self._siblings(head)
        free = self.cache.num_free_blocks
        state = (head, len(siblings), self._publishing.num_prompts, self._headroom.num_releases)
        # A refused request is not tried again until there are more cached tokens or free blocks.
        if self._refused is not None and self._refused[:4] == state and free <= self._refused[4]:
            return False
        found = self.cache.admit(
            head.id,
            head.num_tokens,
            chunk=budget,
            headroom=self._headroom.before(head.order),
            hashes=head.hashes_of(head.num_tokens),
            siblings=siblings,
        )
        if found is None:
            self._refused = (*state, free)
            return False
        self._refused = None
        self._waiting.pop()
        row = heapq.heappop(self._free_rows)
        self._rows[head] = row
        insort(self._running, head, key=_order)
        insort(self._prefilling, head, key=_order)
        self._publishing.admit(head)
        self._headroom.update(head)
        plan.admitted.append(Admission(head, row, found))
        self._update_tables(plan, head, self.cache.table_of(head.id))
        return True

    def _siblings(self, request: Request) -> list[tuple[str, int]]:
        """Return the sibling that has computed the request's prompt, and the tokens to share.

        Shares all tokens but the last, whose logits the request needs to sample its own token.
        """
        shared = len(request.prompt_ids) - 1
        return [(s.id, shared) for s in self._may_fork(request) if s.num_computed >= shared]

    def _waits_for_sibling(self, request: Request) -> bool:
        """Whether siblings are prefilling the request's prompt and none has finished."""
        shared = len(request.prompt_ids) - 1
        running = self._may_fork(request)
        return bool(running) and all(s.num_computed < shared for s in running)

    def _may_fork(self, request: Request) -> list[Request]:
        """Return the running requests that a waiting request can fork from, now or later."""
        if (
            not request.may_fork
            or len(request.prompt_ids) == 1
            or self.cache.is_swapped(request.id)
        ):
            return []
        return [sibling for sibling in request.siblings if sibling in self._rows]

    def _add_chunk(self, plan: StepPlan, request: Request, start: int, budget: int) -> int:
        """Plan a chunk of a prompt within the token budget; return the remaining budget.

        With a latency budget the chunk can be empty. Then the request keeps its row and waits.
        """
        asked = count = min(request.num_tokens - start, budget)
        if asked <= 0:
            return budget
        if self._step_budget is not None:
            count = self._step_budget.fit(plan, request, start, asked)
        if count:
            samples = start + count == request.num_tokens
            plan.prefill.append(RowSpan(request, self._rows[request], start, count, samples))
        return budget - count if count == asked else 0

    def _make_room(
        self, plan: StepPlan, request: Request, num_tokens: int, *, may_leave: bool
    ) -> bool:
        """Allocate the blocks of tokens up to `num_tokens`, preempting requests if necessary.

        Returns False if there are not enough. Then the request has been preempted itself, or
        (without `may_leave`) keeps its blocks and waits for the requests served before it.
        """
        # Siblings may fork at the last token of the prompt, which reads a block that this request's
        # next token does not read. That block is kept for them if enough blocks are free.
        slid = not request.siblings or request.least_computed != len(request.prompt_ids)
        if slid:
            self._slide(plan, request)
        while (grown := self.cache.grow(request.id, num_tokens)) is None:
            if not slid:
                self._slide(plan, request)
                slid = True
                continue
            victim = self._running[-1]
            if victim is request and not may_leave:
                self._headroom.update(request)
                return False
            self._preempt(plan, victim)
            if victim is request:
                return False
        self._update_tables(plan, request, grown)
        self._headroom.update(request)
        return True

    def _slide(self, plan: StepPlan, request: Request) -> None:
        """Free the blocks that the request's next and later tokens do not read."""
        dropped = self.cache.slide(request.id, request.least_computed)
        self._update_tables(plan, request, dropped)

    def _preempt(self, plan: StepPlan, victim: Request) -> None:
        plan.prefill = [chunk for chunk in plan.prefill if chunk.request is not victim]
        self._publishing.publish(victim)
        pairs = None
        num_tokens = victim.least_computed
        num_blocks = self.cache.num_blocks_of(victim.id, num_tokens)
        if self.preemption.swaps(num_blocks, num_tokens):
            pairs = self.cache.swap_out(victim.id, num_tokens)
        if pairs is None:
            self.cache.release(victim.id)
        self._give_up_row(victim)
        self._waiting.push(victim)
        plan.preempted.append(Preemption(victim, pairs))

    def _update_tables(self, plan: StepPlan, request: Request, changes: list[TableChange]) -> None:
        if changes:
            row = self._rows[request]
            for group, column, block in changes:
                plan.table_updates.append(TableUpdate(group, row, column, block))

    def _leave(self, request: Request) -> None:
        """End a running request."""
        self._publishing.publish(request, ends=True)
        self._give_up_row(request)
        self.cache.release(request.id)

    def _give_up_row(self, request: Request) -> None:
        self._running.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        elif request in self._ending:
            self._ending.remove(request)
        elif request in self._decoding:
            self._stop_decoding(request)
        self._next_events.cancel(request)
        self._headroom.forget(request)
        heapq.heappush(self._free_rows, self._rows.pop(request))
        self._publishing.leave(request)

    def check_integrity(self) -> None:
        """Assert that rows, queues and blocks are consistent."""
        self.cache.check_integrity()
        rows = sorted(self._rows.values())
        assert sorted(rows + self._free_rows) == list(range(self.max_num_seqs))
        assert len(self._rows) == len(self._running)
        assert all(request in self._rows for request in self._running)
        assert [r.order for r in self._running] == sorted(r.order for r in self._running)
        self._publishing.check_integrity(self._rows)
        self._headroom.check_integrity(self._rows)
        self._waiting.check_integrity()
        self._check_decoding()
        assert not any(request in self._rows for request in self._waiting)

    def _check_decoding(self) -> None:
        """Assert that every request with a row is in one phase and has its event in time."""
        prefilling, decoding = set(self._prefilling), set(self._decoding)
        assert not prefilling & decoding
        assert [r for r in self._running if r in prefilling] == self._prefilling
        assert [r for r in self._running if r in decoding] == self._decoding
        assert self._ending == set(self._running) - prefilling - decoding
        assert self._decode is None or self._decode == self._decoding
        self._next_events.check_integrity()
        events = self._next_events.all()
        for request in self._ending:
            assert request.decoding
            assert request.reached_max_tokens == (request not in events)
        assert events.keys() - self._ending == decoding
        for request, number in events.items():
            tokens = (number - self._num_steps - 1) * self.tokens_per_row  # decoded before
            assert 0 <= tokens <= request.num_unsampled
            last = request.num_computed + tokens - 1
            assert tokens == 0 or last < self._quiet_until(request)
