"""Block hashes: what makes two of them equal, and what must not."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.blocks import HASH_BYTES, PrefixHashes

from ..rigs.cache_rig import hashes_of

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
