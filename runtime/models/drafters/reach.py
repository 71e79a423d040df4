"""Limits what the layers of a drafter attend to."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.ops.layer_operations import Attend
from ...kernels.ops.layer_plan import LayerPlan, ModelPlan

__all__ = ["within_window"]


def within_window(plan: ModelPlan, window: int | None) -> ModelPlan:
    """Return a plan whose layers attend to the last `window` tokens at most; None: unchanged."""
    if window is None:
        return plan

    def limited(layer: LayerPlan) -> LayerPlan:
        return LayerPlan(
            tuple(
                replace(op, window=min(filter(None, (op.window, window))))
                if isinstance(op, Attend)
                else op
                for op in layer.operations
            )
        )

    layers = {layer: limited(layer) for layer in dict.fromkeys(plan.layers)}
    return replace(plan, layers=tuple(layers[layer] for layer in plan.layers))
