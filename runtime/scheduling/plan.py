"""The plan of one step: written by the scheduler, read by the loop and the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...cache.kv_cache import Admitted
from ...cache.row_states import Copies
from ..request import Request


class TableUpdate(NamedTuple):
    """Write `block` into column `column` of a row's block table in a layer group."""

    group: int
    row: int
    column: int
    block: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that loses its row and blocks and returns to the queue."""

    request: Request
    swap_out: Copies | None
    """To make, to the host, before the step; None: recompute the tokens later."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request that gets a row."""

    request: Request
    row: int
    found: Admitted
    """Tokens that are already cached, and the block copies to issue before the step."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A chunk: `count` consecutive known tokens whose keys and values a step computes."""

    request: Request
    row: int
    start: int
    """Position of the first token."""
    count: int
    samples: bool
    """Whether a token is sampled: False for chunks that end before the last known token."""
    scored: range = range(0)
    """Positions whose logits give the log-probabilities of the next prompt tokens."""
    draft_stop: int = 1
    """The first position that has no slot, if a drafter continues the prompt."""


class Proposed(NamedTuple):
    """What a drafter proposes for a request at the end of a step."""

    request: Request
    stop: int
    """The first position for which the request has no slot."""
    drafts: list[int]
    probabilities: list[float]
    """Of each draft, by the drafter."""


@dataclass(slots=True)
class StepPlan:
    """The work of the next launch.

    Block copies run first: to the host, within the arena, from the host. Decoding rows form a
    uniform batch, prefilling rows a ragged one.
    """

    preempted: list[Preemption] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    """Changed entries of the block tables, in any order, without duplicates."""
    prefill: list[RowSpan] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    """Decoding requests. The same list object while no request joins or leaves, so that decode
    steps need no work per row."""
    decode_counts: Sequence[int] = ()
    """Verify steps: the tokens of each row of `decode`, its newest one and its drafts."""
    drafts: Sequence[Sequence[int]] = ()
    """Verify steps: the drafts of each row, one fewer than its tokens. Empty if the rows
    verify the drafts that they keep on the device, which the host has not read."""
    proposes: int = 0
    """Drafts of each row that a drafter proposes at the end of the step."""
    draft_stops: Sequence[int] = ()
    """Steps that propose: the first position of each row of `decode` that has no slot."""
    prompt_drafts: int = 0
    """Drafts that a drafter proposes after each prompt that ends in the step."""
    blocks_in_use: int = 0
    """Blocks that requests hold at the launch, for the timeline and profilers."""
    timed: int = 0
    """Decode steps that the time of this step stands for; 0: nothing is learned from it."""
    started_ns: int = 0
    """When the loop began with the step, by `time.perf_counter_ns`, set if it is `timed`."""
    lookup_ns: int = 0
    """How long the host looked for drafts of the step."""

    @property
    def decode_tokens(self) -> int:
        """Tokens that the rows of `decode` compute."""
        return sum(self.decode_counts) if self.decode_counts else len(self.decode)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all prefill chunks."""
        return sum(chunk.count for chunk in self.prefill)

    @property
    def scored_tokens(self) -> int:
        """Positions that the prefill chunks score for `prompt_logprobs`."""
        return sum(len(chunk.scored) for chunk in self.prefill)
