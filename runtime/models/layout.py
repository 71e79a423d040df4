"""Maps the parameters of a model to the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import torch

from ..kernels import Kernels
from ..kernels.ops.expert_operations import Experts
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.ops.parameter import Cut, Parameter, Source
from .config import ModelConfig
from .decoder_model import DecoderConfig
from .plan import model_plan, plan_of

__all__ = [
    "Cut",
    "Parameter",
    "Source",
    "fused_layout",
    "parameter_bytes",
    "plan_weights_per_step",
    "weights_per_step",
]


def fused_layout(config: ModelConfig) -> dict[str, Parameter]:
    """Return the parameters of the model by our name, in the order a forward pass needs them.

    Each says which tensors of a Hugging Face checkpoint make it, in which order, and their shapes.
    With tied embeddings there is no `lm_head.weight`.
    """
    return {parameter.name: parameter for parameter in model_plan(config).parameters()}


def weights_per_step(config: DecoderConfig) -> int:
    """Return how many parameters a token is multiplied with, however they are stored.

    Of experts these are the chosen and the shared ones. An untied input embedding is left out: a
    step reads one of its rows per sequence.
    """
    return plan_weights_per_step(plan_of(config))


def plan_weights_per_step(plan: ModelPlan) -> int:
    """Return the same for a plan, which may be that of one rank of a tensor-parallel group."""
    unread = 0 if plan.tied else plan.embedding.elements
    for layer in plan.layers:
        for op in layer.operations:
            if isinstance(op, Experts):
                unused = op.total - op.per_token
                unread += (op.gate_up.elements + op.down.elements) * unused // op.total
    return sum(parameter.elements for parameter in plan.parameters()) - unread


def parameter_bytes(parameter: Parameter, kernels: Kernels, dtype: torch.dtype) -> int:
    """Return the bytes of a parameter as the kernels store it."""
    if not parameter.is_matrix:
        return parameter.elements * (parameter.dtype or dtype).itemsize
    rows, columns = parameter.shape
    return kernels.stored_bytes(rows, columns, dtype, parameter.matrices)
