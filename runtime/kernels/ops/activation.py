"""Gated activations in plain PyTorch. Shapes: T tokens, F features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .layer_operations import Activate

__all__ = ["gated_activation"]

Gated = Callable[[Tensor, Tensor], Tensor]


def gated_activation(operation: Activate) -> Gated:
    """Return the function of gate and up, `[T, F]` each, that an operation computes."""
    activate = _function(operation)
    limit, offset = operation.limit, operation.up_offset
    if not limit and not offset:
        return lambda gate_TF, up_TF: activate(gate_TF) * up_TF

    def clamped(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        if limit:
            gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
        return activate(gate_TF) * (up_TF + offset)

    return clamped


def _function(operation: Activate) -> Callable[[Tensor], Tensor]:
    alpha = operation.alpha
    if operation.function == "gelu_tanh":
        return lambda gate_TF: F.gelu(gate_TF, approximate="tanh")
    if alpha == 1.0:
        return F.silu
    return lambda gate_TF: gate_TF * torch.sigmoid(alpha * gate_TF)
