"""What distinguishes the steps of an engine, and what each returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Literal, NamedTuple

import torch

from ...graphs.buckets import Buckets, default_width_buckets
from ...profiling import ranges
from ..kernels import Kernels
from ..models.drafters.drafter import Drafts
from ..models.resolved_config import ResolvedConfig
from ..request import Request
from ..sampling.reference_sampler import SampleOutput
from ..scheduling.plan import StepPlan

__all__ = [
    "MOST_VERIFIED_TOKENS",
    "PlanParts",
    "PlannedPart",
    "StepKey",
    "StepOutput",
    "StepSizes",
    "most_table_updates",
]

Phase = Literal["decode", "prefill", "sample"]


class StepKey(NamedTuple):
    """All host scalars that are constant in a captured step."""

    phase: Phase
    """`sample` continues a step with token masks on a device that runs asynchronously, once the
    host has copied the masks."""
    size: int
    """Bucket: rows of a decode or sample step, tokens of a prefill step."""
    read_blocks: int
    """Columns of the block tables that attention may read."""
    full_sampler: bool
    """Whether any request in the step needs more than the greedy token."""
    tokens_per_row: int = 1
    """Tokens of each row of a decode step; 1 + k makes it a verify step of k drafts."""
    drafts: int = 0
    """Drafts of each row that the drafter proposes at the end of the step. In a prefill step it
    proposes for rows that sample."""
    masked: bool = False
    """Whether tokens are sampled with the masks of their rows."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Outputs of a step on the device. B: rows of a decode step, or chunks of a prefill step.

    For a verify step, tokens and details are `[1 + k, B]` instead of `[B]`.
    """

    tokens: torch.Tensor
    """int64 `[B]`: sampled tokens; undefined for padded lanes, after rejected drafts, and if a
    `sample` step follows."""
    logits: torch.Tensor
    """`[B, vocab_size]` in the model's dtype: logits before sampling; of a verify step `[T,
    vocab_size]`, row by row. After a greedy step of a rank of a tensor-parallel group, the logits
    of its own tokens."""
    details: SampleOutput | None
    """Log-probabilities; only the full sampler returns them."""
    drafts: Drafts | None = None
    """What the drafter proposes to follow the newest token of each row."""
    accepted: torch.Tensor | None = None
    """int64 `[B]`: tokens that each row of a verify step advanced by, accepted drafts and one more;
    0 or more for padding. None: 1."""


# The sizes that steps are prepared for, and the smallest one that fits a plan.

MOST_VERIFIED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that steps are prepared for."""

    rows: Buckets
    tokens: Buckets
    read_blocks: Buckets
    tokens_per_row: tuple[int, ...] = ()
    """Tokens per row of verify steps, ascending; see `verifying`."""
    proposed: int = 0
    """Drafts that the drafter of the engine proposes in a step; 0 without a drafter."""
    masked: bool = False
    """Whether steps may have token masks."""
    prefill_rows: int = 0
    """Lanes of a sample step after a prefill step; 0 if no step needs one."""

    @classmethod
    def choose(cls, config: ResolvedConfig, kernels: Kernels) -> StepSizes:
        """Return the sizes of an engine's steps."""
        return cls(
            rows=config.row_buckets,
            tokens=config.token_buckets,
            # Kernels that stop at each row's length need no narrower tables.
            read_blocks=Buckets([config.max_blocks_per_row])
            if kernels.bounded_by_length
            else default_width_buckets(config.max_blocks_per_row, config.block_size),
            tokens_per_row=config.tokens_per_row,
            proposed=config.proposed_drafts,
            masked=config.structured_output,
            prefill_rows=config.max_prefill_rows if config.is_async_device else 0,
        )

    def keys(self) -> list[StepKey]:
        """Return the keys of all steps to prepare."""
        drafted = (0, self.proposing(1))
        shapes = [StepKey("prefill", n, 0, False, drafts=k) for n in self.tokens for k in drafted]
        for size in self.rows:
            step = StepKey("decode", size, 0, False)
            drafts = self.proposing(size)
            shapes.append(step)
            shapes += [
                step._replace(tokens_per_row=n, drafts=drafts) for n in (1, *self.verifying(size))
            ]
        if self.masked:
            shapes += [shape._replace(drafts=0, masked=True) for shape in shapes]
        found = (
            part
            for shape in shapes
            for width in self.read_blocks
            for full in (False, True)
            for part in self.parts(shape._replace(read_blocks=width, full_sampler=full))
        )
        return list(dict.fromkeys(found))

    def verifying(self, rows: int) -> tuple[int, ...]:
        """Return the tokens per row of the verify steps of `rows` rows, ascending.

        A verify step has at most 128 tokens: more take as much longer as they are more. It has at
        most as many tokens as the largest prefill step.
        """
        if not self.tokens_per_row:
            return ()
        most = min(self.tokens.largest, MOST_VERIFIED_TOKENS) // _fit(self.rows, rows)
        return tuple(n for n in self.tokens_per_row if n <= most)

    def proposing(self, rows: int) -> int:
        """Return the drafts that steps of `rows` propose: no more than can be verified."""
        return min(self.proposed, max(self.verifying(rows), default=1) - 1)

    def parts(self, key: StepKey) -> tuple[StepKey, ...]:
        """Return the keys of the steps that run a step, one after the other."""
        if not (key.masked and self.prefill_rows):
            return (key,)
        lanes = key.size if key.phase == "decode" else self.prefill_rows
        sample = key._replace(phase="sample", size=lanes, read_blocks=0)
        return key._replace(full_sampler=False), sample

    def key(
        self,
        phase: Phase,
        size: int,
        read_blocks: int,
        full_sampler: bool,
        tokens_per_row: int = 1,
        *,
        drafts: int = 0,
        masked: bool = False,
    ) -> StepKey:
        """Return the key of the smallest step of at least these sizes; see `StepKey`.

        `tokens_per_row` is 1, or one of `verifying`. `drafts` is 0 for a `masked` step; else it may
        be `proposing`, of one row in a prefill step.
        """
        size = _fit(self.rows if phase == "decode" else self.tokens, size)
        width = _fit(self.read_blocks, read_blocks)
        return StepKey(phase, size, width, full_sampler, tokens_per_row, drafts, masked)


def _fit(buckets: Buckets, n: int) -> int:
    size = buckets.fit(n)
    assert size is not None, f"the plan has {n}, the largest bucket is {buckets.largest}"
    return size


def most_table_updates(config: ResolvedConfig, num_groups: int) -> int:
    """Return the number of block table entries that one copy to the device can update.

    In each layer group, every decoding row adds and drops at most the blocks that the tokens of a
    step fill (one for a single token), and a prompt adds the blocks of a chunk. A plan with more
    updates, whose prompt was cached, needs several copies. Every copy has this size, so the rare
    case does not increase it.
    """
    most_per_row = -(-min(config.max_model_len, config.prefill_chunk) // config.block_size)
    tokens = max(config.tokens_per_row, default=1) + config.proposed_drafts
    most_per_step = -(-tokens // config.block_size)
    return num_groups * (2 * config.max_num_seqs * most_per_step + most_per_row)


# Chooses the prepared steps that run a plan.


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
        self._requests: list[Request] = []
        self.decode_rows: list[int] = []
        """The rows that the last plan decodes, in their order."""
        self._full_sampler = self._masked = False
        self._part: PlannedPart | None = None
        self._find_longest()

    def of(self, plan: StepPlan) -> list[PlannedPart]:
        """Return the parts in the order of their launch: decode, then prefill."""
        if plan.decode is not self._requests:
            self._requests = plan.decode
            self.decode_rows = [request.row for request in plan.decode if request.row is not None]
            assert len(self.decode_rows) == len(plan.decode), "a request that decodes holds a row"
            self._full_sampler = any(r.params.needs_full_sampler for r in plan.decode)
            self._masked = any(request.matcher is not None for request in plan.decode)
            self._find_longest()
        elif self._changed:
            self._find_longest()
        parts = []
        if plan.drafts or plan.proposes:
            parts.append(self._verify_part(plan))
        elif plan.decode:
            part = self._part
            assert self._longest is not None, "the plan has no decoding row"
            stop = self._longest.num_computed + 1
            if part is None or stop > part.key.read_blocks * self._block_size:
                rows, blocks = len(plan.decode), -(-stop // self._block_size)
                key = self._sizes.key(
                    "decode", rows, blocks, self._full_sampler, masked=self._masked
                )
                part = PlannedPart(ranges.REPLAY, key, plan.decode, rows, key.size)
                self._part = part
            parts.append(part)
        if plan.prefill:
            parts.append(self._prefill_part(plan))
        return parts

    def _find_longest(self) -> None:
        """Find the longest row, after verify steps too, which advance rows differently."""
        self._longest = max(self._requests, key=attrgetter("num_computed"), default=None)
        self._changed = any(request.num_unsure for request in self._requests)
        """Whether another row may be longest: in the step after a verify step, and while the host
        does not know how many tokens one has accepted."""
        self._part = None

    def _blocks(self, stop: int, drafts: int) -> int:
        """Return the columns up to `stop`, or after it the newest token and all drafts."""
        if drafts:
            stop += 1 + drafts
        return -(-min(stop, self._most_positions) // self._block_size)

    def _verify_part(self, plan: StepPlan) -> PlannedPart:
        """The part of a step that drafts, after which another row may be longest."""
        rows = len(plan.decode)
        counts = plan.decode_counts or repeat(1, rows)
        stop = max(r.num_computed + n for r, n in zip(plan.decode, counts, strict=False))
        self._changed = True
        key = self._sizes.key(
            "decode",
            rows,
            self._blocks(stop, plan.proposes),
            self._full_sampler,
            tokens_per_row=plan.tokens_per_row,
            drafts=plan.proposes,
            masked=self._masked,
        )
        tokens = plan.decode_tokens
        room = tokens + key.size - rows if self._ragged else key.tokens_per_row * key.size
        return PlannedPart(ranges.VERIFY, key, plan.decode, tokens, room)

    def _prefill_part(self, plan: StepPlan) -> PlannedPart:
        chunks, tokens = plan.prefill, plan.prefill_tokens
        key = self._sizes.key(
            "prefill",
            tokens,
            self._blocks(max(c.start + c.count for c in chunks), plan.prompt_drafts),
            any(chunk.request.params.needs_full_sampler for chunk in chunks),
            drafts=plan.prompt_drafts,
            masked=any(chunk.samples and chunk.request.matcher is not None for chunk in chunks),
        )
        requests = [chunk.request if chunk.samples else None for chunk in chunks]
        return PlannedPart(ranges.PREFILL, key, requests, tokens, key.size)
