"""The cache as the scheduler sees it. What blocks hold is the matter of `test_cache_machine.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.kv_cache import Admitted, KVCache
from stepgraph.cache.prefix_hashes import PrefixHashes
from stepgraph.cache.spec import FullAttentionSpec, LayerGroup, SlidingWindowSpec


def make_cache(
    *windows: int | None,
    num_blocks: int,
    block_size: int = 4,
    chunk: int = 1,
    host_blocks: int = 0,
) -> KVCache:
    sizes = {"num_kv_heads": 2, "head_dim": 8, "element_bytes": 2}
    specs = [
        FullAttentionSpec(**sizes) if w is None else SlidingWindowSpec(**sizes, window=w)
        for w in windows
    ]
    groups = [LayerGroup(i, spec, (2 * i, 2 * i + 1)) for i, spec in enumerate(specs)]
    return KVCache(groups, num_blocks, block_size, chunk=chunk, host_blocks=host_blocks)


def hashes_of(tokens: list[int], block_size: int = 4, salt: str = "") -> PrefixHashes:
    hashes = PrefixHashes(block_size, salt)
    hashes.extend(lambda start, stop: tokens[start:stop], len(tokens))
    return hashes


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


def tables(cache: KVCache, request_id: str) -> list[list[int]]:
    return [list(cache.block_table(request_id, group)) for group in range(cache.num_groups)]


# Growth ------------------------------------------------------------------------------------------


def test_growth_is_atomic_over_groups() -> None:
    cache = make_cache(None, None, num_blocks=6)
    for name in "ab":
        assert cache.admit(name, 4, chunk=1) == Admitted(0)
    # One block is left: enough for one group, not for both.
    assert cache.admit("c", 1, chunk=1) is None
    assert tables(cache, "c") == [[], []]
    assert cache.grow("a", 5) is None
    assert cache.num_free_blocks == 1
    assert cache.grow("a", 3) == []
    cache.check_integrity()
    cache.release("b")
    assert cache.grow("a", 5) == [(0, 1, 3), (1, 1, 4)]
    cache.check_integrity()


def test_a_window_slides() -> None:
    cache = make_cache(None, 4, num_blocks=9)
    cache.admit("a", 9, chunk=1)
    assert tables(cache, "a") == [[1, 2, 3], [4]]
    assert cache.grow("a", 9) == [(1, 1, 5), (1, 2, 6)]
    assert cache.slide("a", 6) == []  # reads positions 3 to 6
    assert cache.slide("a", 7) == [(1, 0, 0)]
    assert cache.slide("a", 7) == []
    assert tables(cache, "a") == [[1, 2, 3], [0, 5, 6]]
    assert cache.table_of("a") == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 1, 5), (1, 2, 6)]
    assert cache.grow("a", 13) == [(0, 3, 4), (1, 3, 7)]  # what was given back goes out first
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


# Admission ---------------------------------------------------------------------------------------


def test_full_attention_gets_room_for_all_windows_for_a_chunk() -> None:
    cache = make_cache(None, 4, num_blocks=20, chunk=3)
    assert cache.admit("a", 18, chunk=3) == Admitted(0)
    assert [len(table) for table in tables(cache, "a")] == [5, 1]


def test_headroom_and_the_peak_of_windows_are_left_free() -> None:
    # Full attention takes 4 blocks at once; the window 1, and 3 when it is widest.
    for num_blocks, headroom, fits in [(8, 0, True), (7, 0, False), (9, 1, True), (8, 1, False)]:
        cache = make_cache(None, 6, num_blocks=num_blocks, chunk=2)
        assert (cache.admit("a", 16, chunk=2, headroom=headroom) is not None) == fits
        assert cache.num_free_blocks == num_blocks - 1 - 5 * fits


def test_revived_blocks_are_counted() -> None:
    cache = make_cache(None, num_blocks=6)
    tokens = list(range(12))
    compute(cache, "a", tokens)
    cache.release("a")
    cache.admit("hog", 8, chunk=1)
    assert tables(cache, "hog") == [[4, 5]]  # the two that never held anything
    # Two cached blocks to share, one to take: all three that are free.
    assert cache.admit("b", 12, chunk=4, headroom=1, hashes=hashes_of(tokens)) is None
    found = cache.admit("b", 12, chunk=4, hashes=hashes_of(tokens))
    assert found == Admitted(8, "prefix")
    assert tables(cache, "b") == [[1, 2, 3]]
    assert cache.num_free_blocks == 0
    assert cache.num_evictions == 1  # block 3 held tokens 8 to 11, the last of them to compute
    cache.check_integrity()


def test_blocks_are_shared_with_one_that_still_runs() -> None:
    cache = make_cache(None, num_blocks=9)
    tokens = list(range(20))
    hashes = hashes_of(tokens)
    cache.admit("a", 20, chunk=4)
    cache.publish("a", hashes, 11)  # two blocks are computed, the third is not full
    assert cache.admit("b", 20, chunk=4, hashes=hashes) == Admitted(8, "prefix")
    assert tables(cache, "b")[0][:2] == tables(cache, "a")[0][:2]


def test_the_last_token_is_always_computed() -> None:
    cache = make_cache(None, num_blocks=9)
    compute(cache, "a", list(range(8)))
    for name, length, found in [("b", 8, 4), ("c", 9, 8), ("d", 4, 0), ("e", 5, 4)]:
        admitted = cache.admit(name, length, chunk=4, hashes=hashes_of(list(range(length))))
        assert admitted is not None
        assert admitted.num_tokens == found


def test_a_window_needs_only_its_last_blocks() -> None:
    cache = make_cache(None, 4, num_blocks=20)
    tokens = list(range(20))
    compute(cache, "a", tokens)
    cache.release("a")
    hit = cache.admit("b", 17, chunk=1, hashes=hashes_of(tokens))
    assert hit == Admitted(16, "prefix")
    full, sliding = tables(cache, "b")
    assert len(full) == 5
    assert sliding[:3] == [0, 0, 0]
    assert sliding[3] != 0
    cache.check_integrity()


def test_groups_agree_on_the_longest_prefix() -> None:
    cache = make_cache(None, 5, 9, num_blocks=40, block_size=2)
    tokens = list(range(20))
    compute(cache, "a", tokens)
    hashes = hashes_of(tokens, 2)
    pool, allocators = cache._pool, cache._allocators
    # Forget one block of each window: of 5 in column 8, of 9 in column 5.
    for group, column in [(1, 8), (2, 5)]:
        block = allocators[group].find(hashes, column)
        assert block is not None
        key = pool._keys[block]
        assert key is not None
        del pool._block_of[key[0]][key]
        pool._keys[block] = None
        pool._num_published -= 1
    cache.release("a")
    found = cache.admit("b", 20, chunk=1, hashes=hashes)
    # 9 blocks lack column 8; 8, 7 and 6 lack column 5, which 9 tokens reach; 5 are all there.
    assert found == Admitted(10, "prefix")
    cache.check_integrity()


def test_what_is_known_by_another_salt_is_not_found() -> None:
    cache = make_cache(None, num_blocks=9)
    compute(cache, "a", list(range(8)))
    tokens = list(range(9))
    assert cache.admit("b", 9, chunk=4, hashes=hashes_of(tokens, salt="b")) == Admitted(0)
    assert cache.admit("c", 9, chunk=4) == Admitted(0)


def test_tails_go_first_and_groups_in_step() -> None:
    cache = make_cache(None, None, num_blocks=9)
    compute(cache, "a", list(range(16)))
    assert tables(cache, "a") == [[1, 2, 3, 4], [5, 6, 7, 8]]
    cache.release("a")
    assert cache._pool.allocate(8) == [4, 8, 3, 7, 2, 6, 1, 5]


def test_short_requests_leave_a_cached_prefix_alone() -> None:
    cache = make_cache(None, 4, num_blocks=20)
    tokens = list(range(17))
    compute(cache, "a", tokens)
    cache.release("a")
    for i in range(20):
        compute(cache, f"short {i}", [100 + i, 1, 2])  # no block is full
        cache.release(f"short {i}")
    assert cache.admit("b", 17, chunk=1, hashes=hashes_of(tokens)) == Admitted(16, "prefix")
    assert cache.num_evictions == 0
    cache.check_integrity()


def test_an_admission_can_be_taken_back() -> None:
    cache = make_cache(None, 6, num_blocks=20)
    tokens = list(range(16))
    compute(cache, "a", tokens)
    cache.release("a")
    cached = cache.num_cached_blocks
    assert cache.admit("b", 16, chunk=1, hashes=hashes_of(tokens)) is not None
    cache.release("b")
    assert cache.num_free_blocks == cache.usable_blocks
    assert cache.num_cached_blocks == cached
    assert not any(cache.counts.values())
    cache.check_integrity()


@given(
    admissions=st.lists(
        st.tuples(
            st.sampled_from(["nothing", "prefix", "fork", "swap"]),
            st.integers(1, 9),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_what_is_counted(admissions: list[tuple[str, int, int, bool]]) -> None:
    cache = make_cache(None, num_blocks=4)
    expected = dict.fromkeys(cache.counts, 0)
    for source, found, blocks, again in admissions:
        first = not again and source != "swap"
        pairs = [(i, 10 + i) for i in range(blocks)]
        admitted = Admitted(
            found if source != "nothing" else 0,
            source,
            pairs if source == "fork" else [],
            pairs if source == "swap" else [],
        )
        cache.count_admission(admitted, 10, first=first)
        expected["queried_tokens"] += 10 * first
        expected["hit_tokens"] += admitted.num_tokens * first
        expected["forks"] += source == "fork"
        expected["copied_blocks"] += blocks * (source == "fork")
        expected["swapped_in"] += blocks * (source == "swap")
        if source == "swap":
            cache.count_swapped_out(blocks)
            expected["swapped_out"] += blocks
    assert cache.counts == expected


def test_misuse() -> None:
    cache = make_cache(None, 4, num_blocks=20, chunk=2)
    with pytest.raises(AssertionError, match="no token to compute"):
        cache.admit("a", 0, chunk=1)
    with pytest.raises(AssertionError, match="the cache was made for 2"):
        cache.admit("a", 9, chunk=3)
    cache.admit("a", 9, chunk=2)
    with pytest.raises(AssertionError, match="holds blocks already"):
        cache.admit("a", 9, chunk=2)


# Forks -------------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_other() -> None:
    cache = make_cache(None, 4, num_blocks=30)
    compute(cache, "a", list(range(10)))
    parent = tables(cache, "a")
    found = cache.admit("b", 11, chunk=1, siblings=[("a", 10)])
    assert found is not None
    child = tables(cache, "b")
    assert (found.num_tokens, found.source) == (10, "fork")
    assert found.copies == [(parent[0][2], child[0][2]), (parent[1][2], child[1][2])]
    assert child[0][:2] == parent[0][:2]
    assert child[1][:2] == [0, parent[1][1]]
    assert not set(parent[0] + parent[1]) & {destination for _, destination in found.copies}
    cache.check_integrity()


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    cache = make_cache(None, num_blocks=9)
    compute(cache, "a", list(range(8)))
    assert cache.admit("b", 9, chunk=1, siblings=[("a", 8)]) == Admitted(8, "fork")
    assert tables(cache, "b")[0][:2] == tables(cache, "a")[0]


def test_a_sibling_that_went_on_past_the_window_is_no_help() -> None:
    cache = make_cache(4, num_blocks=20)
    compute(cache, "a", list(range(16)))
    compute(cache, "c", list(range(100, 110)))
    assert cache.admit("b", 8, chunk=1, siblings=[("a", 7)]) == Admitted(0)
    found = cache.admit("d", 11, chunk=1, siblings=[("a", 10), ("c", 10)])
    assert found is not None
    assert found.source == "fork"


def test_a_longer_prefix_is_preferred_to_a_fork() -> None:
    cache = make_cache(None, num_blocks=20)
    tokens = list(range(16))
    compute(cache, "a", tokens)
    hashes = hashes_of(tokens)
    found = cache.admit("b", 14, chunk=1, hashes=hashes, siblings=[("a", 6)])
    assert found == Admitted(12, "prefix")
    found = cache.admit("c", 7, chunk=1, hashes=hashes, siblings=[("a", 6)])
    assert found is not None
    assert (found.num_tokens, found.source) == (6, "fork")


# Swap --------------------------------------------------------------------------------------------


def test_swap_out_and_in() -> None:
    cache = make_cache(None, 4, num_blocks=11, chunk=4, host_blocks=8)
    compute(cache, "a", list(range(10)), chunk=4)
    (f0, f1, f2), (_, s1, s2) = tables(cache, "a")
    # The next token reads positions 7 to 10 in the window.
    assert cache.num_blocks_of("a", 10) == 5
    assert not cache.is_swapped("a")
    assert cache.swap_out("a", 10) == [(f0, 0), (f1, 1), (f2, 2), (s1, 3), (s2, 4)]
    assert cache.num_free_blocks == cache.usable_blocks
    assert cache.host.num_free == 3
    assert cache.is_swapped("a")
    cache.check_integrity()

    cache.admit("b", 8, chunk=1)
    found = cache.admit("a", 11, chunk=4)
    assert found is not None
    assert (found.num_tokens, found.source) == (10, "swap")
    full, sliding = tables(cache, "a")
    blocks = [*full, *sliding[1:]]
    assert found.swap_in == list(zip(range(5), blocks, strict=True))
    assert cache.host.num_free == 8
    assert not cache.is_swapped("a")
    cache.check_integrity()


def test_a_swapped_request_can_be_forgotten() -> None:
    cache = make_cache(None, num_blocks=10, host_blocks=4)
    cache.admit("a", 10, chunk=1)
    cache.swap_out("a", 10)
    for _ in range(2):
        cache.forget_swapped("a")
        assert not cache.is_swapped("a")
        assert cache.host.num_free == 4
    assert cache.admit("a", 11, chunk=1) == Admitted(0)
    cache.check_integrity()


def test_a_full_host_changes_nothing() -> None:
    cache = make_cache(4, num_blocks=10, host_blocks=1)
    cache.admit("a", 1, chunk=1)
    cache.grow("a", 10)
    before = tables(cache, "a")
    assert cache.swap_out("a", 10) is None
    assert tables(cache, "a") == before  # not even what has left the window
    cache.check_integrity()


def test_room_that_was_not_computed_is_not_swapped() -> None:
    cache = make_cache(None, num_blocks=10, host_blocks=8)
    cache.admit("a", 16, chunk=1)
    assert cache.num_blocks_of("a", 5) == 2
    assert cache.swap_out("a", 5) == [(1, 0), (2, 1)]


def test_a_swapped_request_waits_until_there_is_room() -> None:
    cache = make_cache(None, num_blocks=5, host_blocks=4)
    cache.admit("a", 12, chunk=1)
    cache.swap_out("a", 12)
    cache.admit("b", 8, chunk=1)
    assert cache.admit("a", 13, chunk=1) is None
    assert cache.is_swapped("a")
    cache.release("b")
    assert cache.admit("a", 13, chunk=1) is not None
    cache.check_integrity()


# The rest ----------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least one layer group"):
        make_cache(num_blocks=4)
    with pytest.raises(ValueError, match="num_blocks"):
        make_cache(None, num_blocks=1)
    with pytest.raises(ValueError, match="block_size"):
        make_cache(None, num_blocks=4, block_size=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tables: tables["a"].append(0), "null block"),
        (lambda tables: tables["a"].append(tables["a"][0]), "in 2 block tables"),
        (lambda tables: tables.pop("a"), "in 0 block tables"),
    ],
)
def test_integrity_check_sees_damage(damage, message: str) -> None:
    cache = make_cache(None, num_blocks=4)
    cache.admit("a", 8, chunk=1)
    damage(cache._allocators[0]._tables)
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


def test_integrity_check_sees_uneven_groups() -> None:
    cache = make_cache(None, None, num_blocks=6)
    cache.admit("a", 4, chunk=1)
    cache._allocators[1].grow("a", 8)
    with pytest.raises(AssertionError, match="one group and not in another"):
        cache.check_integrity()


def test_integrity_check_sees_a_step_that_would_not_grow() -> None:
    cache = make_cache(None, num_blocks=6)
    cache.admit("a", 4, chunk=1)
    cache._held["a"].room = 8
    with pytest.raises(AssertionError, match="counts room for 8 tokens"):
        cache.check_integrity()


def test_host_bookkeeping_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import stepgraph.cache.kv_cache, stepgraph.cache.memory.handler"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
