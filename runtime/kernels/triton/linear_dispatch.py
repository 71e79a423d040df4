"""The linear layers of a decode step, and what computes each: one kernel, several, or the library.

Shapes: T rows, N output features, K input features, F features of gate and of up; H query heads, S
splits of a row's positions, E value head_dim, K = H * E after attention.

The operations have one signature for every `LinearConfig`; in `dispatch_linear` the kind selects
what runs. Kind `few_rows`: one kernel, `linear_of_few_rows`. Kind `rows`: the norm, a product over
normed rows and, with several parts, their sum. Kind `library`: the norm, the library's product, and
its epilogue (activation or residual).

A split of attention leaves a sum that is not normalised: acc = sum of 2**(score - m) * value, m the
maximum of its scores, l = sum of 2**(score - m). Of all splits together the result is
sum 2**(m_s - M) acc_s / sum 2**(m_s - M) l_s with M the maximum of m_s (flash decoding's second
pass; Dao et al. 2023).

"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import (
    FEW_ROWS,
    STORAGES,
    GpuLinear,
    GpuNorm,
    LinearConfig,
    Pending,
    reference_linear,
    row_class,
)
from .linear_kernels import call_few_rows
from .matmul import library_linear
from .row_product import call_row_product, sum_parts
from .rowwise import activate_rows, norm_rows, reference_activate_rows, reference_norm_rows
from .split_attention import Partials, reference_combine_splits
from .tuning import best_config

__all__ = [
    "combine_output",
    "dispatch_linear",
    "gate_up",
    "norm_linear",
    "product_combines",
    "reference_combine_output",
    "reference_gate_up",
    "reference_norm_linear",
    "reference_residual_linear",
    "residual_linear",
]


def dispatch_linear(
    name: str,
    x: Tensor,
    linear: GpuLinear,
    out_TN: Tensor,
    config: LinearConfig | None,
    *,
    norm: GpuNorm | None = None,
    pending: Pending | None = None,
    splits: tuple[Tensor, Tensor] | None = None,
    residual_TN: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
    best: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compute the product with a configuration, as the operation `name`.

    Args:
        name: of the operation.
        x: `[T, K]`; with `splits` their partial sums `[T, H, S, E]`.
        linear: `[2N, K]` if `gated`, else `[N, K]`.
        out_TN: written; its dtype is the model's.
        config: None: as tuned, or the default.
        norm: of the input.
        pending: added before.
        splits: maxima and sums `[T, H, S]` of attention's splits.
        residual_TN: what the product is added to.
        gated: the result is `act(gate) * up`.
        gelu: of the activation; else silu.
        scale: factor of results, rounded before and after; not if `gated`.
        softcap: results x become softcap * tanh(x / softcap); 0: they stay.
        best: for each row and program of the kernel the largest result and its feature, float32 and
            int32 `[T, programs]`, which are written.

    Raises ValueError for sizes that do not fit together, or more rows than the kernels take.
    """
    rows, n = out_TN.shape
    stored_n, k = linear.weight.shape
    if stored_n != n * (2 if gated else 1) or x[0].numel() != k * (
        1 if splits is None else splits[0].shape[2]
    ):
        raise ValueError(
            f"{name}: a weight of {tuple(linear.weight.shape)} does not map inputs of"
            f" {tuple(x.shape)} to outputs of {tuple(out_TN.shape)}"
        )
    if linear.weight.dtype not in STORAGES:
        raise TypeError(f"{name}: no kernel for weights of {linear.weight.dtype}")
    row_class(rows)
    if config is None:
        dtypes = (out_TN.dtype, linear.weight.dtype)
        config = best_config(name, rows, n, k, *dtypes, x.device, pending=pending is not None)
    if config.kind == "few_rows":
        call_few_rows(
            name,
            x,
            linear,
            out_TN,
            config,
            norm=norm,
            pending=pending,
            splits=splits,
            residual_TN=residual_TN,
            gated=gated,
            gelu=gelu,
            scale=scale,
            softcap=softcap,
            best=best,
        )
        return
    if splits is not None:
        raise ValueError(f"{name}: only kind 'few_rows' combines splits, not {config.kind!r}")
    if norm is not None or pending is not None:
        normed_TK = torch.empty_like(x)
        norm_rows(x, norm, normed_TK, pending)
        x = normed_TK
    if config.kind == "rows":
        call_row_product(
            name,
            x,
            linear,
            out_TN,
            config,
            residual_TN=residual_TN,
            gated=gated,
            gelu=gelu,
            scale=scale,
            softcap=softcap,
            best=best,
        )
        return
    assert best is None, "after the library the head calls best_of_chunks"
    if gated:
        product_TN = x.new_empty(rows, stored_n)
        library_linear(x, linear, product_TN)
        activate_rows(product_TN, out_TN, gelu=gelu)
    elif residual_TN is not None or scale != 1.0:
        # Not addmm, which copies the residual first and so calls as many kernels, and rounds once.
        product_TN = torch.empty_like(out_TN)
        library_linear(x, linear, product_TN)
        sum_parts(product_TN[None], out_TN, residual_TN=residual_TN, scale=scale)
    else:
        library_linear(x, linear, out_TN)


