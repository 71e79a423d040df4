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
) -> None:
    """`out = residual + linear(a)`, the product rounded before it is added, or the product alone.

    All contiguous, activations in the model's dtype; at most 32 rows. `out_TN` may be
    `residual_TN` itself.
    """
    dispatch_linear("residual_linear", a_TK, linear, out_TN, config, residual_TN=residual_TN)


def reference_residual_linear(
    a_TK: Tensor, linear: GpuLinear, residual_TN: Tensor | None
) -> Tensor:
    """What `residual_linear` does, in plain torch."""
    product_TN = reference_linear(a_TK, linear)
    return product_TN if residual_TN is None else residual_TN + product_TN
