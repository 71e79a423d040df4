"""Import of transformers, and its configuration for a model of ours."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from ...errors import ConfigError, StepgraphError
from ...models.config import MULTIPLIERS, LatentConfig, ModelConfig
from ...models.families import Family
from ...models.rope import Rope
from ...models.transformers import library
from .transformers_experts import expert_fields

__all__ = ["BaselineError", "hf_config", "import_transformers"]

_LATENT_FIELDS = dataclasses.fields(LatentConfig)
"""Named as the keys of transformers."""
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor"),
    ),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("truncate", "attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": (
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("short_factor", "long_factor"),
    ),
    "dynamic": ("factor",),
}
"""Keys of transformers' `rope_parameters`, by type."""


class BaselineError(StepgraphError, RuntimeError):
    """transformers is missing, or does not decode this model."""


def import_transformers() -> Any:
    """Return the module, with its progress bars and warnings disabled.

    Raises:
        BaselineError: it is missing or too old.
    """
    try:
        transformers = library.import_transformers("comparing with transformers", "baseline")
    except ConfigError as error:
        raise BaselineError(str(error)) from error
    transformers.utils.logging.disable_progress_bar()
    # Failures are raised as `BaselineError`, not logged as tracebacks of its thread.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    return transformers


def hf_config(config: ModelConfig) -> Any:
    """Return the transformers configuration of a model of these shapes.

    Raises:
        BaselineError: transformers is missing or too old.
    """
    family = config.family
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        family.inner_size_key: config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        family.activation_key: config.hidden_act,
        "rope_parameters": _rope_parameters(config, family),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": None,
    }
    if family.latent:
        fields |= {field.name: getattr(config.latent, field.name) for field in _LATENT_FIELDS}
        fields |= {
            "num_key_value_heads": config.num_heads,
            "first_k_dense_replace": config.num_layers,  # unless there are experts
        }
    else:
        fields |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    windowed = config.sliding_window is not None
    if windowed or family.window_switch:
        fields |= {"sliding_window": config.sliding_window}
    if family.window_switch:
        fields |= {"use_sliding_window": windowed}
    if family.lists_layer_types:
        fields |= {"layer_types": list(config.layer_types) or _all_full(config)}
    if family.multipliers:
        fields |= {name: getattr(config, name) for name in MULTIPLIERS}
    if config.model_type in _SPECIAL_FIELDS:
        fields |= _SPECIAL_FIELDS[config.model_type](config)
    if family.query_scalar:
        fields |= {"query_pre_attn_scalar": round(config.query_pre_attn_scalar or 0)}
    if family.score_softcap:
        fields |= {"attn_logit_softcapping": config.attn_logit_softcapping}
    if family.logits_softcap:
        fields |= {"final_logit_softcapping": config.final_logit_softcapping}
    fields |= expert_fields(config)
    transformers = import_transformers()
    return transformers.AutoConfig.for_model(config.model_type, **fields)


def _all_full(config: ModelConfig) -> list[str]:
    return ["full_attention"] * config.num_layers


def _granite4_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "layer_types": _all_full(config),
        "num_local_experts": 0,
        "position_embedding_type": None if config.unrotated_layers else "rope",
        # Of layers that it does not have, and must be consistent.
        "mamba_n_heads": 1,
    }


_SPECIAL_FIELDS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "smollm3": lambda config: {
        "no_rope_layers": [
            int(layer not in config.unrotated_layers) for layer in range(config.num_layers)
        ]
    },
    "phi3": lambda config: {
        "original_max_position_embeddings": config.rope_scaling.original_max_position_embeddings
    },
    "granitemoehybrid": _granite4_fields,
}
"""Keys that only one family has."""


def _rope_parameters(config: ModelConfig, family: Family) -> dict[str, Any]:
    full = _rope(Rope(config.rope_theta, config.rope_scaling, config.partial_rotary_factor))
    if not family.two_ropes:
        return full
    return {
        "full_attention": full,
        "sliding_attention": full if config.sliding_rope is None else _rope(config.sliding_rope),
    }


def _rope(rope: Rope) -> dict[str, Any]:
    scaling = dataclasses.asdict(rope.scaling)
    given = {key: scaling[key] for key in _ROPE_KEYS[rope.scaling.type] if scaling[key] is not None}
    if rope.partial != 1.0:
        given["partial_rotary_factor"] = rope.partial
    given = {key: list(v) if isinstance(v, tuple) else v for key, v in given.items()}
    return {"rope_type": rope.scaling.type, "rope_theta": rope.theta, **given}
