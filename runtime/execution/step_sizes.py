"""The sizes that steps are prepared for, and the smallest one that fits a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...graphs.buckets import Buckets, default_width_buckets
from ..kernels import Kernels
from ..resolved_config import ResolvedConfig
from .step_key import Phase, StepKey

__all__ = ["StepSizes", "most_table_updates"]

MOST_VERIFIED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that steps are prepared for."""

    rows: Buckets
    tokens: Buckets
    read_blocks: Buckets
    steps: int = 1
    """Decode steps per launch; single steps are always prepared too."""
    tokens_per_row: tuple[int, ...] = ()
    """Tokens per row of verify steps, ascending; see `verifying`."""
    proposed: int = 0
    """Drafts that the drafter of the engine proposes in a step; 0 without a drafter."""
    masked: bool = False
    """Whether steps may have token masks."""
    prefill_rows: int = 0
    """Lanes of the sampling part of a prefill step; 0 if steps with token masks have one part."""

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
            steps=config.steps_per_launch,
            tokens_per_row=config.tokens_per_row,
            proposed=config.proposed_drafts,
            masked=config.structured_output,
            prefill_rows=config.max_prefill_rows if config.is_async_device else 0,
        )

    def keys(self) -> list[StepKey]:
        """Return the keys of all steps to prepare."""
        variants = [(width, full) for width in self.read_blocks for full in (False, True)]
        launches = [(*variant, n) for n in sorted({1, self.steps}) for variant in variants]
        return [
            *(
                StepKey("prefill", size, *variant, drafts=drafts)
                for size in self.tokens
                for variant in variants
                for drafts in sorted({0, self.proposing(1)})
            ),
            *(StepKey("decode", size, *variant) for size in self.rows for variant in launches),
            *(
                StepKey("decode", size, *variant, tokens_per_row=n, drafts=self.proposing(size))
                for size in self.rows
                for n in self._drafting(size)
                for variant in variants
            ),
            *self._masked_keys(),
        ]

    def verifying(self, rows: int) -> tuple[int, ...]:
        """Return the tokens per row of the verify steps of `rows` rows, ascending.

        A verify step has at most 128 tokens: more take as much longer as they are more. It has at
        most those of the largest prefill step.
        """
        if not self.tokens_per_row:
            return ()
        most = min(self.tokens.largest, MOST_VERIFIED_TOKENS) // _fit(self.rows, rows)
        return tuple(n for n in self.tokens_per_row if n <= most)

    def proposing(self, rows: int) -> int:
        """Return the drafts that steps of so many rows propose: no more than can be verified."""
        return min(self.proposed, max(self.verifying(rows), default=1) - 1)

    def _drafting(self, rows: int) -> tuple[int, ...]:
        """Return the tokens per row of the steps that verify drafts or propose them."""
        sizes = self.verifying(rows)
        return (1, *sizes) if self.proposed and sizes else sizes

    def _masked_keys(self) -> list[StepKey]:
        """Return the keys of steps with token masks."""
        if not self.masked:
            return []
        sizes: list[tuple[Phase, int, int]] = [("prefill", size, 1) for size in self.tokens]
        sizes += [("decode", size, n) for size in self.rows for n in (1, *self.verifying(size))]
        whole = [
            StepKey(phase, size, width, full, tokens_per_row=n, masked=True)
            for phase, size, n in sizes
            for width in self.read_blocks
            for full in (False, True)
        ]
        return [part for key in whole for part in self.parts(key)]

    def parts(self, key: StepKey) -> tuple[StepKey, ...]:
        """Return the keys of the steps that run a step, one after the other."""
        if not (key.masked and self.prefill_rows):
            return (key,)
        lanes = key.size if key.phase == "decode" else self.prefill_rows
        return (
            replace(key, full_sampler=False, masked=False, part="forward"),
            replace(key, size=lanes, read_blocks=0, part="sample"),
        )

    def decode_key(
        self,
        rows: int,
        read_blocks: int,
        full_sampler: bool,
        steps: int = 1,
        tokens_per_row: int = 1,
        *,
        drafts: int = 0,
        masked: bool = False,
    ) -> StepKey:
        """Return the key of the smallest launch of `steps` decode steps, or verify step, that fits.

        `tokens_per_row` is 1, or one of `verifying`; `drafts` is 0 or `proposing`, and 0 for a
        `masked` step.
        """
        size, width = _fit(self.rows, rows), _fit(self.read_blocks, read_blocks)
        return StepKey(
            "decode", size, width, full_sampler, steps, tokens_per_row, drafts=drafts, masked=masked
        )

    def prefill_key(
        self,
        tokens: int,
        read_blocks: int,
        full_sampler: bool,
        *,
        drafts: int = 0,
        masked: bool = False,
    ) -> StepKey:
        """Return the key of the smallest prefill step that fits.

        `drafts` is 0 or `proposing(1)`, and 0 for a `masked` step.
        """
        size, width = _fit(self.tokens, tokens), _fit(self.read_blocks, read_blocks)
        return StepKey("prefill", size, width, full_sampler, drafts=drafts, masked=masked)


def _fit(buckets: Buckets, n: int) -> int:
    size = buckets.fit(n)
    assert size is not None, f"the plan has {n}, the largest bucket is {buckets.largest}"
    return size


def most_table_updates(config: ResolvedConfig, num_groups: int) -> int:
    """Return the number of block table entries that one copy to the device can update.

    In each layer group, every decoding row adds and drops at most the blocks that the tokens of a
    launch fill (one for a single token), and a prompt adds the blocks of a chunk. A plan with more
    updates, whose prompt was cached, needs several copies. Every copy has this size, so the rare
    case does not increase it.
    """
    most_per_row = -(-min(config.max_model_len, config.prefill_chunk) // config.block_size)
    drafted = max(config.tokens_per_row, default=1) + config.proposed_drafts
    tokens = max(config.steps_per_launch, drafted)
    most_per_launch = -(-tokens // config.block_size)
    return num_groups * (2 * config.max_num_seqs * most_per_launch + most_per_row)
