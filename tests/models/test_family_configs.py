"""Configs of families other than Llama: defaults, windows, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.models.rope import Rope, RopeScaling
from transformers import AutoConfig, Gemma3TextConfig, Qwen2Config

from .test_model_config import check_refused

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 64,
}
DENSE = {"first_k_dense_replace": 8, "num_key_value_heads": 32}
PLAIN = (
    *("llama", "mistral", "qwen2", "mimo", "smollm3", "phi3", "olmo2", "olmo3", "granite", "glm"),
    *("glm4", "qwen3", "gemma2", "gemma3_text", "cohere2", "lfm2"),
)
FAMILIES: dict[str, dict[str, Any]] = {
    **{model_type: {} for model_type in PLAIN},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4},
    "bamba": {"attn_layer_indices": [1, 6]},
    "falcon_h1": {},
    **{kind: {} for kind in ("minimax", "jamba")},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2},
    "deepseek_v2": DENSE | {"num_experts_per_tok": 6},
    "deepseek_v3": DENSE,
    **{kind: {"num_local_experts": 8} for kind in ("mixtral", "gpt_oss", "llama4_text")},
    "qwen3_moe": {"num_experts": 8},
    "qwen3_next": {"num_experts": 8, "num_experts_per_tok": 3},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {"num_experts": 8},
    "kimi_linear": {"num_local_experts": 8, "num_key_value_heads": 32, "pad_token_id": None},
    "olmo_hybrid": {"pad_token_id": None},
    "lfm2_moe": {"num_experts": 8, "layer_types": ["conv", "full_attention"] * 4},
    "glm4_moe": {},
    "glm4_moe_lite": {"num_key_value_heads": 32},
    "mimo_v2_flash": {},
    **{kind: {} for kind in ("ernie4_5_moe", "hy_v3", "minimax_m2")},
}
"""Keys that a config of each family must have, besides sizes."""
GEMMA_3_1B: dict[str, Any] = {  # as published, in the layout of transformers 4
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
F, S = ["full_attention"], ["sliding_attention"]
SLIDING = {"use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4}


def of_full(rope: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters of layers with full attention only."""
    return {"rope_parameters": {"full_attention": rope}}


def longrope(**changes: Any) -> dict[str, Any]:
    """A head of 8 elements, rotated by longrope."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    return {"head_dim": 8, "rope_scaling": {"type": "su", **factors, **changes}}


def complete(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config with all keys that transformers adds."""
    if model_type == "mimo":  # which it lacks; its authors' differs in the model type alone
        keys: dict[str, Any] = Qwen2Config(**SIZES, **changes).to_dict()
        return keys | {"model_type": "mimo"}
    made = AutoConfig.for_model(model_type, **SIZES | FAMILIES[model_type] | changes).to_dict()
    return made | {"dtype": None}


def of_family(model_type: str, **changes: Any) -> ModelConfig:
    minimal = {"model_type": model_type, **SIZES, **FAMILIES[model_type]}
    return ModelConfig.from_hf(copy.deepcopy({**minimal, **changes}))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_of_a_family(model_type: str) -> None:
    """What is left out is what transformers assumes; tokens may be null; not all have soft caps."""
    assert ModelConfig.from_hf(complete(model_type)) == of_family(model_type)
    if model_type.startswith("deepseek"):
        experts = {"first_k_dense_replace": 1}
        expected = of_family(model_type, **experts)
        assert ModelConfig.from_hf(complete(model_type, **experts)) == expected
    config = of_family(model_type, bos_token_id=None, eos_token_id=None)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    config = of_family(model_type, attn_logit_softcapping=5.0, final_logit_softcapping=7.0)
    assert config.attn_logit_softcapping == (5.0 if model_type == "gemma2" else None)
    gemma = model_type in ("gemma2", "gemma3_text")
    assert config.final_logit_softcapping == (7.0 if gemma else None)


