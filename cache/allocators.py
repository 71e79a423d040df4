"""The block tables of one layer group: allocation, sliding windows and sharing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .blocks import NULL_BLOCK, BlockPool
from .prefix_hashes import PrefixHashes
from .spec import LayerGroup

__all__ = ["GroupAllocator"]


class GroupAllocator:
    """The block tables of one layer group.

    Token `i` of a request lives in block `table[i // block_size]` at offset `i % block_size`:
    columns are absolute positions, with a sliding window too. Blocks that have left the window are
    freed, and the null block takes their place:

        window 8, blocks of 4, next token 13: it reads positions 6 to 13
        table [ 0 | 7 | 3 | 9 ]      column 0 (positions 0 to 3) is no longer read

    A request without blocks has an empty table.
    """

    def __init__(self, pool: BlockPool, group: LayerGroup, block_size: int) -> None:
        """Allocate from `pool` in blocks of `block_size` slots.

        Raises:
            ValueError: `block_size` is not positive.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._pool = pool
        self.block_size = block_size
        self.index = group.index
        self.spec = group.spec
        self.slides = group.spec.window_tokens is not None
        self.key_suffix = group.index.to_bytes(2, "little")
        """What this group appends to the hashes of its blocks."""
        self._tables: dict[str, list[int]] = {}
        self._firsts: dict[str, int] = {}  # columns before it have left the window

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        """The block ids of each request that holds any, in position order."""
        return self._tables

    def table(self, request_id: str) -> Sequence[int]:
        """The block ids of a request, in position order. Not a copy: it changes later."""
        return self._tables.get(request_id, ())

    def live_columns(self, request_id: str) -> range:
        """The columns of a request's table that contain a block other than the null block."""
        return range(self._firsts.get(request_id, 0), len(self.table(request_id)))

    def columns(self, num_tokens: int) -> int:
        """Columns of the table of a request of `num_tokens` tokens."""
        assert num_tokens >= 0, f"a request cannot have {num_tokens} tokens"
        return -(-num_tokens // self.block_size)

    def first_live_column(self, num_tokens: int) -> int:
        """First column that the token after the first `num_tokens` of a request reads."""
        return min(self.spec.first_column(num_tokens, self.block_size), self.columns(num_tokens))

    def lacking(self, request_id: str, num_tokens: int) -> int:
        """Return how many more blocks a request needs for tokens 0 to `num_tokens` - 1."""
        return max(0, self.columns(num_tokens) - len(self.table(request_id)))

    def grows(self, request_id: str, num_tokens: int, chunk: int) -> bool:
        """Whether a request may hold more blocks than now before it has `num_tokens` tokens.

        `chunk` is the maximum number of its tokens that one step computes. With a sliding window
        it may allocate blocks without holding more of them, because it frees others first.
        """
        most = self.spec.most_blocks(num_tokens, self.block_size, chunk)
        held = len(self.live_columns(request_id))
        return held < most and self.lacking(request_id, num_tokens) > 0

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Allocate and return the blocks that a request still needs for `num_tokens` tokens.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        lacking = self.lacking(request_id, num_tokens)
        if lacking == 0:
            return []
        blocks = self._pool.allocate(lacking)
        self._tables.setdefault(request_id, []).extend(blocks)
        return blocks

    def slide(self, request_id: str, position: int) -> range:
        """Free the blocks that the tokens from `position` on do not read.

        Returns the columns that now hold the null block.
        """
        table = self._tables.get(request_id, [])
        begin = self._firsts.get(request_id, 0)
        end = min(self.spec.first_column(position, self.block_size), len(table))
        if end <= begin:
            return range(0)
        self._pool.free(reversed(table[begin:end]))
        table[begin:end] = [NULL_BLOCK] * (end - begin)
        self._firsts[request_id] = end
        return range(begin, end)

    def slides_next(self, request_id: str) -> int:
        """Return the first position at which `slide` frees a block; needs a window."""
        window = self.spec.window_tokens
        assert window is not None, f"layer group {self.index} has no window"
        return (self._firsts.get(request_id, 0) + 1) * self.block_size + window - 1

    def find(self, hashes: PrefixHashes, column: int) -> int | None:
        """Return the published block with the contents of a sequence in `column`, or None."""
        return self._pool.find(hashes[column] + self.key_suffix)

    def find_all(self, hashes: PrefixHashes, begin: int, end: int) -> list[int]:
        """Return the blocks that `find` returns from column `begin` on, up to the first miss."""
        pool_find, suffix = self._pool.find, self.key_suffix
        blocks: list[int] = []
        for column in range(begin, end):
            block = pool_find(hashes[column] + suffix)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def shareable(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Return a table for another request that has the same first `num_tokens` tokens.

        The caller must copy its last block if `num_tokens` tokens fill it only in part. None if
        this request has freed blocks that the next token reads.
        """
        count = self.columns(num_tokens)
        first = self.first_live_column(num_tokens)
        table = self.table(request_id)
        if len(table) < count or (first < count and self._firsts.get(request_id, 0) > first):
            return None
        return [NULL_BLOCK] * first + list(table[first:count])

    def adopt(self, request_id: str, table: Sequence[int]) -> None:
        """Start a request's table with shared blocks, held by other requests or cached.

        Null blocks, if any, come first.
        """
        assert not self.table(request_id), f"request {request_id} holds blocks already"
        if not table:
            return
        first = 0
        while first < len(table) and table[first] == NULL_BLOCK:
            first += 1
        self._pool.share(table[first:])
        self._tables[request_id] = list(table)
        self._firsts[request_id] = first

    def publish(self, request_id: str, hashes: PrefixHashes, begin: int, end: int) -> None:
        """Publish the blocks in columns `begin` to `end` - 1, which are full."""
        table, publish, suffix = self._tables[request_id], self._pool.publish, self.key_suffix
        for column in range(max(begin, self._firsts.get(request_id, 0)), end):
            publish(table[column], hashes[column] + suffix)

    def verify(self, hashes: PrefixHashes, begin: int, end: int) -> None:
        """Protect the blocks of a sequence in columns `begin` to `end` - 1 from `withdraw`."""
        for column in range(begin, end):
            self._pool.verify(hashes[column] + self.key_suffix)

    def withdraw(self, hashes: PrefixHashes, begin: int) -> None:
        """Unpublish the blocks of a sequence from column `begin` on, except verified ones."""
        for column in range(begin, len(hashes)):
            self._pool.withdraw(hashes[column] + self.key_suffix)

    def forget(self, request_id: str) -> tuple[range, Sequence[int]]:
        """Drop a request's table and return its live columns and the table.

        The blocks stay held: the caller frees them, in one order for all groups.
        """
        live = self.live_columns(request_id)
        self._firsts.pop(request_id, None)
        return live, self._tables.pop(request_id, [])
