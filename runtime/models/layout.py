"""Maps the parameters of a model to the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from ..kernels.ops.layer_operations import Parameter
from .config import ModelConfig
from .plan import model_plan

__all__ = ["Parameter", "fused_layout", "weights_per_step"]


def fused_layout(config: ModelConfig) -> dict[str, Parameter]:
    """Return the parameters of the model by our name, in the order a forward pass needs them.

    Each says which tensors of a Hugging Face checkpoint make it, in which order, and their shapes.
    With tied embeddings there is no `lm_head.weight`.
    """
    return {parameter.name: parameter for parameter in model_plan(config).parameters()}


def weights_per_step(config: ModelConfig) -> int:
    """Return how many parameters a decode step multiplies with, however they are stored.

    An untied input embedding is left out: a step reads one of its rows per sequence.
    """
    plan = model_plan(config)
    unread = 0 if plan.tied else plan.embedding.elements
    return sum(parameter.elements for parameter in plan.parameters()) - unread
