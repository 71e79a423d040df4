"""Block tables of one layer group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.blocks import BlockPool
from stepgraph.cache.kv_cache import GroupAllocator
from stepgraph.cache.spec import LayerGroup

from ..rigs.cache_rig import hashes_of, spec


def make(pool: BlockPool, block_size: int, window: int | None = None) -> GroupAllocator:
    return GroupAllocator(pool, LayerGroup(0, spec(window), (0,)), block_size)


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