def norm_linear(
    x_TK: Tensor,
    norm: GpuNorm | None,
    linear: GpuLinear,
    out_TN: Tensor,
    pending: Pending | None = None,
    config: LinearConfig | None = None,
) -> None:
    """`out = linear(norm(x))`, or of `x + pending.norm(pending.delta)`, which is kept.

    All contiguous; activations in the model's dtype; at most 32 rows. Without `norm`, of the rows
    as they are.
    """
    dispatch_linear("norm_linear", x_TK, linear, out_TN, config, norm=norm, pending=pending)


def reference_norm_linear(
    x_TK: Tensor, norm: GpuNorm | None, linear: GpuLinear, pending: Pending | None = None
) -> Tensor:
    """What `norm_linear` does, in plain torch."""
    return reference_linear(reference_norm_rows(x_TK, norm, pending), linear)


def gate_up(
    x_TK: Tensor,
    norm: GpuNorm | None,
    linear: GpuLinear,
    out_TF: Tensor,
    *,
    gelu: bool,
    pending: Pending | None = None,
    config: LinearConfig | None = None,
) -> None:
    """`out = act(gate) * up` of `linear(norm(x))`, whose weight is `[2F, K]`, gate first.

    The activation is silu, or tanh's approximation of gelu. Gate and up, the activation and the
    product are rounded to the model's dtype each. `pending` as for `norm_linear`.
    """
    dispatch_linear(
        "gate_up",
        x_TK,
        linear,
        out_TF,
        config,
        norm=norm,
        pending=pending,
        gated=True,
        gelu=gelu,
    )


def reference_gate_up(
    x_TK: Tensor,
    norm: GpuNorm | None,
    linear: GpuLinear,
    *,
    gelu: bool,
    pending: Pending | None = None,
) -> Tensor:
    """What `gate_up` does, in plain torch."""
    product_TF = reference_norm_linear(x_TK, norm, linear, pending)
    return reference_activate_rows(product_TF, gelu=gelu)


def residual_linear(
    a_TK: Tensor,
    linear: GpuLinear,
    residual_TN: Tensor | None,
    out_TN: Tensor,
    config: LinearConfig | None = None,
    *,
    scale: float = 1.0,
) -> None:
    """`out = residual + scale * linear(a)`, both products rounded, or the scaled product alone.

    All contiguous, activations in the model's dtype; at most 32 rows. `out_TN` may be
    `residual_TN` itself.
    """
    product = ("residual_linear", a_TK, linear, out_TN, config)
    dispatch_linear(*product, residual_TN=residual_TN, scale=scale)


def reference_residual_linear(
    a_TK: Tensor, linear: GpuLinear, residual_TN: Tensor | None, *, scale: float = 1.0
) -> Tensor:
    """What `residual_linear` does, in plain torch."""
    product_TN = reference_linear(a_TK, linear) * scale
    return product_TN if residual_TN is None else residual_TN + product_TN


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
