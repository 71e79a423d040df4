"""The one face of the cache that the scheduler talks to. Host bookkeeping only, no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .allocators import FullAttentionAllocator
from .blocks import NULL_BLOCK, BlockPool
from .spec import LayerGroup

__all__ = ["KVCache"]


class KVCache:
    """Which blocks each request holds in each layer group, all groups drawing on one pool.

    Operations are atomic over the groups: a request grows in all of them or in none. A request
    needs no announcement: before its first `grow` and after its `release` it holds no block.
    """

    def __init__(self, groups: Sequence[LayerGroup], num_blocks: int, block_size: int) -> None:
        """Manage `num_blocks` blocks (the null block included) of `block_size` slots.

        Raises:
            ValueError: no group, `num_blocks < 2` or `block_size < 1`.
        """
        if not groups:
            raise ValueError("a cache needs at least one layer group, got none")
        self._pool = BlockPool(num_blocks)
        self._allocators = tuple(FullAttentionAllocator(self._pool, block_size) for _ in groups)
        self._block_size = block_size

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self._block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self._pool.num_blocks - 1

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest request that fits when it is alone."""
        return self.usable_blocks // len(self._allocators) * self._block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` tokens holds, over all groups."""
        return sum(allocator.blocks_for(num_tokens) for allocator in self._allocators)

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Whether `grow` with the same arguments would succeed now."""
        needed = sum(a.blocks_needed(request_id, num_tokens) for a in self._allocators)
        return needed <= self._pool.num_free

    def grow(self, request_id: str, num_tokens: int) -> tuple[list[int], ...] | None:
        """Make room for `num_tokens` tokens in total; never shrinks.

        Returns:
            For each group the new block ids, to be appended to the block table on the device (all
            lists empty if the room was there), or None if blocks ran out and nothing was changed.
        """
        if not self.can_grow(request_id, num_tokens):
            return None
        return tuple(allocator.grow(request_id, num_tokens) for allocator in self._allocators)

    def release(self, request_id: str) -> None:
        """Give back every block of a request, in all groups."""
        for allocator in self._allocators:
            allocator.release(request_id)

    def block_table(self, request_id: str, group: int = 0) -> Sequence[int]:
        """The block ids of a request in one group, in position order. Not a copy."""
        return self._allocators[group].table(request_id)

    def check_integrity(self) -> None:
        """Assert that pool and tables agree: every block is free or held as often as counted."""
        self._pool.check_integrity()
        tables = [table for a in self._allocators for table in a.tables.values()]
        held = Counter(block for table in tables for block in table)
        assert NULL_BLOCK not in held, "a block table holds the null block"
        for block in range(1, self._pool.num_blocks):
            assert self._pool.ref_count(block) == held[block], (
                f"block {block} is in {held[block]} block tables, "
                f"the pool counts {self._pool.ref_count(block)} holders"
            )
        first, *others = (a.tables for a in self._allocators)
        for tables_of_group in others:
            assert {r: len(t) for r, t in tables_of_group.items()} == {
                r: len(t) for r, t in first.items()
            }, "a request grew in one group and not in another"
