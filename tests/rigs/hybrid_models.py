"""Shapes of tiny models with recurrent layers; see `tiny_models.py`."""

from __future__ import annotations

from typing import Any

from .family_variants import variant


def _delta(
    heads: tuple[int, int], sizes: tuple[int, int], taps: int = 4, **fields: Any
) -> dict[str, Any]:
    """Fields of the delta rule: heads and head sizes of keys and of values."""
    names = ("linear_num_key_heads", "linear_num_value_heads")
    dims = ("linear_key_head_dim", "linear_value_head_dim")
    return {
        **dict(zip((*names, *dims), (*heads, *sizes), strict=True)),
        **{"linear_conv_kernel_dim": taps},
        **fields,
    }


_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_KIMI = {
    **{"kv_heads": 6, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
    **{"v_head_dim": 14, "num_local_experts": 5, "top_k": 2, "moe_intermediate_size": 16},
    **{"bos_token_id": None, "eos_token_id": None},
}
_NO_ROPE = {"rope_theta": None, "rope_type": "default"}

HYBRID_VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **variant("qwen3_next", "lfl", tied=False, shared_expert_intermediate_size=28, **_EXPERTS),
        **_delta((2, 4), (8, 6), mlp_only_layers=[0]),
    },
    "qwen3_next_odd": {
        **variant("qwen3_next", "llf", heads=3, kv_heads=1, head_dim=20, attention_bias=True),
        **_delta((3, 9), (5, 7), 2, decoder_sparse_step=2, norm_topk_prob=False),
        **_EXPERTS,
        "shared_expert_intermediate_size": 9,
    },
    "qwen3_5": {
        **variant("qwen3_5_text", "lfl"),
        **_delta((2, 4), (8, 6)),
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
            **{"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
        },
    },
    "qwen3_5_moe": {
        **variant("qwen3_5_moe_text", "llfl", shared_expert_intermediate_size=20, **_EXPERTS),
        **_delta((4, 4), (6, 10), 3),
    },
    "kimi_linear": variant("kimi_linear", "lfl", tied=False, **_KIMI)
    | {"linear_num_heads": 3, "linear_head_dim": 8, "q_lora_rank": None},
    "kimi_linear_compressed": {
        **variant("kimi_linear", "llf", tied=False, **_KIMI | {"num_shared_experts": 2}),
        **{"linear_num_heads": 2, "linear_head_dim": 6, "q_lora_rank": 20},
        **{"linear_conv_kernel_dim": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        **{"save_original_format": False, "n_group": 1, "topk_group": 1},
    },
    "olmo_hybrid": {
        **variant("olmo_hybrid", "lfl", tied=False, rope=_NO_ROPE, eos_token_id=3),
        **_delta((2, 4), (8, 6)),
    },
    "olmo_hybrid_rotated": {
        **variant("olmo_hybrid", "llf", kv_heads=6, eos_token_id=3),
        **_delta((3, 3), (6, 12), 3, linear_allow_neg_eigval=False, save_original_format=False),
    },
}
