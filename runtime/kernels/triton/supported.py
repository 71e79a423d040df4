"""The operations and traits that the Triton kernels of a layer support. Imports no triton."""

from __future__ import annotations

from ..ops.expert_operations import Experts
from ..ops.layer_operations import (
    Activate,
    AllReduce,
    Attend,
    Known,
    Linear,
    Norm,
    QKNorm,
    Residual,
    Rotate,
)

__all__ = ["SUPPORTED"]

SUPPORTED: Known = {
    Norm: frozenset({"offset"}),
    Linear: frozenset({"bias", "split", "unit"}),
    QKNorm: frozenset({"offset", "all_heads"}),
    Rotate: frozenset(),
    Attend: frozenset({"window", "chunk", "softcap", "sinks", "temperature"}),
    Activate: frozenset({"limit", "alpha", "up_offset"}),
    AllReduce: frozenset(),
    Residual: frozenset({"scale"}),
    Experts: frozenset(
        {
            "router_bias",
            "correction",
            "gate_up_bias",
            "down_bias",
            "shared",
            "scaled_inputs",
        }
    ),
}
"""Traits of each kind of operation."""
