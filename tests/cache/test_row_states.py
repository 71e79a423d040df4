"""Recurrent state: how much of it rows hold, and which snapshots stay cached. Its contents are
checked by the machine of tests/scheduling, on a device that computes with it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.cache.blocks import PrefixHashes
from stepgraph.cache.kv_cache import KVCache
from stepgraph.cache.row_states import RowPools, RowStateCache

from ..rigs.cache_rig import hashes_of
from ..rigs.scheduler_rig import groups_of


def cache_of(cached: int, rows: int = 1, *, ahead: int = 1, size: int = 4) -> KVCache:
    pools = RowPools.of(rows, 1, size, ahead=ahead, cached=cached)
    return KVCache(groups_of((None,)), 200, size, chunk=99, row_pools=pools)


def run(cache: KVCache, name: str, tokens: list[int], *chunks: int, hashes: PrefixHashes) -> int:
    """Compute the tokens of a request in these chunks and the rest, and end it; return how many it
    reused."""
    found = cache.admit(name, len(tokens), chunk=99, hashes=hashes)
    assert found is not None
    done = found.num_tokens
    for stop in [*chunks, len(tokens)]:
        if stop > done:
            cache.slide(name, done)
            assert cache.grow(name, stop) is not None
            done = stop
            cache.publish(name, hashes, done)
        cache.check_integrity()
    cache.publish(name, hashes, done, leaves=True)
    cache.release(name)
    cache.check_integrity()
    return found.num_tokens


@given(data=st.data())
@settings(deadline=None)
def test_rows_have_room_for_every_step(data: st.DataObject) -> None:
    """Rows prefill one after the other, then verify drafts in flight, and are never refused."""
    size, rows = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3))
    ahead = data.draw(st.integers(1, 2 * size))
    pools = RowPools.of(rows, 1, size, ahead=ahead, cached=0)
    cache = RowStateCache(pools, size)
    for row in range(rows):
        known, done = data.draw(st.integers(1, 99)), 0
        assert cache.can_admit()
        cache.admit(f"{row}", 0, known, junction=data.draw(st.integers(0, (known - 1) // size)))
        while done < known:
            cache.slide(f"{row}", done)
            done = data.draw(st.integers(done + 1, known))
            assert cache.can_advance(f"{row}", done)
            cache.advance(f"{row}", done)
            cache.check_integrity()
        for _ in range(data.draw(st.integers(0, 9))):
            launched = done + data.draw(st.integers(1, ahead))  # in flight
            done += data.draw(st.integers(1, launched - done))
            stop = launched + data.draw(st.integers(1, ahead))
            cache.slide(f"{row}", done)
            assert cache.can_advance(f"{row}", stop)
            cache.advance(f"{row}", stop)
            cache.check_integrity()
            done = launched
        cache.slide(f"{row}", done)


@pytest.mark.parametrize("chunks", [(), (16,), (17,), (5, 23, 24)])
@pytest.mark.parametrize("length", [25, 27, 28])
def test_prompts_leave_their_last_snapshot(chunks: tuple[int, ...], length: int) -> None:
    cache = cache_of(1)
    tokens = list(range(length))
    hashes = hashes_of(tokens, 4)
    assert run(cache, "a", tokens, *chunks, hashes=hashes) == 0
    assert cache.states is not None
    assert cache.states.snapshots.num_published == 1
    assert run(cache, "b", tokens, *chunks, hashes=hashes) == 24
    longer = [*tokens, *range(100, 120)]  # the next turn of a conversation
    assert run(cache, "c", longer, hashes=hashes_of(longer, 4)) == 24


def test_junctions_are_stored_once_they_are_needed() -> None:
    cache = cache_of(9)
    prompts = [[*range(40), *range(base, base + 40)] for base in (100, 200, 300)]
    found = [run(cache, f"{n}", p, 30, 77, hashes=hashes_of(p, 4)) for n, p in enumerate(prompts)]
    assert found == [0, 0, 40]


def test_old_snapshots_make_room() -> None:
    cache = cache_of(2)
    prompts = [[base, *range(30)] for base in range(9)]
    for turn in range(2):
        for n, prompt in enumerate(prompts):
            assert run(cache, f"{turn} {n}", prompt, hashes=hashes_of(prompt, 4)) == 0
    assert run(cache, "newest", prompts[-1], hashes=hashes_of(prompts[-1], 4)) == 28
    assert cache.states is not None
    assert cache.states.snapshots.num_evictions > 9


def test_forgotten_contents_are_not_found() -> None:
    cache = cache_of(4)
    tokens = list(range(30))
    for name in ("a", "b"):
        assert run(cache, name, tokens, hashes=hashes_of(tokens, 4)) == 0
        cache.forget_contents()
    assert cache.states is not None
    assert cache.states.snapshots.num_published == 0


def test_small_pools_refuse_and_change_nothing() -> None:
    cache = cache_of(0)
    hashes = hashes_of(list(range(50)), 4)
    for name in "abcd":
        before = cache.pool.num_free
        if cache.admit(name, 50, chunk=99, hashes=hashes) is None:
            assert cache.pool.num_free == before
            break
        free = cache.states and cache.states.inputs.num_free
        if cache.grow(name, 50) is None:
            assert cache.states is not None
            assert cache.states.inputs.num_free == free
    else:
        pytest.fail("four rows fit into the memory of one")
    cache.check_integrity()
