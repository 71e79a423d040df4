"""Decoder families without experts whose configs need more than a few traits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError
from .family import Family, Json, LayerNorms, read_field, read_optional

__all__ = ["DENSE_FAMILIES", "sliding_if_windowed"]


def sliding_if_windowed(config: Json, layer: int) -> bool:
    """All layers slide if the config has a window."""
    return config.get("sliding_window") is not None


def _three_of_four_slide(config: Json, layer: int) -> bool:
    return (layer + 1) % 4 != 0


def _is_unrotated(config: Json, layer: int) -> bool:
    """SmolLM3: `no_rope_layers` has a 1 for each layer that is rotated."""
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = read_field(config, "no_rope_layer_interval", int)
        if interval < 1:
            raise CheckpointError(f"no_rope_layer_interval = {interval} must be at least 1")
        return (layer + 1) % interval == 0
    num_layers = read_field(config, "num_hidden_layers", int)
    if not isinstance(listed, list) or not all(flag in (0, 1) for flag in listed):
        raise CheckpointError(
            "no_rope_layers must be a list with a 1 for each layer that is rotated and a 0 for "
            f"each other, not {bounded_repr(listed)}"
        )
    if len(listed) < num_layers:
        raise CheckpointError(
            f"no_rope_layers lists {len(listed)} layers, num_hidden_layers = {num_layers}"
        )
    return not listed[layer]


def _unrotated_layers_slide(config: Json, layer: int) -> bool:
    windowed = read_field(config, "use_sliding_window", bool) and sliding_if_windowed(config, layer)
    return windowed and _is_unrotated(config, layer)


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


def _dense_granite(config: Json) -> Json:
    """Granite 4: refuse layers with Mamba or experts."""
    types = config.get("layer_types")
    if types is None:
        types = config.get("layers_block_type")
    if types is None:
        raise CheckpointError(
            "the config has no layer_types, so all layers of GraniteMoeHybridForCausalLM are "
            "Mamba layers, which are not supported; only 'full_attention' is"
        )
    if isinstance(types, list):
        types = ["full_attention" if name == "attention" else name for name in types]
        for layer, name in enumerate(types):
            if name != "full_attention":
                raise CheckpointError(
                    f"layer_types has {bounded_repr(name)} for layer {layer}; of "
                    "GraniteMoeHybridForCausalLM only models whose layers are all "
                    "'full_attention' are supported"
                )
    experts = read_field(config, "num_local_experts", int)
    if experts != 0:
        raise CheckpointError(
            f"num_local_experts = {experts} makes the layers of GraniteMoeHybridForCausalLM "
            "mixtures of experts, which are not supported; only dense models "
            "(num_local_experts = 0) are"
        )
    read_optional(config, "position_embedding_type", str)
    return {**config, "layer_types": types}


def _without_rope(config: Json, layer: int) -> bool:
    return config.get("position_embedding_type") != "rope"


def _with_end_tokens(config: Json) -> Json:
    """GLM: without end-of-text tokens, it has those of the published models."""
    if config.get("eos_token_id") is not None:
        return config
    return {**config, "eos_token_id": _GLM["eos_token_id"]}


_OLMO: dict[str, Any] = {"eos_token_id": 50279, "rms_norm_eps": 1e-5}
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    defaults=_OLMO,
    layer_norms=LayerNorms(
        input=None,
        attention_output="post_attention_layernorm",
        mlp=None,
        mlp_output="post_feedforward_layernorm",
    ),
    qk_norm="all_heads",
)
_GRANITE = Family(
    architecture="GraniteForCausalLM",
    defaults={"bos_token_id": 1, "eos_token_id": 2},
    mlp_bias=True,
    multipliers=True,
)
_GLM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
_GLM_FAMILY = Family(
    architecture="GlmForCausalLM",
    defaults=_GLM,
    prepare=_with_end_tokens,
    gate_up=("mlp.gate_up_proj",),
    output_bias=False,
    partial_rotation=True,
    rope_interleaved=True,
)

DENSE_FAMILIES: dict[str, Family] = {
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        },
        is_sliding=_unrotated_layers_slide,
        lists_layer_types=True,
        is_unrotated=_is_unrotated,
        mlp_bias=True,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
        },
        fixed={"attention_bias": False},
        prepare=_with_longrope,
        is_sliding=sliding_if_windowed,
        qkv=("self_attn.qkv_proj",),
        gate_up=("mlp.gate_up_proj",),
        partial_rotation=True,
        recomputes_long=True,
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        defaults=_OLMO | {"rope_theta": 5e5, "sliding_window": 4096},
        fixed={"rope_local_base_freq": 5e5},
        is_sliding=_three_of_four_slide,
        lists_layer_types=True,
        two_ropes=True,
    ),
    "granite": _GRANITE,
    "granitemoehybrid": replace(
        _GRANITE,
        architecture="GraniteMoeHybridForCausalLM",
        defaults={
            **_GRANITE.defaults,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
        },
        prepare=_dense_granite,
        is_unrotated=_without_rope,
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        inner_size_key="shared_intermediate_size",
        mlp_bias=False,
    ),
    "glm": _GLM_FAMILY,
    "glm4": replace(
        _GLM_FAMILY,
        architecture="Glm4ForCausalLM",
        layer_norms=LayerNorms(
            attention_output="post_self_attn_layernorm",
            mlp="post_attention_layernorm",
            mlp_output="post_mlp_layernorm",
        ),
    ),
}
"""By `model_type`."""
