"""The supported decoder families, and readers for the keys of their `config.json`.

A family is data: the traits of its layers, and the defaults of transformers for absent keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError

__all__ = [
    "FAMILIES",
    "LAYER_TYPES",
    "Family",
    "Json",
    "LayerType",
    "family_of",
    "read_field",
    "read_optional",
]

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")

Json = Mapping[str, Any]
T = TypeVar("T")

_MOST_INT = 2**63 - 1


def _full(config: Json, layer: int) -> bool:
    return False


def _sliding_if_windowed(config: Json, layer: int) -> bool:
    return config.get("sliding_window") is not None


def _sliding_from_a_layer_on(config: Json, layer: int) -> bool:
    windowed = config["use_sliding_window"] and config["sliding_window"] is not None
    return windowed and layer >= read_field(config, "max_window_layers", int)


def _every_second_full(config: Json, layer: int) -> bool:
    return layer % 2 == 0


def _last_of_each_pattern_full(config: Json, layer: int) -> bool:
    pattern = read_field(config, "sliding_window_pattern", int)
    if pattern < 1:
        raise CheckpointError(f"sliding_window_pattern = {pattern} must be at least 1")
    return (layer + 1) % pattern != 0


@dataclass(frozen=True, kw_only=True)
class Family:
    """The traits of all models of one `model_type`."""

    architecture: str
    """The class name that checkpoints give."""
    defaults: Json = field(default_factory=dict)
    """Optional keys of `config.json`, with the defaults of transformers."""
    is_sliding: Callable[[Json, int], bool] = _full
    """Whether a layer has a sliding window, if the config does not list `layer_types`."""
    window_switch: bool = False
    """Whether `use_sliding_window` of the config switches the window on."""
    lists_layer_types: bool = False
    """Whether `layer_types` of the config decides."""
    attention_bias: bool = True
    """Whether the projections of attention have biases if the config says so."""
    mlp_bias: bool = False
    """Whether the MLP has biases if the config says so."""
    activation_key: str = "hidden_act"
    """The key of `config.json` that names the activation of the MLP."""
    activation: str = "silu"
    """The activation where the config names none."""
    qk_norm: bool = False
    """Each head of the queries and keys is normed before it is rotated."""
    offset_norms: bool = False
    """Norms multiply by one plus their weight, in float32, and round afterwards."""
    output_norms: bool = False
    """The outputs of attention and MLP are normed before the residual addition."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    query_scalar: bool = False
    """Scores are divided by the root of `query_pre_attn_scalar`, not by that of the head size."""
    score_softcap: bool = False
    """`attn_logit_softcapping` applies."""
    logits_softcap: bool = False
    """`final_logit_softcapping` applies."""
    two_ropes: bool = False
    """Sliding layers have rotary parameters of their own."""
    attention_sinks: bool = False
    """Each head has an attention sink, a softmax logit without a value (gpt-oss)."""
    clamped_activation: bool = False
    """`swiglu_limit` applies: gate and up are clamped, and the activation is
    (up + 1) * gate * sigmoid(1.702 * gate) (gpt-oss)."""
    latent: bool = False
    """Multi-head latent attention."""
    rope_interleaved: bool | None = False
    """Whether rotated pairs are neighbours; None: `rope_interleave` of the config says it."""


_GEMMA: dict[str, Any] = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    defaults=_GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    is_sliding=_every_second_full,
    lists_layer_types=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    offset_norms=True,
    output_norms=True,
    scaled_embeddings=True,
    query_scalar=True,
    score_softcap=True,
    logits_softcap=True,
)
_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={"bos_token_id": 1, "eos_token_id": 2},
        mlp_bias=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        is_sliding=_sliding_if_windowed,
        attention_bias=False,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        is_sliding=_sliding_from_a_layer_on,
        window_switch=True,
        lists_layer_types=True,
        qk_norm=True,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA
        | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        is_sliding=_last_of_each_pattern_full,
        qk_norm=True,
        score_softcap=False,
        two_ropes=True,
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        defaults=_DEEPSEEK
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
        },
        mlp_bias=True,
        latent=True,
        rope_interleaved=True,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        defaults=_DEEPSEEK
        | {
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "rope_interleave": True,
        },
        latent=True,
        rope_interleaved=None,
    ),
}
"""By `model_type`. As in transformers, `attn_logit_softcapping` is ignored for Gemma 3, attention
biases are ignored for Mistral, and only the logits of the Gemmas are capped."""


def family_of(config: Json) -> tuple[str, Family]:
    """Return the model type of a `config.json` and its family. Raises `CheckpointError`."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    supported = None if family is None else family.architecture
    architectures = config.get("architectures")
    # Checkpoints name the class they were saved from; a bare config has only the model type.
    named = architectures if isinstance(architectures, list) and architectures else [supported]
    if family is None or supported not in named:
        found = ", ".join(bounded_text(name, 60) for name in named[:3] if name) or "(unnamed)"
        raise CheckpointError(
            f"architecture {found} (model_type {bounded_repr(model_type, 60)}) is not supported; "
            "supported: " + ", ".join(family.architecture for family in FAMILIES.values())
        )
    return str(model_type), family


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
