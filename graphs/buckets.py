"""Bucket sizes: the sizes that steps are compiled and captured for. Does not import torch.

A step has a fixed shape. A batch of n runs in the smallest bucket of at least n; the rest of the
bucket is padding. More buckets cost more compilations and captures at start; fewer buckets cost
more padding while serving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MIN_TOKEN_BUCKET = 16
"""Smallest default prefill bucket, in tokens. Smaller steps take as long: reading the weights
dominates."""

MIN_READ_TOKENS = 128
"""Smallest default read width, in tokens. Below it the width does not change the time of a step."""


@dataclass(frozen=True, slots=True, init=False)
class Buckets:
    """Bucket sizes, in rows, tokens or blocks: sorted in ascending order, without duplicates."""

    sizes: tuple[int, ...]

    def __init__(self, sizes: Iterable[int]) -> None:
        object.__setattr__(self, "sizes", tuple(sorted(set(sizes))))

    @property
    def largest(self) -> int:
        """The largest size."""
        return self.sizes[-1]

    def fit(self, n: int) -> int | None:
        """Return the smallest size of at least `n` (n >= 1), or None if `n` exceeds the largest."""
        assert n >= 1, f"an empty step has no bucket, got n={n}"
        index = bisect_left(self.sizes, n)
        return self.sizes[index] if index < len(self.sizes) else None

    def __iter__(self) -> Iterator[int]:
        """Iterate over the sizes, ascending."""
        return iter(self.sizes)

    def __len__(self) -> int:
        """Return the number of sizes."""
        return len(self.sizes)


def default_row_buckets(max_num_seqs: int) -> Buckets:
    """Return decode buckets, in rows: 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 128, ...

    From 32 on there are four buckets from one power of two to the next, so that less than a fifth
    of a bucket is padding (33 rows run in bucket 40: 7/40). From 8 to 32 they are multiples of 8,
    the width of a tensor-core tile. `max_num_seqs` is always a bucket: a full batch needs no
    padding.
    """
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)  # the power of two at or below
        size += max(8, octave // 4)
    return Buckets([*sizes, max_num_seqs])


def default_token_buckets(max_tokens: int, *, fine: bool = False) -> Buckets:
    """Return prefill buckets, in tokens: the powers of two from 16, and `max_tokens` itself.

    Powers of two are enough, because the scheduler fills chunks if it can: few steps have to be
    prepared, and less than half of a step is padding. `fine` adds a bucket halfway between each
    two, for chunks that are sized by predicted time: such a chunk has at least two thirds of the
    tokens that the time allows.
    """
    buckets = _doubling(min(MIN_TOKEN_BUCKET, max_tokens), max_tokens)
    if not fine:
        return buckets
    halfway = [size + size // 2 for size in buckets if size >= MIN_TOKEN_BUCKET]
    return Buckets([*buckets, *(size for size in halfway if size < max_tokens)])


def default_width_buckets(max_blocks: int, block_size: int) -> Buckets:
    """Return read widths, in blocks per row: doubling from 128 tokens' blocks to `max_blocks`.

    A read width is the number of block table columns that attention reads. Needed for kernels whose
    time depends on it and not on the length of each row. Steps are prepared for each width, so the
    widths double: a context of 128k tokens in blocks of 16 has 11 widths (8, 16, ..., 8192).
    """
    smallest = -(-MIN_READ_TOKENS // block_size)
    return _doubling(min(smallest, max_blocks), max_blocks)


def _doubling(smallest: int, largest: int) -> Buckets:
    sizes = [smallest]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return Buckets([*sizes, largest])
