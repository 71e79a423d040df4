"""Shapes of tiny models with recurrent layers; see `tiny_models.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
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


def _mamba(heads: int, groups: int, size: int, taps: int = 4, **fields: Any) -> dict[str, Any]:
    """Fields of Mamba-2: heads, groups, elements of the state, and taps of the convolution."""
    names = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return {**dict(zip(names, (heads, groups, size, taps), strict=True)), **fields}


def _nemotron(
    heads: tuple[int, int], groups: int, size: int, taps: int = 4, **fields: Any
) -> dict[str, Any]:
    """Fields of Mamba-2 in Nemotron-H: heads and their elements, and as `_mamba`."""
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    return {**dict(zip(names, (*heads, groups, size, taps), strict=True)), **fields}


_FACTORS = {
    **{"attention_in_multiplier": 0.7, "attention_out_multiplier": 1.4, "key_multiplier": 0.6},
    **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8, "lm_head_multiplier": 1.5},
    **{"ssm_multipliers": [0.9, 1.2, 0.7, 1.3, 0.8], "mlp_multipliers": [1.2, 0.9]},
    "embedding_multiplier": 1.6,
}


def _periods(attention: int, attends: int, experts: int, routed: int) -> dict[str, int]:
    """Fields of Jamba: a layer with attention, and one with experts, in this many."""
    return {
        **{"attn_layer_period": attention, "attn_layer_offset": attends},
        **{"expert_layer_period": experts, "expert_layer_offset": routed},
    }


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
    "granite4_hybrid": {
        **variant("granitemoehybrid", "lfl", num_local_experts=5, top_k=2, features=20),
        **_mamba(6, 2, 10, shared_intermediate_size=28, mamba_expand=2),
        **{"attention_multiplier": 0.3, "residual_multiplier": 0.8, "embedding_multiplier": 3.0},
    },
    "granite4_hybrid_dense": {
        **variant("granitemoehybrid", "llfl", num_local_experts=0, tied=False),
        **_mamba(8, 1, 6, 3, shared_intermediate_size=40, mamba_conv_bias=False),
        **{"mamba_proj_bias": True, "position_embedding_type": "rope"},
    },
    "bamba": {
        **variant("bamba", 4, attn_layer_indices=[1, 3], head_dim=8, tied=False),
        **_mamba(6, 3, 8, mamba_proj_bias=True),
    },
    "falcon_h1": {
        **variant("falcon_h1", 3, head_dim=10, tied=False, **_FACTORS),
        **_mamba(6, 2, 9, mamba_d_ssm=84),
    },
    "falcon_h1_normed": {
        **variant("falcon_h1", 2, kv_heads=1, mamba_rms_norm=True, mamba_norm_before_gate=False),
        **_mamba(4, 4, 5, 2, mamba_d_ssm=None, projectors_bias=True),
    },
    "nemotron_h": {
        **variant("nemotron_h", tied=False, mlp_hidden_act="relu2", layer_norm_epsilon=1e-4),
        "layers_block_type": ["moe", "linear_attention", "mlp", "full_attention", "moe"],
        **_nemotron((6, 10), 3, 12, use_bias=True, mlp_bias=False),
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"moe_shared_expert_intermediate_size": 28, "n_group": 3, "topk_group": 2},
    },
    "nemotron_h_latent": {
        **variant("nemotron_h", tied=False, mlp_hidden_act="relu2", moe_latent_size=18),
        "layers_block_type": ["full_attention", "moe", "linear_attention", "moe"],
        **_nemotron((6, 8), 2, 10),
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"moe_shared_expert_intermediate_size": 20, "n_group": 1, "topk_group": 1},
    },
    "nemotron_h_dense": {
        **variant("nemotron_h", tied=False, kv_heads=1, mlp_bias=True),
        "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention"],
        **_nemotron((4, 6), 4, 7, 3, use_conv_bias=False),
    },
    "jamba": {
        **variant("jamba", 4, num_experts=4, features=28, mamba_d_state=6, mamba_expand=1),
        **_periods(3, 1, 2, 1),
    },
    "minimax": {
        **variant("minimax", "flfl", num_local_experts=5, features=20, head_dim=10),
        **{"block_size": 16, "linear_attn_alpha_factor": 1.5, "mlp_beta_factor": 0.8},
    },
    "minimax_deep": {
        **variant("minimax", "llf", kv_heads=1, num_local_experts=3, features=36, tied=False),
        **{"full_attn_alpha_factor": 2.5, "linear_attn_alpha_factor": 2.5, "mlp_alpha_factor": 2.5},
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


def _random_mamba(draws: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Draw sizes with Mamba-2 layers, and the types of layers."""
    groups, each, head = draws.randint(1, 3), draws.randint(1, 3), 2 * draws.randint(1, 6)
    heads = groups * each
    hidden = heads * head * draws.choice([1, 2])
    while hidden < 32:
        hidden *= 2
    layers = ["linear_attention", "full_attention", *draws.choices(_KINDS, k=2)]
    draws.shuffle(layers)
    fields = _mamba(heads, groups, draws.randint(3, 20), draws.randint(2, 5))
    fields |= {"mamba_conv_bias": draws.random() < 0.7, "mamba_proj_bias": draws.random() < 0.3}
    kv_heads = draws.choice([1, 2, 3, 6])
    fields |= variant(hidden=hidden, kv_heads=kv_heads, features=draws.randint(20, 60))
    return fields | {"bos_token_id": None, "eos_token_id": None}, layers


