"""A linear layer over normed rows: the first kernel of a decoder layer (norm, then q, k and v).

Shapes: T rows, K input features, N output features.
"""

from __future__ import annotations

from torch import Tensor

from .linear import GpuLinear, GpuNorm, LinearConfig, Pending, reference_linear
from .linear_dispatch import dispatch_linear
from .norm import reference_norm_rows

__all__ = ["norm_linear", "reference_norm_linear"]


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
