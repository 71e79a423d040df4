"""The gated half of an MLP over normed rows: activation(gate) * up in one kernel.

Shapes: T rows, K input features (hidden_size), F features of gate and of up.
"""

from __future__ import annotations

from torch import Tensor

from .activation import reference_activate_rows
from .linear import GpuLinear, GpuNorm, LinearConfig, Pending
from .linear_dispatch import dispatch_linear
from .norm_linear import reference_norm_linear

__all__ = ["gate_up", "reference_gate_up"]


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
