"""The supported decoder families.

A family is data: the traits of its layers, and the defaults of transformers for absent keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError
from . import experts_families, llama4
from .dense_families import DENSE_FAMILIES, sliding_if_windowed
from .family import Family, Json, LayerNorms, read_field
from .mtp_layout import DEEPSEEK_MTP, MIMO_MTP

__all__ = ["FAMILIES", "family_of"]


def _sliding_if_used(config: Json, layer: int) -> bool:
    return bool(config["use_sliding_window"]) and sliding_if_windowed(config, layer)


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
    layer_norms=LayerNorms(
        attention_output="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        mlp_output="post_feedforward_layernorm",
    ),
    scaled_embeddings=True,
    query_scalar=True,
    score_softcap=True,
    logits_softcap=True,
)
_QWEN: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    defaults=_QWEN | {"num_key_value_heads": 32},
    fixed={"attention_bias": True},
    is_sliding=_sliding_from_a_layer_on,
    window_switch=True,
    lists_layer_types=True,
    output_bias=False,
)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _with_gpt_oss_rope(config: Json) -> Json:
    if config.get("rope_parameters") is not None or config.get("rope_scaling"):
        return config
    return {**config, "rope_parameters": _GPT_OSS_ROPE}


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
        fixed={"attention_bias": False},
        is_sliding=sliding_if_windowed,
    ),
    "qwen2": _QWEN2,
    "mimo": replace(_QWEN2, architecture="MiMoForCausalLM", mtp=MIMO_MTP),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=_QWEN | {"num_key_value_heads": 32, "head_dim": 128},
        is_sliding=_sliding_from_a_layer_on,
        window_switch=True,
        lists_layer_types=True,
        qk_norm="each_head",
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA
        | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        is_sliding=_last_of_each_pattern_full,
        qk_norm="each_head",
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
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
        mlp_bias=True,
        latent=True,
        rope_interleaved=True,
        experts=experts_families.DEEPSEEK_V2,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        defaults=_DEEPSEEK
        | {
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "rope_interleave": True,
        },
        latent=True,
        rope_interleaved=None,
        experts=experts_families.DEEPSEEK_V3,
        mtp=DEEPSEEK_MTP,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        fixed={"attention_bias": False},
        is_sliding=sliding_if_windowed,
        experts=experts_families.MIXTRAL,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        is_sliding=_sliding_if_used,
        window_switch=True,
        qk_norm="each_head",
        experts=experts_families.QWEN3_MOE,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        fixed={"hidden_act": "silu"},
        prepare=_with_gpt_oss_rope,
        is_sliding=_every_second_full,
        lists_layer_types=True,
        attention_sinks=True,
        clamped_activation=True,
        experts=experts_families.GPT_OSS,
    ),
    "llama4_text": Family(
        architecture="Llama4ForCausalLM",
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        prepare=llama4.prepare,
        lists_layer_types=True,
        is_unrotated=llama4.is_unrotated,
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        inner_size_key="intermediate_size_mlp",
        qk_norm="unweighted",
        chunked=True,
        tempered=True,
        rope_interleaved=True,
        experts=experts_families.LLAMA4,
    ),
    **DENSE_FAMILIES,
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
