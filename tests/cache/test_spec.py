"""Specs and the grouping of layers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.spec import LayerSpec, group_layers

FULL = LayerSpec(num_kv_heads=8, head_dim=64, element_bytes=2)
SLIDING = replace(FULL, window=512)
WIDER = replace(FULL, window=1024)


@given(
    window=st.none() | st.integers(1, 20),
    position=st.integers(0, 60),
    block_size=st.integers(1, 9),
)
def test_first_column_is_that_of_the_first_token_attended_to(
    window: int | None, position: int, block_size: int
) -> None:
    spec = replace(FULL, window=window)
    attended = [p for p in range(position + 1) if window is None or p > position - window]
    assert spec.first_column(position, block_size) == attended[0] // block_size


@given(
    window=st.none() | st.integers(1, 14),
    num_tokens=st.integers(0, 40),
    block_size=st.integers(1, 6),
    chunk=st.integers(1, 9),
)
def test_most_blocks_is_what_the_worst_chunk_takes(
    window: int | None, num_tokens: int, block_size: int, chunk: int
) -> None:
    spec = replace(FULL, window=window)
    most = 0
    for start in range(num_tokens):  # a prefix may be there already, so a chunk begins anywhere
        for stop in range(start + 1, min(start + chunk, num_tokens) + 1):
            begin = 0 if window is None else max(0, start - window + 1) // block_size
            most = max(most, -(-stop // block_size) - begin)
    assert spec.most_blocks(num_tokens, block_size, chunk) == most


def test_unlike_layers_are_refused() -> None:
    for other in ({"num_kv_heads": 4}, {"scale_bytes": 2}, {"sides": 1}):
        with pytest.raises(ValueError, match="layer 2"):
            group_layers([FULL, SLIDING, replace(FULL, **other)])


@given(st.lists(st.sampled_from([FULL, SLIDING, WIDER]), min_size=1, max_size=40))
def test_grouping_is_a_partition_into_equal_sizes(specs: list[LayerSpec]) -> None:
    groups = group_layers(specs)  # a spec with more layers than others has several groups
    assert [g.index for g in groups] == list(range(len(groups)))
    assert sorted(layer for g in groups for layer in g.layers) == list(range(len(specs)))
    for g in groups:
        assert list(g.layers) == sorted(g.layers)
        assert {specs[layer] for layer in g.layers} == {g.spec}
        assert len(g.layers) == math.gcd(*Counter(specs).values())
