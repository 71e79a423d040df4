"""Reads the keys of a `config.json` that describe its layers and their attention."""

from __future__ import annotations

from typing import Any

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError
from ..kernels.ops.layer_operations import AttentionTemperature
from .family import LAYER_TYPES, Family, Json, LayerType, read_field, read_optional
from .latent_config import LatentConfig
from .rope_fields import read_ropes

__all__ = ["MULTIPLIERS", "read_attention"]

MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
"""Of Granite; keys of `config.json` and fields of `ModelConfig`."""


def read_attention(config: Json, family: Family) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` that describe the layers and their attention."""
    num_layers = read_field(config, "num_hidden_layers", int)
    heads = read_field(config, "num_attention_heads", int)
    hidden_size = read_field(config, "hidden_size", int)
    rope, sliding_rope = read_ropes(config, family)
    layer_types, window = _read_windows(config, family, num_layers)
    fields: dict[str, Any] = {
        "num_layers": num_layers,
        "num_heads": heads,
        "hidden_size": hidden_size,
        "max_position_embeddings": read_field(config, "max_position_embeddings", int),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "partial_rotary_factor": rope.partial,
        "sliding_rope": sliding_rope,
        "layer_types": layer_types,
        "sliding_window": window,
        "unrotated_layers": tuple(
            layer for layer in range(num_layers) if family.is_unrotated(config, layer)
        ),
        "attention_bias": read_field(config, "attention_bias", bool, False),
    }
    if family.multipliers:
        for name in MULTIPLIERS:
            fields[name] = read_field(config, name, float, 1.0)
    if family.clamped_activation:
        for name in ("swiglu_limit", "swiglu_alpha"):
            fields[name] = read_field(config, name, float)
    if family.qk_norm == "unweighted":
        fields["use_qk_norm"] = read_field(config, "use_qk_norm", bool)
    if family.tempered and read_field(config, "attn_temperature_tuning", bool):
        fields["temperature"] = AttentionTemperature(
            read_field(config, "floor_scale", int), read_field(config, "attn_scale", float)
        )
    if family.query_scalar:
        fields["query_pre_attn_scalar"] = read_field(config, "query_pre_attn_scalar", float)
    if family.score_softcap:
        fields["attn_logit_softcapping"] = read_optional(config, "attn_logit_softcapping", float)
    if family.latent:
        return fields | _latent_fields(config, family, heads)
    if config.get("head_dim") is None and heads > 0 and hidden_size % heads:
        raise CheckpointError(
            f"hidden_size = {hidden_size} must be a multiple of num_attention_heads = {heads} "
            "where the config has no head_dim"
        )
    fields["num_kv_heads"] = read_field(config, "num_key_value_heads", int, heads)
    fields["head_dim"] = read_field(config, "head_dim", int, hidden_size // max(heads, 1))
    return fields


def _latent_fields(config: Json, family: Family, heads: int) -> dict[str, Any]:
    kv_heads = read_field(config, "num_key_value_heads", int, heads)
    if kv_heads != heads:
        raise CheckpointError(
            f"num_key_value_heads = {kv_heads} must be num_attention_heads = {heads}: latent "
            "attention shares its cache among all heads"
        )
    interleave = family.rope_interleaved
    if interleave is None:
        interleave = read_field(config, "rope_interleave", bool)
    latent = LatentConfig(
        q_lora_rank=read_optional(config, "q_lora_rank", int),
        kv_lora_rank=read_field(config, "kv_lora_rank", int),
        qk_nope_head_dim=read_field(config, "qk_nope_head_dim", int),
        qk_rope_head_dim=read_field(config, "qk_rope_head_dim", int),
        v_head_dim=read_field(config, "v_head_dim", int),
        rope_interleave=interleave,
    )
    return {"latent": latent, "num_kv_heads": 1, "head_dim": latent.cached_dim}


def _read_windows(
    config: Json, family: Family, num_layers: int
) -> tuple[tuple[LayerType, ...], int | None]:
    """Return the type of each layer and the window of those that slide.

    Without types, all layers have full attention.
    """
    window = read_optional(config, "sliding_window", int)
    if family.window_switch and not read_field(config, "use_sliding_window", bool):
        window = None
    implied = tuple(LAYER_TYPES[family.is_sliding(config, i)] for i in range(num_layers))
    listed = config.get("layer_types")
    if listed is None:
        types = implied
    elif not isinstance(listed, list) or not all(name in LAYER_TYPES for name in listed):
        known = ", ".join(map(repr, LAYER_TYPES))
        raise CheckpointError(f"layer_types must be a list of {known}, not {bounded_repr(listed)}")
    elif len(listed) != num_layers:
        raise CheckpointError(
            f"layer_types lists {len(listed)} layers, num_hidden_layers = {num_layers}"
        )
    else:
        types = tuple(listed)
        if types != implied and not family.lists_layer_types:
            raise CheckpointError(
                f"layer_types = {bounded_repr(listed)} contradicts {family.architecture}, whose "
                f"layers are {bounded_repr(list(implied))}"
            )
    return (types, window) if "sliding_attention" in types else ((), None)
