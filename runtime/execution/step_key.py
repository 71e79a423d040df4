"""What distinguishes the steps of an engine, and what each returns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ...graphs.buckets import Buckets, default_width_buckets
from ..kernels import Kernels
from ..models.drafters.drafter import Drafts
from ..models.resolved_config import ResolvedConfig
from ..request import Request
from ..sampling.reference_sampler import SampleOutput

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


MOST_VERIFIED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that steps are prepared for, of which a plan gets the smallest that fits."""

    rows: Buckets
    tokens: Buckets
    read_blocks: Buckets
    block_size: int
    """Positions of a block."""
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
            else default_width_buckets(config.max_blocks_per_row, config.user.block_size),
            block_size=config.user.block_size,
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
        stop: int,
        full_sampler: bool,
        tokens_per_row: int = 1,
        *,
        drafts: int = 0,
        masked: bool = False,
    ) -> StepKey:
        """Return the key of the smallest step of at least these sizes; see `StepKey`.

        Its tokens are at positions before `stop`. `tokens_per_row` is at most the largest of
        `verifying`. `drafts` is 0 for a `masked` step; else it may be `proposing`, of one row in a
        prefill step. They follow the newest token, at `stop`, and end with the longest row.
        """
        if tokens_per_row > 1:
            fitting = bisect_left(self.tokens_per_row, tokens_per_row)
            tokens_per_row = self.tokens_per_row[fitting]
        size = _fit(self.rows if phase == "decode" else self.tokens, size)
        blocks = -(-(stop + 1 + drafts if drafts else stop) // self.block_size)
        width = _fit(self.read_blocks, min(blocks, self.read_blocks.largest))
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
    most_per_row = -(-min(config.max_model_len, config.prefill_chunk) // config.user.block_size)
    tokens = max(config.tokens_per_row, default=1) + config.proposed_drafts
    most_per_step = -(-tokens // config.user.block_size)
    return num_groups * (2 * config.user.max_num_seqs * most_per_step + most_per_row)
