"""The MLP of a decoder layer as operations."""

from __future__ import annotations

from collections.abc import Iterator

from ..kernels.ops.layer_operations import Activate, ActivationName, Operation
from .config import ModelConfig
from .plan_operations import linear

__all__ = ["activate", "gated_mlp"]

_ACTIVATIONS: dict[str, ActivationName] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def gated_mlp(config: ModelConfig) -> Iterator[Operation]:
    """A gated MLP (Shazeer 2020, "GLU Variants Improve Transformer")."""
    family = config.family
    hidden, inner = config.hidden_size, config.intermediate_size

    def biased(part: str) -> bool:
        return config.mlp_bias

    rows = 2 * inner // len(family.gate_up)
    gate_up = dict.fromkeys(family.gate_up, rows)
    yield linear("gate_up", gate_up, hidden, biased, split=(inner, inner))
    yield activate(config, inner)
    yield linear("down", {family.down: hidden}, inner, biased)


def activate(config: ModelConfig, features: int) -> Activate:
    """The activation of an MLP, or of an expert, with so many features."""
    function = _ACTIVATIONS[config.hidden_act]
    if not config.swiglu_limit:
        return Activate(name="activate", function=function, features=features)
    return Activate(
        name="activate",
        function=function,
        features=features,
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
        up_offset=1.0,
    )
