"""Specs and the grouping of layers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.spec import FullAttentionSpec, group_layers

A = FullAttentionSpec(num_kv_heads=8, head_dim=64, element_bytes=2)
B = FullAttentionSpec(num_kv_heads=4, head_dim=128, element_bytes=2)
C = FullAttentionSpec(num_kv_heads=8, head_dim=64, element_bytes=1)


def test_bytes() -> None:
    # Llama-3.2-1B in bfloat16: 8 heads of 64, keys and values.
    assert A.slot_bytes == 2048
    assert A.block_bytes(16) == 32768
    assert C.slot_bytes == A.slot_bytes // 2


@pytest.mark.parametrize("field", ["num_kv_heads", "head_dim", "element_bytes"])
def test_fields_are_positive(field: str) -> None:
    values = {"num_kv_heads": 8, "head_dim": 64, "element_bytes": 2, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        FullAttentionSpec(**values)


def test_equal_layers_are_one_group() -> None:
    (group,) = group_layers([A] * 5)
    assert (group.index, group.spec, group.layers) == (0, A, (0, 1, 2, 3, 4))


def test_spec_with_more_layers_is_split() -> None:
    groups = group_layers([A, B, A, B, B, B])
    assert [(g.index, g.spec, g.layers) for g in groups] == [
        (0, A, (0, 2)),
        (1, B, (1, 3)),
        (2, B, (4, 5)),
    ]


def test_no_layers() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        group_layers([])


@given(st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=40))
def test_grouping_is_a_partition_into_equal_sizes(specs: list[FullAttentionSpec]) -> None:
    groups = group_layers(specs)
    assert [g.index for g in groups] == list(range(len(groups)))
    assert sorted(layer for g in groups for layer in g.layers) == list(range(len(specs)))
    for g in groups:
        assert list(g.layers) == sorted(g.layers)
        assert {specs[layer] for layer in g.layers} == {g.spec}
        assert len(g.layers) == math.gcd(*Counter(specs).values())
