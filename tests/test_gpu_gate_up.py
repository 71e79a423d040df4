"""act(gate) * up over normed rows, whatever carries it out, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.triton.activation import activate_rows, reference_activate_rows
from stepgraph.runtime.kernels.triton.gate_up import gate_up, reference_gate_up
from stepgraph.runtime.kernels.triton.linear import LIBRARY, LinearConfig, Pending

from .gpu_linear_rig import (
    DTYPES,
    STORAGES,
    cases,
    error,
    poisoned,
    random_linear,
    random_norm,
    rows,
    tolerance,
)

K, F = 21, 37


FEW = LinearConfig(8, 64)
ROWS = LinearConfig(8, 16, kind="rows", stages=2)
PARTS = LinearConfig(16, 16, kind="rows", stages=2, splits=2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("count", "config", "dtype"), cases(FEW, ROWS, PARTS, LIBRARY))
def test_odd_shapes(count: int, config: LinearConfig, gelu: bool, dtype: torch.dtype) -> None:
    x_TK, norm = rows(count, K, dtype), random_norm(K, dtype)
    linear = random_linear(2 * F, K, dtype, bias=True)
    out_TF = poisoned(count, F, dtype=dtype)
    gate_up(x_TK, norm, linear, out_TF, gelu=gelu, config=config)
    expected = reference_gate_up(x_TK, norm, linear, gelu=gelu)
    assert error(out_TF, expected) < tolerance(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("count", "config"),
    [
        (1, LinearConfig(16, 128)),
        (17, LinearConfig(16, 128, kind="rows", stages=2)),
        (5, LinearConfig(16, 128, kind="rows", stages=2, splits=2)),
        (5, LIBRARY),
    ],
)
def test_weights_of_8_bits(count: int, config: LinearConfig, storage: str) -> None:
    x_TK, norm = rows(count, 256, torch.bfloat16), random_norm(256, torch.bfloat16)
    linear = random_linear(2 * F, 256, torch.bfloat16, storage, bias=True)
    out_TF = poisoned(count, F, dtype=torch.bfloat16)
    gate_up(x_TK, norm, linear, out_TF, gelu=False, config=config)
    assert error(out_TF, reference_gate_up(x_TK, norm, linear, gelu=False)) < 1e-2


@pytest.mark.parametrize(("count", "config"), [(1, FEW), (5, ROWS), (5, LIBRARY)])
def test_what_is_pending_is_added_and_kept(count: int, config: LinearConfig) -> None:
    dtype = torch.bfloat16
    x_TK, delta_TK = rows(count, K, dtype), rows(count, K, dtype)
    norm, post = random_norm(K, dtype, offset=True), random_norm(K, dtype, offset=True)
    linear = random_linear(2 * F, K, dtype)
    out_TF, sum_TK = poisoned(count, F, dtype=dtype), poisoned(count, K, dtype=dtype)
    pending = Pending(delta_TK, post, sum_TK)
    gate_up(x_TK, norm, linear, out_TF, gelu=True, pending=pending, config=config)
    expected = torch.empty_like(sum_TK)
    pending = Pending(delta_TK, post, expected)
    reference_TF = reference_gate_up(x_TK, norm, linear, gelu=True, pending=pending)
    assert error(out_TF, reference_TF) < 1e-2
    torch.testing.assert_close(sum_TK, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_the_activation_by_itself(gelu: bool, dtype: torch.dtype) -> None:
    x_TF = rows(3, 2 * 1029, dtype) * 10
    out_TF = poisoned(3, 1029, dtype=dtype)
    activate_rows(x_TF, out_TF, gelu=gelu)
    assert error(out_TF, reference_activate_rows(x_TF, gelu=gelu)) < tolerance(dtype)
