"""Mixtures of experts of ours in transformers: their configuration and implementation."""

from __future__ import annotations

from typing import Any

import torch

from ...models.config import ExpertsConfig, ModelConfig
from ...models.decoder_model import DecoderConfig

__all__ = ["expert_fields", "fit_experts"]

_ALIGNMENT = 16
"""Bytes that rows of the weights of grouped products are multiples of."""


def expert_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of a transformers configuration that describe the experts of a model."""
    moe, traits = config.experts, config.family.experts
    if moe is None or traits is None:
        return {}
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    fields = {traits.keys.get(name, name): getattr(moe, name) for name in sizes}
    match config.model_type:
        case "qwen3_moe":
            return fields | {
                "norm_topk_prob": moe.norm_topk_prob,
                "mlp_only_layers": list(moe.dense_layers),
            }
        case "gpt_oss":
            return fields | {
                "swiglu_limit": config.swiglu_limit,
                "swiglu_alpha": config.swiglu_alpha,
            }
        case "deepseek_v2" | "deepseek_v3":
            return fields | _deepseek_fields(moe)
        case "llama4_text":
            return fields | _llama4_fields(config, moe)
    return fields


def fit_experts(model: Any, config: DecoderConfig, dtype: torch.dtype) -> None:
    """Have transformers compute experts one by one if their sizes do not fit grouped products."""
    if not isinstance(config, ModelConfig) or config.experts is None:
        return
    rows = (config.hidden_size, config.experts.moe_intermediate_size)
    if any(size * dtype.itemsize % _ALIGNMENT for size in rows):
        model.set_experts_implementation("eager")


def _deepseek_fields(moe: ExpertsConfig) -> dict[str, Any]:
    return {
        "first_k_dense_replace": len(moe.dense_layers),
        "n_shared_experts": moe.n_shared_experts,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "norm_topk_prob": moe.norm_topk_prob,
        "topk_method": "group_limited_greedy" if moe.n_group > 1 else "greedy",
        "n_group": moe.n_group,
        "topk_group": moe.topk_group,
    }


def _llama4_fields(config: ModelConfig, moe: ExpertsConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    fields: dict[str, Any] = {
        "intermediate_size_mlp": config.intermediate_size,
        "moe_layers": [layer for layer in layers if moe.is_mixture(layer)],
        "no_rope_layers": [int(layer not in config.unrotated_layers) for layer in layers],
        "attention_chunk_size": config.sliding_window,
        "layer_types": [
            "full_attention" if config.window(layer) is None else "chunked_attention"
            for layer in layers
        ],
        "use_qk_norm": config.use_qk_norm,
        "attn_temperature_tuning": config.temperature is not None,
    }
    if config.temperature is not None:
        floor, scale = config.temperature
        fields |= {"floor_scale": floor, "attn_scale": scale}
    return fields
