"""Scheduler: admission, chunked prefill, priorities, preemption, and tokens beyond one a row.

A plan has a decode part and a prefill part. Every request whose prompt is computed decodes one
token. The remaining token budget of the step goes to prefill chunks. Requests are served in the
order of `(priority, arrival)`. Admission allocates the blocks of all known tokens (in
sliding-window layers of the next chunk only), so most later allocations are for decoding. If no
block is free, the running request that is last in the order of service is preempted: its blocks are
swapped to the host, or its tokens are recomputed later.

Most decoding requests need no work per step. The earliest step at which a request can need a block,
publish one or sample its last token is known in advance (`WakeTimes`), so a step processes only the
requests that are due, prefilling requests, and the head of the queue.

A sequence that outgrows the context of its rotary parameters can lose its keys and values (see
`RopeLengths.recompute_above`). It is preempted without a copy, and recomputed at its next
admission.

An admitted request reuses cached state: its own swapped blocks, the prompt of a sibling, or blocks
with the same content (see `cache/kv_cache.py`). Does not import torch.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter

from ...cache.kv_cache import Admitted, KVCache, TableChange
from ..request import Request, RequestStatus
from ..rope_lengths import RopeLengths
from .plan import Admission, Preemption, RowSpan, StepPlan, TableUpdate
from .step_budget import StepBudget

order_of = attrgetter("order")


class PrefixPublisher:
    """Publishes full blocks of running requests in the prefix cache, and withdraws invalid ones.

    A block is published once launched steps have computed all of its tokens, before their logits
    are known. It is verified once finite logits were computed from it. When a request has
    non-finite logits, the blocks that it computed since its last finite logits are withdrawn. So
    are the cached blocks that it reused, unless a request has verified them.
    """

    def __init__(self, cache: KVCache) -> None:
        self.num_prompts = 0
        """Number of times that blocks of a prompt were published."""
        self._cache = cache
        self._at: dict[Request, int] = {}  # computed tokens at which its next block is full
        self._known: dict[Request, int] = {}  # known tokens of running requests at admission

    def admit(self, request: Request) -> None:
        """Start tracking a request that got a row."""
        self._known[request] = request.num_tokens
        if request.prefix_hashes is not None:
            self._at[request] = self._cache.block_size

    def next_at(self, request: Request) -> int:
        """Return the number of computed tokens at which a request's next block is full."""
        return self._at.get(request, sys.maxsize)

    def publish(self, request: Request, *, ends: bool = False, leaves: bool = False) -> None:
        """Publish the full blocks that launched steps have computed for a running request.

        With `ends`, the logits after its last token will not be read, so that token is excluded.
        A request `leaves` if it loses its blocks, as one that ends does.
        """
        if request not in self._at:
            return
        known = min(request.least_computed, request.num_tokens)
        verified = self._num_verified(request)
        if ends and verified:
            known = min(known, verified)
        hashes = request.hashes_of(known)
        if hashes is None:
            return
        size = self._cache.block_size
        self._cache.publish(request.id, hashes, known, leaves=ends or leaves)
        if verified:
            self._cache.verify(request.id, hashes, verified)
        if known < len(request.prompt_ids) + size:
            self.num_prompts += 1
        self._at[request] = (known // size + 1) * size

    def withdraw(self, request: Request) -> None:
        """Withdraw the unverified blocks of a request with non-finite logits, and stop publishing.

        The request may have been preempted after the step with these logits was launched.
        """
        verified = self._num_verified(request)
        hashes = request.hashes_of(verified)
        if hashes is None:
            return
        self._at.pop(request, None)
        if verified:
            self._cache.verify(request.id, hashes, verified)
        self._cache.withdraw(hashes, verified)

    def leave(self, request: Request) -> None:
        """Stop tracking a request that loses its row."""
        self._at.pop(request, None)
        del self._known[request]

    def forget_contents(self) -> None:
        """Stop publishing blocks of the requests that run now."""
        self._at.clear()

    def check_integrity(self, rows: dict[Request, int]) -> None:
        """Assert that exactly the requests with a row are tracked."""
        assert self._at.keys() <= self._known.keys() == rows.keys()

    def _num_verified(self, request: Request) -> int:
        """Return the number of tokens before the request's last finite logits.

        0 if it has no row, or if no token was sampled since it got the row.
        """
        sampled = request.num_tokens > self._known.get(request, sys.maxsize)
        return request.num_tokens - 1 if sampled else 0


class RunningRequests:
    """Requests with a row: prefilling, decoding or ending. Lists are in the order of service."""

    def __init__(self, max_num_seqs: int) -> None:
        self.rows: dict[Request, int] = {}
        self.free_rows = list(range(max_num_seqs))
        """A heap: low rows are given first."""
        self.prefilling: list[Request] = []
        self.ending: set[Request] = set()
        """Requests whose launched steps may have sampled all of their tokens."""
        self.decoding: list[Request] = []
        """Replaced when one joins or leaves: steps in flight keep the list that they have."""
        self._max_num_seqs = max_num_seqs

    def join(self, request: Request) -> int:
        """Give a request a row to prefill, and return the row."""
        row = self.rows[request] = heapq.heappop(self.free_rows)
        insort(self.prefilling, request, key=order_of)
        return row

    def begin_decoding(self, request: Request) -> None:
        """Let a request decode that has been prefilled or has not ended after all."""
        self.ending.discard(request)
        self.decoding = self.decoding.copy()
        insort(self.decoding, request, key=order_of)

    def stop_decoding(self, request: Request) -> None:
        """Exclude a decoding request from later steps."""
        self.decoding = [other for other in self.decoding if other is not request]

    def leave(self, request: Request) -> None:
        """Free the row of a request in any phase."""
        if request in self.prefilling:
            self.prefilling.remove(request)
        elif request in self.ending:
            self.ending.remove(request)
        elif request in self.decoding:
            self.stop_decoding(request)
        heapq.heappush(self.free_rows, self.rows.pop(request))

    def check_integrity(self) -> None:
        """Assert that each row has at most one request, and each request is in one phase."""
        rows = sorted(self.rows.values())
        assert sorted(rows + self.free_rows) == list(range(self._max_num_seqs))
        for phase in (self.prefilling, self.decoding):
            assert phase == sorted(set(phase), key=order_of)
        phases = [*self.prefilling, *self.decoding, *self.ending]
        assert len(phases) == len(self.rows)
        assert self.rows.keys() == set(phases)


class WakeTimes:
    """The earliest step at which each decoding request needs blocks, publishes one or ends."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Planned so far."""
        self._due: dict[int, dict[Request, None]] = {}  # step number -> requests
        self.steps: dict[Request, int] = {}
        """The scheduled step of each request."""

    def schedule(self, request: Request, step: int) -> None:
        """Schedule the next event of a request that has none."""
        assert request not in self.steps, f"request {request.id} is already scheduled"
        self.steps[request] = step
        self._due.setdefault(step, {})[request] = None

    def cancel(self, request: Request) -> None:
        """Remove the scheduled event of a request, if it has one."""
        step = self.steps.pop(request, None)
        if step is not None:
            due = self._due[step]
            del due[request]
            if not due:
                del self._due[step]

    def begin_step(self) -> dict[Request, None] | None:
        """Begin the next step; remove and return the requests that are due at it, or None."""
        self.num_steps += 1
        due = self._due.pop(self.num_steps, None)
        if due is not None:
            for request in due:
                del self.steps[request]
        return due

    def check_integrity(self) -> None:
        """Assert that both lookups agree."""
        by_step = {request: step for step, due in self._due.items() for request in due}
        assert by_step == self.steps
        assert all(self._due.values()), "a step without requests"


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
        step_budget: StepBudget | None = None,
        rope_lengths: RopeLengths | None = None,
    ) -> None:
        """Plan steps of at most these sizes."""
        assert max_batch_tokens > max_num_seqs >= 1
        assert prefill_chunk >= 1
        assert max_prefill_rows >= 1
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.prefill_chunk = prefill_chunk
        self.max_prefill_rows = max_prefill_rows
        self._step_budget = step_budget
        self._rope_lengths = rope_lengths or RopeLengths()
        self._waiting: list[Request] = []
        """Requests that wait for a row, in the order of service."""
        self._paused: set[Request] = set()  # without a row
        self._pausing: dict[Request, None] = {}  # paused, with a row
        self._wakes = WakeTimes()
        self._running = RunningRequests(max_num_seqs)
        self._reserved: dict[Request, int] = {}
        """Of each running request: the layer groups that may grow, each by a block."""
        self._num_releases = 0
        """Number of times that one of these fell. While it is unchanged, no sum has fallen."""
        self.publisher = PrefixPublisher(cache)
        # The request that was refused last, with the state at that time: siblings to fork from,
        # prompts published, reservations released, free blocks.
        self._refused: tuple[Request, int, int, int, int] | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row; paused ones do not."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running.rows)

    def add(self, request: Request) -> None:
        """Queue a new request. Alone it must fit into the cache."""
        request.outgrown_at = self._rope_lengths.outgrown_at(request.rope_length)
        self._wait(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ended, and free its row and blocks.

        The engine has set its status to `FINISHED`. Launched steps may still write to the blocks;
        steps of the next owner are launched after them.
        """
        assert request.status is RequestStatus.FINISHED
        if request in self._running.rows:
            self.publisher.publish(request, ends=True)
            self._leave(request)
            self.cache.release(request.id)
            return
        self.cache.drop_swapped(request.id)
        self._stop_waiting(request)

    def on_paused(self, request: Request) -> None:
        """Handle an unfinished request whose `paused` the engine has changed.

        The next plan preempts it if it has a row, unless its last token is being computed.
        """
        if request not in self._running.rows:
            self._stop_waiting(request)
            self._wait(request)
        elif request.paused:
            self._pausing[request] = None
        else:
            del self._pausing[request]

    def plan(self) -> StepPlan:
        """Return the plan of the next launch.

        Allocates and frees rows and blocks. Requests do not change until the engine launches the
        plan.
        """
        plan, running = StepPlan(), self._running
        due = self._wakes.begin_step()
        if self._pausing:
            for request in tuple(self._pausing):
                if request not in running.ending:  # its last token is being computed
                    self._preempt(plan, request)
        if due is not None or running.prefilling:
            self._look_at(plan, due or {})
        plan.decode = running.decoding
        if running.prefilling or (self._waiting and running.free_rows):
            self._plan_prefill(plan)
            plan.decode = running.decoding
        return plan

    def on_rejected_drafts(self, request: Request) -> None:
        """Handle a committed step that advanced a running request by less than was launched.

        Its next event is now earlier than necessary, which is harmless. If the launched steps could
        have sampled all of its tokens, it decodes again from the next plan on.
        """
        if request in self._running.ending and not request.reached_max_tokens:
            self._wakes.cancel(request)
            self._wakes.schedule(request, self._wakes.num_steps + 1)

    def undo(self, plan: StepPlan, admission: Admission) -> None:
        """Undo an admission of the current plan whose copies failed; the request waits again.

        Its swapped and copied blocks are dropped. After its next admission it recomputes its tokens
        or shares valid blocks.
        """
        request, row = admission.request, admission.row
        plan.admitted.remove(admission)
        plan.prefill = [chunk for chunk in plan.prefill if chunk.request is not request]
        plan.table_updates = [update for update in plan.table_updates if update.row != row]
        self._leave(request)
        self.cache.release(request.id)
        self._wait(request)

    def forget_contents(self) -> None:
        """Clear the prefix cache, and exclude tokens computed so far from later sharing."""
        self.cache.forget_contents()
        self.publisher.forget_contents()
        for request in (*self._running.rows, *self._waiting, *self._paused):
            request.prefix_hashes = None

    def verify(
        self, plan: StepPlan, drafts: Sequence[Sequence[int]], unread: Sequence[int]
    ) -> None:
        """Let the decoding rows of a plan verify drafts, as far as blocks and tokens are free.

        No request is preempted for drafts. The number of accepted tokens is known when the step is
        committed. Until then blocks are allocated for the largest possible number, and freed or
        shared for the smallest. A request that may have sampled all of its tokens is not planned;
        it decodes again if the commit rejects drafts (`on_rejected_drafts`).

        `drafts` are those of each of `plan.decode`, or empty if the rows keep them on the device;
        then `unread` has the number of drafts of each row.
        """
        spare = self.max_batch_tokens - plan.prefill_tokens - len(plan.decode)
        counts = []
        for request, most in zip(plan.decode, unread or map(len, drafts), strict=True):
            count = _next_count(request, 1 + max(0, min(most, spare // len(plan.decode))))
            grown = count > 1 and self._grow_decoding(plan, request, count, count)
            counts.append(count if grown else 1)
        if max(counts) > 1:
            plan.decode_counts = counts
            plan.drafts = [own[: n - 1] for own, n in zip(drafts, counts, strict=False)]

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
            ahead = _next_count(request, count + drafts + 1)
            table = self.cache.block_table(request.id, group)
            if ahead > count and request.num_computed + ahead > len(table) * size:
                self._grow_decoding(plan, request, ahead, count)
            stops.append(len(table) * size)
        plan.proposes, plan.draft_stops = drafts, stops

    def propose_after_prompts(self, plan: StepPlan, drafts: int, group: int) -> None:
        """Let a drafter propose `drafts` tokens after each prompt that ends in a plan.

        As `propose`. Siblings share the blocks of their prompt, so that none are added for drafts.
        """
        cache = self.cache
        for index, chunk in enumerate(plan.prefill):
            if not chunk.samples:
                continue
            request, end = chunk.request, chunk.start + chunk.count
            table = cache.block_table(request.id, group)
            stop = min(end + min(drafts + 1, request.num_unsampled - 1), request.outgrown_at)
            if not request.siblings:
                self._grow(plan, request, stop, stop - end)
            plan.prefill[index] = replace(chunk, draft_stop=len(table) * cache.block_size)
        plan.prompt_drafts = drafts

    def check_integrity(self) -> None:
        """Assert that rows, queues and blocks are consistent, and events are in time."""
        self.cache.check_integrity()
        self._running.check_integrity()
        self.publisher.check_integrity(self._running.rows)
        assert self._reserved.keys() == self._running.rows.keys()
        assert self._waiting == sorted(self._waiting, key=order_of)
        assert self._paused.isdisjoint(self._waiting)
        for request in (*self._waiting, *self._paused):
            assert request.status is not RequestStatus.FINISHED
            assert request not in self._running.rows
            assert request.paused == (request in self._paused)
        assert self._pausing.keys() == {request for request in self._running.rows if request.paused}
        self._wakes.check_integrity()
        wakes, ending = self._wakes.steps, self._running.ending
        for request in ending:
            assert request.decoding
            assert request.reached_max_tokens == (request not in wakes)
        assert wakes.keys() - ending == set(self._running.decoding)
        for request, number in wakes.items():
            tokens = number - self._wakes.num_steps - 1  # decoded before, if no step verifies
            assert 0 <= tokens <= request.num_unsampled
            last = request.num_computed + tokens - 1
            assert tokens == 0 or last < self._next_change_position(request)

    def _wait(self, request: Request) -> None:
        """Queue a request; set a paused one aside, so that no plan has to pass over it."""
        if request.paused:
            self._paused.add(request)
        else:
            insort(self._waiting, request, key=order_of)

    def _stop_waiting(self, request: Request) -> None:
        if request in self._paused:
            self._paused.remove(request)
            return
        index = bisect_left(self._waiting, request.order, key=order_of)
        assert self._waiting[index] is request, f"request {request.id} is not in the queue"
        del self._waiting[index]

    def _look_at(self, plan: StepPlan, due: dict[Request, None]) -> None:
        """Process the due events of decoding requests, and add requests that begin to decode."""
        running = self._running
        joining = [request for request in running.prefilling if request.decoding]
        for request in (*due, *running.prefilling):
            if request.least_computed >= self.publisher.next_at(request):
                self.publisher.publish(request)
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
                self._schedule_next(request)

    def _outgrow(self, request: Request) -> None:
        """Before an admission: let a sequence that became too long be computed for its length."""
        if request.num_tokens <= request.outgrown_at:
            return
        self.cache.drop_swapped(request.id)
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
            start = request.num_computed
            count, left = self._next_chunk(plan, request, start, budget)
            if self._make_room(plan, request, start + count, may_leave=False):
                budget = left
                self._add_chunk(plan, request, start, count)
        if plan.preempted:  # would readmit them with the blocks they just lost
            return
        passed = 0  # requests that do not hold back later ones
        while running.free_rows and budget > 0 and len(plan.prefill) < self.max_prefill_rows:
            if passed == len(self._waiting):
                break
            head = self._waiting[passed]
            self._outgrow(head)
            # All tokens of the prompt but the last, whose logits it needs to sample its own token.
            shared, siblings = len(head.prompt_ids) - 1, self._may_fork(head)
            ready = [(s.id, shared) for s in siblings if s.num_computed > shared]
            if siblings and not ready:
                passed += 1
                continue
            found = self._admit(head, ready, budget)
            if found is None:
                break
            del self._waiting[passed]
            row = running.join(head)
            self.publisher.admit(head)
            self._reserve(head)
            self._update_tables(plan, head, self.cache.table_of(head.id))
            plan.admitted.append(Admission(head, row, found))
            count, budget = self._next_chunk(plan, head, found.num_tokens, budget)
            self._grow(plan, head, found.num_tokens + count)
            self._add_chunk(plan, head, found.num_tokens, count)

    def _next_chunk(
        self, plan: StepPlan, request: Request, start: int, budget: int
    ) -> tuple[int, int]:
        """Return the tokens of a request's next chunk, and the token budget after it.

        With a latency budget the chunk can be empty. Then the request keeps its row and waits.
        """
        asked = count = min(request.num_tokens - start, budget)
        if self._step_budget is not None:
            count = self._step_budget.fit(plan, request, start, asked)
        return count, budget - count if count == asked else 0

    def _add_chunk(self, plan: StepPlan, request: Request, start: int, count: int) -> None:
        if not count:
            return
        row, stop = self._running.rows[request], start + count
        samples, scored = stop == request.num_tokens, request.unscored(start, stop)
        plan.prefill.append(RowSpan(request, row, start, count, samples, scored))

    def _make_room(
        self, plan: StepPlan, request: Request, num_tokens: int, *, may_leave: bool
    ) -> bool:
        """Allocate the blocks of tokens up to `num_tokens`, preempting requests if necessary.

        Returns False if there are not enough. Then the request has been preempted itself, or
        (without `may_leave`) keeps its blocks and waits for the requests served before it.
        """
        # Siblings may fork at the last token of the prompt, which reads a block that this request's
        # next token does not read. That block is kept for them if enough blocks are free.
        keeps = request.siblings and request.least_computed == len(request.prompt_ids)
        self._slide(plan, request, request.least_computed - bool(keeps))
        while not self._grow(plan, request, num_tokens):
            if keeps:
                self._slide(plan, request, request.least_computed)
                keeps = False
                continue
            victim = max(self._running.rows, key=order_of)  # served last
            if victim is request and not may_leave:
                self._reserve(request)
                return False
            self._preempt(plan, victim)
            if victim is request:
                return False
        return True

    def _preempt(self, plan: StepPlan, victim: Request, *, may_swap: bool = True) -> None:
        plan.prefill = [chunk for chunk in plan.prefill if chunk.request is not victim]
        self.publisher.publish(victim, leaves=True)
        pairs = None
        num_tokens = victim.least_computed
        if may_swap and num_tokens and self.cache.host.num_blocks:
            pairs = self.cache.swap_out(victim.id, num_tokens)
        if pairs is None:
            self.cache.release(victim.id)
        self._leave(victim)
        self._wait(victim)
        plan.preempted.append(Preemption(victim, pairs))

    def _admit(
        self, head: Request, siblings: Sequence[tuple[str, int]], chunk: int
    ) -> Admitted | None:
        """Allocate the blocks of the first waiting request; None if there are not enough.

        Of `siblings` it may share as many tokens as given.

        Running requests that are served before it must still be able to allocate the next block
        that they may need. Otherwise it would be preempted one step later. A refused request is not
        tried again until there are more cached tokens or free blocks.
        """
        free = self.cache.pool.num_free
        state = (head, len(siblings), self.publisher.num_prompts, self._num_releases)
        if self._refused is not None and self._refused[:4] == state and free <= self._refused[4]:
            return None
        earlier = (n for request, n in self._reserved.items() if request.order < head.order)
        found = self.cache.admit(
            head.id,
            head.num_tokens,
            chunk=chunk,
            headroom=sum(earlier),
            hashes=head.hashes_of(head.num_tokens),
            siblings=siblings,
            reusable_tokens=head.reusable_tokens,
        )
        self._refused = (*state, free) if found is None else None
        return found

    def _may_fork(self, request: Request) -> list[Request]:
        """Return the running requests that a waiting request can fork from, now or later."""
        if (
            not request.may_fork
            or len(request.prompt_ids) == 1
            or request.reusable_tokens is not None
            or self.cache.host.find(request.id) is not None
        ):
            return []
        return [
            sibling
            for sibling in request.siblings
            if sibling in self._running.rows and sibling.rope_length == request.rope_length
        ]

    def _leave(self, request: Request) -> None:
        """Take the row of a request, whose blocks the caller frees."""
        self._running.leave(request)
        self._pausing.pop(request, None)
        self._wakes.cancel(request)
        self._num_releases += self._reserved.pop(request) > 0
        self.publisher.leave(request)

    def _reserve(self, request: Request) -> None:
        """Reserve blocks for a running request whose blocks have changed.

        Its last possible token needs no slot: it is sampled, but its keys are never written.
        """
        longest = len(request.prompt_ids) + request.max_tokens - 1
        before = self._reserved.get(request, 0)
        blocks = self.cache.growing_groups(request.id, longest, decodes=request.decoding)
        self._reserved[request] = blocks
        self._num_releases += blocks < before

    def _grow(self, plan: StepPlan, request: Request, stop: int, drafted: int = 0) -> bool:
        """Allocate the blocks of tokens up to `stop`, if enough are free; see `KVCache.grow`."""
        grown = self.cache.grow(request.id, stop, drafted)
        if grown is None:
            return False
        self._update_tables(plan, request, grown)
        self._reserve(request)
        return True

    def _grow_decoding(self, plan: StepPlan, request: Request, tokens: int, count: int) -> bool:
        """Allocate the blocks of a decoding request's next `tokens`, if enough are free.

        This step computes `count` of them.
        """
        if not self._grow(plan, request, request.num_computed + tokens, tokens - count):
            return False
        self._wakes.cancel(request)
        self._schedule_next(request, count=count)
        return True

    def _slide(self, plan: StepPlan, request: Request, position: int) -> None:
        """Free the blocks that the request's tokens from `position` on do not read."""
        self._update_tables(plan, request, self.cache.slide(request.id, position))

    def _schedule_next(self, request: Request, *, count: int = 1) -> None:
        """Schedule the next event of a request that decodes from this step on.

        This step computes `count` of its tokens if all drafts are accepted, and each later one a
        token, unless it verifies drafts too.
        """
        tokens = min(
            self._next_change_position(request) - request.num_computed, request.num_unsampled
        )
        self._wakes.schedule(request, self._wakes.num_steps + max(1, tokens - count + 1))

    def _next_change_position(self, request: Request) -> int:
        """First position whose token requires a change of the request's blocks."""
        return min(
            self.cache.quiet_until(request.id),
            self.publisher.next_at(request),
            request.outgrown_at,
        )

    def _update_tables(self, plan: StepPlan, request: Request, changes: list[TableChange]) -> None:
        if changes:
            row = self._running.rows[request]
            for group, column, block in changes:
                plan.table_updates.append(TableUpdate(group, row, column, block))


def _next_count(request: Request, most: int) -> int:
    """Return the number of tokens that a decoding request can compute next, at most `most`."""
    return min(most, request.num_unsampled, request.outgrown_at - request.num_computed)
