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

from .linear import GpuLinear, LinearConfig
from .linear_kernels import launch_linear
from .residual_linear import reference_residual_linear

__all__ = ["combine", "combine_output", "reference_combine", "reference_combine_output"]


def combine(acc_THSE: Tensor, max_THS: Tensor, sum_THS: Tensor, out_TK: Tensor) -> None:
    """What the splits make together, `[T, H * E]`, rounded to the dtype of `out_TK`.

    All float32 but `out_TK`, contiguous. Of a split without positions the maximum is -inf, the sum
    0 and `acc_THSE` anything; at least one split of each row and head has positions.
    """
    out_TK.copy_(reference_combine(acc_THSE, max_THS, sum_THS))


def combine_output(
    acc_THSE: Tensor,
    max_THS: Tensor,
    sum_THS: Tensor,
    linear: GpuLinear,
    residual_TN: Tensor | None,
    out_TN: Tensor,
    attended_TK: Tensor,
    config: LinearConfig | None = None,
) -> None:
    """`out = residual + linear(combined)`, rounded as `residual_linear` does, or the product alone.

    `attended_TK` is work space in the model's dtype: where each program of the product would read
    too much of the splits, a kernel of its own combines them into it.
    """
    launch_linear(
        "combine_output",
        acc_THSE,
        linear,
        out_TN,
        config,
        splits=(max_THS, sum_THS),
        residual_TN=residual_TN,
    )


def reference_combine(acc_THSE: Tensor, max_THS: Tensor, sum_THS: Tensor) -> Tensor:
    """What `combine` does, in plain torch, in float32."""
    weight_THS = torch.exp2(max_THS - max_THS.amax(-1, keepdim=True))
    weight_THS = torch.where(sum_THS > 0, weight_THS, 0.0)
    acc_THSE = torch.where(weight_THS[..., None] > 0, acc_THSE, 0.0) * weight_THS[..., None]
    total_TH = (weight_THS * sum_THS).sum(-1)
    return (acc_THSE.sum(2) / total_TH[..., None]).flatten(1)


def reference_combine_output(
    acc_THSE: Tensor,
    max_THS: Tensor,
    sum_THS: Tensor,
    linear: GpuLinear,
    residual_TN: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """What `combine_output` does, in plain torch, for activations of `dtype`."""
    attended_TK = reference_combine(acc_THSE, max_THS, sum_THS).to(dtype)
    return reference_residual_linear(attended_TK, linear, residual_TN)
