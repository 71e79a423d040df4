"""The sizes that exist, and which one fits n."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from stepgraph.graphs.buckets import (
    Buckets,
    default_row_buckets,
    default_token_buckets,
    default_width_buckets,
)

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


@given(sizes, st.integers(1, 6000))
def test_fit_is_the_smallest_that_holds_n(given_sizes, n):
    buckets = Buckets(given_sizes)
    assert buckets.fit(n) == min((s for s in given_sizes if s >= n), default=None)
    assert list(buckets) == sorted(set(given_sizes))
    assert buckets == Buckets(reversed(given_sizes))
    assert hash(buckets) == hash(Buckets(tuple(given_sizes)))


@given(st.integers(1, 4096))
def test_row_ladder_pads_little_and_never_a_full_batch(max_num_seqs):
    buckets = default_row_buckets(max_num_seqs)
    assert buckets.largest == max_num_seqs
    assert len(buckets) <= 40
    for n in range(1, max_num_seqs + 1):
        bucket = buckets.fit(n)
        assert bucket is not None
        padding = bucket - n
        assert padding <= 7 or padding / bucket < 0.2


@given(st.integers(1, 1 << 20))
def test_token_ladders(max_tokens):
    buckets = list(default_token_buckets(max_tokens))
    assert buckets[:-1] == [1 << k for k in range(4, 20) if 1 << k < max_tokens and max_tokens > 16]
    fine = list(default_token_buckets(max_tokens, fine=True))
    assert set(buckets) <= set(fine)
    assert buckets[-1] == fine[-1] == max_tokens
    assert all(b <= 1.5 * a for a, b in pairwise(fine))


@given(st.integers(1, 10_000), st.sampled_from([1, 8, 16, 32, 128, 256]))
def test_width_ladder(max_blocks, block_size):
    buckets = default_width_buckets(max_blocks, block_size)
    ladder = list(buckets)
    assert buckets.largest == max_blocks
    assert ladder[0] * block_size >= min(128, max_blocks * block_size)
    assert all(b <= 2 * a for a, b in pairwise(ladder))
    assert all(b == 2 * a for a, b in pairwise(ladder[:-1]))