def _random_granite(draws: random.Random) -> dict[str, Any]:
    fields, layers = _random_mamba(draws)
    experts = draws.choice([0, 4, 7])
    return fields | {
        **{"model_type": "granitemoehybrid", "layer_types": layers, "num_hidden_layers": 4},
        **{"num_local_experts": experts, "num_experts_per_tok": draws.randint(1, 4)},
        **{"shared_intermediate_size": draws.randint(9, 60), "attention_multiplier": 0.25},
        **{"residual_multiplier": draws.uniform(0.3, 1.0)},
        "position_embedding_type": draws.choice([None, "rope"]),
    }


def _random_bamba(draws: random.Random) -> dict[str, Any]:
    fields, layers = _random_mamba(draws)
    attending = [i for i, kind in enumerate(layers) if kind == "full_attention"]
    named = {"model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": attending}
    return fields | named | {"head_dim": draws.choice([8, 12, 20])}


def _random_falcon(draws: random.Random) -> dict[str, Any]:
    fields, _ = _random_mamba(draws)
    size = fields["mamba_n_heads"] * 2 * draws.randint(1, 8)
    normed = draws.random() < 0.5
    fields |= {"model_type": "falcon_h1", "num_hidden_layers": 3, "mamba_d_ssm": size}
    fields |= {"mamba_rms_norm": normed, "mamba_norm_before_gate": draws.random() < 0.5}
    return fields | _FACTORS | {"mamba_proj_bias": False}


def _random_nemotron(draws: random.Random) -> dict[str, Any]:
    fields, layers = _random_mamba(draws)
    layers += draws.choices(["mlp", "moe"], k=3)
    draws.shuffle(layers)
    experts = 2 * draws.randint(2, 4)
    groups = draws.choice([1, 2])
    heads = (fields["mamba_n_heads"], draws.randint(3, 12))
    sizes = (fields["mamba_d_state"], fields["mamba_d_conv"])
    named = {
        **{"model_type": "nemotron_h", "layers_block_type": layers, "mlp_hidden_act": "relu2"},
        **{"n_routed_experts": experts, "num_experts_per_tok": draws.randint(1, 2)},
        **{"moe_intermediate_size": draws.randint(5, 40), "n_group": groups, "topk_group": 1},
        "moe_shared_expert_intermediate_size": draws.randint(5, 60),
        "moe_latent_size": draws.choice([None, draws.randint(8, 40)]),
    }
    kept = ("hidden_size", "intermediate_size", "num_key_value_heads")
    named |= {name: fields[name] for name in kept}
    return (
        named | _nemotron(heads, fields["mamba_n_groups"], *sizes) | {"tie_word_embeddings": False}
    )


