"""The block pool against a plain model: a list of free blocks, dictionaries of counts and keys."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepgraph.cache.blocks import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free_order = list(range(1, num_blocks))
        self.counts = dict.fromkeys(range(1, num_blocks), 0)
        self.keys: dict[bytes, int] = {}
        self.evictions = 0

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        if n > len(self.free_order):
            with pytest.raises(AssertionError):
                self.pool.allocate(n)
            return
        expected, self.free_order = self.free_order[:n], self.free_order[n:]
        assert self.pool.allocate(n) == expected
        self.counts.update(dict.fromkeys(expected, 1))
        evicted = [key for key, block in self.keys.items() if block in expected]
        self.evictions += len(evicted)
        for key in evicted:
            del self.keys[key]

    @rule(data=st.data(), key=st.sampled_from([b"\0a", b"\0b", b"\1a", b"\xffa"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        if self.counts[block] == 0:
            with pytest.raises(AssertionError):
                self.pool.publish(block, key)
            return
        taken = key in self.keys or block in self.keys.values()
        assert self.pool.publish(block, key) == (not taken)
        if not taken:
            self.keys[key] = block

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        shared = data.draw(st.lists(st.sampled_from(sorted(self.counts)), max_size=3))
        assert self.pool.count_free(shared) == sum(self.counts[block] == 0 for block in shared)
        self.pool.share(shared)
        for block in shared:
            if self.counts[block] == 0:
                self.free_order.remove(block)
            self.counts[block] += 1

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        held = [block for block, count in self.counts.items() for _ in range(count)]
        freed = data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))]
        self.pool.free(freed)
        empty: list[int] = []
        for block in freed:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                cached = block in self.keys.values()
                (self.free_order if cached else empty).append(block)
        self.free_order[:0] = empty

    @rule()
    def forget_contents(self) -> None:
        self.pool.forget_contents()
        self.keys.clear()

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        pool = self.pool
        wrong = data.draw(st.sampled_from([NULL_BLOCK, -1, pool.num_blocks, *self.free_order]))
        with pytest.raises(AssertionError):
            pool.free([wrong])
        if wrong not in self.free_order:
            with pytest.raises(AssertionError):
                pool.share([wrong])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.free_order)
        assert {b: self.pool.ref_count(b) for b in self.counts} == self.counts
        assert self.pool.num_published == len(self.keys)
        assert self.pool.num_evictions == self.evictions
        for key in (b"\0a", b"\0b", b"\1a", b"\xffa"):
            assert self.pool.find(key) == self.keys.get(key)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.free([b for b, count in self.counts.items() for _ in range(count)])
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks - 1
        everything = self.pool.allocate(self.pool.num_free)
        assert sorted(everything) == list(range(1, self.pool.num_blocks))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
