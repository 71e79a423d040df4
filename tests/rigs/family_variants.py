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

BIASES = {"attention_bias": True, "mlp_bias": True}

_FIELDS = {
    **{"hidden": "hidden_size", "features": "intermediate_size", "vocab": "vocab_size"},
    **{"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"},
    **{"window": "sliding_window", "tied": "tie_word_embeddings", "rope": "rope_parameters"},
    **{"length": "max_position_embeddings", "top_k": "num_experts_per_tok"},
}
_LAYER_TYPES = {
    **{"s": "sliding_attention", "f": "full_attention", "c": "conv"},
    "l": "linear_attention",
}


def variant(
    model_type: str = "llama", layers: int | str | None = None, **fields: Any
) -> dict[str, Any]:
    """Fields of a configuration, the common ones by short names.

    Args:
        model_type: of transformers.
        layers: how many, or the initial of each one's type.
        **fields: keys of `_FIELDS`, and fields of the configuration.
    """
    named = {"model_type": model_type}
    named |= {_FIELDS.get(name, name): value for name, value in fields.items()}
    if isinstance(layers, str):
        named["layer_types"] = [_LAYER_TYPES[initial] for initial in layers]
        layers = len(layers)
    return named if layers is None else named | {"num_hidden_layers": layers}


def sliding(window: int, **fields: Any) -> dict[str, Any]:
    """Fields of the families that slide on demand."""
    return {"use_sliding_window": True, "sliding_window": window, **fields}


_GRANITE4 = {
    **variant("granitemoehybrid", "fff", num_local_experts=0, shared_intermediate_size=56),
    **{"attention_multiplier": 0.3, "mamba_n_heads": 4},
}

FAMILY_VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": variant("qwen2", 5, kv_heads=1, head_dim=10) | sliding(7, max_window_layers=3),
    "smollm3": variant("smollm3", 5, no_rope_layer_interval=3) | sliding(9) | BIASES,
    "smollm3_listed": variant("smollm3", no_rope_layers=[0, 1, 0, 1], head_dim=10, tied=False),
    "phi3": variant("phi3", head_dim=12, window=11, partial_rotary_factor=0.75, tied=False),
    "phi3_quarter": variant("phi3", head_dim=24, kv_heads=3, partial_rotary_factor=0.25),
    "cohere2": variant("cohere2", "sssff", window=8, heads=4, logit_scale=0.7),
    # With 48 inputs of a convolution, beside 32 elements of keys and values.
    "lfm2": variant("lfm2", "ccfcf", kv_heads=1, conv_bias=True),
    "olmo2": variant("olmo2", head_dim=14, kv_heads=6, tied=False),
    "olmo3": {
        **variant("olmo3", 6, tied=False, window=8, head_dim=10),
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0},
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "granite": {
        **variant("granite", head_dim=10, logits_scaling=0.7, embedding_multiplier=1.7, **BIASES),
        **{"attention_multiplier": 0.4, "residual_multiplier": 0.61},
    },
    "granite4": {
        **_GRANITE4,
        **{"position_embedding_type": "rope", "logits_scaling": 2.0},
        **{"residual_multiplier": 0.8, "embedding_multiplier": 3.0},
    },
    "granite4_nope": _GRANITE4 | {"tie_word_embeddings": False},
    "glm": variant("glm", head_dim=20, kv_heads=1, eos_token_id=3),
    "glm4": {
        **variant("glm4", head_dim=12, kv_heads=6, partial_rotary_factor=0.75, tied=False),
        **{"attention_bias": False, "rms_norm_eps": 1e-3},
    },
    "gemma4": {
        **variant(
            "gemma4_text",
            "ssfsf",
            kv_heads=3,
            head_dim=10,
            window=11,
            hidden_size_per_layer_input=0,
        ),
        **{"global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
        "final_logit_softcapping": 9.0,
    },
    "gemma4_layer_inputs": {
        **variant("gemma4_text", "sfssfsf", kv_heads=1, head_dim=10, window=13, tied=False),
        **{"global_head_dim": 12, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97},
    },
    "gemma4_unified": variant(
        "gemma4_unified_text", "ssfsf", window=12, global_head_dim=24, num_kv_shared_layers=2
    ),
    # Tokens from 90 on have the input of token 0.
    "gemma3n": {
        **variant("gemma3n_text", "sfssfsf", head_dim=12, window=11, num_kv_shared_layers=3),
        **{"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 90, "laurel_rank": 6},
        "activation_sparsity_pattern": [0.95, 0.95, 0.5, 0.0, 0.0, 0.0, 0.9],
    },
    # int(0.5 * 10) = 5 elements, rounded up to 6.
    "glm4_odd": variant("glm4", head_dim=10, attention_bias=True),
}
"""The token ids of some defaults are not in the vocabulary."""

LENGTH_VARIANTS: dict[str, dict[str, Any]] = {
    "phi3_longrope": {
        # transformers checks factors by hidden_size / heads.
        **variant("phi3", heads=3, kv_heads=1, head_dim=16, original_max_position_embeddings=40),
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.625},
    },
    "llama_longrope": variant(head_dim=10, rope=LONGROPE | {"attention_factor": 1.2}),
    "llama_dynamic": variant(head_dim=10, length=40, rope=DYNAMIC),
    "glm4_dynamic": variant(
        "glm4", head_dim=16, length=40, rope=DYNAMIC | {"partial_rotary_factor": 0.5}
    ),
    "olmo3_lengths": {
        **variant("olmo3", 4, head_dim=10, length=40, window=13),
        "rope_parameters": {
            "full_attention": DYNAMIC,
            "sliding_attention": LONGROPE | {"original_max_position_embeddings": 30},
        },
    },
}
"""Models whose rotations depend on the length: beyond 40 tokens, or 30."""
