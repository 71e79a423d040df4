"""States and the grouping of layers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.spec import PagedState, group_layers, layouts

from ..rigs.cache_rig import layer_group

FULL = PagedState(heads=8, head_dim=64)
FEW = PagedState(heads=2, head_dim=64)
LATENT = PagedState(heads=1, head_dim=576, sides=1)


@given(
    window=st.none() | st.integers(1, 20),
    position=st.integers(0, 60),
    block_size=st.integers(1, 9),
)
def test_first_column_is_that_of_the_first_token_attended_to(
    window: int | None, position: int, block_size: int
) -> None:
    attended = [p for p in range(position + 1) if window is None or p > position - window]
    assert layer_group(0, window).first_column(position, block_size) == attended[0] // block_size


@given(
    window=st.none() | st.integers(1, 14),
    num_tokens=st.integers(0, 40),
    block_size=st.integers(1, 6),
    chunk=st.integers(1, 9),
)
def test_most_blocks_is_what_the_worst_chunk_takes(
    window: int | None, num_tokens: int, block_size: int, chunk: int
) -> None:
    most = 0
    for start in range(num_tokens):  # a prefix may be there already, so a chunk begins anywhere
        for stop in range(start + 1, min(start + chunk, num_tokens) + 1):
            begin = 0 if window is None else max(0, start - window + 1) // block_size
            most = max(most, -(-stop // block_size) - begin)
    assert layer_group(0, window).most_blocks(num_tokens, block_size, chunk) == most


@given(
    st.lists(
        st.builds(replace, st.sampled_from([FULL, FEW, LATENT]), window=st.sampled_from([None, 9])),
        min_size=1,
        max_size=40,
    )
)
def test_grouping_is_a_partition_into_equal_sizes(states: list[PagedState]) -> None:
    groups = group_layers(states)  # a window with more layers than others has several groups
    assert [g.index for g in groups] == list(range(len(groups)))
    assert sorted(layer for g in groups for layer in g.layers) == list(range(len(states)))
    room = layouts(groups)
    for g in groups:
        assert list(g.layers) == sorted(g.layers)
        assert list(g.states) == [states[layer] for layer in g.layers]
        assert {state.window for state in g.states} == {g.window}
        assert len(g.layers) == math.gcd(*Counter(s.window for s in states).values())
        assert Counter(state.layout for state in g.states) <= Counter(room)
