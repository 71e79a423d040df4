"""What the scheduler decides of one step: plain nouns, read by the loop and the runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ...cache.kv_cache import Admitted
from ..request import Request

__all__ = ["Admission", "Preemption", "PrefillChunk", "StepPlan", "TableUpdate"]


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


@dataclass(slots=True)
class StepPlan:
    """What the next launch does. Copies come first: out to the host, within the arena, in."""

    preempted: list[Preemption] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    """Entries of block tables that changed, in any order; none occurs twice."""
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    steps: int = 1
    """Decode steps: the tokens that each request of `decode` gets. More than one only where there
    is no prefill."""
    blocks_in_use: int = 0
    """Blocks that requests hold when it is launched; for whoever looks at it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not (self.prefill or self.decode)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        if not self.prefill:
            return 0
        return sum(chunk.count for chunk in self.prefill)
