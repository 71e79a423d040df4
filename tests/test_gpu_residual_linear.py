"""A linear layer that is added to its residual, in both kernels, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.gpu.linear import LinearConfig
from stepgraph.runtime.kernels.gpu.residual_linear import (
    reference_residual_linear,
    residual_linear,
)

from .gpu_linear_rig import DTYPES, STORAGES, error, poisoned, random_linear, rows, tolerance

K, N = 37, 21


def config_for(count: int) -> LinearConfig:
    return LinearConfig(8, 16) if count <= 4 else LinearConfig(16, 32, parts=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 29])
def test_odd_shapes(count: int, residual: bool, dtype: torch.dtype) -> None:
    a_TK, linear = rows(count, K, dtype), random_linear(N, K, dtype, bias=True)
    residual_TN = rows(count, N, dtype) if residual else None
    out_TN = poisoned(count, N, dtype=dtype)
    residual_linear(a_TK, linear, residual_TN, out_TN, config_for(count))
    expected = reference_residual_linear(a_TK, linear, residual_TN)
    assert error(out_TN, expected) < tolerance(dtype)


@pytest.mark.parametrize("count", [1, 5])
def test_the_residual_may_be_what_is_written(count: int) -> None:
    a_TK, linear = rows(count, K, torch.bfloat16), random_linear(N, K, torch.bfloat16)
    x_TN = rows(count, N, torch.bfloat16)
    expected = reference_residual_linear(a_TK, linear, x_TN.clone())
    residual_linear(a_TK, linear, x_TN, x_TN, config_for(count))
    assert error(x_TN, expected) < 1e-2


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("k", [256, 37])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_weights_of_8_bits(count: int, k: int, storage: str) -> None:
    a_TK, residual_TN = rows(count, k, torch.float16), rows(count, N, torch.float16)
    linear = random_linear(N, k, torch.float16, storage)
    out_TN = poisoned(count, N, dtype=torch.float16)
    config = LinearConfig(8, 128) if count < 5 else LinearConfig(16, 128, parts=2)
    residual_linear(a_TK, linear, residual_TN, out_TN, config)
    expected = reference_residual_linear(a_TK, linear, residual_TN)
    assert error(out_TN, expected) < tolerance(torch.float16)


@pytest.mark.parametrize("count", [3, 6])
def test_a_row_is_its_own(count: int) -> None:
    a_TK, linear = rows(count, K, torch.bfloat16), random_linear(N, K, torch.bfloat16)
    out_TN, again_TN = (poisoned(count, N, dtype=torch.bfloat16) for _ in range(2))
    residual_linear(a_TK, linear, None, out_TN, config_for(count))
    a_TK[count - 1] = float("nan")
    residual_linear(a_TK, linear, None, again_TN, config_for(count))
    assert again_TN[-1].isnan().all()
    assert torch.equal(again_TN[:-1], out_TN[:-1])
