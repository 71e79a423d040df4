"""The shapes of well-known models, for runs with random weights (`preset:NAME`)."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .config import ExpertsConfig, LatentConfig, LayerType, ModelConfig, Rope, RopeScaling

_SHAPE = (
    *("model_type", "num_layers", "hidden_size", "intermediate_size"),
    *("num_heads", "num_kv_heads", "head_dim"),
    *("vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps"),
    *("bos_token_id", "eos_token_ids", "tie_word_embeddings"),
)


def _model(*shape: Any, **more: Any) -> ModelConfig:
    """Return a config in bfloat16 with the fields `_SHAPE`, and more."""
    return ModelConfig(**dict(zip(_SHAPE, shape, strict=True)), torch_dtype="bfloat16", **more)


def _llama3_scaling(factor: float) -> RopeScaling:
    return RopeScaling(
        type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def _every_nth_full(pattern: int, num_layers: int) -> tuple[LayerType, ...]:
    return tuple(
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(num_layers)
    )


_V2_LITE_LATENT = LatentConfig(
    q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)

PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": _model(
        *("llama", 30, 576, 1536, 9, 3, 64),
        *(49152, 8192, 100000.0, 1e-5, 0, (0,), True),
    ),
    "llama-3.2-1b": _model(
        *("llama", 16, 2048, 8192, 32, 8, 64),
        *(128256, 131072, 500000.0, 1e-5, 128000, (128001,), True),
        rope_scaling=_llama3_scaling(32.0),
    ),
    "llama-3.1-8b": _model(
        *("llama", 32, 4096, 14336, 32, 8, 128),
        *(128256, 131072, 500000.0, 1e-5, 128000, (128001,), False),
        rope_scaling=_llama3_scaling(8.0),
    ),
    "llama-3.1-70b": _model(
        *("llama", 80, 8192, 28672, 64, 8, 128),
        *(128256, 131072, 500000.0, 1e-5, 128000, (128001,), False),
        rope_scaling=_llama3_scaling(8.0),
    ),
    "qwen2.5-0.5b": _model(
        *("qwen2", 24, 896, 4864, 14, 2, 64),
        *(151936, 32768, 1000000.0, 1e-6, 151643, (151643,), True),
        attention_bias=True,
    ),
    "qwen3-0.6b": _model(
        *("qwen3", 28, 1024, 3072, 16, 8, 128),
        *(151936, 32768, 1000000.0, 1e-6, 151643, (151643,), True),
    ),
    "mistral-7b": _model(
        *("mistral", 32, 4096, 14336, 32, 8, 128),
        *(32000, 32768, 10000.0, 1e-5, 1, (2,), False),
        layer_types=("sliding_attention",) * 32,
        sliding_window=4096,
    ),
    "gemma-2-2b": _model(
        *("gemma2", 26, 2304, 9216, 8, 4, 256),
        *(256000, 8192, 10000.0, 1e-6, 2, (1,), True),
        hidden_act="gelu_pytorch_tanh",
        layer_types=_every_nth_full(2, 26),
        sliding_window=4096,
        query_pre_attn_scalar=256.0,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma-3-1b": _model(
        *("gemma3_text", 26, 1152, 6912, 4, 1, 256),
        *(262144, 32768, 1000000.0, 1e-6, 2, (1,), True),
        sliding_rope=Rope(10000.0),
        hidden_act="gelu_pytorch_tanh",
        layer_types=_every_nth_full(6, 26),
        sliding_window=512,
        query_pre_attn_scalar=256.0,
    ),
    # No published model: the attention of DeepSeek-V2-Lite with dense layers, about a billion.
    "mla-small": _model(
        *("deepseek_v2", 16, 2048, 5632, 16, 1, 576),
        *(102400, 4096, 10000.0, 1e-6, 100000, (100001,), True),
        latent=_V2_LITE_LATENT,
    ),
    "mixtral-8x7b": _model(
        *("mixtral", 32, 4096, 14336, 32, 8, 128),
        *(32000, 32768, 1000000.0, 1e-5, 1, (2,), False),
        experts=ExpertsConfig(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=14336,
            norm_topk_prob=True,
        ),
    ),
    "qwen3-30b-a3b": _model(
        *("qwen3_moe", 48, 2048, 6144, 32, 4, 128),
        *(151936, 32768, 1000000.0, 1e-6, 151643, (151643,), False),
        experts=ExpertsConfig(
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    "gpt-oss-20b": _model(
        *("gpt_oss", 24, 2880, 2880, 64, 8, 64),
        *(201088, 131072, 150000.0, 1e-5, 199998, (200002,), False),
        rope_scaling=RopeScaling(
            type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
        ),
        attention_bias=True,
        layer_types=("sliding_attention", "full_attention") * 12,
        sliding_window=128,
        swiglu_limit=7.0,
        experts=ExpertsConfig(
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=2880,
            scores="softmax_chosen",
        ),
    ),
    "deepseek-v2-lite": _model(
        *("deepseek_v2", 27, 2048, 10944, 16, 1, 576),
        *(102400, 163840, 10000.0, 1e-6, 100000, (100001,), False),
        rope_scaling=RopeScaling(
            type="yarn",
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=0.707,
            mscale_all_dim=0.707,
        ),
        latent=_V2_LITE_LATENT,
        experts=ExpertsConfig(
            num_experts=64,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            n_shared_experts=2,
            dense_layers=(0,),
        ),
    ),
    # No published model: a mixture with 1.1 of 6.8 billion parameters active, for 24 GB of memory.
    "qwen3-moe-7b-a1b": _model(
        *("qwen3_moe", 16, 2048, 6144, 16, 4, 128),
        *(50304, 32768, 1000000.0, 1e-6, 0, (0,), False),
        experts=ExpertsConfig(
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=1024,
            norm_topk_prob=True,
        ),
    ),
}

"""Name → shapes, with the end-of-text tokens of the base models."""


def preset(name: str) -> ModelConfig:
    """Return the shapes of the named model. Raises `ConfigError`, which lists the names."""
    try:
        return PRESETS[name]
    except KeyError:
        known = ", ".join(PRESETS)
        raise ConfigError(f"no preset is called {name!r}; there are: {known}") from None
