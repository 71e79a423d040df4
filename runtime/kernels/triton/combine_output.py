"""Attention's output projection over what its splits left: combine, project, add.

Shapes: T rows, H query heads, S splits of a row's positions, E value head_dim, K = H * E input
features, N output features.

A split leaves a sum that is not normalised: acc = sum of 2**(score - m) * value, m the maximum of
its scores, l = sum of 2**(score - m). Of all splits together the result is
sum 2**(m_s - M) acc_s / sum 2**(m_s - M) l_s with M the maximum of m_s (flash decoding's second
pass; Dao et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import FEW_ROWS, GpuLinear, LinearConfig
from .linear_dispatch import dispatch_linear
from .residual_linear import reference_residual_linear
from .split_attention import Partials, reference_combine_splits
from .tuning import best_config

__all__ = [
    "combine_output",
    "product_combines",
    "reference_combine_output",
]

_SPLITS_TRAFFIC = 1.0
"""Bytes of splits that the programs of a product may read together, in those of its weight.

They come out of the L2 cache, which reads more than twice as fast as the memory, but are read only
after the wait, when weights are on their way already.
"""


def product_combines(acc_THSE: Tensor, linear: GpuLinear, dtype: torch.dtype) -> bool:
    """Whether to leave the splits to `combine_output`: its programs would not read too much.

    Else attention combines them (`decode_attention` with counters) for `residual_linear`: always
    for more than four rows, and where there is one split only, which needs no counting.

    Args:
        acc_THSE: as for `combine_output`; its shape counts.
        linear: the output projection.
        dtype: the model's.
    """
    rows, splits = acc_THSE.shape[0], acc_THSE.shape[2]
    if splits == 1 or rows > FEW_ROWS:
        return False
    weight = linear.weight
    sizes = (*weight.shape, dtype, weight.dtype, weight.device)
    config = best_config("combine_output", rows, *sizes)
    traffic = -(-weight.shape[0] // config.block_n) * acc_THSE.nbytes
    return config.block_k >= weight.shape[1] and traffic <= _SPLITS_TRAFFIC * weight.nbytes


def combine_output(
    acc_THSE: Tensor,
    max_THS: Tensor,
    sum_THS: Tensor,
    linear: GpuLinear,
    residual_TN: Tensor | None,
    out_TN: Tensor,
    config: LinearConfig | None = None,
    *,
    scale: float = 1.0,
) -> None:
    """`out = residual + scale * linear(combined)` as `residual_linear`, or the product alone.

    Splits are float32, all contiguous, and rows at most four. Of a split without positions the
    maximum is -inf, the sum 0 and `acc_THSE` anything; at least one split of each row and head has
    positions. The `parts` of a `config` are 0.
    """
    dispatch_linear(
        "combine_output",
        acc_THSE,
        linear,
        out_TN,
        config,
        splits=(max_THS, sum_THS),
        residual_TN=residual_TN,
        scale=scale,
    )


def reference_combine_output(
    acc_THSE: Tensor,
    max_THS: Tensor,
    sum_THS: Tensor,
    linear: GpuLinear,
    residual_TN: Tensor | None,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
) -> Tensor:
    """What `combine_output` does, in plain torch, for activations of `dtype`."""
    attended_TK = reference_combine_splits(Partials(acc_THSE, max_THS, sum_THS)).to(dtype)
    return reference_residual_linear(attended_TK, linear, residual_TN, scale=scale)