def _random_minimax(draws: random.Random) -> dict[str, Any]:
    layers = ["linear_attention", "full_attention", *draws.choices(_KINDS, k=2)]
    draws.shuffle(layers)
    factors = {f"{name}_factor": draws.uniform(0.5, 2.0) for name in _DEEP_NORM}
    fields = variant("minimax", hidden=8 * draws.randint(3, 9), kv_heads=draws.choice([1, 2, 3, 6]))
    return {
        **fields | factors,
        **{
            "num_hidden_layers": 4,
            "layer_types": layers,
            "intermediate_size": draws.randint(9, 60),
        },
        **{"num_local_experts": draws.randint(2, 7), "num_experts_per_tok": 2},
        **{"head_dim": 2 * draws.randint(3, 10), "tie_word_embeddings": False},
        "block_size": draws.choice([8, 256]),
    }


def _random_jamba(draws: random.Random) -> dict[str, Any]:
    fields = variant("jamba", 5, hidden=8 * draws.randint(4, 9), kv_heads=draws.choice([1, 2, 6]))
    period, experts = draws.randint(2, 4), draws.randint(2, 4)
    return {
        **fields | _periods(period, draws.randrange(period), experts, draws.randrange(experts)),
        **{"num_experts": draws.choice([1, 4, 5]), "num_experts_per_tok": draws.randint(1, 3)},
        **{"mamba_d_state": draws.randint(3, 20), "mamba_d_conv": draws.randint(2, 5)},
        **{"mamba_expand": draws.randint(1, 2), "mamba_dt_rank": draws.choice(["auto", 5])},
        **{"mamba_conv_bias": draws.random() < 0.7, "mamba_proj_bias": draws.random() < 0.3},
        "tie_word_embeddings": False,
    }


_DEEP_NORM = (
    *("full_attn_alpha", "full_attn_beta", "linear_attn_alpha", "linear_attn_beta"),
    *("mlp_alpha", "mlp_beta"),
)
_KINDS = ("linear_attention", "full_attention")
_MAMBA_SIZES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "granitemoehybrid": _random_granite,
    "bamba": _random_bamba,
    "falcon_h1": _random_falcon,
    "nemotron_h": _random_nemotron,
    "minimax": _random_minimax,
    "jamba": _random_jamba,
}


def random_sizes(model_type: str, draws: random.Random) -> dict[str, Any]:
    """Draw the sizes of a tiny model."""
    if model_type in _MAMBA_SIZES:
        return _MAMBA_SIZES[model_type](draws)
    heads, each = draws.randint(1, 3), draws.randint(1, 3)
    kv_heads = draws.choice([1, 2, 3, 6])
    layers = [*"llf", *draws.choices("lf", k=draws.randint(0, 2))]
    draws.shuffle(layers)
    sizes = variant(model_type, "".join(layers), hidden=8 * draws.randint(3, 9), kv_heads=kv_heads)
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    taps, key, value = draws.randint(2, 5), draws.randint(3, 20), draws.randint(3, 20)
    experts, width = draws.randint(2, 7), draws.randint(5, 40)
    if model_type == "kimi_linear":
        own = variant(**_KIMI | {"kv_heads": 6, "num_local_experts": experts + 1})
        own |= {"linear_num_heads": heads * each, "linear_head_dim": key}
        own |= {"linear_conv_kernel_dim": taps, "moe_intermediate_size": width}
        return own | sizes | {"num_key_value_heads": 6, "tie_word_embeddings": False}
    sizes |= _delta((heads, heads * each), (key, value), taps)
    if model_type == "olmo_hybrid":
        return sizes | {"rope_parameters": draws.choice([_NO_ROPE, None])}
    if model_type != "qwen3_5_text":
        sizes |= {"num_experts": experts, "num_experts_per_tok": draws.randint(1, experts)}
        sizes |= {"moe_intermediate_size": width}
        sizes["shared_expert_intermediate_size"] = draws.randint(5, 40)
    partial = draws.choice([0.25, 0.5, 1.0])
    return sizes | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": partial}}
