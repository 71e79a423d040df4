"""Families with attention in every layer, and mixtures of experts in some or all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...bounded_repr import bounded_repr
from ...errors import CheckpointError
from ..config_keys import Json, read_count, read_field, read_layers, read_optional
from ..layers import ATTENTION_TYPES
from ..layers.experts import ExpertLayout, ExpertTraits
from .dense import LLAMA_TOKENS, is_unrotated
from .family import Family
from .mtp import DEEPSEEK_MTP, ERNIE_MTP, HY_V3_MTP, MIMO_V2_MTP

LOCAL_EXPERTS = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}

ROUTED: dict[str, Any] = {
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}

LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

# Which layers have an MLP.


def first_dense(config: Json, layers: int, key: str, default: int | None = None) -> tuple[int, ...]:
    """Return the first layers, as many as a key says."""
    return tuple(range(max(0, min(read_field(config, key, int, default), layers))))


def listed_dense(config: Json, layers: int) -> tuple[int, ...]:
    """GLM-4.7-Flash, Hy3: `mlp_layer_types` lists `dense` and `sparse`; default: the first layer
    is dense."""
    listed = config.get("mlp_layer_types")
    if listed is None:
        return (0,)
    if not isinstance(listed, list) or len(listed) != layers or {*listed} - {"dense", "sparse"}:
        raise CheckpointError(
            f"mlp_layer_types must list 'dense' or 'sparse' for each of {layers} layers "
            f"(num_hidden_layers), not {bounded_repr(listed)}"
        )
    return tuple(i for i, kind in enumerate(listed) if kind == "dense")


def _qwen3_dense(config: Json, layers: int) -> tuple[int, ...]:
    step = read_count(config, "decoder_sparse_step", 1)
    listed = read_layers(config, "mlp_only_layers")
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def _llama4_dense(config: Json, layers: int) -> tuple[int, ...]:
    if config.get("moe_layers") is not None:
        mixtures = read_layers(config, "moe_layers")
        return tuple(i for i in range(layers) if i not in mixtures)
    step = read_count(config, "interleave_moe_layer_step", 1)
    return tuple(i for i in range(layers) if (i + 1) % step)


def _ernie_dense(config: Json, layers: int) -> tuple[int, ...]:
    step = read_count(config, "moe_layer_interval")
    first = read_field(config, "moe_layer_start_index", int)
    last = read_field(config, "moe_layer_end_index", int)
    sparse = range(first, layers if last == -1 else last + 1)
    return tuple(i for i in range(layers) if i not in sparse or (i + 1) % step)


# What some models derive from other keys.


def _with_rotary_dim(config: Json) -> Json:
    """MiniMax M2: `rotary_dim` elements of a head are rotated."""
    rotated = read_optional(config, "rotary_dim", int)
    if rotated is None or config.get("partial_rotary_factor") is not None:
        return config
    return {**config, "partial_rotary_factor": rotated / read_count(config, "head_dim")}


def _with_mimo_heads(config: Json) -> Json:
    """MiMo-V2-Flash: layers with a window have twice the key/value heads."""
    heads, kv_heads = (
        read_count(config, name) for name in ("num_attention_heads", "num_key_value_heads")
    )
    types = config["layer_types"] if isinstance(config["layer_types"], list) else []
    before = read_optional(config, "sliding_window_size", int)
    return {
        **config,
        "layer_heads": [(heads, kv_heads << (kind == "sliding_attention")) for kind in types],
        "sliding_window": config["sliding_window"] if before is None else before + 1,
        "routed_scaling_factor": read_field(config, "routed_scaling_factor", float, 1.0),
    }


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


MIXTRAL_EXPERTS = ExpertTraits(
    layouts=(
        ExpertLayout.of_tensors("block_sparse_moe.", names=("w1", "w3", "w2")),
        ExpertLayout.stacked("mlp."),
    ),
)

QWEN3_EXPERTS = ExpertTraits(
    dense_layers=_qwen3_dense,
    optional=True,
    layouts=(*ExpertLayout.both("mlp."), ExpertLayout.stacked("mlp.", transposed=True)),
)

_DEEPSEEK_V2_EXPERTS = ExpertTraits(
    dense_layers=lambda config, layers: first_dense(config, layers, "first_k_dense_replace", 0),
    optional=True,
    layouts=ExpertLayout.both("mlp."),
    shared="mlp.shared_experts",
)

DEEPSEEK_EXPERTS = replace(
    _DEEPSEEK_V2_EXPERTS,
    scores="sigmoid",
    group_score="top_2_sum",
    correction="mlp.gate.e_score_correction_bias",
)

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    defaults={
        **LLAMA_TOKENS,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    fixed={"attention_bias": False, "norm_topk_prob": True},
    keys=LOCAL_EXPERTS,
    experts=MIXTRAL_EXPERTS,
)

_DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **LATENT,
        **ROUTED,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "rope_interleave": True,
    },
    # Every layer after the first `first_k_dense_replace` ones is a mixture of experts.
    only={"moe_layer_freq": 1},
    latent=True,
    keys={"num_experts": "n_routed_experts"},
    experts=DEEPSEEK_EXPERTS,
    mtp=DEEPSEEK_MTP,
)

FAMILIES: dict[str, Family] = {
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        defaults={
            **LATENT,
            **LLAMA_TOKENS,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "mlp_bias": False,
        },
        experts=_DEEPSEEK_V2_EXPERTS,
        mtp=None,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        defaults={
            **ROUTED,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
        },
        only=_DEEPSEEK_V3.only,
        output_bias=False,
        qk_norm="each_head",
        keys=_DEEPSEEK_V3.keys,
        experts=DEEPSEEK_EXPERTS,
        mtp=DEEPSEEK_MTP,
    ),
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        architecture="Glm4MoeLiteForCausalLM",
        defaults={
            **_DEEPSEEK_V3.defaults,
            **ROUTED,
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
        },
        only={},
        experts=replace(DEEPSEEK_EXPERTS, dense_layers=listed_dense),
    ),
    "mimo_v2_flash": Family(
        architecture="MiMoV2FlashForCausalLM",
        defaults={
            **ROUTED,
            "bos_token_id": 1,
            "num_key_value_heads": 4,
            "layer_heads": None,
            "head_dim": 192,
            "v_head_dim": 128,
            "attention_value_scale": 0.707,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
        },
        # Of `rope_parameters`, if there are any; published configs have the same ones elsewhere.
        fixed={"rope_theta": 5e6, "rope_local_base_freq": 1e4, "partial_rotary_factor": 0.334},
        prepare=_with_mimo_heads,
        # Every sixth layer and the first one have full attention.
        layer_types=lambda config, layers: [
            ATTENTION_TYPES[layer > 0 and (layer + 1) % 6 != 0] for layer in layers
        ],
        lists_layer_types=True,
        output_bias=False,
        keys={"num_experts": "n_routed_experts", "value_dim": "v_head_dim"},
        attention_sinks={"sliding_attention": "self_attn.attention_sink_bias"},
        experts=replace(DEEPSEEK_EXPERTS, dense_layers=listed_dense, shared=""),
        mtp=MIMO_V2_MTP,
    ),
    "ernie4_5_moe": Family(
        architecture="Ernie4_5_MoeForCausalLM",
        defaults={
            **LLAMA_TOKENS,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 5e5,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        fixed={"attention_bias": False, "norm_topk_prob": True},
        # The output projection of the model would have a bias as well.
        only={"use_bias": False},
        keys={
            "num_experts": "moe_num_experts",
            "n_shared_experts": "moe_num_shared_experts",
            "num_experts_per_tok": "moe_k",
        },
        rope_interleaved=True,
        experts=ExpertTraits(
            dense_layers=_ernie_dense,
            layouts=ExpertLayout.both("mlp."),
            shared="mlp.shared_experts",
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_rows=True,
        ),
        mtp=ERNIE_MTP,
    ),
    "hy_v3": Family(
        architecture="HYV3ForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "mlp_bias": False,
            "num_experts": 192,
            "num_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        fixed={"norm_topk_prob": True},
        qk_norm="each_head",
        keys={
            "n_shared_experts": "num_shared_experts",
            "routed_scaling_factor": "router_scaling_factor",
        },
        experts=ExpertTraits(
            scores="sigmoid",
            dense_layers=listed_dense,
            layouts=(ExpertLayout.of_tensors("mlp.", "router.gate"),),
            shared="mlp.shared_mlp",
            correction="mlp.expert_bias",
        ),
        mtp=HY_V3_MTP,
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        defaults={
            "bos_token_id": 200034,
            "eos_token_id": 200020,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "partial_rotary_factor": 1.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        fixed={"attention_bias": False, "norm_topk_prob": True},
        qk_norm="all_heads",
        keys=LOCAL_EXPERTS,
        prepare=_with_rotary_dim,
        experts=replace(
            MIXTRAL_EXPERTS,
            scores="sigmoid",
            correction="block_sparse_moe.e_score_correction_bias",
        ),
    ),
    "mixtral": MIXTRAL,
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
        qk_norm="each_head",
        experts=QWEN3_EXPERTS,
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
        fixed={"hidden_act": "silu", "sliding_window_pattern": 2},
        prepare=_with_gpt_oss_rope,
        lists_layer_types=True,
        attention_sinks=dict.fromkeys(ATTENTION_TYPES, "self_attn.sinks"),
        keys=LOCAL_EXPERTS,
        experts=ExpertTraits(
            scores="softmax_chosen",
            layouts=(
                ExpertLayout(
                    router="mlp.router",
                    gate_up=("mlp.experts.gate_up_proj_blocks",),
                    down="mlp.experts.down_proj_blocks",
                    interleaved=True,
                ),
                ExpertLayout.stacked("mlp.", "router", transposed=True, interleaved=True),
                ExpertLayout.of_tensors("mlp.", "router"),  # of GGUF files
            ),
            router_bias=True,
            biases=True,
        ),
    ),
    "llama4_text": Family(
        architecture="Llama4ForCausalLM",
        defaults={
            **LLAMA_TOKENS,
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
        fixed={"n_shared_experts": 1},
        keys={
            **LOCAL_EXPERTS,
            "intermediate_size": "intermediate_size_mlp",
            "sliding_window": "attention_chunk_size",
        },
        # Rotated layers attend within chunks, the others to all previous tokens.
        layer_types=lambda config, layers: [
            ("chunked_attention", "full_attention")[is_unrotated(config, layer)] for layer in layers
        ],
        lists_layer_types=True,
        layer_kinds={"chunked_attention": "sliding_attention", "full_attention": "full_attention"},
        is_unrotated=is_unrotated,
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        qk_norm="unweighted",
        chunked=True,
        rope_interleaved=True,
        experts=ExpertTraits(
            scores="sigmoid",
            dense_layers=_llama4_dense,
            layouts=(
                ExpertLayout.stacked("feed_forward.", "router", transposed=True),
                ExpertLayout.of_tensors("feed_forward.", "router"),  # of GGUF files
            ),
            shared="feed_forward.shared_expert",
            scaled_inputs=True,
        ),
    ),
}
