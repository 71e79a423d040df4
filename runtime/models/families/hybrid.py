"""Families with mixers other than attention in some layers, or beside it."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from ...bounded_repr import bounded_repr
from ...errors import CheckpointError
from ..config_keys import Json, read_count, read_field, read_layers, read_optional
from ..layers.delta_rule import DeltaRuleLayout
from ..layers.experts import ExpertLayout, ExpertTraits
from .dense import GRANITE, LLAMA_TOKENS, OLMO2, with_inverse
from .family import Family, LayerNorms
from .mixtures import (
    DEEPSEEK_EXPERTS,
    LATENT,
    LOCAL_EXPERTS,
    MIXTRAL,
    QWEN3_EXPERTS,
    ROUTED,
    first_dense,
    listed_dense,
)
from .mtp import QWEN3_NEXT_MTP


def _attending(layers: range, attending: Container[int], other: str) -> list[str]:
    return ["full_attention" if layer in attending else other for layer in layers]


def _periodic(config: Json, name: str, layers: int) -> range:
    """Return the layers of one kind: one in each period, at an offset."""
    period = read_count(config, f"{name}_period")
    offset = read_field(config, f"{name}_offset", int)
    if not 0 <= offset < period:
        raise CheckpointError(
            f"{name}_offset = {offset} must be at least 0 and below {name}_period = {period}"
        )
    return range(offset, layers, period)


# Mamba layers.


def _time_steps(config: Json) -> Json:
    """Return the limits of time steps, of which the largest may be infinite."""
    limits = config.get("time_step_limit")
    if limits is None:
        return {}
    if isinstance(limits, list):  # transformers writes numbers that JSON lacks as objects
        limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    if (
        not isinstance(limits, list)
        or [type(limit) in (int, float) for limit in limits] != [True, True]
        or not 0 <= limits[0] < limits[1]
    ):
        raise CheckpointError(
            "time_step_limit must be the least and the largest time step, not "
            + bounded_repr(limits)
        )
    return {"least_time_step": float(limits[0]), "largest_time_step": min(limits[1], 1e18)}


def _mamba2(config: Json) -> Json:
    """Mamba-2: the sizes of heads, and the limits of time steps."""
    heads, head = read_count(config, "mamba_n_heads"), config.get("mamba_d_head")
    inner, named = read_optional(config, "mamba_d_ssm", int), "mamba_d_ssm"
    if inner is None:
        inner = read_count(config, "mamba_expand") * read_count(config, "hidden_size")
        named = "mamba_expand * hidden_size"
    if inner % heads or head not in (None, "auto", inner // heads):
        raise CheckpointError(
            f"{named} = {inner} must be mamba_n_heads = {heads} times mamba_d_head = "
            + bounded_repr(head)
        )
    return {**config, "mamba_d_head": inner // heads, **_time_steps(config)}


def _granite_types(config: Json, layers: range) -> list[str]:
    """Granite 4: all layers are Mamba layers if the config lists none."""
    listed: list[str] | None = config.get("layers_block_type")
    return ["mamba"] * len(layers) if listed is None else listed


def _falcon_h1(config: Json) -> Json:
    """Falcon-H1: factors follow linear layers."""
    for bias, name in (("attention_bias", "attention_in"), ("mamba_proj_bias", "ssm_in")):
        by = read_field(config, f"{name}_multiplier", float)
        if by != 1.0 and read_field(config, bias, bool, False):
            raise CheckpointError(f"{bias} is not supported with {name}_multiplier = {by}")
    if read_field(config, "mlp_bias", bool, False) and config["mlp_multipliers"][0] != 1.0:
        raise CheckpointError("mlp_bias is not supported with mlp_multipliers")
    return _mamba2(with_inverse(config, "lm_head_multiplier"))


def _jamba(config: Json) -> Json:
    """Jamba: a rank of time steps that may be derived."""
    if config["mamba_dt_rank"] != "auto":
        return config
    return {**config, "mamba_dt_rank": -(-read_count(config, "hidden_size") // 16)}


def _jamba_dense(config: Json, layers: int) -> tuple[int, ...]:
    """Jamba: the layers without experts, all of them if there is a single expert."""
    mixtures = _periodic(config, "expert_layer", layers)
    sparse = read_count(config, "num_experts") > 1
    return tuple(layer for layer in range(layers) if not sparse or layer not in mixtures)


_NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_types(config: Json) -> list[Any]:
    """Nemotron-H: the types of its layers, which a list or a letter for each names."""
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is None and isinstance(pattern := config.get("hybrid_override_pattern"), str):
        if unknown := {*pattern} - {*_NEMOTRON_KINDS}:
            raise CheckpointError(
                f"hybrid_override_pattern has {', '.join(sorted(map(repr, unknown)))}; it may have"
                f" {', '.join(map(repr, _NEMOTRON_KINDS))}"
            )
        listed = [_NEMOTRON_KINDS[letter] for letter in pattern]
    if not isinstance(listed, list):
        raise CheckpointError(
            "the config must have layers_block_type or hybrid_override_pattern, not"
            f" {bounded_repr(listed)}"
        )
    return listed


_MAMBA: dict[str, Any] = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

_MAMBA2: dict[str, Any] = {
    **_MAMBA,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": None,
    "least_time_step": 0.0,
    "largest_time_step": 1e18,
}

_MAMBA2_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("attention", "full_attention"), "full_attention"),
    **dict.fromkeys(("mamba", "linear_attention"), "mamba2"),
}

_BAMBA = Family(
    architecture="BambaForCausalLM",
    defaults={
        **LLAMA_TOKENS,
        **_MAMBA2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
    },
    fixed={"partial_rotary_factor": 0.5, "layer_types": None},
    only={"hidden_act": "silu"},
    keys={"mamba_output_bias": "mamba_proj_bias"},
    prepare=_mamba2,
    layer_types=lambda config, layers: _attending(
        layers, read_layers(config, "attn_layer_indices"), "mamba"
    ),
    lists_layer_types=True,
    layer_kinds=_MAMBA2_KINDS,
    layer_norms=LayerNorms(mlp="pre_ff_layernorm"),
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    final_norm="model.final_layernorm",
)

# The delta rule.

_DELTA_RULE: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_LINEAR_KINDS: Mapping[str, str] = {
    "full_attention": "full_attention",
    "linear_attention": "delta_rule",
}

_SEPARATE = DeltaRuleLayout(
    qkv=("q_proj", "k_proj", "v_proj"),
    gate=("g_proj",),
    decay=("a_proj",),
    beta="b_proj",
    norm="o_norm",
    output="o_proj",
)

_QWEN3_NEXT_EXPERTS = replace(
    QWEN3_EXPERTS, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"
)


def _qwen3_next_types(config: Json, layers: range) -> list[str]:
    """Qwen3-Next: the last of each `full_attention_interval` layers has attention."""
    interval = read_count(config, "full_attention_interval", 4)
    return _attending(layers, layers[interval - 1 :: interval], "linear_attention")


_QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    defaults={
        **_DELTA_RULE,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    layer_types=_qwen3_next_types,
    lists_layer_types=True,
    layer_kinds=_LINEAR_KINDS,
    qk_norm="each_head",
    offset_norms=True,
    gated_attention=True,
    mixer={
        "layout": DeltaRuleLayout(
            qkv=("in_proj_qkvz",), gate=(), decay=(), beta="in_proj_ba", by_key_head=True
        )
    },
    experts=_QWEN3_NEXT_EXPERTS,
    mtp=QWEN3_NEXT_MTP,
)

_KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def _kimi_sizes(config: Json) -> Json:
    """Kimi Linear: the object with its linear attention."""
    inner = config.get("linear_attn_config") or {}
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"linear_attn_config must be an object, not {bounded_repr(inner)}")
    return inner


def _kimi_types(config: Json, layers: range) -> list[str]:
    inner, attending = _kimi_sizes(config), {i for i in layers if i and i % 4 == 0}
    if {"full_attn_layers", "kda_layers"} <= inner.keys():
        attending = {layer - 1 for layer in read_layers(inner, "full_attn_layers")}
        listed = attending | {layer - 1 for layer in read_layers(inner, "kda_layers")}
        if listed != {*layers}:
            raise CheckpointError(
                f"full_attn_layers and kda_layers must list the layers 1 to {len(layers)}"
                f" (num_hidden_layers), not {bounded_repr(sorted(i + 1 for i in listed))}"
            )
    return _attending(layers, attending, "linear_attention")


def _kimi(config: Json) -> Json:
    """Kimi Linear: sizes in an object of their own, and other names of keys."""
    renamed = {
        ours: config[theirs]
        for theirs, ours in _KIMI_NAMES.items()
        if config.get(theirs) is not None
    }
    config, inner = {**config, **renamed}, _kimi_sizes(config)
    heads = read_count(inner, "num_heads", read_field(config, "linear_num_heads", int))
    size = read_count(inner, "head_dim", read_field(config, "linear_head_dim", int))
    taps = read_field(config, "linear_conv_kernel_dim", int)
    return {
        **config,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": read_count(inner, "short_conv_kernel_size", taps),
    }


def _kimi_dense(config: Json, layers: int) -> tuple[int, ...]:
    if config.get("mlp_layer_types") is not None:
        return listed_dense(config, layers)
    return first_dense(config, layers, "first_k_dense_replace", 1)


def _olmo_types(config: Json, layers: range) -> list[str]:
    """OLMo Hybrid: every fourth layer has attention, or the last one."""
    return _attending(layers, layers[3::4] or layers[-1:], "linear_attention")


def _olmo_hybrid(config: Json) -> Json:
    """OLMo Hybrid: sizes of the delta rule that follow from others."""
    heads = read_count(config, "num_attention_heads")
    key_heads = read_count(config, "linear_num_key_heads", heads)
    key = int(0.75 * read_field(config, "hidden_size", int) / key_heads)
    key = read_count(config, "linear_key_head_dim", key)
    return {
        **config,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": read_count(config, "linear_num_value_heads", heads),
        "linear_key_head_dim": key,
        "linear_value_head_dim": read_count(config, "linear_value_head_dim", 2 * key),
    }


def _has_no_base(config: Json, layer: int) -> bool:
    """OLMo Hybrid: a base that is null switches rotary positions off."""
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else config
    return "rope_theta" in rope and rope["rope_theta"] is None


# Convolutions, and lightning attention.


def _lfm2_types(config: Json, layers: range) -> list[str]:
    """LFM2: layers with attention by number; all if the config lists none."""
    attending = read_layers(config, "full_attn_idxs")
    return _attending(layers, layers if config.get("full_attn_idxs") is None else attending, "conv")


def _lfm2(config: Json) -> Json:
    """LFM2: a width of the MLP that is rounded."""
    renamed = config.get("block_ff_dim") is not None
    width = read_field(config, "block_ff_dim" if renamed else "intermediate_size", int)
    if read_field(config, "block_auto_adjust_ff_dim", bool):
        multiple = read_count(config, "block_multiple_of")
        factor = read_optional(config, "block_ffn_dim_multiplier", float)
        width = int(2 * width / 3)
        if factor is not None:
            width = multiple * -(-int(factor * width) // multiple)
    tied = read_optional(config, "tie_embedding", bool)
    found = {**config, "intermediate_size": width}
    return found if tied is None else {**found, "tie_word_embeddings": tied}


_LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    defaults={
        **LLAMA_TOKENS,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    fixed={"attention_bias": False, "mlp_bias": False},
    keys={"rms_norm_eps": "norm_eps", "conv_taps": "conv_L_cache"},
    prepare=_lfm2,
    layer_types=_lfm2_types,
    lists_layer_types=True,
    layer_kinds={"full_attention": "full_attention", "conv": "conv"},
    layer_norms=LayerNorms(input="operator_norm", mlp="ffn_norm"),
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    qk_norm="each_head",
    qk_norm_names=("q_layernorm", "k_layernorm"),
    final_norm="model.embedding_norm",
)


def _minimax(config: Json) -> Json:
    """MiniMax-01: lightning attention decays slower in later layers."""
    count = read_field(config, "num_hidden_layers", int)
    slopes = [1 - layer / (count - 1 + 1e-5) + 1e-5 for layer in range(count)]
    return {**config, "layer_slopes": slopes}


FAMILIES: dict[str, Family] = {
    "minimax": replace(
        MIXTRAL,
        architecture="MiniMaxForCausalLM",
        defaults={
            **MIXTRAL.defaults,
            "num_local_experts": 8,
            "layer_slopes": [],
            "full_attn_alpha_factor": 1.0,
            "full_attn_beta_factor": 1.0,
            "linear_attn_alpha_factor": 1.0,
            "linear_attn_beta_factor": 1.0,
            "mlp_alpha_factor": 1.0,
            "mlp_beta_factor": 1.0,
        },
        only={"hidden_act": "silu", "sliding_window": None},
        prepare=_minimax,
        layer_types=lambda config, layers: _attending(layers, layers[::2], "linear_attention"),
        lists_layer_types=True,
        layer_kinds={"full_attention": "full_attention", "linear_attention": "lightning"},
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        architecture="Lfm2MoeForCausalLM",
        defaults={
            **_LFM2.defaults,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        fixed={**_LFM2.fixed, "block_auto_adjust_ff_dim": False},
        experts=ExpertTraits(
            scores="sigmoid",
            dense_layers=lambda config, layers: first_dense(config, layers, "num_dense_layers"),
            layouts=(
                ExpertLayout.of_tensors("feed_forward.", names=("w1", "w3", "w2")),
                ExpertLayout.stacked("feed_forward."),
            ),
            correction="feed_forward.expert_bias",
        ),
    ),
    "olmo_hybrid": replace(
        OLMO2,
        architecture="OlmoHybridForCausalLM",
        defaults={
            **dict.fromkeys(_DELTA_RULE),
            "linear_conv_kernel_dim": 4,
            "eos_token_id": 100257,
            "linear_allow_neg_eigval": True,
        },
        fixed={"mlp_bias": False},
        prepare=_olmo_hybrid,
        layer_types=_olmo_types,
        lists_layer_types=True,
        layer_kinds=_LINEAR_KINDS,
        is_unrotated=_has_no_base,
        norms_of={"delta_rule": LayerNorms()},
        renamed={
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
        mixer={"layout": replace(_SEPARATE, norm_eps=1e-5)},
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(
        _QWEN3_NEXT,
        architecture="Qwen3_5ForCausalLM",
        defaults={
            **_DELTA_RULE,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
        },
        mixer={},
        experts=None,
    ),
    "qwen3_5_moe_text": replace(
        _QWEN3_NEXT,
        architecture="Qwen3_5MoeForCausalLM",
        # All layers have experts, and none an MLP of this intermediate_size.
        defaults={**_QWEN3_NEXT.defaults, "num_experts_per_tok": 8, "intermediate_size": 512},
        fixed={"norm_topk_prob": True},
        mixer={},
        experts=replace(
            _QWEN3_NEXT_EXPERTS, dense_layers=lambda config, layers: (), optional=False
        ),
    ),
    "kimi_linear": Family(
        architecture="KimiLinearForCausalLM",
        defaults={
            **LATENT,
            **_DELTA_RULE,
            **ROUTED,
            "bos_token_id": 163584,
            "eos_token_id": 163586,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446,
            "max_position_embeddings": 1048576,
        },
        prepare=_kimi,
        layer_types=_kimi_types,
        lists_layer_types=True,
        layer_kinds=_LINEAR_KINDS,
        is_unrotated=lambda config, layer: True,
        latent=True,
        renamed={".block_sparse_moe.": ".mlp.", ".forget_gate.": "."},
        mixer={
            "layout": replace(
                _SEPARATE,
                module="self_attn",
                gate=("g_a_proj", "g_b_proj"),
                decay=("f_a_proj", "f_b_proj"),
                gate_activation="sigmoid",
                norm_in_float32=True,
            )
        },
        experts=replace(
            DEEPSEEK_EXPERTS,
            dense_layers=_kimi_dense,
            layouts=(
                ExpertLayout.of_tensors("mlp.", names=("w1", "w3", "w2")),
                ExpertLayout.stacked("mlp."),
            ),
        ),
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        defaults={
            **GRANITE,
            **_MAMBA2,
            "intermediate_size": 11008,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
        keys={
            **LOCAL_EXPERTS,
            "intermediate_size": "shared_intermediate_size",
            "shared_expert_intermediate_size": "shared_intermediate_size",
            "mamba_output_bias": "mamba_proj_bias",
        },
        only={"hidden_act": "silu"},
        prepare=_mamba2,
        layer_types=_granite_types,
        lists_layer_types=True,
        layer_kinds=_MAMBA2_KINDS,
        experts=ExpertTraits(
            scores="softmax_chosen",
            optional=True,
            layouts=(
                ExpertLayout(
                    router="block_sparse_moe.router.layer",
                    gate_up=("block_sparse_moe.input_linear.weight",),
                    down="block_sparse_moe.output_linear.weight",
                ),
                ExpertLayout.stacked("block_sparse_moe.", "router"),
            ),
            shared="shared_mlp",
            shared_names=("input_linear", "output_linear"),
        ),
        is_unrotated=lambda config, layer: (
            read_optional(config, "position_embedding_type", str) != "rope"
        ),
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
    ),
    "bamba": _BAMBA,
    "jamba": replace(
        _BAMBA,
        architecture="JambaForCausalLM",
        defaults={
            **LLAMA_TOKENS,
            **_MAMBA,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_dt_rank": "auto",
        },
        fixed={"attention_bias": False, "norm_topk_prob": False, "layer_types": None},
        keys={"moe_intermediate_size": "intermediate_size"},
        prepare=_jamba,
        layer_types=lambda config, layers: _attending(
            layers, _periodic(config, "attn_layer", len(layers)), "mamba"
        ),
        layer_kinds={"full_attention": "full_attention", "mamba": "mamba1"},
        is_unrotated=lambda config, layer: True,
        experts=ExpertTraits(
            dense_layers=_jamba_dense, layouts=ExpertLayout.both("feed_forward.", "router")
        ),
    ),
    "nemotron_h": Family(
        architecture="NemotronHForCausalLM",
        defaults={
            **LLAMA_TOKENS,
            **ROUTED,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "least_time_step": 0.0,
            "largest_time_step": 1e18,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
        },
        fixed={"attention_bias": False},
        only={"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"},
        keys={
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "mlp_hidden_act",
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_proj_bias": "use_bias",
            "mamba_output_bias": "use_bias",
        },
        num_layers=lambda config: len(_nemotron_types(config)),
        prepare=lambda config: {
            **config,
            "layer_types": _nemotron_types(config),
            **_time_steps(config),
        },
        layer_types=lambda config, layers: _nemotron_types(config),
        lists_layer_types=True,
        layer_kinds={**_MAMBA2_KINDS, "moe": "experts", "mlp": "mlp"},
        separate_layers=True,
        is_unrotated=lambda config, layer: True,
        renamed={"backbone.": "model.", "model.embeddings.": "model.embed_tokens."},
        layer_norms=LayerNorms(input="norm", mlp="norm"),
        mixer={"mamba_module": "mixer"},
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        final_norm="model.norm_f",
        experts=ExpertTraits(
            scores="sigmoid",
            group_score="top_2_sum",
            dense_layers=lambda config, layers: tuple(
                layer for layer, kind in enumerate(config["layer_types"][:layers]) if kind != "moe"
            ),
            layouts=(
                ExpertLayout.of_tensors("mixer.", names=("up_proj", "down_proj")),
                ExpertLayout(
                    router="mixer.gate",
                    gate_up=("mixer.experts.up_proj",),
                    down="mixer.experts.down_proj",
                ),
            ),
            shared="mixer.shared_experts",
            shared_names=("up_proj", "down_proj"),
            correction="mixer.gate.e_score_correction_bias",
            latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
            exact=True,
        ),
    ),
    "falcon_h1": replace(
        _BAMBA,
        architecture="FalconH1ForCausalLM",
        defaults={
            **_BAMBA.defaults,
            **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier"), 1.0),
            **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
            **dict.fromkeys(("key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
            "ssm_multipliers": [1.0] * 5,
            "mlp_multipliers": [1.0] * 2,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "projectors_bias": False,
        },
        fixed={"logits_scaling": 1.0, "layer_types": None},
        keys={"mamba_output_bias": "projectors_bias"},
        prepare=_falcon_h1,
        layer_types=lambda config, layers: ["hybrid"] * len(layers),
        layer_kinds={"hybrid": "mamba2_attention"},
    ),
}
