"""The cache as the scheduler sees it. What blocks hold is the matter of `test_cache_machine.py`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.kv_cache import KVCache
from stepgraph.cache.spec import LayerGroup

from ..rigs.cache_rig import hashes_of, spec


def make_cache(
    *windows: int | None,
    num_blocks: int,
    block_size: int = 4,
    chunk: int = 1,
    host_blocks: int = 0,
) -> KVCache:
    groups = [LayerGroup(i, spec(window), (2 * i, 2 * i + 1)) for i, window in enumerate(windows)]
    return KVCache(groups, num_blocks, block_size, chunk=chunk, host_blocks=host_blocks)


def compute(cache: KVCache, request_id: str, tokens: list[int], chunk: int = 1) -> None:
    """Do what an engine does with a request alone: all of its tokens, published."""
    hashes = hashes_of(tokens, cache.block_size)
    found = cache.admit(request_id, len(tokens), chunk=chunk, hashes=hashes)
    assert found is not None
    position = found.num_tokens
    while position < len(tokens):
        cache.slide(request_id, position)
        stop = min(len(tokens), position + chunk)
        assert cache.grow(request_id, stop) is not None
        cache.publish(request_id, hashes, stop)
        position = stop
        cache.check_integrity()


@given(
    windows=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
    num_blocks=st.integers(2, 30),
    block_size=st.integers(1, 5),
    chunk=st.integers(1, 9),
)
def test_the_longest_request_that_fits_alone_runs_to_its_end(
    windows: list[int | None], num_blocks: int, block_size: int, chunk: int
) -> None:
    cache = make_cache(*windows, num_blocks=num_blocks, block_size=block_size, chunk=chunk)
    longest = max(n for n in range(51) if cache.most_blocks(n) <= cache.usable_blocks)
    if longest == 0:
        return
    compute(cache, "a", list(range(longest)), chunk)
    cache.release("a")
    compute(cache, "b", list(range(100, 100 + longest)), chunk)  # what is cached is no obstacle
    cache.release("b")
    assert cache.num_free_blocks == cache.usable_blocks


def test_headroom_and_the_peak_of_windows_are_left_free() -> None:
    # Full attention takes 4 blocks at once; the window 1, and 3 when it is widest.
    for num_blocks, headroom, fits in [(8, 0, True), (7, 0, False), (9, 1, True), (8, 1, False)]:
        cache = make_cache(None, 6, num_blocks=num_blocks, chunk=2)
        assert (cache.admit("a", 16, chunk=2, headroom=headroom) is not None) == fits
        assert cache.num_free_blocks == num_blocks - 1 - 5 * fits


def test_tails_go_first_and_groups_in_step() -> None:
    cache = make_cache(None, None, num_blocks=9)
    compute(cache, "a", list(range(16)))
    assert [cache.block_table("a", g) for g in range(2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    cache.release("a")
    assert cache._pool.allocate(8) == [4, 8, 3, 7, 2, 6, 1, 5]


def test_room_that_was_not_computed_is_not_swapped() -> None:
    cache = make_cache(None, num_blocks=10, host_blocks=8)
    cache.admit("a", 16, chunk=1)
    assert cache.swap_out("a", 5) == [(1, 0), (2, 1)]
