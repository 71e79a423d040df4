"""Import of transformers, and its configuration for a model of ours."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

from ...errors import StepgraphError
from ...models.config import LatentConfig, ModelConfig
from ...models.families import Family
from ...models.rope import Rope

__all__ = ["BaselineError", "hf_config", "import_transformers"]

LEAST_VERSION = (5, 17)
"""Of transformers: the first with the configuration of continuous batching that is used here."""
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
        import transformers
    except ImportError as error:
        raise BaselineError(
            'comparing with transformers needs its package: pip install "stepgraph[baseline]"'
        ) from error
    found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if found is None or tuple(map(int, found.groups())) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise BaselineError(
            f"transformers {transformers.__version__} is too old to compare with, {least} is the"
            ' oldest that will do: pip install --upgrade "stepgraph[baseline]"'
        )
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
        "intermediate_size": config.intermediate_size,
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
            "first_k_dense_replace": config.num_layers,  # no mixture of experts
        }
    else:
        fields |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    windowed = config.sliding_window is not None
    if windowed or family.window_switch:
        fields |= {"sliding_window": config.sliding_window}
    if family.window_switch:
        fields |= {"use_sliding_window": windowed}
    if family.lists_layer_types and config.layer_types:
        fields |= {"layer_types": list(config.layer_types)}
    if family.query_scalar:
        fields |= {"query_pre_attn_scalar": round(config.query_pre_attn_scalar or 0)}
    if family.score_softcap:
        fields |= {"attn_logit_softcapping": config.attn_logit_softcapping}
    if family.logits_softcap:
        fields |= {"final_logit_softcapping": config.final_logit_softcapping}
    transformers = import_transformers()
    return transformers.AutoConfig.for_model(config.model_type, **fields)


def _rope_parameters(config: ModelConfig, family: Family) -> dict[str, Any]:
    full = _rope(Rope(config.rope_theta, config.rope_scaling))
    if not family.two_ropes:
        return full
    return {
        "full_attention": full,
        "sliding_attention": full if config.sliding_rope is None else _rope(config.sliding_rope),
    }


def _rope(rope: Rope) -> dict[str, Any]:
    scaling = dataclasses.asdict(rope.scaling)
    given = {key: scaling[key] for key in _ROPE_KEYS[rope.scaling.type] if scaling[key] is not None}
    return {"rope_type": rope.scaling.type, "rope_theta": rope.theta, **given}
