"""`BlockTables`: which blocks each request holds, in all layer groups. No tensors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .allocators import GroupAllocator
from .blocks import NULL_BLOCK, BlockPool
from .spec import LayerGroup

__all__ = ["BlockTables", "TableChange"]

TableChange = tuple[int, int, int]
"""(group, column, block): an entry of a request's block tables that has changed."""


@dataclass(slots=True)
class _Held:
    """State of a request over all groups, so that most steps need not check each group."""

    room: int = 0
    """Tokens that the request's blocks can hold, in every group."""
    slides_next: int = sys.maxsize
    """First position at which a group frees a block."""
    published: int = 0
    """Full blocks that `KVCache.publish` has processed."""
    verified: int = 0
    """Full blocks that `KVCache.verify` has processed."""


class BlockTables:
    """The block tables of all requests; all layer groups allocate from one pool.

    Operations are atomic over the groups: a request grows in all of them or in none.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], num_blocks: int, block_size: int, chunk: int
    ) -> None:
        """Manage `num_blocks` blocks; see `KVCache` for the arguments and the errors."""
        if not groups:
            raise ValueError("a cache needs at least one layer group, got none")
        self._pool = BlockPool(num_blocks)
        self._allocators = tuple(GroupAllocator(self._pool, g, block_size) for g in groups)
        self._sliding = tuple(a for a in self._allocators if a.slides)
        self._block_size = block_size
        self._chunk = chunk
        self._held: dict[str, _Held] = {}

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self._block_size

    @property
    def num_groups(self) -> int:
        """Number of layer groups; each has its own block table."""
        return len(self._allocators)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, including those with cached contents."""
        return self._pool.num_free

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._pool.num_held

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self._pool.num_blocks - 1

    def most_blocks(self, num_tokens: int) -> int:
        """Maximum blocks, over all groups, that a request of `num_tokens` tokens holds at once."""
        return sum(
            a.spec.most_blocks(num_tokens, self._block_size, self._chunk) for a in self._allocators
        )

    def _start(
        self, request_id: str, tables: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> list[list[int]]:
        """Give a request shared blocks, and new ones up to `lengths` columns.

        `tables` has the shared blocks of each group, after null blocks in columns that are not
        read. Returns the new blocks of each group.
        """
        for allocator, table in zip(self._allocators, tables, strict=True):
            allocator.adopt(request_id, table)
        new = [
            allocator.grow(request_id, length * self._block_size)
            for allocator, length in zip(self._allocators, lengths, strict=True)
        ]
        held = self._held[request_id] = _Held(room=min(lengths) * self._block_size)
        held.slides_next = self._slides_next(request_id)
        return new

    def grow(self, request_id: str, num_tokens: int) -> list[TableChange] | None:
        """Allocate the missing blocks of tokens 0 to `num_tokens` - 1 in all groups.

        Returns:
            The changed entries of the request's block tables (often none); None if too few blocks
            are free, in which case nothing has changed.
        """
        held = self._held[request_id]
        if num_tokens <= held.room:
            return []
        if self.lacking(request_id, num_tokens) > self._pool.num_free:
            return None
        changes: list[TableChange] = []
        for allocator in self._allocators:
            column = len(allocator.table(request_id))
            for block in allocator.grow(request_id, num_tokens):
                changes.append((allocator.index, column, block))
                column += 1
        held.room = -(-num_tokens // self._block_size) * self._block_size
        return changes

    def lacking(self, request_id: str, num_tokens: int) -> int:
        """Return how many blocks `grow` would allocate, over all groups."""
        lacking = 0
        for allocator in self._allocators:
            lacking += allocator.lacking(request_id, num_tokens)
        return lacking

    def growing_groups(self, request_id: str, num_tokens: int, *, decodes: bool) -> int:
        """Count the groups in which a request may need more blocks to reach `num_tokens` tokens.

        `decodes`: whether a step computes one token of the request, not up to a chunk.
        """
        chunk = 1 if decodes else self._chunk
        return sum(a.grows(request_id, num_tokens, chunk) for a in self._allocators)

    def quiet_until(self, request_id: str) -> int:
        """Return the first position at which `slide` or `grow` changes a block table."""
        held = self._held[request_id]
        return min(held.room, held.slides_next)

    def slide(self, request_id: str, position: int) -> list[TableChange]:
        """Free the blocks that the next token, at `position`, no longer reads.

        Returns the entries that are now the null block.
        """
        held = self._held[request_id]
        if position < held.slides_next:
            return []
        changes: list[TableChange] = []
        for allocator in self._sliding:
            dropped = allocator.slide(request_id, position)
            changes += [(allocator.index, column, NULL_BLOCK) for column in dropped]
        held.slides_next = self._slides_next(request_id)
        return changes

    def release(self, request_id: str) -> None:
        """Free every block of a request, in all groups.

        A cached block is useful only together with all blocks before it. So the last blocks are
        freed first, and evicted first.
        """
        self._held.pop(request_id, None)
        forgotten = [allocator.forget(request_id) for allocator in self._allocators]
        longest = max(live.stop for live, _ in forgotten)
        self._pool.free(
            table[column]
            for column in range(longest - 1, -1, -1)
            for live, table in forgotten
            if column in live
        )

    def block_table(self, request_id: str, group: int = 0) -> Sequence[int]:
        """The block ids of a request in one group, in position order. Not a copy."""
        return self._allocators[group].table(request_id)

    def table_of(self, request_id: str) -> list[TableChange]:
        """Return the entries of a request's tables that hold a block, in all groups."""
        return [
            (a.index, column, a.table(request_id)[column])
            for a in self._allocators
            for column in a.live_columns(request_id)
        ]

    def _slides_next(self, request_id: str) -> int:
        return min((a.slides_next(request_id) for a in self._sliding), default=sys.maxsize)

    def check_integrity(self) -> None:
        """Assert that pool and tables agree on the holders of every block."""
        self._pool.check_integrity()
        held: Counter[int] = Counter()
        for allocator in self._allocators:
            for request_id, table in allocator.tables.items():
                live = allocator.live_columns(request_id)
                assert all(block == NULL_BLOCK for block in table[: live.start])
                held.update(table[live.start :])
        assert NULL_BLOCK not in held, "a block table holds the null block"
        for block, count in held.items():
            assert self._pool.ref_count(block) == count, (
                f"block {block} is in {count} block tables, "
                f"the pool counts {self._pool.ref_count(block)} holders"
            )
        assert len(held) == self._pool.num_held, (
            f"{len(held)} blocks are in block tables, {self._pool.num_held} are held"
        )
        first, *others = (a.tables.keys() for a in self._allocators)
        for requests in others:
            assert requests == first, "a request holds blocks in one group and not in another"
        full = [a for a in self._allocators if not a.slides]
        for request_id in first:
            assert len({len(a.table(request_id)) for a in full}) <= 1, (
                "a request grew in one group and not in another"
            )
            held_now = self._held[request_id]
            room = min(len(a.table(request_id)) for a in self._allocators) * self._block_size
            assert held_now.room == room, (
                f"request {request_id} counts room for {held_now.room} tokens, it has {room}"
            )
            assert held_now.slides_next == self._slides_next(request_id), (
                f"request {request_id} would not slide at the right time"
            )
        assert self._held.keys() == first, "a request is known that holds no table"
