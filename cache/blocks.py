"""The block pool: which blocks are free, least recently used first, and who shares the others."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["NULL_BLOCK", "BlockPool", "OutOfBlocksError"]

NULL_BLOCK = 0
"""The block that padding reads and writes. It is never allocated, shared or freed."""


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free. Internal: callers look at `num_free` first."""


class BlockPool:
    """Reference counts and a free list over the block ids `1 .. num_blocks - 1`.

    The free list is doubly linked through two preallocated lists, so taking from the front,
    appending at the back and removing from the middle cost O(1) and allocate nothing. It is
    circular and closes over the null block, which is never free itself: `next[0]` is the front
    (least recently freed, handed out first), `prev[0]` the back.

    Misuse (a double free, the null block, an id that does not exist) is an `AssertionError`.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of `num_blocks` blocks, the null block included.

        Raises:
            ValueError: fewer than 2 blocks, which leaves none for tokens.
        """
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (the null block and one for tokens), "
                f"got {num_blocks}"
            )
        self._num_blocks = num_blocks
        self._num_free = num_blocks - 1
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._ref_counts = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self._num_free

    def ref_count(self, block: int) -> int:
        """How many holders `block` has; 0 if it is free."""
        self._assert_usable(block)
        return self._ref_counts[block]

    def allocate(self, n: int) -> list[int]:
        """Take the `n` least recently freed blocks, each with one holder. All or nothing.

        Raises:
            OutOfBlocksError: fewer than `n` blocks are free; nothing was taken.
        """
        assert n >= 0, f"cannot allocate {n} blocks"
        if n > self._num_free:
            raise OutOfBlocksError(f"{n} blocks asked for, {self._num_free} are free")
        blocks: list[int] = []
        block = self._next[NULL_BLOCK]
        for _ in range(n):
            blocks.append(block)
            self._ref_counts[block] = 1
            block = self._next[block]
        self._next[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self._num_free -= n
        return blocks

    def share(self, block: int) -> None:
        """Add a holder to `block`.

        A free block keeps its contents until it is allocated again, so it may be shared too: it
        leaves the free list, from wherever in it it stands.
        """
        self._assert_usable(block)
        if self._ref_counts[block] == 0:
            before, after = self._prev[block], self._next[block]
            self._next[before] = after
            self._prev[after] = before
            self._num_free -= 1
        self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take one holder from each of `blocks`; those without any join the back of the free list.

        They join in the order given, and the first is handed out first. A caller that frees a
        chain of blocks gives its tail first: the head of a chain is what others may still share.
        """
        for block in blocks:
            self._assert_usable(block)
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                back = self._prev[NULL_BLOCK]
                self._next[back] = self._prev[NULL_BLOCK] = block
                self._prev[block] = back
                self._next[block] = NULL_BLOCK
                self._num_free += 1

    def check_integrity(self) -> None:
        """Assert that the free list is sound and holds the blocks without a holder. O(blocks)."""
        on_list: set[int] = set()
        before, block = NULL_BLOCK, self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            assert block not in on_list, f"the free list meets block {block} twice"
            assert self._prev[block] == before, f"the links around free block {block} disagree"
            on_list.add(block)
            before, block = block, self._next[block]
        assert self._prev[NULL_BLOCK] == before, "the back of the free list is not its last block"
        assert len(on_list) == self._num_free, (
            f"{len(on_list)} blocks on the free list, {self._num_free} counted as free"
        )
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block has a holder"
        for block in range(1, self._num_blocks):
            count = self._ref_counts[block]
            assert count >= 0, f"block {block} has {count} holders"
            assert (count == 0) == (block in on_list), (
                f"block {block} has {count} holders and is "
                f"{'on' if block in on_list else 'not on'} the free list"
            )

    def _assert_usable(self, block: int) -> None:
        assert block != NULL_BLOCK, "the null block is not allocated, shared or freed"
        assert 0 < block < self._num_blocks, f"there is no block {block} of {self._num_blocks}"
