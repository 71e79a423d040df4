"""How many splits decode attention has, and the counters of those that are put together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton import kernel_calls
from stepgraph.runtime.kernels.triton.split_attention import (
    MOST_SPLITS,
    choose_splits,
    new_counters,
)

from ..rigs.gpu_linear_rig import DEVICE


@given(
    rows=st.integers(1, 256),
    kv_heads=st.integers(1, 64),
    positions=st.integers(1, 1 << 17),
    processors=st.integers(1, 200),
)
def test_splits_that_are_chosen(rows: int, kv_heads: int, positions: int, processors: int) -> None:
    splits = choose_splits(rows, kv_heads, positions, processors)
    assert 1 <= splits <= min(-(-positions // 64), MOST_SPLITS)
    assert splits == 1 or rows * kv_heads * splits <= 2 * processors
    assert splits >= choose_splits(rows + 3, kv_heads, positions, processors) or rows <= 2


@given(rows=st.integers(1, 256), kv_heads=st.integers(1, 64), processors=st.integers(1, 200))
def test_there_are_counters_for_all_that_is_split(
    rows: int, kv_heads: int, processors: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_calls, "MULTIPROCESSORS", processors)
        counters = new_counters(torch.device("meta"))
    assert counters.dtype == torch.int32
    splits = choose_splits(rows, kv_heads, 1 << 17, processors)
    assert splits == 1 or counters.numel() >= rows * kv_heads
    assert not new_counters(torch.device(DEVICE)).any()
