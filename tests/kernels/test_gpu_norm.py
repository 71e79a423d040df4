"""The norm by itself, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.triton.linear import Pending
from stepgraph.runtime.kernels.triton.rowwise import norm_rows, reference_norm_rows

from ..rigs.gpu_linear_rig import DTYPES, error, poisoned, random_norm, rows, tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("features", [21, 64, 5000])
def test_norm_rows(features: int, offset: bool, dtype: torch.dtype) -> None:
    x_TD, norm = rows(3, features, dtype), random_norm(features, dtype, offset=offset)
    out_TD = poisoned(3, features, dtype=dtype)
    norm_rows(x_TD, norm, out_TD)
    assert error(out_TD, reference_norm_rows(x_TD, norm)) < tolerance(dtype)


@pytest.mark.parametrize("features", [21, 5000])
def test_what_is_pending_is_added_and_kept(features: int) -> None:
    dtype = torch.bfloat16
    x_TD, delta_TD = rows(3, features, dtype), rows(3, features, dtype)
    norm, post = random_norm(features, dtype), random_norm(features, dtype, offset=True)
    out_TD, sum_TD = (poisoned(3, features, dtype=dtype) for _ in range(2))
    norm_rows(x_TD, norm, out_TD, Pending(delta_TD, post, sum_TD))
    expected = torch.empty_like(sum_TD)
    pending = Pending(delta_TD, post, expected)
    assert error(out_TD, reference_norm_rows(x_TD, norm, pending)) < 1e-2
    torch.testing.assert_close(sum_TD, expected)
