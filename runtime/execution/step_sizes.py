"""Which sizes steps are prepared for, and which of them a plan fits."""

from __future__ import annotations

from dataclasses import dataclass

from ...graphs.buckets import Buckets, default_width_buckets
from ..kernels import Kernels
from ..resolved_config import ResolvedConfig
from .step_functions import StepKey

__all__ = ["StepSizes", "most_table_updates"]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that steps are prepared for."""

    rows: Buckets
    tokens: Buckets
    read_blocks: Buckets
    steps: int = 1
    """Decode steps of a launch of several, beside which there are those of one."""

    @classmethod
    def choose(cls, config: ResolvedConfig, kernels: Kernels) -> StepSizes:
        """Return the sizes of an engine's steps."""
        return cls(
            rows=config.row_buckets,
            tokens=config.token_buckets,
            # Kernels that stop at a row's own length read no more for a wider table.
            read_blocks=Buckets([config.max_blocks_per_row])
            if kernels.bounded_by_length
            else default_width_buckets(config.max_blocks_per_row, config.block_size),
            steps=config.steps_per_launch,
        )

    def keys(self) -> list[StepKey]:
        """Return the key of every step there will be."""
        variants = [(width, full) for width in self.read_blocks for full in (False, True)]
        launches = [(*variant, n) for n in sorted({1, self.steps}) for variant in variants]
        return [
            *(StepKey("prefill", size, *variant) for size in self.tokens for variant in variants),
            *(StepKey("decode", size, *variant) for size in self.rows for variant in launches),
        ]

    def decode_key(
        self, rows: int, read_blocks: int, full_sampler: bool, steps: int = 1
    ) -> StepKey:
        """Return the key of the smallest decode step that fits, or of `steps` of them."""
        size = _fit(self.rows, rows)
        return StepKey("decode", size, _fit(self.read_blocks, read_blocks), full_sampler, steps)

    def prefill_key(self, tokens: int, read_blocks: int, full_sampler: bool) -> StepKey:
        """Return the key of the smallest prefill step that fits."""
        size = _fit(self.tokens, tokens)
        return StepKey("prefill", size, _fit(self.read_blocks, read_blocks), full_sampler)


def _fit(buckets: Buckets, n: int) -> int:
    size = buckets.fit(n)
    assert size is not None, f"the plan has {n}, the largest bucket is {buckets.largest}"
    return size


def most_table_updates(config: ResolvedConfig, num_groups: int) -> int:
    """Return the entries of the block tables that one copy to the device can change.

    In each layer group every decoding row takes as many blocks and drops as many as the steps of a
    launch fill, at most (one, for a single step), and a prompt takes what a chunk fills. A plan
    with more, whose prompt was found in the cache, is brought over in several copies: every copy
    has this size, so it is not made for the rare one.
    """
    most_per_row = -(-min(config.max_model_len, config.prefill_chunk) // config.block_size)
    most_per_launch = -(-config.steps_per_launch // config.block_size)
    return num_groups * (2 * config.max_num_seqs * most_per_launch + most_per_row)
