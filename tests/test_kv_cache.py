"""The cache as the scheduler sees it, against a plain model of tables and an eviction order."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepgraph.cache.kv_cache import KVCache
from stepgraph.cache.spec import FullAttentionSpec, LayerGroup

SPEC = FullAttentionSpec(num_kv_heads=2, head_dim=8, element_bytes=2)
REQUEST_IDS = st.sampled_from(["a", "b", "c", "d"])


def make_groups(count: int) -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup(i, SPEC, (2 * i, 2 * i + 1)) for i in range(count))


class CacheMachine(RuleBasedStateMachine):
    """The oracle: `tables[group][request]`, and the free blocks in the order they are reused."""

    @initialize(
        num_groups=st.integers(1, 3), num_blocks=st.integers(2, 16), block_size=st.integers(1, 5)
    )
    def make(self, num_groups: int, num_blocks: int, block_size: int) -> None:
        self.cache = KVCache(make_groups(num_groups), num_blocks, block_size)
        self.tables: list[dict[str, list[int]]] = [{} for _ in range(num_groups)]
        self.free_order = list(range(1, num_blocks))

    @rule(request_id=REQUEST_IDS, num_tokens=st.integers(0, 40))
    def grow(self, request_id: str, num_tokens: int) -> None:
        length = -(-num_tokens // self.cache.block_size)
        lacking = max(0, length - len(self.tables[0].get(request_id, [])))
        fits = lacking * len(self.tables) <= len(self.free_order)
        assert self.cache.blocks_for(num_tokens) == length * len(self.tables)
        assert self.cache.can_grow(request_id, num_tokens) == fits
        new = self.cache.grow(request_id, num_tokens)
        if not fits:
            assert new is None
            return
        expected = []
        for tables in self.tables:
            taken, self.free_order = self.free_order[:lacking], self.free_order[lacking:]
            expected.append(taken)
            tables[request_id] = tables.get(request_id, []) + taken
        assert new == tuple(expected)

    @rule(request_id=REQUEST_IDS)
    def release(self, request_id: str) -> None:
        self.cache.release(request_id)
        for tables in self.tables:
            self.free_order += reversed(tables.pop(request_id, []))

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_free_blocks == len(self.free_order)
        for group, tables in enumerate(self.tables):
            for request_id in "abcd":
                expected = tables.get(request_id, [])
                assert list(self.cache.block_table(request_id, group)) == expected

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request_id in "abcd":
            self.cache.release(request_id)
        self.cache.check_integrity()
        assert self.cache.num_free_blocks == self.cache.usable_blocks


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCache = CacheMachine.TestCase


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_capacity_is_the_longest_request_that_fits(num_groups: int) -> None:
    cache = KVCache(make_groups(num_groups), num_blocks=12, block_size=4)
    assert cache.usable_blocks == 11
    assert cache.capacity_tokens == 11 // num_groups * 4
    assert not cache.can_grow("a", cache.capacity_tokens + 1)
    assert cache.grow("a", cache.capacity_tokens) is not None


def test_growth_is_atomic_over_groups() -> None:
    cache = KVCache(make_groups(2), num_blocks=4, block_size=4)
    assert cache.grow("a", 4) == ([1], [2])
    # One block is left: enough for one group, not for both.
    assert cache.grow("b", 1) is None
    assert cache.grow("a", 5) is None
    assert cache.num_free_blocks == 1
    assert cache.block_table("b", 0) == cache.block_table("b", 1) == ()
    assert cache.grow("a", 3) == ([], [])
    cache.check_integrity()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least one layer group"):
        KVCache((), num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="num_blocks"):
        KVCache(make_groups(1), num_blocks=1, block_size=4)
    with pytest.raises(ValueError, match="block_size"):
        KVCache(make_groups(1), num_blocks=4, block_size=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tables: tables["a"].append(0), "null block"),
        (lambda tables: tables["a"].append(tables["a"][0]), "in 2 block tables"),
        (lambda tables: tables.pop("a"), "in 0 block tables"),
    ],
)
def test_integrity_check_sees_damage(damage, message: str) -> None:
    cache = KVCache(make_groups(1), num_blocks=4, block_size=4)
    cache.grow("a", 8)
    damage(cache._allocators[0]._tables)
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


def test_integrity_check_sees_uneven_groups() -> None:
    cache = KVCache(make_groups(2), num_blocks=6, block_size=4)
    cache.grow("a", 4)
    cache._allocators[1].grow("a", 8)
    with pytest.raises(AssertionError, match="one group and not in another"):
        cache.check_integrity()


def test_host_bookkeeping_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import stepgraph.cache.kv_cache, stepgraph.cache.memory"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
