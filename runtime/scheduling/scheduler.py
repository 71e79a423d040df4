"""Which requests run in the next step: admission, chunked prefill, priorities, preemption.

A plan has two parts. Every request whose prompt is in the cache decodes one token; what
is left of the step's token budget goes to chunks of prompts. Requests are served by `(priority,
arrival)`. Blocks for all known tokens are taken when a request is admitted (in layers with a
sliding window those that the next chunk needs), so mostly decoding takes more; when none are left,
the running request that would be served last loses its blocks and its row. They wait on the host,
or it computes its sequence anew when there is room (see `preemption.py`).

Most requests that decode need nothing of the scheduler: the earliest step at which the next block,
the next one to share, or the last token can be due is known beforehand. That step is the next event
of the request (`next_events.py`). A step looks only at requests whose event is due, at requests
that are prefilled, and at the head of the queue.

With `tokens_per_row` = 1 + k every row verifies up to k drafts a step. How far it has come is known
when the step is committed. Until then blocks are taken for the most that it may have computed, and
given back or shared by the least. A request whose tokens may all be sampled is not planned; commit
lets it go on if drafts were rejected (`fell_short`).

With `steps_per_launch` a plan decodes so many tokens of each row at once, if nobody is prefilled,
every row has as many to go, and the blocks for them are free. Else it decodes one, as always: the
last tokens of a request are decoded singly, and those of others beside it too, and nobody loses
blocks for tokens that are not due yet. Requests that wait for a row or for blocks do not stand
against it. They wait longer, since a row that ends within a launch is given back behind it.

A request that is admitted goes on from what the cache has of it: its own blocks on the host, the
prompt that a sibling has computed, or blocks with the same content (see `cache/kv_cache.py`).
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

    Reads requests and changes none, but for the block hashes that they remember of their tokens.
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
        """Plan decode steps of one token a row, or verify steps of up to `tokens_per_row`."""
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
        # By order: all that hold a row; of these, those that are prefilled, and those that decode.
        self._running: list[Request] = []
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        # Those whose launched steps may have sampled all of their tokens.
        self._ending: set[Request] = set()
        self._decode: list[Request] | None = []  # what plans show of `_decoding` until it changes
        self._num_steps = 0  # that plans have decided, so many of a plan as it has decode steps
        self._next_events = NextEvents()
        self._headroom = Headroom(cache)
        self._rows: dict[Request, int] = {}
        self._free_rows = list(range(max_num_seqs))  # a heap: low rows first
        self._publishing = Publishing(cache)
        # Who did not fit, and when: siblings to fork from, prompts published, headroom released,
        # free blocks.
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
        """Queue a new request, one that fits into the cache when it runs alone."""
        self._waiting.push(request)

    def remove(self, request: Request) -> None:
        """Forget a request that ended; its row and blocks are free at once.

        The engine has set its status to `FINISHED`. Launched steps may still write to the blocks:
        whoever gets them next is launched after those.
        """
        assert request.status is RequestStatus.FINISHED
        if request in self._rows:
            self._leave(request)
            return
        self.cache.forget_swapped(request.id)
        self._waiting.drop_ended()

    def plan(self, *, single: bool = False) -> StepPlan:
        """Decide the next launch: of one decode step if it has to be a `single` one.

        Rows and blocks are given and taken here; requests are left as they are, until the engine
        makes the plan true.
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
        """Note that a committed step advanced a running request by less than was launched.

        Its next event is early now, which does no harm. If all of its tokens seemed to be sampled
        it decodes again, beginning with the next plan.
        """
        if request in self._ending and not request.reached_max_tokens:
            self._next_events.cancel(request)
            self._next_events.schedule(request, self._num_steps + 1)

    def undo(self, plan: StepPlan, admission: Admission) -> None:
        """Take back an admission of the plan just made, whose copies failed; it waits again.

        Nothing of what it found is kept, so the next time it computes all of its tokens or shares
        blocks that are where they should be.
        """
        request, row = admission.request, admission.row
        plan.admitted.remove(admission)
        plan.prefill = [chunk for chunk in plan.prefill if chunk.request is not request]
        plan.table_updates = [update for update in plan.table_updates if update.row != row]
        self._give_up_row(request)
        self.cache.release(request.id)
        self._waiting.push(request)

    def forget_contents(self) -> None:
        """Let nothing that has been computed so far be shared, now or later."""
        self.cache.forget_contents()
        self._publishing.forget_contents()
        for request in (*self._running, *self._waiting):
            request.prefix_hashes = None

    def withdraw(self, request: Request) -> None:
        """Let others find nothing of a request that its newest, not finite logits came from.

        It is about to end; it may have been preempted meanwhile. See `publishing.py`.
        """
        self._publishing.withdraw(request)

    def _look_at(self, plan: StepPlan, due: dict[Request, None]) -> None:
        """Do what those who decode need for their next token, if it is time; see who joins them."""
        joining = [request for request in self._prefilling if request.decoding]
        for request in (*due, *self._prefilling):
            if request.least_computed >= self._publishing.next_at(request):
                self._publishing.publish(request)
        if joining:
            self._prefilling = [request for request in self._prefilling if not request.decoding]
        for request in sorted((*due, *joining), key=_order):
            if request not in self._rows:  # preempted for one that is served before it
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
        """Let every row decode `steps_per_launch` tokens, if that is possible; see above.

        A request without an event before the end of those steps has as many tokens to go, and room.
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
        """Note at which step a request that decodes from this one on needs something again.

        For the first `least` steps it has all that it needs. The step is the earliest that it can
        be: rows may advance by less than `tokens_per_row`.
        """
        tokens = min(self._quiet_until(request) - request.num_computed, request.num_unsampled)
        steps = tokens // self.tokens_per_row
        self._next_events.schedule(request, self._num_steps + max(least, steps))

    def _next_count(self, request: Request) -> int:
        """Return the tokens of a request's next span, if it decodes."""
        return min(self.tokens_per_row, request.num_unsampled)

    def _quiet_until(self, request: Request) -> int:
        """First position before whose token the blocks of a request have to be seen to."""
        return min(self.cache.quiet_until(request.id), self._publishing.next_at(request))

    def _stop_decoding(self, request: Request) -> None:
        self._decoding.remove(request)
        self._decode = None

    def _those_that_decode(self) -> list[Request]:
        """Return what is in `_decoding`: the same list as long as it has not changed.

        Steps under way go on showing the list that they were launched with.
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
        if plan.preempted:  # they would be admitted again with the blocks they just lost
            return
        aside: list[Request] = []
        while self._free_rows and budget > 0 and len(plan.prefill) < self.max_prefill_rows:
            head = self._waiting.head()
            if head is None:
                break
            if self._waits_for_sibling(head):  # and nobody waits for it
                self._waiting.pop()
                aside.append(head)
                continue
            if not self._admit(plan, head, budget):
                break
            budget = self._add_chunk(plan, head, plan.admitted[-1].found.num_tokens, budget)
        for request in aside:
            self._waiting.push(request)

    def _admit(self, plan: StepPlan, head: Request, budget: int) -> bool:
        """Give the first waiting request a row and blocks, if it is its time and there is room.

        Running requests that are served before it must still be able to take the next block that
        they may need: else it would be the first to be preempted, a step later. Those that are
        served after it lose theirs first, so nothing is kept for them.
        """
        siblings = self._siblings(head)
        free = self.cache.num_free_blocks
        state = (head, len(siblings), self._publishing.num_prompts, self._headroom.num_releases)
        # Nothing is looked up again for a request that was refused when there was as much to find
        # and as much room.
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
        """Return who has computed the request's prompt, and how much of it is to be shared.

        All but its last token: whoever goes on from it samples a token of its own.
        """
        shared = len(request.prompt_ids) - 1
        return [(s.id, shared) for s in self._may_fork(request) if s.num_computed >= shared]

    def _waits_for_sibling(self, request: Request) -> bool:
        """Whether others are computing the request's prompt, and none has come to its end."""
        shared = len(request.prompt_ids) - 1
        running = self._may_fork(request)
        return bool(running) and all(s.num_computed < shared for s in running)

    def _may_fork(self, request: Request) -> list[Request]:
        """Return the running requests that a waiting one could go on from, now or soon."""
        if (
            not request.may_fork
            or len(request.prompt_ids) == 1
            or self.cache.is_swapped(request.id)
        ):
            return []
        return [sibling for sibling in request.siblings if sibling in self._rows]

    def _add_chunk(self, plan: StepPlan, request: Request, start: int, budget: int) -> int:
        """Plan as much of a prompt as the budget allows; return what is left of the budget.

        With a budget of time that may be nothing: then the request has its row and waits there.
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
        """Take the blocks that tokens up to `num_tokens` need, from others if need be.

        Returns False if there are not enough: then the request has been preempted itself, or
        (not `may_leave`) keeps what it has and waits for those that are served before it.
        """
        # Siblings may be about to go on from the last token of the prompt, which reads a block that
        # this request's next token does not: it is kept for them if there is room.
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
        """Give back what a request's next token, and all after it, will not read."""
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
        """Assert that rows, queues and blocks agree with each other."""
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
        """Assert that who holds a row is where the next plan expects it, and looked at in time."""
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
