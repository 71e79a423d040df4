"""Block tables of one layer group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.allocators import FullAttentionAllocator
from stepgraph.cache.blocks import BlockPool, OutOfBlocksError


def test_grow_and_release() -> None:
    pool = BlockPool(8)
    allocator = FullAttentionAllocator(pool, block_size=4)
    assert allocator.blocks_needed("a", 5) == 2
    assert allocator.grow("a", 5) == [1, 2]
    assert allocator.grow("a", 8) == []  # the second block has room for tokens 5..8
    assert allocator.grow("b", 1) == [3]
    assert allocator.grow("a", 9) == [4]
    assert allocator.table("a") == [1, 2, 4]
    assert dict(allocator.tables) == {"a": [1, 2, 4], "b": [3]}

    allocator.release("a")
    assert allocator.table("a") == ()
    assert dict(allocator.tables) == {"b": [3]}
    # Blocks 5, 6, 7 were free longer; then the tail of what was released, its head last.
    assert pool.allocate(6) == [5, 6, 7, 4, 2, 1]


def test_request_without_blocks() -> None:
    pool = BlockPool(3)
    allocator = FullAttentionAllocator(pool, block_size=4)
    assert allocator.grow("a", 0) == []
    assert allocator.table("a") == ()
    assert not allocator.tables
    allocator.release("a")
    assert pool.num_free == 2


def test_failed_growth_changes_nothing() -> None:
    pool = BlockPool(4)
    allocator = FullAttentionAllocator(pool, block_size=2)
    allocator.grow("a", 4)
    for request_id in ("a", "b"):
        before = list(allocator.table(request_id))
        with pytest.raises(OutOfBlocksError):
            allocator.grow(request_id, 9)
        assert list(allocator.table(request_id)) == before
    assert pool.num_free == 1


def test_never_shrinks() -> None:
    allocator = FullAttentionAllocator(BlockPool(4), block_size=2)
    allocator.grow("a", 5)
    assert allocator.grow("a", 1) == []
    assert len(allocator.table("a")) == 3


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        FullAttentionAllocator(BlockPool(4), block_size=0)
    with pytest.raises(AssertionError):
        FullAttentionAllocator(BlockPool(4), block_size=2).grow("a", -1)


@given(block_size=st.integers(1, 9), totals=st.lists(st.integers(0, 60), max_size=10))
def test_table_has_the_fewest_blocks_that_hold_the_tokens(
    block_size: int, totals: list[int]
) -> None:
    allocator = FullAttentionAllocator(BlockPool(61), block_size)
    most = 0
    for total in totals:
        before = list(allocator.table("a"))
        new = allocator.grow("a", total)
        assert list(allocator.table("a")) == before + new
        most = max(most, total)
        slots = len(allocator.table("a")) * block_size
        assert most <= slots < most + block_size
