"""What the scheduler decides of one step: plain nouns, read by the loop and the runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from ...cache.kv_cache import Admitted
from ..request import Request

__all__ = ["Admission", "Preemption", "RowSpan", "StepPlan", "TableUpdate"]


class TableUpdate(NamedTuple):
    """Write `block` into column `column` of a row's block table in a layer group."""

    group: int
    row: int
    column: int
    block: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that loses its row and blocks; it waits again."""

    request: Request
    swap_out: list[tuple[int, int]] | None
    """(block, host block) to copy before the step; None: it will be computed again."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request that gets a row."""

    request: Request
    row: int
    found: Admitted
    """What need not be computed, and the copies that this takes before the step."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """`count` neighbouring tokens of a row, whose keys and values a step computes.

    One token of a row that decodes, the newest token and drafts after it of one that verifies, a
    chunk of known tokens of one that is prefilled.
    """

    request: Request
    row: int
    start: int
    """Position of the first token. Of rows that decode, the furthest that it may be: how far a row
    has come is known when its steps are committed, and its device tensors hold it before."""
    count: int
    samples: bool
    """Whether tokens are sampled: always, but for chunks that end before the last known token."""


@dataclass(slots=True)
class StepPlan:
    """What the next launch does. Copies come first: out to the host, within the arena, in.

    Its tokens are a uniform batch of the rows that decode and a ragged one of those that are
    prefilled.
    """

    preempted: list[Preemption] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    """Entries of block tables that changed, in any order; none occurs twice."""
    prefill: list[RowSpan] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    """Who decodes. The same list as long as nobody joins or leaves, so that steps of one token a
    row need not look at rows."""
    tokens_per_row: int = 1
    """Tokens of each row of `decode`: 1, or 1 + k of a verify step."""
    decode_counts: Sequence[int] = ()
    """Of a verify step: tokens of each row that count, 1 to `tokens_per_row`; the rest is
    padding."""
    steps: int = 1
    """Decode steps: the tokens that each request of `decode` gets. More than one only where there
    is no prefill."""
    blocks_in_use: int = 0
    """Blocks that requests hold when it is launched; for whoever looks at it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not (self.prefill or self.decode)

    def decode_spans(self) -> Iterator[RowSpan]:
        """Yield the spans of the rows of `decode`, as of before the launch."""
        counts = self.decode_counts or repeat(1, len(self.decode))
        for request, count in zip(self.decode, counts, strict=True):
            assert request.row is not None, "a request that decodes holds a row"
            yield RowSpan(request, request.row, request.num_computed, count, samples=True)

    @property
    def decode_tokens(self) -> int:
        """Tokens that the rows of `decode` compute in each of the plan's steps."""
        return sum(self.decode_counts) if self.decode_counts else len(self.decode)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        if not self.prefill:
            return 0
        return sum(chunk.count for chunk in self.prefill)
