"""Model descriptions: read from both layouts of config.json, refused when they cannot be served."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.errors import CheckpointError, ConfigError
from stepgraph.runtime.models.config import ModelConfig, Rope, RopeScaling
from stepgraph.runtime.models.layout import fused_layout
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import PRESETS, preset
from stepgraph.runtime.models.rope import inverse_frequencies, rotate
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# As transformers 4 wrote it, values of a published 1B model.
OLD_LAYOUT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def old(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy({**OLD_LAYOUT, **changes})  # transformers writes into nested objects


def new_layout(**changes: Any) -> dict[str, Any]:
    """What transformers 5 makes of the same values."""
    config = LlamaConfig(**old(**changes)).to_dict()
    assert "rope_parameters" in config
    assert "rope_theta" not in config
    return config


class TestReading:
    def test_old_layout(self) -> None:
        config = ModelConfig.from_hf(OLD_LAYOUT)
        expected = dataclasses.replace(preset("llama-3.2-1b"), eos_token_ids=(128001, 128008))
        assert config == expected

    def test_new_layout_means_the_same(self) -> None:
        assert ModelConfig.from_hf(new_layout()) == ModelConfig.from_hf(OLD_LAYOUT)

    def test_minimal_config_gets_the_architecture_s_defaults(self) -> None:
        minimal = {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "rope_scaling": None,
            "num_key_value_heads": None,
        }
        config = ModelConfig.from_hf(minimal)
        reference = LlamaConfig(**minimal)
        assert config.num_kv_heads == reference.num_key_value_heads == 4
        assert config.head_dim == reference.head_dim == 12
        assert config.rms_norm_eps == reference.rms_norm_eps
        assert config.rope_theta == reference.rope_parameters["rope_theta"]
        assert config.tie_word_embeddings is reference.tie_word_embeddings
        assert config.rope_scaling == RopeScaling()
        assert (config.query_size, config.kv_size) == (48, 48)
        assert config.bos_token_id == reference.bos_token_id == 1
        assert config.eos_token_ids == (reference.eos_token_id,) == (2,)

    @pytest.mark.parametrize(
        ("own", "generation", "expected"),
        [
            (2, None, (2,)),
            ([2, 3], {}, (2, 3)),
            (2, {"eos_token_id": [5, 2]}, (2, 5)),
            (None, {"eos_token_id": 7}, (7,)),
            (None, {"eos_token_id": None}, ()),
        ],
    )
    def test_eos_tokens_are_merged(self, own: Any, generation: Any, expected: Any) -> None:
        assert ModelConfig.from_hf(old(eos_token_id=own), generation).eos_token_ids == expected

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_dtype(self, key: str) -> None:
        config = {k: v for k, v in OLD_LAYOUT.items() if k != "torch_dtype"}
        assert ModelConfig.from_hf(config).torch_dtype == "float32"
        assert ModelConfig.from_hf({**config, key: "float16"}).torch_dtype == "float16"

    @pytest.mark.parametrize("key", ["rope_type", "type"])
    def test_linear_scaling(self, key: str) -> None:
        config = ModelConfig.from_hf(old(rope_scaling={key: "linear", "factor": 2}))
        assert config.rope_scaling == RopeScaling(type="linear", factor=2.0)

    @pytest.mark.parametrize("kind", ["llama3", "yarn"])
    @pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 4096}])
    def test_first_context_outside_the_object_has_priority(
        self, kind: str, inside: dict[str, int]
    ) -> None:
        rope = {"rope_type": kind, "factor": 8.0, **inside}
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        changes = {"original_max_position_embeddings": 1024, "rope_scaling": rope}
        config = ModelConfig.from_hf(old(**changes))
        assert config.rope_scaling.original_max_position_embeddings == 1024
        expected = LlamaRotaryEmbedding(LlamaConfig(**old(**changes))).inv_freq
        actual = inverse_frequencies(config.rope(0), model_plan(config).rope_dim)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0.0)
        new = LlamaConfig(**old(**changes)).to_dict()
        assert ModelConfig.from_hf(new) == config


class TestRefusal:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClass"),
            ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "LlamaForCausalLM"),
            ({"architectures": None, "model_type": "mamba"}, "mamba"),
            ({"architectures": None, "model_type": None}, "LlamaForCausalLM"),
            ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu'"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
            ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "'longrope'.*'llama3'"),
            ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
            ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"factor = 0\.5"),
            ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor = nan"),
            (
                {"rope_scaling": {**OLD_LAYOUT["rope_scaling"], "low_freq_factor": 4.0}},
                "low_freq_factor = 4.0.*high_freq_factor = 4.0",
            ),
            (
                {
                    "rope_scaling": {
                        **OLD_LAYOUT["rope_scaling"],
                        "original_max_position_embeddings": 0,
                    }
                },
                "original_max_position_embeddings = 0",
            ),
            ({"rope_scaling": [1]}, "rope_scaling must be an object"),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
                "rope_parameters = .*'factor': 2.0.* and rope_scaling = .*'factor': 32.0",
            ),
            (
                {"rope_parameters": {**OLD_LAYOUT["rope_scaling"], "rope_theta": 1e4}}
                | {"rope_scaling": {**OLD_LAYOUT["rope_scaling"], "rope_theta": 2e4}},
                "rope_parameters = .*10000.0.* and rope_scaling = .*20000.0",
            ),
            (
                {"original_max_position_embeddings": 0},
                "original_max_position_embeddings = 0",
            ),
            ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
            ({"num_key_value_heads": 5}, "num_attention_heads = 32.*num_key_value_heads = 5"),
            ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
            ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads = 0"),
            ({"num_attention_heads": -32}, "num_attention_heads = -32"),
            ({"head_dim": None, "hidden_size": 2050}, "hidden_size = 2050.*num_attention_heads"),
            ({"head_dim": 63}, "head_dim = 63 must be even"),
            ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
            ({"vocab_size": -1}, "vocab_size = -1"),
            ({"vocab_size": None}, "no vocab_size"),
            ({"hidden_size": "2048"}, "hidden_size must be of type int, not '2048'"),
            ({"num_hidden_layers": True}, "num_hidden_layers must be of type int"),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings must be of type bool"),
            ({"rms_norm_eps": 0}, r"rms_norm_eps = 0\.0"),
            ({"rope_theta": float("inf")}, "rope_theta = inf"),
            ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn'"),
            ({"eos_token_id": "</s>"}, "eos_token_id must be"),
            ({"eos_token_id": [1, 128256]}, r"eos_token_id = .*128256"),
            ({"bos_token_id": -1}, "bos_token_id = -1"),
        ],
    )
    def test_message_names_the_field(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            ModelConfig.from_hf(old(**changes))


class TestFrequencies:
    @given(
        head_dim=st.integers(1, 64).map(lambda n: 2 * n),
        theta=st.floats(1e3, 1e7),
        kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
        factor=st.floats(1.0, 64.0),
        low=st.floats(0.5, 2.0),
        span=st.floats(0.5, 40.0),
        original=st.integers(64, 16384),
        truncate=st.booleans(),
        mscale=st.sampled_from([None, 0.0, 0.707, 1.0]),
        mscale_all_dim=st.sampled_from([None, 0.0, 0.5, 1.0]),
        attention_factor=st.sampled_from([None, 1.0, 1.5]),
    )
    @settings(deadline=None)
    def test_equal_to_transformers(
        self,
        head_dim: int,
        theta: float,
        kind: str,
        factor: float,
        low: float,
        span: float,
        original: int,
        truncate: bool,
        mscale: float | None,
        mscale_all_dim: float | None,
        attention_factor: float | None,
    ) -> None:
        rope: dict[str, Any] = {"rope_type": kind}
        if kind != "default":
            rope["factor"] = factor
        if kind == "llama3":
            rope |= {"low_freq_factor": low, "high_freq_factor": low + span}
        if kind == "yarn":
            rope |= {"beta_slow": low, "beta_fast": low + span, "truncate": truncate}
            rope |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
            rope["attention_factor"] = attention_factor
        if kind in ("llama3", "yarn"):
            rope["original_max_position_embeddings"] = original
        hf = LlamaConfig(**old(head_dim=head_dim, rope_scaling=rope, rope_theta=theta))
        embedding = LlamaRotaryEmbedding(hf)
        config = ModelConfig.from_hf(hf.to_dict())
        actual = inverse_frequencies(config.rope(0), model_plan(config).rope_dim)
        assert actual.dtype == torch.float32
        assert actual.shape == (head_dim // 2,)
        torch.testing.assert_close(actual, embedding.inv_freq, rtol=1e-5, atol=1e-12)
        assert config.rope(0).scaling.amplitude == pytest.approx(embedding.attention_scaling)

    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_to_the_last_bits(self, name: str) -> None:
        config = preset(name)
        for layer in range(config.num_layers):
            theta, scaling = config.rope(layer)
            hf = LlamaConfig(
                head_dim=model_plan(config).rope_dim,
                rope_parameters={
                    "rope_theta": theta,
                    "rope_type": scaling.type,
                    "factor": scaling.factor,
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": 8192,
                },
            )
            expected = LlamaRotaryEmbedding(hf).inv_freq
            actual = inverse_frequencies(config.rope(layer), model_plan(config).rope_dim)
            torch.testing.assert_close(actual, expected, rtol=3e-7, atol=0.0)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_rotation_turns_pairs(self, interleaved: bool) -> None:
        x = torch.randn(5, 3, 8)
        angles = torch.rand(5, 4) * 6
        even = (slice(0, None, 2), slice(1, None, 2))
        first, second = even if interleaved else (slice(0, 4), slice(4, 8))
        turned = torch.complex(x[..., first], x[..., second])
        turned = turned * torch.polar(torch.ones(5, 1, 4), angles[:, None])
        expected = torch.cat((turned.real, turned.imag), dim=-1)
        actual = rotate(x, angles.cos(), angles.sin(), interleaved=interleaved)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


class TestPresets:
    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("smollm2-135m", 134_515_008),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.1-8b", 8_030_261_248),
            ("qwen3-0.6b", 596_049_920),
            ("mistral-7b", 7_241_732_096),
            ("gemma-2-2b", 2_614_341_888),
            ("gemma-3-1b", 999_885_952),
        ],
    )
    def test_number_of_parameters_is_the_published_one(self, name: str, parameters: int) -> None:
        layout = fused_layout(preset(name))
        assert sum(math.prod(fused.shape) for fused in layout.values()) == parameters


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 64,
}
DENSE = {"first_k_dense_replace": 8, "num_key_value_heads": 32}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mistral": (MistralConfig, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, {}),
    "gemma3_text": (Gemma3TextConfig, {}),
    "deepseek_v2": (DeepseekV2Config, DENSE),
    "deepseek_v3": (DeepseekV3Config, DENSE),
}
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


def of_family(model_type: str, **changes: Any) -> ModelConfig:
    minimal = {"model_type": model_type, **SIZES, **FAMILIES[model_type][1]}
    return ModelConfig.from_hf(copy.deepcopy({**minimal, **changes}))


class TestFamilies:
    @pytest.mark.parametrize("model_type", FAMILIES)
    def test_what_is_left_out_is_what_transformers_assumes(self, model_type: str) -> None:
        hf_class, changes = FAMILIES[model_type]
        spelled_out = hf_class(**SIZES, **changes).to_dict()
        assert ModelConfig.from_hf(spelled_out | {"dtype": None}) == of_family(model_type)

    @pytest.mark.parametrize("model_type", ["llama", *FAMILIES])
    def test_tokens_that_are_null_are_none(self, model_type: str) -> None:
        minimal = {"model_type": model_type, **SIZES, **FAMILIES.get(model_type, (None, {}))[1]}
        config = ModelConfig.from_hf({**minimal, "bos_token_id": None, "eos_token_id": None})
        assert (config.bos_token_id, config.eos_token_ids) == (None, ())

    @pytest.mark.parametrize("model_type", ["llama", *FAMILIES])
    def test_caps_are_those_of_the_families_that_have_them(self, model_type: str) -> None:
        minimal = {"model_type": model_type, **SIZES, **FAMILIES.get(model_type, (None, {}))[1]}
        caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
        config = ModelConfig.from_hf({**minimal, **caps})
        assert config.attn_logit_softcapping == (5.0 if model_type == "gemma2" else None)
        gemma = model_type in ("gemma2", "gemma3_text")
        assert config.final_logit_softcapping == (7.0 if gemma else None)

    def test_gemma_3_in_both_layouts(self) -> None:
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

    @pytest.mark.parametrize(
        ("model_type", "changes", "windows"),
        [
            ("mistral", {}, [4096] * 8),
            ("mistral", {"sliding_window": 5}, [5] * 8),
            ("mistral", {"sliding_window": None}, [None] * 8),
            ("qwen3", {}, [None] * 8),
            ("qwen3", {"max_window_layers": 2}, [None] * 8),
            ("qwen3", {"use_sliding_window": True, "max_window_layers": 8}, [None] * 8),
            (
                "qwen3",
                {"use_sliding_window": True, "max_window_layers": 6, "sliding_window": 7},
                [None] * 6 + [7] * 2,
            ),
            (
                "qwen3",
                {
                    "use_sliding_window": True,
                    "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 5,
                },
                [4096] * 3 + [None] * 5,
            ),
            ("gemma2", {"sliding_window": 3}, [3, None] * 4),
            ("gemma2", {"layer_types": ["full_attention"] * 8}, [None] * 8),
            ("gemma3_text", {"sliding_window": 3}, [3] * 5 + [None] + [3] * 2),
            ("gemma3_text", {"sliding_window_pattern": 4}, [4096, 4096, 4096, None] * 2),
            ("deepseek_v3", {}, [None] * 8),
        ],
    )
    def test_windows(
        self, model_type: str, changes: dict[str, Any], windows: list[int | None]
    ) -> None:
        config = of_family(model_type, **changes)
        assert [config.window(layer) for layer in range(8)] == windows
        hf = FAMILIES[model_type][0](**SIZES, **FAMILIES[model_type][1], **changes)
        again = ModelConfig.from_hf(hf.to_dict())
        assert [again.window(layer) for layer in range(8)] == windows

    def test_latent_attention(self) -> None:
        config = of_family("deepseek_v3", q_lora_rank=None, kv_lora_rank=48)
        assert config.latent is not None
        assert config.latent.q_lora_rank is None
        plan = model_plan(config)
        attend = plan.layers[0].attend
        assert (attend.kv_heads, attend.head_dim, attend.value_dim) == (1, 112, 48)
        assert plan.rope_dim == 64
        assert attend.scale == pytest.approx((128 + 64) ** -0.5)
        yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
        stretched = of_family("deepseek_v3", rope_scaling=yarn)
        assert stretched.rope(0).scaling.amplitude == 1.0
        more = (0.1 * math.log(40) + 1) ** 2
        attend = model_plan(stretched).layers[0].attend
        assert attend.scale == pytest.approx(more * (128 + 64) ** -0.5)

    def test_experts_that_no_layer_uses(self) -> None:
        assert of_family("deepseek_v2", first_k_dense_replace=0, n_routed_experts=None)

    @pytest.mark.parametrize(
        ("model_type", "changes", "message"),
        [
            ("deepseek_v3", {"first_k_dense_replace": 3}, "n_routed_experts = 256.*layers 3 to 7"),
            ("deepseek_v2", {"first_k_dense_replace": 0}, "n_routed_experts = 64.*not supported"),
            ("deepseek_v3", {"num_key_value_heads": 4}, "num_key_value_heads = 4.*heads = 32"),
            ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0 must be at least 1"),
            ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank = -1 must be at least 1"),
            ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 must be even: rotary"),
            ("deepseek_v2", {"kv_lora_rank": 7}, "kv_lora_rank = 7 must be even: .* of 2 bytes"),
            (
                "deepseek_v3",
                {"layer_types": ["sliding_attention"] * 8},
                "layer_types .*contradicts",
            ),
            ("mistral", {"layer_types": ["full_attention"] * 8}, "layer_types = .* contradicts"),
            ("mistral", {"sliding_window": 0}, "sliding_window = 0 must be at least 1"),
            ("mistral", {"sliding_window": 4.5}, "sliding_window must be of type int, not 4.5"),
            ("qwen3", {"layer_types": ["sliding_attention"] * 8}, "sliding_window is not in use"),
            ("gemma2", {"sliding_window": None}, "sliding_window is not in use"),
            ("gemma2", {"layer_types": ["full_attention"] * 7}, "7 layers, num_hidden_layers = 8"),
            ("gemma2", {"layer_types": ["chunked_attention"] * 8}, "layer_types must be a list"),
            ("gemma2", {"layer_types": [[]] * 8}, "layer_types must be a list"),
            ("gemma2", {"attn_logit_softcapping": 0}, r"attn_logit_softcapping = 0\.0"),
            ("gemma2", {"final_logit_softcapping": -3.0}, r"final_logit_softcapping = -3\.0"),
            ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'.*pytorch_tanh"),
            ("gemma2", {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar = 0\.0"),
            ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
            ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
            ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "by layer type"),
            ("gemma3_text", {"rope_local_base_freq": -1}, r"rope_theta = -1\.0"),
            (
                "gemma3_text",
                {
                    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2}},
                    "rope_scaling": {"rope_type": "linear", "factor": 4},
                },
                "rope_parameters = .*'factor': 2.* and rope_scaling = .*'factor': 4",
            ),
            (
                "gemma3_text",
                {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
                "'dynamic'",
            ),
            (
                "qwen3",
                {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
                "the same for all layers",
            ),
            (
                "qwen3",
                {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_slow": 64}},
                r"beta_slow = 64\.0 .* beta_fast = 32\.0",
            ),
            (
                "qwen3",
                {"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4}},
                r"rope_theta = 1\.0",
            ),
        ],
    )
    def test_refusal_names_the_field(
        self, model_type: str, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            of_family(model_type, **changes)

    def test_contradictions_of_the_constructor(self) -> None:
        latent, gemma = preset("mla-small"), preset("gemma-3-1b")
        for config, changes, message in (
            (latent, {"model_type": "llama"}, "latent = .*contradicts model_type 'llama'"),
            (latent, {"head_dim": 512}, "must be 1 and 576"),
            (latent, {"layer_types": ("full_attention",) * 16}, "layer_types must be empty"),
            (gemma, {"num_layers": 25}, "layer_types lists 26 layers, num_layers = 25"),
        ):
            with pytest.raises(ConfigError, match=message):
                dataclasses.replace(config, **changes)  # type: ignore[arg-type]
