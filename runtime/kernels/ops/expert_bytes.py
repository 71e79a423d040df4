"""Temporary memory of a mixture of experts in plain PyTorch."""

from __future__ import annotations

from .expert_operations import Experts
from .experts import GATHERED_ELEMENTS

__all__ = ["activation_bytes", "converted_bytes"]

_FLOAT32 = 4


def activation_bytes(op: Experts, hidden: int, itemsize: int) -> int:
    """Return the bytes of the largest tensors of one token, hidden states included.

    Args:
        op: the mixture.
        hidden: elements of a hidden state.
        itemsize: bytes of an element of the model's dtype.
    """
    routing = 6 * _FLOAT32 * op.routed + 4 * 8 * op.per_token
    products = 2 * _FLOAT32 * op.per_token * hidden
    # All tokens may have chosen one expert; its inner features are gate and up, and activated.
    inner = (itemsize + _FLOAT32) * (hidden + 4 * op.activate.features)
    return itemsize * 3 * hidden + routing + products + inner


def converted_bytes(
    op: Experts, hidden: int, itemsize: int, *, quantised: bool, on_cpu: bool
) -> int:
    """Return the bytes of the weights that `reference_experts` gathers and converts at once.

    Args:
        op: the mixture.
        hidden: elements of a hidden state.
        itemsize: bytes of an element of a stored weight.
        quantised: whether weights are stored in 8 bits.
        on_cpu: whether it runs on a CPU, expert by expert.
    """
    gate_up = 2 * op.activate.features * hidden
    if on_cpu:
        if quantised:
            return 2 * _FLOAT32 * gate_up
        return 0 if itemsize == _FLOAT32 else _FLOAT32 * gate_up // 2
    at_once = max(1, GATHERED_ELEMENTS // gate_up)
    return at_once * gate_up * (itemsize + _FLOAT32)
