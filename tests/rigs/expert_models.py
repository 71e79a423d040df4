"""Shapes of tiny mixtures of experts; see `tiny_models.py`."""

from __future__ import annotations

from typing import Any

from .family_variants import sliding, variant

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}


def _deepseek(
    version: int, experts: tuple[int, int, int, int], groups: tuple[int, int], **fields: Any
) -> dict[str, Any]:
    """With latent attention.

    Args:
        version: of DeepSeek.
        experts: how many there are, of which a token chooses and that are shared; features of each.
        groups: of experts, and how many of them a token chooses.
        **fields: other fields of the configuration.
    """
    heads = {"head_dim": 6, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
    names = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size")
    return {
        **variant(f"deepseek_v{version}", kv_heads=6, kv_lora_rank=24, tied=False, **heads),
        **dict(zip((*names, "n_group", "topk_group"), (*experts, *groups), strict=True)),
        **fields,
    }


EXPERT_VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral": variant("mixtral", num_local_experts=5, top_k=2, features=35),
    "mixtral_one": variant(
        "mixtral", num_local_experts=3, top_k=1, window=9, max_shard_size="30KB", tied=False
    ),
    "mixtral_all": variant(
        "mixtral", num_local_experts=3, top_k=3, features=32, save_original_format=False
    ),
    "qwen3_moe": {
        **variant("qwen3_moe", 6, num_experts=7, top_k=3, moe_intermediate_size=21, head_dim=14),
        # Experts, MLP, experts, MLP, MLP, MLP.
        **{"decoder_sparse_step": 1, "mlp_only_layers": [1, 3, 4, 5]},
        **{"norm_topk_prob": True, "attention_bias": True},
    },
    "qwen3_moe_sliding": {
        **variant("qwen3_moe", num_experts=4, top_k=2, moe_intermediate_size=64),
        **sliding(13, decoder_sparse_step=2, save_original_format=False),
    },
    "gpt_oss": {
        **variant("gpt_oss", 4, num_local_experts=6, top_k=3, features=31, window=11, tied=False),
        **{"swiglu_limit": 0.8, "rope_parameters": YARN | {"truncate": False}},
    },
    "gemma4_experts": {
        **variant("gemma4_text", "sfsf", window=9, head_dim=12, hidden_size_per_layer_input=0),
        **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "global_head_dim": 20},
        "moe_intermediate_size": 22,
    },
    "gpt_oss_odd": {
        **variant("gpt_oss", "ffs", hidden=37, heads=3, kv_heads=1, head_dim=10, window=5),
        **{"num_local_experts": 3, "num_experts_per_tok": 1, "swiglu_alpha": 1.1},
    },
    "gpt_oss_mxfp4": variant(
        "gpt_oss", 2, hidden=64, num_local_experts=3, top_k=2, features=32, window=7
    ),
    "deepseek_v2_moe": _deepseek(2, (9, 4, 2, 23), (3, 2), q_lora_rank=None)
    | {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy"}
    | {"routed_scaling_factor": 3.5},
    "deepseek_v2_greedy": _deepseek(
        2, (5, 2, 1, 32), (5, 1), q_lora_rank=20, save_original_format=False
    ),
    "deepseek_v3_moe": _deepseek(3, (8, 3, 3, 18), (4, 2), q_lora_rank=22, first_k_dense_replace=1),
    "deepseek_v3_scaled": _deepseek(3, (4, 2, 1, 40), (1, 1), q_lora_rank=22)
    | {"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.5}
    | {"save_original_format": False},
    "lfm2_moe": {
        **variant("lfm2_moe", "cfccf", num_experts=6, top_k=3, moe_intermediate_size=20),
        **{"num_dense_layers": 2, "routed_scaling_factor": 1.3},
    },
    "lfm2_moe_unbiased": {
        **variant("lfm2_moe", "cf", kv_heads=1, num_experts=4, top_k=2, moe_intermediate_size=33),
        **{"num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False},
        **{"conv_bias": True, "conv_L_cache": 4, "save_original_format": False},
    },
    "glm4_moe": {
        **variant("glm4_moe", head_dim=12, top_k=3, n_routed_experts=8, moe_intermediate_size=20),
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "use_qk_norm": True},
        **{"attention_bias": True, "routed_scaling_factor": 1.3, "tie_word_embeddings": False},
    },
    "glm4_moe_plain": {
        **variant("glm4_moe", top_k=2, n_routed_experts=5, moe_intermediate_size=32),
        **{"partial_rotary_factor": 0.25, "n_shared_experts": 2, "save_original_format": False},
    },
    "glm4_moe_lite": {
        **_deepseek(3, (6, 2, 2, 19), (1, 1), q_lora_rank=21),
        **{"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse", "sparse"]},
    },
    "mimo_v2_flash": {
        **variant("mimo_v2_flash", "fssf", heads=4, kv_heads=1, head_dim=20, v_head_dim=12),
        **{"sliding_window": 9, "n_routed_experts": 6, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 22, "attention_bias": True, "tie_word_embeddings": False},
    },
    "ernie4_5_moe": {
        **variant("ernie4_5_moe", 5, head_dim=14, moe_num_experts=7, moe_k=3),
        **{"moe_num_shared_experts": 2, "moe_intermediate_size": 18},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2},
    },
    "hy_v3": {
        **variant("hy_v3", num_experts=6, top_k=3, moe_intermediate_size=22, head_dim=10),
        **{"num_shared_experts": 2, "attention_bias": True, "tie_word_embeddings": False},
    },
    "minimax_m2": {
        **variant("minimax_m2", num_local_experts=6, top_k=2, features=26, head_dim=20),
        **{"rotary_dim": 12, "tie_word_embeddings": False},
    },
    "llama4": {
        **variant("llama4_text", 6, num_local_experts=4, top_k=2, features=36, tied=False),
        **{"interleave_moe_layer_step": 2, "intermediate_size_mlp": 50},
        **{"no_rope_layer_interval": 3, "attention_chunk_size": 14},
        **{"floor_scale": 8, "attn_scale": 0.3, "rms_norm_eps": 0.1},
        "rope_parameters": YARN | {"attention_factor": 1.7},  # which the norm of a head cancels
    },
    "llama4_maverick": {
        **variant("llama4_text", num_local_experts=5, top_k=1, features=33, moe_layers=[0, 2]),
        **{"intermediate_size_mlp": 45, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 32},
        **{"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True},
    },
}
