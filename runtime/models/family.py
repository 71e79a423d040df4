"""What a decoder family is, and readers for the keys of its `config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError
from .experts_config import ExpertTraits
from .mtp_layout import MtpLayout

__all__ = [
    "LAYER_TYPES",
    "Family",
    "Json",
    "LayerNorms",
    "LayerType",
    "read_field",
    "read_optional",
]

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")

Json = Mapping[str, Any]
T = TypeVar("T")

_MOST_INT = 2**63 - 1


def _unchanged(config: Json) -> Json:
    return config


def _none(config: Json, layer: int) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms of a layer, by their names in a checkpoint; None: the layer has no such norm."""

    input: str | None = "input_layernorm"
    """Of the hidden states, before attention."""
    attention_output: str | None = None
    """Of the output of attention, before the residual addition."""
    mlp: str | None = "post_attention_layernorm"
    """Of the hidden states, before the MLP."""
    mlp_output: str | None = None
    """Of the output of the MLP, before the residual addition."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The traits of all models of one `model_type`."""

    architecture: str
    """The class name that checkpoints give."""
    defaults: Json = field(default_factory=dict)
    """Optional keys of `config.json`, with the defaults of transformers."""
    fixed: Json = field(default_factory=dict)
    """Keys of `config.json` that transformers does not read, with the values it assumes."""
    prepare: Callable[[Json], Json] = _unchanged
    """Returns a config with the keys that transformers derives from others. Raises
    `CheckpointError` for variants of the architecture that are not supported."""
    is_sliding: Callable[[Json, int], bool] = _none
    """Whether a layer has a sliding window, if the config does not list `layer_types`."""
    window_switch: bool = False
    """Whether `use_sliding_window` of the config switches the window on."""
    lists_layer_types: bool = False
    """Whether `layer_types` of the config decides."""
    is_unrotated: Callable[[Json, int], bool] = _none
    """Whether queries and keys of a layer are not rotated."""
    layer_norms: LayerNorms = field(default_factory=LayerNorms)
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Names in a checkpoint of the projections of queries, keys and values; one if fused."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Names in a checkpoint of the projections of the MLP to gate and up; one if fused."""
    down: str = "mlp.down_proj"
    inner_size_key: str = "intermediate_size"
    """The key of `config.json` with the width of the MLP."""
    output_bias: bool = True
    """Whether the output projection of attention has a bias if q, k and v have one."""
    mlp_bias: bool = False
    """Whether the MLP has biases if the config says so."""
    activation_key: str = "hidden_act"
    """The key of `config.json` that names the activation of the MLP."""
    activation: str = "silu"
    """The activation where the config names none."""
    qk_norm: Literal["none", "each_head", "all_heads", "unweighted"] = "none"
    """What is normed of queries and keys before they are rotated: each head of a token by itself,
    or all its heads together; or each head without weight, in layers with rotation only."""
    offset_norms: bool = False
    """Norms multiply by one plus their weight, in float32, and round afterwards."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    query_scalar: bool = False
    """Scores are divided by the root of `query_pre_attn_scalar`, not by that of the head size."""
    multipliers: bool = False
    """`embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`
    apply (Granite)."""
    score_softcap: bool = False
    """`attn_logit_softcapping` applies."""
    logits_softcap: bool = False
    """`final_logit_softcapping` applies."""
    two_ropes: bool = False
    """Sliding layers have rotary parameters of their own."""
    recomputes_long: bool = False
    """A sequence that outgrows the first context of a `longrope` is computed anew with the
    parameters of long sequences."""
    partial_rotation: bool = False
    """`partial_rotary_factor` applies: the first elements of a head are rotated."""
    attention_sinks: bool = False
    """Each head has an attention sink, a softmax logit without a value (gpt-oss)."""
    clamped_activation: bool = False
    """`swiglu_limit` applies: gate and up are clamped, and the activation is
    (up + 1) * gate * sigmoid(swiglu_alpha * gate) (gpt-oss)."""
    chunked: bool = False
    """Tokens of sliding layers attend only to their own chunk, of `sliding_window` positions."""
    tempered: bool = False
    """Queries of layers without rotation have a temperature by position (Llama 4)."""
    latent: bool = False
    """Multi-head latent attention."""
    experts: ExpertTraits | None = None
    """The traits of mixtures of experts, if layers can have them."""
    mtp: MtpLayout | None = None
    """Modules for multi-token prediction that checkpoints may hold, which only drafters read."""
    rope_interleaved: bool | None = False
    """Whether rotated pairs are neighbours; None: `rope_interleave` of the config says it."""


def read_optional(config: Json, name: str, kind: type[T]) -> T | None:
    """Return a field checked for its type, None if it is absent or null.

    Integers must fit 64 bits, floating-point numbers must be finite.
    """
    value = config.get(name)
    if value is None:
        return None
    if kind is float and type(value) is int and abs(value) <= _MOST_INT:
        value = float(value)
    if type(value) is not kind:  # not isinstance: to Python, true is an int
        raise CheckpointError(f"{name} must be of type {kind.__name__}, not {bounded_repr(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{name} = {value} must be a finite number")
    if isinstance(value, int) and abs(value) > _MOST_INT:
        raise CheckpointError(f"{name} = {bounded_repr(value)} does not fit 64 bits")
    return value


def read_field(config: Json, name: str, kind: type[T], default: T | None = None) -> T:
    """Return a field checked for its type; absent and null mean the default, if there is one."""
    value = read_optional(config, name, kind)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no {name}")
    return value
