"""A linear layer that is added to its residual, whatever carries it out, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.triton.linear import LIBRARY, LinearConfig
from stepgraph.runtime.kernels.triton.residual_linear import (
    reference_residual_linear,
    residual_linear,
)

from .gpu_linear_rig import STORAGES, cases, error, poisoned, random_linear, rows, tolerance

K, N = 37, 21


FEW = LinearConfig(8, 16)
ROWS = LinearConfig(16, 16, kind="rows", stages=3)
PARTS = LinearConfig(16, 16, kind="rows", stages=3, splits=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("count", "config", "dtype"), cases(FEW, ROWS, PARTS, LIBRARY))
def test_odd_shapes(count: int, config: LinearConfig, dtype: torch.dtype) -> None:
    a_TK, linear = rows(count, K, dtype), random_linear(N, K, dtype, bias=True)
    out_TN, residual_TN = poisoned(count, N, dtype=dtype), rows(count, N, dtype)
    residual_linear(a_TK, linear, residual_TN, out_TN, config)
    expected = reference_residual_linear(a_TK, linear, residual_TN)
    assert error(out_TN, expected) < tolerance(dtype)


@pytest.mark.parametrize(("count", "config"), [(3, FEW), (8, ROWS), (8, PARTS), (8, LIBRARY)])
def test_without_a_residual(count: int, config: LinearConfig) -> None:
    a_TK, linear = rows(count, K, torch.float32), random_linear(N, K, torch.float32)
    out_TN = poisoned(count, N, dtype=torch.float32)
    residual_linear(a_TK, linear, None, out_TN, config)
    assert error(out_TN, a_TK.double() @ linear.weight.double().T) < 1e-5


@pytest.mark.parametrize(
    ("count", "config"), [(1, FEW), (5, ROWS), (5, PARTS), (5, LIBRARY), (1, LIBRARY)]
)
def test_the_residual_may_be_what_is_written(count: int, config: LinearConfig) -> None:
    a_TK, linear = rows(count, K, torch.bfloat16), random_linear(N, K, torch.bfloat16)
    x_TN = rows(count, N, torch.bfloat16)
    expected = reference_residual_linear(a_TK, linear, x_TN.clone())
    residual_linear(a_TK, linear, x_TN, x_TN, config)
    assert error(x_TN, expected) < 1e-2


@pytest.mark.sampled(7)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("k", [256, 37])
@pytest.mark.parametrize(
    ("count", "config"),
    [
        (1, LinearConfig(8, 128)),
        (2, LinearConfig(8, 128)),
        (8, LinearConfig(16, 128, kind="rows", stages=2)),
        (17, LinearConfig(16, 64, kind="rows", stages=2, splits=2)),
        (5, LIBRARY),
    ],
)
def test_weights_of_8_bits(count: int, config: LinearConfig, k: int, storage: str) -> None:
    a_TK, residual_TN = rows(count, k, torch.float16), rows(count, N, torch.float16)
    linear = random_linear(N, k, torch.float16, storage)
    out_TN = poisoned(count, N, dtype=torch.float16)
    residual_linear(a_TK, linear, residual_TN, out_TN, config)
    expected = reference_residual_linear(a_TK, linear, residual_TN)
    assert error(out_TN, expected) < tolerance(torch.float16)


@pytest.mark.parametrize(("count", "config"), [(3, FEW), (6, PARTS)])
def test_a_row_is_its_own(count: int, config: LinearConfig) -> None:
    a_TK, linear = rows(count, K, torch.bfloat16), random_linear(N, K, torch.bfloat16)
    out_TN, again_TN = (poisoned(count, N, dtype=torch.bfloat16) for _ in range(2))
    residual_linear(a_TK, linear, None, out_TN, config)
    a_TK[count - 1] = float("nan")
    residual_linear(a_TK, linear, None, again_TN, config)
    assert again_TN[-1].isnan().all()
    assert torch.equal(again_TN[:-1], out_TN[:-1])
