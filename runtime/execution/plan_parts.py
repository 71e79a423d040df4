"""Chooses the prepared steps that run a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

from ...profiling import ranges
from ..request import Request
from ..scheduling.plan import StepPlan
from .step_key import StepKey
from .step_sizes import StepSizes

__all__ = ["PlanParts", "PlannedPart"]


class PlannedPart(NamedTuple):
    """The decode or the prefill part of a step."""

    name: str
    """Of its range for profilers."""
    key: StepKey
    requests: Sequence[Request | None]
    """Request of each lane; None: a chunk that does not sample."""
    tokens: int
    room: int
    """Tokens that the step computes, padding included."""


class PlanParts:
    """Chooses the smallest step for each part of a plan, that of a decode part while it is valid.

    Plans are given in the order of their launches.
    """

    def __init__(
        self, sizes: StepSizes, block_size: int, most_positions: int, *, ragged: bool
    ) -> None:
        """Choose from the steps of `sizes`.

        Args:
            sizes: of the prepared steps.
            block_size: slots of a block.
            most_positions: slots of the longest row.
            ragged: whether verify steps pad rows, and not the tokens of a row.
        """
        self._sizes, self._block_size = sizes, block_size
        self._most_positions, self._ragged = most_positions, ragged
        self._decoding = _Decoding([])

    @property
    def decode_rows(self) -> list[int]:
        """The rows that the last plan decodes, in their order."""
        return self._decoding.rows

    def of(self, plan: StepPlan) -> list[PlannedPart]:
        """Return the parts in the order of their launch: decode, then prefill."""
        decoding = self._decoding
        if plan.decode is not decoding.requests:
            self._decoding = _Decoding(plan.decode)
        elif decoding.changed:
            decoding.find_longest()
        parts = []
        if plan.decode:
            parts.append(self._verify_part(plan) if plan.drafting else self._decode_part(plan))
        if plan.prefill:
            parts.append(self._prefill_part(plan))
        return parts

    def _decode_part(self, plan: StepPlan) -> PlannedPart:
        decoding, steps, key = self._decoding, plan.steps, self._decoding.key
        assert decoding.longest is not None, "the plan has no decoding row"
        positions, rows = decoding.longest.num_computed + steps, len(plan.decode)
        if key is None or key.steps != steps or positions > key.read_blocks * self._block_size:
            key = decoding.key = self._sizes.decode_key(
                rows,
                -(-positions // self._block_size),
                decoding.full_sampler,
                steps,
                masked=decoding.masked,
            )
        return PlannedPart(ranges.REPLAY, key, plan.decode, steps * rows, steps * key.size)

    def _verify_part(self, plan: StepPlan) -> PlannedPart:
        """The part of a step that drafts, after which another row may be longest."""
        decoding, rows = self._decoding, len(plan.decode)
        counts = plan.decode_counts or repeat(1, rows)
        stop = max(r.num_computed + n for r, n in zip(plan.decode, counts, strict=True))
        if plan.proposes:  # the newest token and all drafts may follow
            stop += 1 + plan.proposes
        decoding.changed = True
        key = self._sizes.decode_key(
            rows,
            -(-min(stop, self._most_positions) // self._block_size),
            decoding.full_sampler,
            tokens_per_row=plan.tokens_per_row,
            drafts=plan.proposes,
            masked=decoding.masked,
        )
        tokens = plan.decode_tokens
        room = tokens + key.size - rows if self._ragged else key.tokens_per_row * key.size
        return PlannedPart(ranges.VERIFY, key, plan.decode, tokens, room)

    def _prefill_part(self, plan: StepPlan) -> PlannedPart:
        chunks, tokens = plan.prefill, plan.prefill_tokens
        stop = max(chunk.start + chunk.count for chunk in chunks)
        if plan.prompt_drafts:  # the newest token and all drafts may follow
            stop += 1 + plan.prompt_drafts
        key = self._sizes.prefill_key(
            tokens,
            -(-min(stop, self._most_positions) // self._block_size),
            any(chunk.request.params.needs_full_sampler for chunk in chunks),
            drafts=plan.prompt_drafts,
            masked=any(chunk.samples and chunk.request.matcher is not None for chunk in chunks),
        )
        requests = [chunk.request if chunk.samples else None for chunk in chunks]
        return PlannedPart(ranges.PREFILL, key, requests, tokens, key.size)


class _Decoding:
    """The decoding requests, and values derived from them while none joins or leaves."""

    __slots__ = ("changed", "full_sampler", "key", "longest", "masked", "requests", "rows")

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.rows = [request.row for request in requests if request.row is not None]
        assert len(self.rows) == len(requests), "a request that decodes holds a row"
        self.full_sampler = any(request.params.needs_full_sampler for request in requests)
        self.masked = any(request.matcher is not None for request in requests)
        self.key: StepKey | None = None
        self.find_longest()

    def find_longest(self) -> None:
        """Find the longest row, after verify steps too, which advance rows differently."""
        self.longest = max(self.requests, key=attrgetter("num_computed"), default=None)
        self.changed = any(request.num_unsure for request in self.requests)
        """Whether another row may be longest: in the step after a verify step, and while the host
        does not know how many tokens one has accepted."""
        self.key = None