def test_gemma_3_in_both_layouts() -> None:
    assert ModelConfig.from_hf(GEMMA_3_1B) == preset("gemma-3-1b")
    new = Gemma3TextConfig(**copy.deepcopy(GEMMA_3_1B)).to_dict()
    assert "rope_theta" not in new
    assert ModelConfig.from_hf(new) == preset("gemma-3-1b")
    scaled = {**GEMMA_3_1B, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = ModelConfig.from_hf(scaled)
    assert config.rope(5) == Rope(1e6, RopeScaling(type="linear", factor=8.0))
    assert config.rope(0) == config.rope(6) == Rope(1e4)
    new = Gemma3TextConfig(**copy.deepcopy(scaled)).to_dict()
    assert ModelConfig.from_hf(new) == config


def test_mimo_is_qwen2() -> None:
    config, qwen2 = of_family("mimo"), of_family("qwen2")
    assert dataclasses.replace(qwen2, model_type="mimo") == config
    assert model_plan(qwen2) == model_plan(config)


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("mistral", {}, [4096] * 8),
        ("mistral", {"sliding_window": 5}, [5] * 8),
        ("mistral", {"sliding_window": None}, [None] * 8),
        ("qwen3", {}, [None] * 8),
        ("qwen3", {"max_window_layers": 2}, [None] * 8),
        ("qwen3", SLIDING | {"max_window_layers": 8}, [None] * 8),
        (
            "qwen3",
            SLIDING | {"max_window_layers": 6, "sliding_window": 7},
            [None] * 6 + [7] * 2,
        ),
        ("qwen3", SLIDING | {"layer_types": S * 3 + F * 5}, [4096] * 3 + [None] * 5),
        ("qwen2", SLIDING | {"max_window_layers": 7, "sliding_window": 3}, [None] * 7 + [3]),
        ("smollm3", {"sliding_window": 3}, [None] * 8),
        ("smollm3", SLIDING | {"sliding_window": 3}, [None, None, None, 3] * 2),
        ("phi3", {}, [None] * 8),
        ("phi3", {"sliding_window": 5}, [5] * 8),
        ("cohere2", {"sliding_window_pattern": 3}, [4096, 4096, None] * 2 + [4096] * 2),
        ("cohere2", {"sliding_window_pattern": None, "layer_types": F * 8}, [None] * 8),
        ("olmo3", {}, [4096, 4096, 4096, None] * 2),
        ("olmo3", {"layer_types": F * 7 + S, "sliding_window": 2}, [None] * 7 + [2]),
        ("gemma2", {"sliding_window": 3}, [3, None] * 4),
        ("gemma2", {"layer_types": F * 8}, [None] * 8),
        ("gemma3_text", {"sliding_window": 3}, [3] * 5 + [None] + [3] * 2),
        ("gemma3_text", {"sliding_window_pattern": 4}, [4096, 4096, 4096, None] * 2),
        ("deepseek_v3", {}, [None] * 8),
    ],
)
def test_windows(model_type: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    config = of_family(model_type, **changes)
    assert [config.window(layer) for layer in range(8)] == windows
    again = ModelConfig.from_hf(complete(model_type, **changes))
    assert [again.window(layer) for layer in range(8)] == windows


def test_latent_attention() -> None:
    config = of_family("deepseek_v3", q_lora_rank=None, kv_lora_rank=48)
    assert config.latent is not None
    assert config.latent.q_lora_rank is None
    plan = model_plan(config)
    attend = plan.attend
    assert (attend.kv_heads, attend.head_dim, attend.value_dim) == (1, 112, 48)
    assert plan.rope_dim == 64
    assert attend.scale == pytest.approx((128 + 64) ** -0.5)
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "attention_factor": 1.0}
    for scaling in (yarn, {**yarn, "type": "longrope", **factors}):
        stretched = of_family("deepseek_v3", rope_scaling=scaling)
        assert stretched.rope(0).scaling.amplitude == 1.0
        more = (0.1 * math.log(40) + 1) ** 2
        attend = model_plan(stretched).attend
        assert attend.scale == pytest.approx(more * (128 + 64) ** -0.5)


def test_experts_that_no_layer_uses() -> None:
    assert of_family("deepseek_v2", first_k_dense_replace=0, n_routed_experts=None)


