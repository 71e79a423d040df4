"""How many experts a decode step reads, as text."""

from __future__ import annotations

from collections import Counter

from ..kernels.ops.expert_operations import Experts
from ..kernels.ops.layer_plan import ModelPlan

__all__ = ["describe_experts"]


def describe_experts(plan: ModelPlan, rows: int) -> list[str]:
    """Return a line for each kind of mixture: how many experts a step of `rows` rows reads."""
    counts = Counter(
        (op.routed, op.routing.top_k, op.shared, op.expected_experts(rows))
        for layer in plan.layers
        for op in layer.operations
        if isinstance(op, Experts)
    )
    return [
        f"{layers} layers with {routed} experts, {top_k} of them a token"
        + (f", and {shared} shared" if shared else "")
        + f": a step of {rows} {'row' if rows == 1 else 'rows'} reads {expected:.1f} of"
        f" {routed + shared} on average, if all are equally likely"
        for (routed, top_k, shared, expected), layers in counts.items()
    ]
