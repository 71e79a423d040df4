"""The block pool against a plain model, and block hashes: what makes two of them equal."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepgraph.cache.blocks import HASH_BYTES, NULL_BLOCK, BlockPool, PrefixHashes

from ..rigs.cache_rig import hashes_of


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


# Block hashes -------------------------------------------------------------------------------------


TOKENS = st.lists(st.integers(0, 2), max_size=12)
SALTS = st.sampled_from(["", "a", "b", "\0", "ä"])


def of(tokens: list[int]) -> Callable[[int, int], list[int]]:
    return lambda start, stop: tokens[start:stop]


@given(a=TOKENS, b=TOKENS, size=st.integers(1, 4), salt_a=SALTS, salt_b=SALTS)
def test_equal_if_and_only_if_everything_up_to_the_end_is(
    a: list[int], b: list[int], size: int, salt_a: str, salt_b: str
) -> None:
    hashes_a, hashes_b = hashes_of(a, size, salt_a), hashes_of(b, size, salt_b)
    assert len(hashes_a) == len(a) // size
    for i in range(len(hashes_a)):
        assert len(hashes_a[i]) == HASH_BYTES
        for j in range(len(hashes_b)):
            same = salt_a == salt_b and a[: (i + 1) * size] == b[: (j + 1) * size]
            assert (hashes_a[i] == hashes_b[j]) == same


@given(tokens=TOKENS, size=st.integers(1, 4), cuts=st.lists(st.integers(0, 12), max_size=6))
def test_growing_by_pieces_is_hashing_at_once(
    tokens: list[int], size: int, cuts: list[int]
) -> None:
    pieces = PrefixHashes(size, "salt")
    for cut in [min(cut, len(tokens)) for cut in cuts] + [len(tokens)]:
        copy, pieces = pieces, pieces.copy()  # which parts ways with the original
        pieces.extend(of(tokens), cut)  # fewer than before changes nothing
        copy.extend(of([7] * len(tokens)), len(tokens))
    at_once = hashes_of(tokens, size, "salt")
    assert [pieces[i] for i in range(len(pieces))] == [at_once[i] for i in range(len(at_once))]


def test_contents_in_the_place_of_tokens_count() -> None:
    tokens = [0, 0, 0, 0, 0, 0]

    def with_contents(shown: bytes) -> PrefixHashes:
        result = PrefixHashes(2)
        result.extend(of(tokens), 6, lambda start, stop: shown if start <= 2 < stop else b"")
        return result

    plain, one, other = hashes_of(tokens, 2), with_contents(b"1"), with_contents(b"2")
    assert plain[0] == one[0] == other[0]  # a block that shows nothing is one of tokens
    assert len({plain[1], one[1], other[1]}) == 3
    assert len({plain[2], one[2], other[2]}) == 3  # and so is everything behind it
    assert with_contents(b"1")[2] == one[2]


def test_a_salt_cannot_pass_for_a_block() -> None:
    # 32 bytes that are a hash, then those of a token: what a block is hashed from, as a salt.
    parent = bytes(range(32))
    salt = (parent + array("q", [5]).tobytes()).decode()
    block = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES).digest()
    child = hashlib.blake2b(block + array("q", [6]).tobytes(), digest_size=HASH_BYTES).digest()
    assert hashes_of([6], 1, salt)[0] != child
