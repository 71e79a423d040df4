"""Scheduler: admission, chunked prefill, priorities and preemption.

A plan has a decode part and a prefill part. Every request whose prompt is computed decodes one
token. The remaining token budget of the step goes to prefill chunks. Requests are served in the
order of `(priority, arrival)`. Admission allocates the blocks of all known tokens (in
sliding-window layers those of the next chunk), so most later allocations are for decoding. If no
block is free, the running request that is last in the order of service is preempted: its blocks are
swapped to the host, or its tokens are recomputed later (see `preemption.py`).

Most decoding requests need no work per step. The earliest step at which a request can need a
block, publish one or sample its last token is known in advance, so its next event is scheduled for
that step. A step processes only the requests with a due event, prefilling requests, and the head of
the queue.

`verify` makes a plan verify drafts of some rows, as far as blocks and tokens are free: no request
is preempted for drafts. The number of accepted tokens is known when the step is committed. Until
then blocks are allocated for the largest possible number, and freed or shared for the smallest. A
request that may have sampled all of its tokens is not planned; it decodes again if the commit
rejects drafts (`fell_short`).

With `steps_per_launch` a plan decodes that many tokens per row if no request prefills, no row
follows a grammar (its next token needs the one before), every row has that many tokens to go, and
the blocks for them are free. Otherwise it decodes one token per
row. So the last tokens of a request are decoded one per launch, and no request is preempted for
tokens of later steps. Waiting requests do not prevent such launches. They wait longer, because a
row that ends within a launch is freed only after it.

A sequence that outgrows the context of its rotary parameters can lose its keys and values (see
`RopeLengths.recompute_above`). It is preempted without a copy, and recomputed at its next
admission.

An admitted request reuses what is cached: its own swapped blocks, the prompt of a sibling, or
blocks with the same content (see `cache/kv_cache.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from ...cache.kv_cache import KVCache, TableChange
from ..request import Request, RequestStatus
from ..rope_lengths import RopeLengths
from .admission import AdmissionControl
from .headroom import Headroom
from .next_events import NextEvents
from .plan import Admission, Preemption, RowSpan, StepPlan, TableUpdate
from .preemption import PreemptionPolicy
from .publishing import Publishing
from .running import RunningRequests, order_of
from .step_budget import StepBudget
from .waiting import WaitingQueue

__all__ = ["Scheduler"]


class Scheduler:
    """Owns the queue, the rows and, through `KVCache`, the blocks.

    Does not change requests, except for their cached block hashes, and their rope lengths, on which
    these depend.
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
        rope_lengths: RopeLengths | None = None,
    ) -> None:
        """Plan steps of at most these sizes."""
        assert max_batch_tokens > max_num_seqs >= 1
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
        self._step_budget = step_budget
        self._rope_lengths = rope_lengths or RopeLengths()
        self._waiting = WaitingQueue()
        self._num_steps = 0  # planned so far; counts each decode step of a launch
        self._next_events = NextEvents()
        self._running = RunningRequests(max_num_seqs)
        self._headroom = Headroom(cache)
        self._publishing = Publishing(cache)
        self._admission = AdmissionControl(cache, self._running, self._publishing, self._headroom)

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
        request.outgrown_at = self._rope_lengths.outgrown_at(request.rope_length)
        self._waiting.push(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ended, and free its row and blocks.

        The engine has set its status to `FINISHED`. Launched steps may still write to the blocks;
        steps of the next owner are launched after them.
        """
        assert request.status is RequestStatus.FINISHED
        if request in self._running.rows:
            self._publishing.publish(request, ends=True)
            self._give_up_row(request)
            self.cache.release(request.id)
            return
        self.cache.forget_swapped(request.id)
        self._waiting.drop_ended()

    def plan(self, *, single: bool = False) -> StepPlan:
        """Return the plan of the next launch, with one decode step if `single`.

        Allocates and frees rows and blocks. Requests do not change until the engine launches the
        plan.
        """
        plan, running = StepPlan(), self._running
        self._num_steps += 1
        due = self._next_events.pop_due(self._num_steps)
        if due is not None or running.prefilling:
            self._look_at(plan, due or {})
        plan.decode = running.decoding()
        if running.prefilling or running.free_rows:
            self._plan_prefill(plan)
            if plan.preempted:
                plan.decode = running.decoding()
        if self.steps_per_launch > 1 and not single:
            self._plan_several_steps(plan)
        return plan

    def verify(self, plan: StepPlan, drafts: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        """Let the decoding rows of a plan verify drafts, those that there is room for.

        Args:
            plan: the current plan, of one decode step.
            drafts: of each of `plan.decode`; may be empty.
            sizes: the tokens per row that verify steps of so many rows exist for, ascending.
        """
        assert plan.steps == 1
        spare = self.max_batch_tokens - plan.prefill_tokens - len(plan.decode)
        kept = [
            own[: self._room_for(plan, request, min(len(own), spare // len(plan.decode)))]
            for request, own in zip(plan.decode, drafts, strict=True)
        ]
        counts = [1 + len(own) for own in kept]
        if (most := max(counts)) > 1:
            plan.drafts, plan.decode_counts = kept, counts
            plan.tokens_per_row = next(size for size in sizes if size >= most)

    def propose(self, plan: StepPlan, drafts: int, group: int) -> None:
        """Let a drafter propose `drafts` tokens for each decoding row of a plan.

        It stores their keys and values in blocks of a layer group. A row for which too few of them
        are free gets fewer drafts (`StepPlan.draft_stops`).
        """
        size = self.cache.block_size
        stops = []
        for request, count in zip(
            plan.decode, plan.decode_counts or repeat(1, len(plan.decode)), strict=True
        ):
            ahead = self._next_count(request, count + drafts + 1)
            table = self.cache.block_table(request.id, group)
            if ahead > count and request.num_computed + ahead > len(table) * size:
                self._grow_if_free(plan, request, ahead, count)
            stops.append(len(table) * size)
        plan.proposes, plan.draft_stops = drafts, stops

    def fell_short(self, request: Request) -> None:
        """Handle a committed step that advanced a running request by less than was launched.

        Its next event is now earlier than necessary, which is harmless. If the launched steps could
        have sampled all of its tokens, it decodes again from the next plan on.
        """
        if request in self._running.ending and not request.reached_max_tokens:
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
        running = self._running
        joining = [request for request in running.prefilling if request.decoding]
        for request in (*due, *running.prefilling):
            if request.least_computed >= self._publishing.next_at(request):
                self._publishing.publish(request)
        if joining:
            running.prefilling = [request for request in running.prefilling if not request.decoding]
        for request in sorted((*due, *joining), key=order_of):
            if request not in running.rows:  # preempted for an earlier request
                continue
            if request.reached_max_tokens:
                if request in due and request not in running.ending:
                    running.stop_decoding(request)
                running.ending.add(request)
                continue
            if request.num_computed >= request.outgrown_at:
                self._preempt(plan, request, may_swap=False)
                continue
            stop = request.num_computed + 1
            if self._make_room(plan, request, stop, may_leave=True):
                if request not in due or request in running.ending:
                    running.begin_decoding(request)
                self._schedule_next_event(request)

    def _plan_several_steps(self, plan: StepPlan) -> None:
        """Decode `steps_per_launch` tokens per row if possible; see the top of this file.

        A request without an event before the end of these steps has enough tokens and blocks.
        """
        steps = self.steps_per_launch
        if not plan.decode or plan.prefill or self._running.prefilling:
            return
        if any(request.matcher is not None for request in plan.decode):
            return
        soon = self._next_events.between(self._num_steps + 1, self._num_steps + steps)
        lacking = 0
        for request in soon:
            if self._next_count(request, steps) < steps:
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

    def _room_for(self, plan: StepPlan, request: Request, drafts: int) -> int:
        """Return how many drafts a decoding request of the plan verifies; allocate their blocks."""
        count = self._next_count(request, 1 + drafts) if drafts > 0 else 1
        if count <= 1:
            return 0
        return count - 1 if self._grow_if_free(plan, request, count, count) else 0

    def _grow_if_free(self, plan: StepPlan, request: Request, tokens: int, count: int) -> bool:
        """Allocate the blocks of a decoding request's next `tokens`, if so many are free.

        This step computes `count` of them.
        """
        stop = request.num_computed + tokens
        if self.cache.lacking(request.id, stop) > self.cache.num_free_blocks:
            return False
        self._next_events.cancel(request)
        grown = self.cache.grow(request.id, stop)
        assert grown is not None, "there were enough blocks"
        self._update_tables(plan, request, grown)
        self._headroom.update(request)
        self._schedule_next_event(request, count=count)
        return True

    def _schedule_next_event(self, request: Request, least: int = 1, *, count: int = 1) -> None:
        """Schedule the next event of a request that decodes from this step on.

        It needs nothing during the first `least` steps. This step computes `count` of its tokens if
        all drafts are accepted, and each later one a token, unless it verifies drafts too.
        """
        tokens = min(self._quiet_until(request) - request.num_computed, request.num_unsampled)
        self._next_events.schedule(request, self._num_steps + max(least, tokens - count + 1))

    def _next_count(self, request: Request, most: int) -> int:
        """Return the number of tokens that a decoding request can compute next, at most `most`."""
        left = request.outgrown_at - request.num_computed
        return min(most, request.num_unsampled, left)

    def _quiet_until(self, request: Request) -> int:
        """First position whose token requires a change of the request's blocks."""
        return min(
            self.cache.quiet_until(request.id),
            self._publishing.next_at(request),
            request.outgrown_at,
        )

    def _outgrow(self, request: Request) -> None:
        """Before an admission: let a sequence that became too long be computed for its length."""
        if request.num_tokens <= request.outgrown_at:
            return
        self.cache.forget_swapped(request.id)
        request.rope_length = request.num_tokens
        request.outgrown_at = self._rope_lengths.outgrown_at(request.rope_length)
        if request.prefix_hashes is not None:
            variant = self._rope_lengths.variant(request.rope_length)
            request.prefix_hashes = request.prefix_hashes.restarted(variant)

    def _plan_prefill(self, plan: StepPlan) -> None:
        running = self._running
        budget = min(self.prefill_chunk, self.max_batch_tokens - len(plan.decode))
        for request in tuple(running.prefilling):
            if budget <= 0 or len(plan.prefill) == self.max_prefill_rows:
                break
            if request not in running.rows:
                continue
            stop = min(request.num_tokens, request.num_computed + budget)
            if self._make_room(plan, request, stop, may_leave=False):
                budget = self._add_chunk(plan, request, request.num_computed, budget)
        if plan.preempted:  # would readmit them with the blocks they just lost
            return
        aside: list[Request] = []
        while running.free_rows and budget > 0 and len(plan.prefill) < self.max_prefill_rows:
            head = self._waiting.head()
            if head is None:
                break
            self._outgrow(head)
            if self._admission.waits_for_sibling(head):  # does not block later requests
                self._waiting.pop()
                aside.append(head)
                continue
            found = self._admission.admit(head, budget)
            if found is None:
                break
            self._waiting.pop()
            plan.admitted.append(Admission(head, running.join(head), found))
            self._publishing.admit(head)
            self._headroom.update(head)
            self._update_tables(plan, head, self.cache.table_of(head.id))
            budget = self._add_chunk(plan, head, found.num_tokens, budget)
        for request in aside:
            self._waiting.push(request)

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
            row, stop = self._running.rows[request], start + count
            samples, scored = stop == request.num_tokens, request.unscored(start, stop)
            plan.prefill.append(RowSpan(request, row, start, count, samples, scored))
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
            victim = self._running.last
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

    def _preempt(self, plan: StepPlan, victim: Request, *, may_swap: bool = True) -> None:
        plan.prefill = [chunk for chunk in plan.prefill if chunk.request is not victim]
        self._publishing.publish(victim)
        pairs = None
        num_tokens = victim.least_computed
        num_blocks = self.cache.num_blocks_of(victim.id, num_tokens)
        if may_swap and self.preemption.swaps(num_blocks, num_tokens):
            pairs = self.cache.swap_out(victim.id, num_tokens)
        if pairs is None:
            self.cache.release(victim.id)
        self._give_up_row(victim)
        self._waiting.push(victim)
        plan.preempted.append(Preemption(victim, pairs))

    def _update_tables(self, plan: StepPlan, request: Request, changes: list[TableChange]) -> None:
        if changes:
            row = self._running.rows[request]
            for group, column, block in changes:
                plan.table_updates.append(TableUpdate(group, row, column, block))

    def _give_up_row(self, request: Request) -> None:
        self._running.leave(request)
        self._next_events.cancel(request)
        self._headroom.forget(request)
        self._publishing.leave(request)

    def check_integrity(self) -> None:
        """Assert that rows, queues and blocks are consistent, and events are in time."""
        self.cache.check_integrity()
        self._running.check_integrity()
        self._publishing.check_integrity(self._running.rows)
        self._headroom.check_integrity(self._running.rows)
        self._waiting.check_integrity()
        assert not any(request in self._running.rows for request in self._waiting)
        self._next_events.check_integrity()
        events, ending = self._next_events.all(), self._running.ending
        for request in ending:
            assert request.decoding
            assert request.reached_max_tokens == (request not in events)
        assert events.keys() - ending == set(self._running.decoding())
        for request, number in events.items():
            tokens = number - self._num_steps - 1  # decoded before, if no step verifies
            assert 0 <= tokens <= request.num_unsampled
            last = request.num_computed + tokens - 1
            assert tokens == 0 or last < self._quiet_until(request)
