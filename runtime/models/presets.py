"""The shapes of well-known models, for runs with random weights (`preset:NAME`)."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .config import ModelConfig

_SHAPE = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id", "tie_word_embeddings"),
)


def _model(*shape: Any, **more: Any) -> dict[str, Any]:
    """Return a `config.json` in bfloat16 with the keys `_SHAPE`, and more."""
    return dict(zip(_SHAPE, shape, strict=True)) | {"dtype": "bfloat16"} | more


def _llama3_scaling(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _model(
        *("llama", 30, 576, 1536, 9, 3, 64),
        *(49152, 8192, 100000.0, 1e-5, 0, 0, True),
    ),
    "llama-3.2-1b": _model(
        *("llama", 16, 2048, 8192, 32, 8, 64),
        *(128256, 131072, 500000.0, 1e-5, 128000, 128001, True),
        rope_scaling=_llama3_scaling(32.0),
    ),
    "llama-3.1-8b": _model(
        *("llama", 32, 4096, 14336, 32, 8, 128),
        *(128256, 131072, 500000.0, 1e-5, 128000, 128001, False),
        rope_scaling=_llama3_scaling(8.0),
    ),
    "llama-3.1-70b": _model(
        *("llama", 80, 8192, 28672, 64, 8, 128),
        *(128256, 131072, 500000.0, 1e-5, 128000, 128001, False),
        rope_scaling=_llama3_scaling(8.0),
    ),
    "qwen2.5-0.5b": _model(
        *("qwen2", 24, 896, 4864, 14, 2, 64),
        *(151936, 32768, 1000000.0, 1e-6, 151643, 151643, True),
    ),
    "qwen3-0.6b": _model(
        *("qwen3", 28, 1024, 3072, 16, 8, 128),
        *(151936, 32768, 1000000.0, 1e-6, 151643, 151643, True),
    ),
    "qwen3.5-0.8b": _model(
        *("qwen3_5_text", 24, 1024, 3584, 8, 2, 256),
        *(248320, 262144, 10000000.0, 1e-6, 248044, 248044, True),
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 6,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        partial_rotary_factor=0.25,
    ),
    "mistral-7b": _model(
        *("mistral", 32, 4096, 14336, 32, 8, 128),
        *(32000, 32768, 10000.0, 1e-5, 1, 2, False),
    ),
    "gemma-2-2b": _model(
        *("gemma2", 26, 2304, 9216, 8, 4, 256),
        *(256000, 8192, 10000.0, 1e-6, 2, 1, True),
    ),
    "gemma-3-1b": _model(
        *("gemma3_text", 26, 1152, 6912, 4, 1, 256),
        *(262144, 32768, 1000000.0, 1e-6, 2, 1, True),
        sliding_window=512,
    ),
    # No published model: the attention of DeepSeek-V2-Lite with dense layers, about a billion.
    "mla-small": _model(
        *("deepseek_v2", 16, 2048, 5632, 16, 16, None),
        *(102400, 4096, 10000.0, 1e-6, 100000, 100001, True),
        q_lora_rank=None,
        first_k_dense_replace=16,
    ),
    "mixtral-8x7b": _model(
        *("mixtral", 32, 4096, 14336, 32, 8, 128),
        *(32000, 32768, 1000000.0, 1e-5, 1, 2, False),
        num_local_experts=8,
    ),
    "qwen3-30b-a3b": _model(
        *("qwen3_moe", 48, 2048, 6144, 32, 4, 128),
        *(151936, 32768, 1000000.0, 1e-6, 151643, 151643, False),
        num_experts=128,
        norm_topk_prob=True,
    ),
    "gpt-oss-20b": _model(
        *("gpt_oss", 24, 2880, 2880, 64, 8, 64),
        *(201088, 131072, 150000.0, 1e-5, 199998, 200002, False),
        num_local_experts=32,
    ),
    "deepseek-v2-lite": _model(
        *("deepseek_v2", 27, 2048, 10944, 16, 16, None),
        *(102400, 163840, 10000.0, 1e-6, 100000, 100001, False),
        rope_scaling={
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        q_lora_rank=None,
        first_k_dense_replace=1,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
    ),
    # No published model: a mixture with 1.1 of 6.8 billion parameters active, for 24 GB of memory.
    "qwen3-moe-7b-a1b": _model(
        *("qwen3_moe", 16, 2048, 6144, 16, 4, 128),
        *(50304, 32768, 1000000.0, 1e-6, 0, 0, False),
        num_experts=64,
        moe_intermediate_size=1024,
        norm_topk_prob=True,
    ),
    "lfm2-350m": _model(
        *("lfm2", 16, 1024, 6656, 16, 8, None),
        *(65536, 128000, 1000000.0, 1e-5, 1, 7, True),
        layer_types=["conv", "conv", "full_attention"] * 3
        + ["conv", "full_attention"] * 3
        + ["conv"],
        conv_L_cache=3,
    ),
}
"""Name → `config.json`, with the end-of-text tokens of the base models."""

PRESETS = {name: ModelConfig.from_hf(config) for name, config in CONFIGS.items()}


def preset(name: str) -> ModelConfig:
    """Return the shapes of the named model. Raises `ConfigError`, which lists the names."""
    try:
        return PRESETS[name]
    except KeyError:
        known = ", ".join(PRESETS)
        raise ConfigError(f"no preset is called {name!r}; there are: {known}") from None