LINEAR = {"rope_type": "linear", "factor": 4}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("deepseek_v3", {"num_key_value_heads": 4}),
        ("deepseek_v3", {"layer_types": S * 8}),
        ("mistral", {"layer_types": F * 8}),
        ("mimo_v2_flash", {"layer_types": F * 7}),
        ("mimo_v2_flash", {"v_head_dim": 256}),
        *((kind, {"sliding_window": None}) for kind in ("gemma2", "olmo3", "cohere2")),
        ("cohere2", {"logit_scale": 0.0}),
        ("lfm2", {"layer_types": ["conv"] * 8}),
        ("lfm2", {"layer_types": ["conv", "mamba"] * 4}),
        ("lfm2", {"layer_types": ["conv"] * 7}),
        ("lfm2", {"full_attn_idxs": [0.5]}),
        ("lfm2", {"conv_L_cache": 0, "layer_types": ["conv", *F] * 4}),
        ("qwen3_next", {"linear_num_value_heads": 24}),
        ("qwen3_next", {"linear_conv_kernel_dim": 0}),
        ("qwen3_next", {"full_attention_interval": 0}),
        ("qwen3_5_text", {"mamba_ssm_dtype": "float8"}),
        ("qwen3_5_moe_text", {"linear_key_head_dim": 0}),
        ("kimi_linear", {"mlp_layer_types": ["dense", "mixed"] * 4}),
        ("kimi_linear", {"linear_attn_config": 3}),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [9], "kda_layers": [1]}}),
        ("olmo_hybrid", {"linear_value_head_dim": -1}),
        ("cohere2", {"layer_types": ["sliding_attention"] * 7}),
        *((kind, {"layer_types": S * 8, "sliding_window": 9}) for kind in ("qwen2", "qwen3")),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma2", {"use_bidirectional_attention": True}),
        *((k, {"rope_parameters": {"rope_theta": 1e4}}) for k in ("gemma3_text", "olmo3")),
        ("gemma3_text", of_full({"rope_type": "linear", "factor": 2}) | {"rope_scaling": LINEAR}),
        ("gemma3_text", of_full({"rope_type": "dynamic", "factor": None})),
        ("qwen3", of_full({"rope_theta": 1e4})),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}),
        ("phi3", {"partial_rotary_factor": 1.5}),
        ("phi3", {"partial_rotary_factor": 1e308}),
        ("phi3", {"head_dim": 8, "partial_rotary_factor": 0.1}),
        ("llama", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}),
        ("granite", {"logits_scaling": 1e30}),
        ("granitemoehybrid", {"layer_types": None}),
        ("granitemoehybrid", {"layer_types": ["attention"] * 7 + ["conv"]}),
        ("granitemoehybrid", {"position_embedding_type": 1}),
        ("granitemoehybrid", {"mamba_d_head": 3}),
        ("granitemoehybrid", {"mamba_n_heads": 100}),
        ("granitemoehybrid", {"mamba_n_groups": 3}),
        ("granitemoehybrid", {"hidden_act": "gelu_pytorch_tanh"}),
        ("granitemoehybrid", {"mamba_ssm_cache_dtype": "int8"}),
        ("bamba", {"attn_layer_indices": "all"}),
        *(("bamba", {"time_step_limit": limits}) for limits in ([1.0], [0.5, 0.1], 3, [0, "inf"])),
        ("nemotron_h", {"moe_latent_size": 0}),
        ("nemotron_h", {"mamba_ssm_cache_dtype": "fp8"}),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}),
        ("nemotron_h", {"mlp_hidden_act": "silu"}),
        ("nemotron_h", {"layers_block_type": None}),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*XE"}),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"]}),
        ("nemotron_h", {"n_groups": 7}),
        ("jamba", {"hidden_act": "gelu"}),
        ("jamba", {"attn_layer_offset": 8}),
        ("jamba", {"expert_layer_period": 0}),
        ("jamba", {"mamba_dt_rank": "full"}),
        ("minimax", {"hidden_act": "gelu"}),
        ("minimax", {"sliding_window": 8}),
        ("minimax", {"layer_types": ["linear_attention"] * 8}),
        ("minimax", {"mlp_beta_factor": "1"}),
        ("falcon_h1", {"lm_head_multiplier": 0.0}),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}),
        ("falcon_h1", {"mlp_multipliers": None}),
        ("falcon_h1", {"mamba_proj_bias": True, "ssm_in_multiplier": 0.5}),
        ("falcon_h1", {"attention_bias": True, "attention_in_multiplier": 0.5}),
        ("falcon_h1", {"mlp_bias": True, "mlp_multipliers": [0.5, 1.0]}),
        ("qwen3", {"rope_scaling": YARN | {"beta_slow": 64}}),
        ("qwen3", {"rope_theta": 1, "rope_scaling": YARN}),
        ("mixtral", {"num_experts": 4}),
        ("mixtral", {"num_local_experts": None}),
        ("deepseek_v3", {"n_group": 7}),
        ("deepseek_v3", {"n_group": 256, "topk_group": 8}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 7}),
        ("hy_v3", {"mlp_layer_types": ["dense"] * 7 + ["moe"]}),
        ("hy_v3", {"mlp_bias": True}),
        ("ernie4_5_moe", {"use_bias": True}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v2", {"num_experts_per_tok": None}),
        ("deepseek_v2", {"mlp_bias": True}),
        ("llama4_text", {"attention_chunk_size": None}),
        ("gpt_oss", {"swiglu_limit": None}),
        ("gpt_oss", {"quantization_config": {"quant_method": "hqq"}}),
        ("gpt_oss", {"quantization_config": "mxfp4"}),
        ("mixtral", {"quantization_config": {"quant_method": "torchao"}}),
        ("deepseek_v3", {"quantization_config": {"quant_method": "quark"}}),
    ],
    ids=str,
)
def test_refusal_names_the_field(model_type: str, changes: dict[str, Any]) -> None:
    sparse = {"first_k_dense_replace": 0} if model_type.startswith("deepseek") else {}
    check_refused(changes, lambda: of_family(model_type, **sparse, **changes))
