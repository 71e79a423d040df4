"""Attention's output projection over what its splits left: combine, project, add.

Shapes: T rows, H query heads, S splits of a row's positions, E value head_dim, K = H * E input
features, N output features.

A split leaves a sum that is not normalised: acc = sum of 2**(score - m) * value, m the maximum of
its scores, l = sum of 2**(score - m). Of all splits together the result is
sum 2**(m_s - M) acc_s / sum 2**(m_s - M) l_s with M the maximum of m_s (flash decoding's second
pass; Dao et al. 2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, let_dependents_start, num_multiprocessors, wait_for_inputs
from .linear import FEW_ROWS, GpuLinear, LinearConfig, default_config
from .linear_kernels import launch_linear
from .linear_tiles import combined_slice
from .residual_linear import reference_residual_linear, residual_linear
from .tuning import best_config

__all__ = ["combine", "combine_output", "reference_combine", "reference_combine_output"]

_SPLITS_TRAFFIC = 1.0
"""Bytes of splits that the programs of a product may read together, in those of its weight.

They come out of the L2 cache, which reads more than twice as fast as the memory, but are read only
after the wait, when weights are on their way already.
"""


@triton.jit
def combine_splits(  # type: ignore[no-untyped-def]
    acc_ptr, max_ptr, sum_ptr, out_ptr, K: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr,
    GROUPS: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program combines `GROUPS * V` features of one row."""
    let_dependents_start(PDL)
    row = tl.program_id(0)
    first = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]) * V
    k = first + tl.arange(0, V)[None, :]
    wait_for_inputs(PDL)
    EVEN: tl.constexpr = K % (GROUPS * V) == 0
    out = combined_slice(acc_ptr, max_ptr, sum_ptr, row, first, k, K, E, SPLITS, EVEN)
    tl.store(out_ptr + row * K + k, out.to(out_ptr.dtype.element_ty), mask=k < K)


def combine(acc_THSE: Tensor, max_THS: Tensor, sum_THS: Tensor, out_TK: Tensor) -> None:
    """What the splits make together, `[T, H * E]`, rounded to the dtype of `out_TK`.

    All float32 but `out_TK`, contiguous. Of a split without positions the maximum is -inf, the sum
    0 and `acc_THSE` anything; at least one split of each row and head has positions.
    """
    rows, heads, splits, head_dim = acc_THSE.shape
    features = heads * head_dim
    vector = math.gcd(4, head_dim)  # 16 bytes
    block = 128 * vector
    launch(
        combine_splits,
        (rows, -(-features // block)),
        acc_THSE,
        max_THS,
        sum_THS,
        out_TK,
        K=features,
        E=head_dim,
        SPLITS=splits,
        GROUPS=128,
        V=vector,
    )


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

    `attended_TK` is work space in the model's dtype: where the programs of the product would read
    too much of the splits, or rows are more than four, a kernel of its own combines them into it.
    With a `config`, whose `parts` are 0, the product's programs do.
    """
    rows, n = out_TN.shape
    weight = linear.weight
    if config is None and rows <= FEW_ROWS:
        config = best_config(
            "combine_output",
            rows,
            n,
            weight.shape[1],
            out_TN.dtype,
            weight.dtype,
            weight.device,
        )
    if config is None and rows <= FEW_ROWS:
        multiprocessors = num_multiprocessors(weight.device)
        sizes = (*weight.shape, weight.element_size(), multiprocessors)
        config = default_config("combine_output", rows, *sizes)
        traffic = -(-n // config.block_n) * acc_THSE.nbytes
        if config.block_k < weight.shape[1] or traffic > _SPLITS_TRAFFIC * weight.nbytes:
            config = None
    if config is None:
        combine(acc_THSE, max_THS, sum_THS, attended_TK)
        residual_linear(attended_TK, linear, residual_TN, out_TN)
        return
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
