"""The sum of a product's parts by itself, against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.triton.row_product import sum_parts

from ..rigs.gpu_linear_rig import DEVICE, DTYPES, error, poisoned, rows, tolerance
from ..rigs.gpu_references import reference_sum_parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("count", "n", "parts"), [(5, 37, 1), (8, 600, 3), (1, 1, 2)])
def test_sums_of_parts(count: int, n: int, parts: int, gated: bool, dtype: torch.dtype) -> None:
    width = 2 * n if gated else n
    parts_STN = rows(parts * count, width, torch.float32).view(parts, count, width)
    scales, bias = torch.rand(width, device=DEVICE) + 0.5, rows(1, width, dtype)[0]
    residual_TN = None if gated else rows(count, n, dtype)
    for ends in ((scales, bias, residual_TN), (None, None, None)):
        out_TN = poisoned(count, n, dtype=dtype)
        sum_parts(parts_STN, out_TN, *ends, gated=gated, gelu=True)
        expected_TN = reference_sum_parts(parts_STN, dtype, *ends, gated=gated, gelu=True)
        assert error(out_TN, expected_TN) < tolerance(dtype)


def test_one_part_in_the_dtype_of_the_model_is_added_in_place() -> None:
    product_TN, residual_TN = (rows(6, 70, torch.bfloat16) for _ in range(2))
    expected_TN = residual_TN + product_TN
    sum_parts(product_TN[None], residual_TN, residual_TN=residual_TN)
    assert torch.equal(residual_TN, expected_TN)
