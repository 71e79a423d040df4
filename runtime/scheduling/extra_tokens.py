"""Lets decoding rows compute more than one token in a launch. No torch.

`verify` makes a plan verify drafts of some rows, as far as blocks and tokens are free: no request
is preempted for drafts. The number of accepted tokens is known when the step is committed. Until
then blocks are allocated for the largest possible number, and freed or shared for the smallest. A
request that may have sampled all of its tokens is not planned; it decodes again if the commit
rejects drafts (`Scheduler.fell_short`).

With `steps_per_launch` a plan decodes that many tokens per row if no request prefills, no row
follows a grammar (its next token needs the one before), every row has that many tokens to go, and
the blocks for them are free. Otherwise it decodes one token per row. So the last tokens of a
request are decoded one per launch, and no request is preempted for tokens of later steps. Waiting
requests do not prevent such launches. They wait longer, because a row that ends within a launch is
freed only after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

from ...cache.kv_cache import KVCache
from ..request import Request
from .next_events import NextEvents
from .plan import StepPlan
from .row_blocks import RowBlocks

__all__ = ["ExtraTokens"]


class ExtraTokens:
    """Adds tokens to a plan of one decode step, for which there are blocks without preemption."""

    def __init__(
        self, cache: KVCache, blocks: RowBlocks, events: NextEvents, max_batch_tokens: int
    ) -> None:
        """Plan at most `max_batch_tokens` tokens in a step."""
        self._cache, self._blocks, self._events = cache, blocks, events
        self._max_batch_tokens = max_batch_tokens

    def verify(self, plan: StepPlan, drafts: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        """Let the decoding rows of a plan verify drafts, those that there is room for.

        Args:
            plan: the current plan, of one decode step.
            drafts: of each of `plan.decode`; may be empty.
            sizes: the tokens per row that verify steps of so many rows exist for, ascending.
        """
        assert plan.steps == 1
        spare = self._max_batch_tokens - plan.prefill_tokens - len(plan.decode)
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
        size = self._cache.block_size
        stops = []
        for request, count in zip(
            plan.decode, plan.decode_counts or repeat(1, len(plan.decode)), strict=True
        ):
            ahead = _next_count(request, count + drafts + 1)
            table = self._cache.block_table(request.id, group)
            if ahead > count and request.num_computed + ahead > len(table) * size:
                self._blocks.grow_decoding(plan, request, ahead, count)
            stops.append(len(table) * size)
        plan.proposes, plan.draft_stops = drafts, stops

    def propose_after_prompts(self, plan: StepPlan, drafts: int, group: int) -> None:
        """Let a drafter propose `drafts` tokens after each prompt that ends in a plan.

        As `propose`. Siblings share the blocks of their prompt, so that none are added for drafts.
        """
        cache = self._cache
        for index, chunk in enumerate(plan.prefill):
            if not chunk.samples:
                continue
            request, end = chunk.request, chunk.start + chunk.count
            table = cache.block_table(request.id, group)
            stop = min(end + min(drafts + 1, request.num_unsampled - 1), request.outgrown_at)
            lacking = 0 if request.siblings else cache.lacking(request.id, stop)
            if 0 < lacking <= cache.num_free_blocks:
                grown = self._blocks.grow(plan, request, stop)
                assert grown, "there were enough blocks"
            plan.prefill[index] = replace(chunk, draft_stop=len(table) * cache.block_size)
        plan.prompt_drafts = drafts

    def decode_several(self, plan: StepPlan, steps: int) -> None:
        """Let a plan without prefill decode `steps` tokens per row, if every row can.

        A request without an event before the end of these steps has enough tokens and blocks.
        """
        if any(request.matcher is not None for request in plan.decode):
            return
        events, cache, first = self._events, self._cache, self._events.num_steps
        soon = events.between(first + 1, first + steps)
        lacking = 0
        for request in soon:
            if _next_count(request, steps) < steps:
                return
            lacking += cache.lacking(request.id, request.num_computed + steps)
        if lacking > cache.num_free_blocks:
            return
        for request in soon:
            events.cancel(request)
            grown = self._blocks.grow(plan, request, request.num_computed + steps)
            assert grown, "there were enough blocks"
            self._blocks.schedule_next(request, steps)
        plan.steps = steps
        events.num_steps += steps - 1

    def _room_for(self, plan: StepPlan, request: Request, drafts: int) -> int:
        """Return how many drafts a decoding request of the plan verifies; allocate their blocks."""
        count = _next_count(request, 1 + drafts) if drafts > 0 else 1
        if count <= 1:
            return 0
        return count - 1 if self._blocks.grow_decoding(plan, request, count, count) else 0


def _next_count(request: Request, most: int) -> int:
    """Return the number of tokens that a decoding request can compute next, at most `most`."""
    return min(most, request.num_unsampled, request.outgrown_at - request.num_computed)
