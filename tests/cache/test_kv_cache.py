"""The cache as the scheduler sees it. What blocks hold is the matter of `test_cache_machine.py`."""

from __future__ import annotations

from stepgraph.cache.kv_cache import KVCache

from ..rigs.cache_rig import hashes_of
from ..rigs.scheduler_rig import groups_of


def test_headroom_and_the_peak_of_windows_are_left_free() -> None:
    # Full attention takes 4 blocks at once; the window 1, and 3 when it is widest.
    for num_blocks, headroom, fits in [(8, 0, True), (7, 0, False), (9, 1, True), (8, 1, False)]:
        cache = KVCache(groups_of((None, 6)), num_blocks, 4, chunk=2)
        assert (cache.admit("a", 16, chunk=2, headroom=headroom) is not None) == fits
        assert cache.pool.num_free == num_blocks - 1 - 5 * fits


def test_tails_go_first_and_groups_in_step() -> None:
    cache = KVCache(groups_of((None, None)), 9, 4)
    hashes = hashes_of(range(16), 4)
    cache.admit("a", 16, chunk=1, hashes=hashes)
    cache.publish("a", hashes, 16)
    assert [cache.block_table("a", g) for g in range(2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    cache.release("a")
    assert cache.pool.allocate(8) == [4, 8, 3, 7, 2, 6, 1, 5]


def test_room_that_was_not_computed_is_not_swapped() -> None:
    cache = KVCache(groups_of((None,)), 10, 4, host_blocks=8)
    cache.admit("a", 16, chunk=1)
    assert cache.swap_out("a", 5) == [(1, 0), (2, 1)]
