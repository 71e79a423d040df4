"""What attention's splits make together, and its output projection, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.triton import kernel_calls
from stepgraph.runtime.kernels.triton.linear import GpuLinear, LinearConfig
from stepgraph.runtime.kernels.triton.linear_dispatch import (
    combine_output,
    product_combines,
    reference_combine_output,
)
from torch import Tensor

from ..rigs.gpu_linear_rig import DEVICE, STORAGES, error, poisoned, random_linear, rows, tolerance

N = 21


def random_splits(count: int, heads: int, splits: int, head_dim: int) -> tuple[Tensor, ...]:
    """Some splits are empty: their accumulators hold NaN."""
    acc = torch.randn(count, heads, splits, head_dim, device=DEVICE)
    maxima = torch.randn(count, heads, splits, device=DEVICE) * 4
    sums = torch.rand(count, heads, splits, device=DEVICE) + 0.5
    empty = torch.rand(count, heads, splits, device=DEVICE) < 0.4
    empty[:, :, 0] = False
    acc[empty] = float("nan")
    maxima[empty] = -float("inf")
    sums[empty] = 0.0
    return acc, maxima, sums


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 7), (6, 10), (2, 64)])
@pytest.mark.parametrize("count", [1, 3])
def test_in_one_kernel(count: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    parts = random_splits(count, heads, 4, head_dim)
    linear = random_linear(N, heads * head_dim, dtype)
    out_TN, residual_TN = poisoned(count, N, dtype=dtype), rows(count, N, dtype)
    combine_output(*parts, linear, residual_TN, out_TN, LinearConfig(8, 32))
    expected = reference_combine_output(*parts, linear, residual_TN, dtype)
    assert error(out_TN, expected) < tolerance(dtype)


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_of_8_bits(storage: str) -> None:
    parts = random_splits(2, 2, 3, 72)
    linear = random_linear(N, 144, torch.bfloat16, storage, bias=True)
    out_TN = poisoned(2, N, dtype=torch.bfloat16)
    combine_output(*parts, linear, None, out_TN, LinearConfig(8, 64))
    expected = reference_combine_output(*parts, linear, None, torch.bfloat16)
    assert error(out_TN, expected) < 1e-2


def test_sizes_that_are_not_given() -> None:
    parts = random_splits(2, 2, 4, 16)
    linear, residual_TN = random_linear(N, 32, torch.bfloat16), rows(2, N, torch.bfloat16)
    out_TN = poisoned(2, N, dtype=torch.bfloat16)
    combine_output(*parts, linear, residual_TN, out_TN)
    expected = reference_combine_output(*parts, linear, residual_TN, torch.bfloat16)
    assert error(out_TN, expected) < 1e-2


@pytest.mark.parametrize(
    ("count", "splits", "combines"), [(1, 4, True), (1, 16, False), (5, 2, False), (1, 1, False)]
)
def test_few_splits_are_left_to_the_product(
    monkeypatch: pytest.MonkeyPatch, count: int, splits: int, combines: bool
) -> None:
    monkeypatch.setattr(kernel_calls, "MULTIPROCESSORS", 132)
    meta = torch.device("meta")
    acc_THSE = torch.empty(count, 32, splits, 64, device=meta)
    linear = GpuLinear(torch.empty(2048, 2048, dtype=torch.bfloat16, device=meta))
    assert product_combines(acc_THSE, linear, torch.bfloat16) == combines
