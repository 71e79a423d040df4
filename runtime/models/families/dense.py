"""Families with attention and an MLP in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...bounded_repr import bounded_repr
from ...errors import CheckpointError
from ..config_keys import Json, read_count, read_field
from ..layers import ATTENTION_TYPES
from .family import Family, LayerNorms
from .mtp import MIMO_MTP

LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def is_unrotated(config: Json, layer: int) -> bool:
    """SmolLM3 and Llama 4: `no_rope_layers` has a 1 for each layer that is rotated."""
    listed = config.get("no_rope_layers") or None
    if listed is None:
        return (layer + 1) % read_count(config, "no_rope_layer_interval") == 0
    num_layers = read_field(config, "num_hidden_layers", int)
    if isinstance(listed, list) and len(listed) < num_layers:
        raise CheckpointError(
            f"no_rope_layers lists {len(listed)} layers, num_hidden_layers = {num_layers}"
        )
    if not isinstance(listed, list) or listed[layer] not in (0, 1):
        raise CheckpointError(
            "no_rope_layers must be a list with a 1 for each layer that is rotated and a 0 for "
            f"each other, not {bounded_repr(listed)}"
        )
    return not listed[layer]


def _smollm3_layers(config: Json, layers: range) -> list[str]:
    """SmolLM3: layers without rotation slide."""
    slides = read_field(config, "use_sliding_window", bool, False)
    slides = slides and config.get("sliding_window") is not None
    return [ATTENTION_TYPES[slides and is_unrotated(config, layer)] for layer in layers]


def _with_longrope(config: Json) -> Json:
    """Phi-3: ropes of types `su` and `yarn` are `longrope`; others do not exist."""
    changed = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if not isinstance(rope, Mapping):
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ("default", "longrope", "su", "yarn"):
            raise CheckpointError(
                f"rope type {bounded_repr(kind)} is not one of Phi3ForCausalLM: it has 'default' "
                "and 'longrope'"
            )
        changed[name] = {**rope, "rope_type": "default" if kind == "default" else "longrope"}
    return changed


def with_inverse(config: Json, factor: str) -> Json:
    """Cohere 2 and Falcon-H1: the divisor of logits is the inverse of a factor."""
    if not (by := read_field(config, factor, float)) > 0.0:
        raise CheckpointError(f"{factor} = {by} must be positive")
    return {**config, "logits_scaling": 1.0 / by}


GRANITE: dict[str, Any] = {
    **LLAMA_TOKENS,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}

_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    defaults=_QWEN,
    fixed={"attention_bias": True},
    lists_layer_types=True,
    output_bias=False,
)

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    defaults={"eos_token_id": 50279, "rms_norm_eps": 1e-5},
    layer_norms=LayerNorms(
        input=None,
        attention_output="post_attention_layernorm",
        mlp=None,
        mlp_output="post_feedforward_layernorm",
    ),
    qk_norm="all_heads",
)

_GLM_END = [151329, 151336, 151338]

_GLM = Family(
    architecture="GlmForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "eos_token_id": _GLM_END,
    },
    # Without end-of-text tokens, it gets the published models' tokens.
    prepare=lambda config: (
        {**config, "eos_token_id": _GLM_END} if config["eos_token_id"] is None else config
    ),
    gate_up=("mlp.gate_up_proj",),
    output_bias=False,
    rope_interleaved=True,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={**LLAMA_TOKENS, "mlp_bias": False},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={**LLAMA_TOKENS, "num_key_value_heads": 8, "sliding_window": 4096},
        fixed={"attention_bias": False},
    ),
    "qwen2": _QWEN2,
    "mimo": replace(_QWEN2, architecture="MiMoForCausalLM", mtp=MIMO_MTP),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=_QWEN | {"head_dim": 128},
        lists_layer_types=True,
        qk_norm="each_head",
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "mlp_bias": False,
        },
        layer_types=_smollm3_layers,
        lists_layer_types=True,
        is_unrotated=is_unrotated,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        fixed={"attention_bias": False},
        prepare=_with_longrope,
        qkv=("self_attn.qkv_proj",),
        gate_up=("mlp.gate_up_proj",),
        recomputes_long=True,
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        defaults={
            "bos_token_id": 5,
            "eos_token_id": 255001,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        fixed={"logits_scaling": 1.0},
        keys={"rms_norm_eps": "layer_norm_eps"},
        prepare=lambda config: with_inverse(config, "logit_scale"),
        lists_layer_types=True,
        is_unrotated=lambda config, layer: config["layer_types"][layer] == "full_attention",
        layer_norms=LayerNorms(mlp=None),
        rope_interleaved=True,
        centred_norms=True,
        parallel_residual=True,
    ),
    "olmo2": OLMO2,
    "olmo3": replace(
        OLMO2,
        architecture="Olmo3ForCausalLM",
        defaults={**OLMO2.defaults, "rope_theta": 5e5, "sliding_window": 4096},
        fixed={"rope_local_base_freq": 5e5, "sliding_window_pattern": 4},
        lists_layer_types=True,
    ),
    "granite": Family(architecture="GraniteForCausalLM", defaults=GRANITE | {"mlp_bias": False}),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        layer_norms=LayerNorms(
            attention_output="post_self_attn_layernorm",
            mlp="post_attention_layernorm",
            mlp_output="post_mlp_layernorm",
        ),
    ),
}
