"""A linear layer over normed rows: the first kernel of a decoder layer (norm, then q, k and v).

Shapes: T rows, K input features, N output features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .linear import GpuLinear, LinearConfig, reference_linear

__all__ = [
    "Norm",
    "Pending",
    "norm_linear",
    "reference_norm",
    "reference_norm_linear",
]


class Norm(NamedTuple):
    """A root-mean-square norm, rounded as `models.modules.RMSNorm` rounds."""

    weight: Tensor
    """`[K]` in the model's dtype."""
    eps: float
    offset: bool = False
    """It multiplies by one plus the weight, in float32."""


class Pending(NamedTuple):
    """What a layer has yet to add to its rows: `x + norm(delta)` goes into `out`.

    Of families that norm what attention and the MLP return.
    """

    delta: Tensor
    """`[T, K]`."""
    norm: Norm
    out: Tensor
    """`[T, K]`, no memory that this kernel reads: others read x while one writes this."""


def norm_linear(
    x_TK: Tensor,
    norm: Norm | None,
    linear: GpuLinear,
    out_TN: Tensor,
    pending: Pending | None = None,
    config: LinearConfig | None = None,
) -> None:
    """`out = linear(norm(x))`, or of `x + pending.norm(pending.delta)`, which is kept.

    All contiguous; activations in the model's dtype; at most 64 rows. Without `norm`, of the rows
    as they are.
    """
    out_TN.copy_(reference_norm_linear(x_TK, norm, linear, pending))


def reference_norm(x_TK: Tensor, norm: Norm | None) -> Tensor:
    """`models.modules.RMSNorm`; the rows themselves without one."""
    if norm is None:
        return x_TK
    x = x_TK.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (x * (1.0 + norm.weight.float())).to(x_TK.dtype)
    return norm.weight * x.to(x_TK.dtype)


def reference_norm_linear(
    x_TK: Tensor, norm: Norm | None, linear: GpuLinear, pending: Pending | None = None
) -> Tensor:
    """What `norm_linear` does, in plain torch."""
    if pending is not None:
        x_TK = x_TK + reference_norm(pending.delta, pending.norm)
        pending.out.copy_(x_TK)
    return reference_linear(reference_norm(x_TK, norm), linear)
