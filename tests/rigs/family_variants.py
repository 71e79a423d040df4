"""Odd small models of the families with full, sliding or unrotated attention and a dense MLP.

Prompts of the tests are longer than the windows. Sizes avoid equalities: `head_dim` is not
hidden_size / heads, and query heads are not a power of two.
"""

from __future__ import annotations

from typing import Any

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 40,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6],
    "long_factor": [2.0, 3.0, 4.0, 7.0, 9.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0}

FAMILY_VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "model_type": "qwen2",
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 3,
        "head_dim": 10,
        "num_key_value_heads": 1,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 9,
        "no_rope_layer_interval": 3,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "smollm3_listed": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1, 0, 1],
        "head_dim": 10,
        "tie_word_embeddings": False,
    },
    "phi3": {
        "model_type": "phi3",
        "head_dim": 12,
        "sliding_window": 11,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": False,
    },
    "phi3_quarter": {
        "model_type": "phi3",
        "head_dim": 24,
        "num_key_value_heads": 3,
        "partial_rotary_factor": 0.25,
    },
    "cohere2": {
        "model_type": "cohere2",
        "num_hidden_layers": 5,
        "layer_types": [*["sliding_attention"] * 3, *["full_attention"] * 2],
        "sliding_window": 8,
        "num_attention_heads": 4,
        "logit_scale": 0.7,
    },
    "lfm2": {  # with 48 inputs of a convolution, beside 32 elements of keys and values
        "model_type": "lfm2",
        "num_hidden_layers": 5,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "num_key_value_heads": 1,
        "conv_bias": True,
    },
    "olmo2": {
        "model_type": "olmo2",
        "head_dim": 14,
        "num_key_value_heads": 6,
        "tie_word_embeddings": False,
    },
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 6,
        "tie_word_embeddings": False,
        "sliding_window": 8,
        "head_dim": 10,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "granite": {
        "model_type": "granite",
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 1.7,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.61,
        "logits_scaling": 0.7,
    },
    "granite4": {
        "model_type": "granitemoehybrid",
        "layer_types": ["full_attention"] * 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 56,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "mamba_n_heads": 4,
    },
    "granite4_nope": {
        "model_type": "granitemoehybrid",
        "layer_types": ["full_attention"] * 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 56,
        "attention_multiplier": 0.3,
        "tie_word_embeddings": False,
        "mamba_n_heads": 4,
    },
    "glm": {
        "model_type": "glm",
        "head_dim": 20,
        "num_key_value_heads": 1,
        "eos_token_id": 3,
    },
    "glm4": {
        "model_type": "glm4",
        "head_dim": 12,
        "num_key_value_heads": 6,
        "attention_bias": False,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False,
    },
    "glm4_odd": {  # int(0.5 * 10) = 5 elements, rounded up to 6
        "model_type": "glm4",
        "head_dim": 10,
        "attention_bias": True,
    },
}
"""The token ids of some defaults are not in the vocabulary."""

LENGTH_VARIANTS: dict[str, dict[str, Any]] = {
    "phi3_longrope": {
        "model_type": "phi3",
        "num_attention_heads": 3,  # transformers checks factors by hidden_size / heads
        "num_key_value_heads": 1,
        "head_dim": 16,
        "original_max_position_embeddings": 40,
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.625},
    },
    "llama_longrope": {
        "head_dim": 10,
        "rope_parameters": LONGROPE | {"attention_factor": 1.2},
    },
    "llama_dynamic": {
        "head_dim": 10,
        "max_position_embeddings": 40,
        "rope_parameters": DYNAMIC,
    },
    "glm4_dynamic": {
        "model_type": "glm4",
        "head_dim": 16,
        "max_position_embeddings": 40,
        "rope_parameters": DYNAMIC | {"partial_rotary_factor": 0.5},
    },
    "olmo3_lengths": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "head_dim": 10,
        "max_position_embeddings": 40,
        "sliding_window": 13,
        "rope_parameters": {
            "full_attention": DYNAMIC,
            "sliding_attention": LONGROPE | {"original_max_position_embeddings": 30},
        },
    },
}
"""Models whose rotations depend on the length: beyond 40 tokens, or 30."""
