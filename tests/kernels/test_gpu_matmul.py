"""Linear layers over many rows, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.triton.linear import reference_linear
from stepgraph.runtime.kernels.triton.matmul import library_linear

from ..rigs.gpu_linear_rig import DTYPES, STORAGES, error, poisoned, random_linear, rows, tolerance


@pytest.mark.parametrize("storage", ["model", *STORAGES])
@pytest.mark.parametrize(("count", "n", "k"), [(1, 37, 21), (40, 130, 256), (1040, 150, 70)])
def test_every_storage(count: int, n: int, k: int, storage: str) -> None:
    dtype = torch.bfloat16
    x_TK, linear = rows(count, k, dtype), random_linear(n, k, dtype, storage, bias=True)
    out_TN = poisoned(count, n, dtype=dtype)
    library_linear(x_TK, linear, out_TN)
    assert error(out_TN, reference_linear(x_TK, linear)) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype) -> None:
    x_TK, linear = rows(20, 100, dtype), random_linear(37, 100, dtype, "int8")
    x_TK[3] = float("nan")
    out_TN = poisoned(20, 37, dtype=dtype)
    library_linear(x_TK, linear, out_TN)
    assert out_TN[3].isnan().all()
    whole = torch.arange(20, device=x_TK.device) != 3
    assert error(out_TN[whole], reference_linear(x_TK, linear)[whole]) < tolerance(dtype)
