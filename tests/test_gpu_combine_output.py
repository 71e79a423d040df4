"""What attention's splits make together, and its output projection, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.gpu.combine_output import (
    combine,
    combine_output,
    reference_combine,
    reference_combine_output,
)
from stepgraph.runtime.kernels.gpu.launch import record_launches
from stepgraph.runtime.kernels.gpu.linear import GpuLinear, LinearConfig
from torch import Tensor

from .gpu_linear_rig import DEVICE, STORAGES, error, poisoned, random_linear, rows, tolerance

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


@pytest.mark.parametrize("head_dim", [7, 10, 16])
@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("count", [1, 5])
def test_combine(count: int, splits: int, head_dim: int) -> None:
    parts = random_splits(count, 3, splits, head_dim)
    out_TK = poisoned(count, 3 * head_dim, dtype=torch.float32)
    combine(*parts, out_TK)
    exact = reference_combine(*(part.double() for part in parts))
    assert error(out_TK, exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 7), (6, 10), (2, 64)])
@pytest.mark.parametrize("count", [1, 3])
def test_in_one_kernel(count: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    parts = random_splits(count, heads, 4, head_dim)
    linear = random_linear(N, heads * head_dim, dtype)
    out_TN, residual_TN = poisoned(count, N, dtype=dtype), rows(count, N, dtype)
    nothing_TK = poisoned(count, heads * head_dim, dtype=dtype)
    config = LinearConfig(8, 32)
    combine_output(*parts, linear, residual_TN, out_TN, nothing_TK, config)
    expected = reference_combine_output(*parts, linear, residual_TN, dtype)
    assert error(out_TN, expected) < tolerance(dtype)
    assert nothing_TK.isnan().all()


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_of_8_bits(storage: str) -> None:
    parts = random_splits(2, 2, 3, 72)
    linear = random_linear(N, 144, torch.bfloat16, storage, bias=True)
    out_TN, attended_TK = (poisoned(2, n, dtype=torch.bfloat16) for n in (N, 144))
    combine_output(*parts, linear, None, out_TN, attended_TK, LinearConfig(8, 64))
    expected = reference_combine_output(*parts, linear, None, torch.bfloat16)
    assert error(out_TN, expected) < 1e-2


@pytest.mark.parametrize("count", [1, 5])
def test_in_two_kernels(count: int) -> None:
    """Of small weights the splits would be read more often than the weight."""
    parts = random_splits(count, 2, 4, 16)
    linear, residual_TN = random_linear(N, 32, torch.bfloat16), rows(count, N, torch.bfloat16)
    out_TN, attended_TK = (poisoned(count, n, dtype=torch.bfloat16) for n in (N, 32))
    combine_output(*parts, linear, residual_TN, out_TN, attended_TK)
    expected = reference_combine_output(*parts, linear, residual_TN, torch.bfloat16)
    assert error(out_TN, expected) < 1e-2


@pytest.mark.parametrize(("splits", "kernels"), [(4, 1), (16, 2)])
def test_few_splits_take_one_kernel(splits: int, kernels: int) -> None:
    meta = torch.device("meta")
    parts = [torch.empty(1, 32, splits, 64, device=meta)]
    parts += [torch.empty(1, 32, splits, device=meta) for _ in range(2)]
    linear = GpuLinear(torch.empty(2048, 2048, dtype=torch.bfloat16, device=meta))
    x_TN = torch.empty(1, 2048, dtype=torch.bfloat16, device=meta)
    with record_launches() as launches:
        combine_output(*parts, linear, x_TN, x_TN, x_TN)
    assert len(launches) == kernels
