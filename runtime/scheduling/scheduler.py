"""Scheduler: admission, chunked prefill, priorities and preemption.

A plan has a decode part and a prefill part. Every request whose prompt is computed decodes one
token. The remaining token budget of the step goes to prefill chunks. Requests are served in the
order of `(priority, arrival)`. Admission allocates the blocks of all known tokens (in
sliding-window layers those of the next chunk), so most later allocations are for decoding. If no
block is free, the running request that is last in the order of service is preempted: its blocks are
swapped to the host, or its tokens are recomputed later (see `preemption.py`).

A step processes only the requests whose next event is due (see `row_blocks.py`), prefilling
requests, and the head of the queue. `extra_tokens.py` adds tokens to the decode part.

A sequence that outgrows the context of its rotary parameters can lose its keys and values (see
`RopeLengths.recompute_above`). It is preempted without a copy, and recomputed at its next
admission.

An admitted request reuses what is cached: its own swapped blocks, the prompt of a sibling, or
blocks with the same content (see `cache/kv_cache.py`).
"""

from __future__ import annotations

from ...cache.kv_cache import KVCache
from ..request import Request, RequestStatus
from ..rope_lengths import RopeLengths
from .admission import AdmissionControl
from .extra_tokens import ExtraTokens
from .headroom import Headroom
from .next_events import NextEvents
from .plan import Admission, Preemption, RowSpan, StepPlan
from .preemption import PreemptionPolicy
from .publishing import Publishing
from .row_blocks import RowBlocks
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
        self._pausing: list[Request] = []  # paused, with a row
        self._next_events = NextEvents()
        self._running = RunningRequests(max_num_seqs)
        self._headroom = Headroom(cache)
        self._publishing = Publishing(cache)
        parts = self._publishing, self._headroom
        self._admission = AdmissionControl(cache, self._running, *parts)
        self._blocks = RowBlocks(cache, self._running, self._next_events, *parts)
        self.extra_tokens = ExtraTokens(cache, self._blocks, self._next_events, max_batch_tokens)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Requests that have no row, and get none until they are resumed."""
        return len(self._waiting.paused)

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
            self._blocks.leave(request)
            if request.paused:
                self._pausing.remove(request)
            self.cache.release(request.id)
            return
        self.cache.forget_swapped(request.id)
        self._waiting.drop_ended(request)

    def pause(self, request: Request) -> None:
        """Take the row and the blocks of an unfinished request until `resume`.

        The engine has set its `paused`. The next plan preempts it if it has a row, unless its last
        token is being computed.
        """
        if request in self._running.rows:
            self._pausing.append(request)
        else:
            self._waiting.pause(request)

    def resume(self, request: Request) -> None:
        """Let a paused request wait for a row again. The engine has cleared its `paused`."""
        if request in self._running.rows:
            self._pausing.remove(request)
        else:
            self._waiting.resume(request)

    def plan(self, *, single: bool = False) -> StepPlan:
        """Return the plan of the next launch, with one decode step if `single`.

        Allocates and frees rows and blocks. Requests do not change until the engine launches the
        plan.
        """
        plan, running = StepPlan(), self._running
        due = self._next_events.begin_step()
        if self._pausing:
            self._pause_rows(plan)
        if due is not None or running.prefilling:
            self._look_at(plan, due or {})
        plan.decode = running.decoding()
        if running.prefilling or running.free_rows:
            self._plan_prefill(plan)
            if plan.preempted:
                plan.decode = running.decoding()
        if self.steps_per_launch > 1 and not single and plan.decode and not running.prefilling:
            self.extra_tokens.decode_several(plan, self.steps_per_launch)
        return plan

    def fell_short(self, request: Request) -> None:
        """Handle a committed step that advanced a running request by less than was launched.

        Its next event is now earlier than necessary, which is harmless. If the launched steps could
        have sampled all of its tokens, it decodes again from the next plan on.
        """
        if request in self._running.ending and not request.reached_max_tokens:
            self._next_events.cancel(request)
            self._next_events.schedule(request, self._next_events.num_steps + 1)

    def undo(self, plan: StepPlan, admission: Admission) -> None:
        """Undo an admission of the current plan whose copies failed; the request waits again.

        Its swapped and copied blocks are dropped. After its next admission it recomputes its tokens
        or shares valid blocks.
        """
        request, row = admission.request, admission.row
        plan.admitted.remove(admission)
        plan.prefill = [chunk for chunk in plan.prefill if chunk.request is not request]
        plan.table_updates = [update for update in plan.table_updates if update.row != row]
        self._blocks.leave(request)
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
                self._blocks.schedule_next(request)

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
            plan.admitted.append(Admission(head, self._blocks.admit(plan, head), found))
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
            self._blocks.slide(plan, request)
        while not self._blocks.grow(plan, request, num_tokens):
            if not slid:
                self._blocks.slide(plan, request)
                slid = True
                continue
            victim = self._running.last
            if victim is request and not may_leave:
                self._headroom.update(request)
                return False
            self._preempt(plan, victim)
            if victim is request:
                return False
        return True

    def _pause_rows(self, plan: StepPlan) -> None:
        """Preempt the paused requests, except those whose last token is being computed."""
        for request in tuple(self._pausing):
            if request not in self._running.ending:
                self._preempt(plan, request)

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
        self._blocks.leave(victim)
        if victim.paused:
            self._pausing.remove(victim)
        self._waiting.push(victim)
        plan.preempted.append(Preemption(victim, pairs))

    def check_integrity(self) -> None:
        """Assert that rows, queues and blocks are consistent, and events are in time."""
        self.cache.check_integrity()
        self._running.check_integrity()
        self._publishing.check_integrity(self._running.rows)
        self._headroom.check_integrity(self._running.rows)
        self._waiting.check_integrity()
        assert not any(request in self._running.rows for request in self._waiting)
        assert set(self._pausing) == {request for request in self._running.rows if request.paused}
        self._blocks.check_integrity()
