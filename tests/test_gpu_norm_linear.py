"""A linear layer over normed rows, whatever carries it out, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.triton.linear import LIBRARY, GpuLinear, LinearConfig, Pending
from stepgraph.runtime.kernels.triton.norm_linear import norm_linear, reference_norm_linear

from .gpu_linear_rig import (
    DEVICE,
    STORAGES,
    cases,
    error,
    poisoned,
    random_linear,
    random_norm,
    rows,
    tolerance,
)

FEW = LinearConfig(block_n=8, block_k=64)
ROWS = LinearConfig(16, 16, kind="rows", stages=2)
PARTS = LinearConfig(16, 16, kind="rows", stages=2, splits=4)
K, N = 21, 37


def config_for(count: int) -> LinearConfig:
    return FEW if count <= 4 else PARTS


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("count", "config", "dtype"), cases(FEW, ROWS, PARTS, LIBRARY))
def test_odd_shapes(count: int, config: LinearConfig, dtype: torch.dtype) -> None:
    """The last part of the input features is empty, the one before cut off."""
    x_TK, norm = rows(count, K, dtype), random_norm(K, dtype)
    linear = random_linear(N, K, dtype, bias=True)
    out_TN = poisoned(count, N, dtype=dtype)
    norm_linear(x_TK, norm, linear, out_TN, config=config)
    assert error(out_TN, reference_norm_linear(x_TK, norm, linear)) < tolerance(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [1, 3, 5, 17])
@pytest.mark.parametrize("offset", [False, True])
def test_against_float64(count: int, offset: bool) -> None:
    x_TK, norm = rows(count, 300, torch.bfloat16), random_norm(300, torch.bfloat16, offset=offset)
    linear = random_linear(N, 300, torch.bfloat16)
    out_TN = poisoned(count, N, dtype=torch.bfloat16)
    norm_linear(x_TK, norm, linear, out_TN, config=config_for(count))
    x = x_TK.double()
    x = x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
    x = x * (norm.weight.double() + offset)
    assert error(out_TN, x @ linear.weight.double().T) < 1e-2


@pytest.mark.sampled(7)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("k", [21, 256, 300])
@pytest.mark.parametrize(
    ("count", "config"),
    [
        (1, LinearConfig(32, 64)),
        (8, LinearConfig(16, 64, kind="rows", stages=2)),
        (32, LinearConfig(32, 256, kind="rows", stages=2, splits=2)),
        (5, LIBRARY),
    ],
)
def test_weights_of_8_bits(count: int, config: LinearConfig, k: int, storage: str) -> None:
    x_TK, norm = rows(count, k, torch.bfloat16), random_norm(k, torch.bfloat16)
    linear = random_linear(N, k, torch.bfloat16, storage, bias=True)
    out_TN = poisoned(count, N, dtype=torch.bfloat16)
    norm_linear(x_TK, norm, linear, out_TN, config=config)
    assert error(out_TN, reference_norm_linear(x_TK, norm, linear)) < 1e-2


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_what_is_pending_is_added_and_kept(count: int, offset: bool, normed: bool) -> None:
    dtype, k = torch.bfloat16, 150
    x_TK, delta_TK = rows(count, k, dtype), rows(count, k, dtype)
    norm = random_norm(k, dtype, offset=offset) if normed else None
    post = random_norm(k, dtype, offset=offset)
    linear = random_linear(N, k, dtype)
    out_TN, sum_TK = poisoned(count, N, dtype=dtype), poisoned(count, k, dtype=dtype)
    pending = Pending(delta_TK, post, sum_TK)
    norm_linear(x_TK, norm, linear, out_TN, pending, config_for(count))
    expected = torch.empty_like(sum_TK)
    pending = Pending(delta_TK, post, expected)
    assert error(out_TN, reference_norm_linear(x_TK, norm, linear, pending)) < 1e-2
    torch.testing.assert_close(sum_TK, expected)


@pytest.mark.parametrize("count", [3, 6])
def test_a_row_is_its_own(count: int) -> None:
    """NaN in one row, recycled memory behind it, and other rows change nothing in a row."""
    dtype = torch.bfloat16
    x_TK, norm, linear = rows(count, K, dtype), random_norm(K, dtype), random_linear(N, K, dtype)
    memory = torch.cat([x_TK, poisoned(64, K, dtype=dtype)])
    alone_TN, out_TN = poisoned(count, N, dtype=dtype), poisoned(count, N, dtype=dtype)
    norm_linear(memory[:count], norm, linear, alone_TN, config=config_for(count))
    assert not alone_TN.isnan().any()
    memory[1] = float("nan")
    memory[0] = 1e30
    norm_linear(memory[:count], norm, linear, out_TN, config=config_for(count))
    assert out_TN[1].isnan().all()
    assert torch.equal(out_TN[2:], alone_TN[2:])


def test_what_does_not_fit_is_an_error() -> None:
    x_TK, linear = rows(33, K, torch.bfloat16), random_linear(N, K, torch.bfloat16)
    with pytest.raises(ValueError, match="at most 32 rows"):
        norm_linear(x_TK, None, linear, poisoned(33, N, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="norm_linear: a weight of"):
        norm_linear(x_TK[:1], None, linear, poisoned(1, N + 1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="5 rows need a configuration of kind 'rows'"):
        norm_linear(x_TK[:5], None, linear, poisoned(5, N, dtype=torch.bfloat16), config=FEW)
    wrong = GpuLinear(torch.zeros(N, K, dtype=torch.int32, device=DEVICE))
    with pytest.raises(TypeError, match="int32"):
        norm_linear(x_TK[:1], None, wrong, poisoned(1, N, dtype=torch.bfloat16))
