"""Chooses what computes a linear layer of a decode step: one kernel, several, or the library.

Shapes: T rows, N output features, K input features.

The operations (`norm_linear.py` and others) have one signature for every `LinearConfig`; here the
kind selects what runs. Kind `few_rows`: one kernel, `linear_of_few_rows`. Kind `rows`: the norm, a
product over normed rows and, with several parts, their sum. Kind `library`: the norm, the library's
product, and its epilogue (activation or residual).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import activate_rows
from .linear import STORAGES, GpuLinear, GpuNorm, LinearConfig, Pending, row_class
from .linear_kernels import call_few_rows
from .matmul import library_linear
from .norm import norm_rows
from .row_product import call_row_product, sum_parts
from .tuning import best_config

__all__ = ["dispatch_linear"]


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
