"""Bytes that the kernels of a mixture of experts move in a decode step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..kernels.triton.fusion import Mixture, runs_by_pair

__all__ = ["MixtureCost", "mixture_costs"]

_FLOAT32 = 4
_INT32 = 4


class MixtureCost(NamedTuple):
    """Bytes of an operation of a mixture, and its kernels."""

    name: str
    """A field of `triton.operations.Operations`."""
    weights: int
    """Bytes of the norm, of the router, or of the experts that the rows use, as
    `Experts.expected_experts`."""
    other: int
    kernels: int


def mixture_costs(
    fused: Mixture,
    matrix_bytes: Callable[[int, int], int],
    element_bytes: int,
    *,
    rows: int,
) -> list[MixtureCost]:
    """Return what the operations of a mixture move, in order.

    Args:
        fused: the mixture with its norms.
        matrix_bytes: (output features, input features) -> bytes of a stored weight.
        element_bytes: of an activation.
        rows: that decode.

    Unless each pair of a row and an expert is computed by itself, pairs are sorted by expert, and
    their products written as float32.
    """
    op = fused.experts
    hidden, features = op.router.shape[1], op.activate.features
    expert = matrix_bytes(2 * features, hidden) + matrix_bytes(hidden, features)
    by_pair = runs_by_pair(op, rows, expert)
    biases = sum(p.elements for p in (op.gate_up_bias, op.down_bias) if p is not None) // op.total
    used = op.expected_experts(rows) * (expert + biases * element_bytes)
    router = op.router.elements * element_bytes
    if op.router_bias is not None:
        router += op.router_bias.elements * element_bytes
    if op.correction is not None:
        router += op.correction.elements * _FLOAT32
    state = rows * hidden * element_bytes
    pairs = rows * op.per_token
    choice = rows * op.routed * _FLOAT32 + pairs * (_FLOAT32 + _INT32)
    moved = choice + 2 * pairs * features * element_bytes + 3 * state
    if not by_pair:
        moved += 2 * pairs * hidden * _FLOAT32 + 2 * pairs * _INT32
    norms = [
        0 if norm is None else norm.weight.elements * element_bytes
        for norm in (fused.norm, fused.output_norm)
    ]
    costs = {
        "norm_rows": (norms[0], 2 * state, 1),
        "route": (router, state + choice + rows * op.routed * _FLOAT32, 2),
        "experts": (round(used) + norms[1], moved, 2 if by_pair else 4),
    }
    return [MixtureCost(name, *costs[name]) for name in fused.operations]
