"""A linear layer that is added to the rows before it: the second half of an MLP (down).

Shapes: T rows, K input features, N output features.
"""

from __future__ import annotations

from torch import Tensor

from .linear import GpuLinear, LinearConfig, reference_linear
from .linear_dispatch import dispatch_linear

__all__ = ["reference_residual_linear", "residual_linear"]


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
