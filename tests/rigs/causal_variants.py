"""Small models whose configurations have other traits than the default of their type."""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LONG = _ROPE | {
    "rope_type": "longrope",
    "original_max_position_embeddings": 24,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
_DYNAMIC = _ROPE | {
    "rope_type": "dynamic",
    "factor": 2.0,
    "original_max_position_embeddings": 24,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "llama, dynamic": ("llama", {"rope_parameters": _DYNAMIC}),
    "llama, linear": (
        "llama",
        {"rope_parameters": _ROPE | {"rope_type": "linear", "factor": 2.0}},
    ),
    "llama, longrope": ("llama", {"rope_parameters": _LONG, "head_dim": 16}),
    "llama, biases, one kv head": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "llama, odd sizes": (
        "llama",
        {"hidden_size": 27, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 103}
        | {"intermediate_size": 37, "head_dim": 14, "tie_word_embeddings": True},
    ),
    "mistral, window of 2": ("mistral", {"sliding_window": 2}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "phi3, partial": (
        "phi3",
        {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "phi3, longrope": (
        "phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": _LONG,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 24,
            "sliding_window": 11,
        },
    ),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, without biases": ("gpt_neox", {"attention_bias": False}),
    "gpt2, scaled by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ),
    "opt, norm after": ("opt", {"do_layer_norm_before": False}),
    "opt, projected": ("opt", {"word_embed_proj_dim": 24}),
    "gemma3_text, window of 2": ("gemma3_text", {"sliding_window": 2, "head_dim": 22}),
    "granite, multipliers": ("granite", _MULTIPLIERS),
    "granitemoe, multipliers": ("granitemoe", _MULTIPLIERS),
    "qwen3_moe, one expert each": (
        "qwen3_moe",
        {"num_experts_per_tok": 1, "norm_topk_prob": True, "moe_intermediate_size": 20},
    ),
    "qwen3_moe, dense between": ("qwen3_moe", {"decoder_sparse_step": 2, "num_local_experts": 5}),
    "mixtral, window": ("mixtral", {"sliding_window": 3, "num_local_experts": 3}),
    "deepseek_v3, all experts": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "n_shared_experts": 2},
    ),
    "deepseek_v2, greedy": (
        "deepseek_v2",
        {"topk_method": "greedy", "n_group": None, "topk_group": None, "q_lora_rank": None},
    ),
    "gpt_oss, window of 3": ("gpt_oss", {"sliding_window": 3, "num_local_experts": 4}),
    "olmo3, window of 3": ("olmo3", {"sliding_window": 3, "num_key_value_heads": 4}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "llama4_text, chunks of 3": ("llama4_text", {"attention_chunk_size": 3}),
    "llama4_text, temperature": (
        "llama4_text",
        {"floor_scale": 4, "attn_scale": 0.5, "attention_chunk_size": 128},
    ),
    "gemma4_text, without embeddings of layers": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1},
    ),
    "smollm3, every second": (
        "smollm3",
        {"no_rope_layer_interval": 2, "no_rope_layers": None, "num_key_value_heads": 1},
    ),
    "glm4, odd rotation": (
        "glm4",
        {
            "head_dim": 20,
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.3},
        },
    ),
}
"""Model type and changes of further small models, by name."""
