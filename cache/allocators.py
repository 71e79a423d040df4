"""Per layer group: which blocks a request holds, needs and gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .blocks import BlockPool

__all__ = ["FullAttentionAllocator"]


class FullAttentionAllocator:
    """The block tables of one group of layers that keep every token of the context.

    Token `i` of a request lives in block `table[i // block_size]` at offset `i % block_size`. A
    request that was never grown, or was released, holds the empty table.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Allocate from `pool` in blocks of `block_size` slots.

        Raises:
            ValueError: `block_size` is not positive.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._pool = pool
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        """The block ids of each request that holds any, in position order."""
        return self._tables

    def table(self, request_id: str) -> Sequence[int]:
        """The block ids of a request, in position order. Not a copy: read it, do not keep it."""
        return self._tables.get(request_id, ())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` tokens holds."""
        assert num_tokens >= 0, f"a request cannot have {num_tokens} tokens"
        return -(-num_tokens // self._block_size)

    def blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """Blocks that a request lacks to hold `num_tokens` tokens in total."""
        return max(0, self.blocks_for(num_tokens) - len(self.table(request_id)))

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Give a request what it lacks to hold `num_tokens` tokens in total; return the new blocks.

        Raises:
            OutOfBlocksError: the pool has not enough free blocks; nothing was changed.
        """
        needed = self.blocks_needed(request_id, num_tokens)
        if needed == 0:
            return []
        blocks = self._pool.allocate(needed)
        self._tables.setdefault(request_id, []).extend(blocks)
        return blocks

    def release(self, request_id: str) -> None:
        """Give back all blocks of a request, the last ones first to be reused."""
        self._pool.free(reversed(self._tables.pop(request_id, [])))
