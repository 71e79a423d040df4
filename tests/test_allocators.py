"""Block tables of one layer group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.allocators import GroupAllocator
from stepgraph.cache.blocks import BlockPool, OutOfBlocksError
from stepgraph.cache.prefix_hashes import PrefixHashes
from stepgraph.cache.spec import FullAttentionSpec, LayerGroup, SlidingWindowSpec


def make(pool: BlockPool, block_size: int, window: int | None = None) -> GroupAllocator:
    sizes = {"num_kv_heads": 2, "head_dim": 8, "element_bytes": 2}
    spec = (
        FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, window=window)
    )
    return GroupAllocator(pool, LayerGroup(0, spec, (0,)), block_size)


def hashes_of(tokens: list[int], block_size: int) -> PrefixHashes:
    hashes = PrefixHashes(block_size)
    hashes.extend(lambda start, stop: tokens[start:stop], len(tokens))
    return hashes


def test_grow_and_forget() -> None:
    pool = BlockPool(8)
    allocator = make(pool, 4)
    assert allocator.lacking("a", 5) == 2
    assert allocator.grow("a", 5) == [1, 2]
    assert allocator.grow("a", 8) == []  # the second block has room for tokens 5..8
    assert allocator.grow("b", 1) == [3]
    assert allocator.grow("a", 9) == [4]
    assert allocator.table("a") == [1, 2, 4]
    assert dict(allocator.tables) == {"a": [1, 2, 4], "b": [3]}

    assert allocator.forget("a") == (range(3), [1, 2, 4])
    assert allocator.table("a") == ()
    assert dict(allocator.tables) == {"b": [3]}
    assert pool.num_free == 3  # the caller frees what was forgotten


def test_request_without_blocks() -> None:
    pool = BlockPool(3)
    allocator = make(pool, 4)
    assert allocator.grow("a", 0) == []
    assert allocator.table("a") == ()
    assert not allocator.tables
    assert allocator.forget("a") == (range(0), [])
    assert len(allocator.slide("a", 9)) == 0
    assert pool.num_free == 2


def test_failed_growth_changes_nothing() -> None:
    pool = BlockPool(4)
    allocator = make(pool, 2)
    allocator.grow("a", 4)
    for request_id in ("a", "b"):
        before = list(allocator.table(request_id))
        with pytest.raises(OutOfBlocksError):
            allocator.grow(request_id, 9)
        assert list(allocator.table(request_id)) == before
    assert pool.num_free == 1


def test_never_shrinks() -> None:
    allocator = make(BlockPool(4), 2)
    allocator.grow("a", 5)
    assert allocator.grow("a", 1) == []
    assert len(allocator.table("a")) == 3


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        make(BlockPool(4), 0)
    with pytest.raises(AssertionError):
        make(BlockPool(4), 2).grow("a", -1)


@given(block_size=st.integers(1, 9), totals=st.lists(st.integers(0, 60), max_size=10))
def test_table_has_the_fewest_blocks_that_hold_the_tokens(
    block_size: int, totals: list[int]
) -> None:
    allocator = make(BlockPool(61), block_size)
    most = 0
    for total in totals:
        before = list(allocator.table("a"))
        new = allocator.grow("a", total)
        assert list(allocator.table("a")) == before + new
        most = max(most, total)
        slots = len(allocator.table("a")) * block_size
        assert most <= slots < most + block_size


@given(
    block_size=st.integers(1, 5),
    window=st.integers(1, 12),
    chunks=st.lists(st.integers(1, 9), max_size=12),
)
def test_sliding_keeps_what_the_next_token_reads_and_no_more(
    block_size: int, window: int, chunks: list[int]
) -> None:
    pool = BlockPool(200)
    allocator = make(pool, block_size, window)
    position = 0
    for chunk in chunks:
        due = allocator.slides_next("a")
        dropped = allocator.slide("a", position)
        assert bool(dropped) == (position >= due)
        allocator.grow("a", position + chunk)
        table = allocator.table("a")
        first = max(0, position - window + 1) // block_size
        assert [c for c, block in enumerate(table) if block] == list(range(first, len(table)))
        assert allocator.live_columns("a") == range(first, len(table))
        assert len(table) == -(-(position + chunk) // block_size)
        assert pool.num_free == pool.num_blocks - 1 - len(allocator.live_columns("a"))
        position += chunk


def test_what_leaves_the_window_goes_tail_first() -> None:
    pool = BlockPool(6)
    allocator = make(pool, 2, window=2)
    allocator.grow("a", 8)
    allocator.publish("a", hashes_of(list(range(8)), 2), 0, 4)
    assert allocator.slide("a", 7) == range(3)  # positions 6 and 7 are read: column 3
    assert allocator.table("a") == [0, 0, 0, 4]
    assert pool.allocate(4) == [5, 3, 2, 1]


@given(
    block_size=st.integers(1, 4),
    window=st.none() | st.integers(1, 9),
    computed=st.integers(1, 24),
    shared=st.integers(1, 24),
)
def test_shareable_is_what_the_next_token_reads_if_all_of_it_is_there(
    block_size: int, window: int | None, computed: int, shared: int
) -> None:
    shared = min(shared, computed)
    allocator = make(BlockPool(100), block_size, window)
    allocator.grow("a", computed)
    allocator.slide("a", computed)
    first = 0 if window is None else max(0, shared - window + 1)
    read = {position // block_size for position in range(first, shared)}
    if shared % block_size:  # a partly filled block is copied, even if nothing of it is read
        read.add(shared // block_size)
    live = allocator.live_columns("a")
    table = allocator.shareable("a", shared)
    assert (table is not None) == read.issubset(live)
    if table is not None:
        assert len(table) == -(-shared // block_size)
        assert table == [
            block if column in read else 0
            for column, block in enumerate(allocator.table("a")[: len(table)])
        ]


def test_adopted_blocks_have_one_holder_more() -> None:
    pool = BlockPool(6)
    allocator = make(pool, 2, window=3)
    allocator.grow("a", 6)
    allocator.adopt("b", [0, 2, 3])
    assert allocator.table("b") == [0, 2, 3]
    assert allocator.live_columns("b") == range(1, 3)
    assert [pool.ref_count(block) for block in (1, 2, 3)] == [1, 2, 2]
    allocator.adopt("c", [])
    assert "c" not in allocator.tables
    with pytest.raises(AssertionError, match="holds blocks already"):
        allocator.adopt("b", [1])


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(6)
    spec = FullAttentionSpec(num_kv_heads=2, head_dim=8, element_bytes=2)
    first, second = (GroupAllocator(pool, LayerGroup(i, spec, (i,)), 2) for i in range(2))
    hashes = hashes_of([1, 2, 3, 4], 2)
    first.grow("a", 4)
    first.publish("a", hashes, 0, 2)
    assert [first.find(hashes, column) for column in range(2)] == [1, 2]
    assert [second.find(hashes, column) for column in range(2)] == [None, None]
    assert first.find_all(hashes, 0, 2) == [1, 2]
    assert second.find_all(hashes, 0, 2) == []


def test_publish_leaves_out_what_has_slid_away() -> None:
    pool = BlockPool(6)
    allocator = make(pool, 2, window=2)
    hashes = hashes_of([1, 2, 3, 4, 5, 6], 2)
    allocator.grow("a", 6)
    allocator.slide("a", 4)
    allocator.publish("a", hashes, 0, 3)
    assert [allocator.find(hashes, column) for column in range(3)] == [None, 2, 3]
    assert allocator.find_all(hashes, 1, 3) == [2, 3]
    assert allocator.find_all(hashes, 0, 3) == []  # up to the first miss
