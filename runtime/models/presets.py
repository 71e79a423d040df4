"""The shapes of well-known models, for runs with random weights (`preset:NAME`)."""

from __future__ import annotations

from ..errors import ConfigError
from .config import LatentConfig, LayerType, ModelConfig, Rope, RopeScaling
from .dense_presets import DENSE_PRESETS
from .expert_presets import EXPERT_PRESETS

__all__ = ["PRESETS", "preset"]


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


PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(0,),
        torch_dtype="bfloat16",
    ),
    "llama-3.2-1b": ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=_llama3_scaling(32.0),
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001,),
        torch_dtype="bfloat16",
    ),
    "llama-3.1-8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=_llama3_scaling(8.0),
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        bos_token_id=128000,
        eos_token_ids=(128001,),
        torch_dtype="bfloat16",
    ),
    "llama-3.1-70b": ModelConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=_llama3_scaling(8.0),
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        bos_token_id=128000,
        eos_token_ids=(128001,),
        torch_dtype="bfloat16",
    ),
    "qwen3-0.6b": ModelConfig(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_ids=(151643,),
        torch_dtype="bfloat16",
    ),
    "mistral-7b": ModelConfig(
        model_type="mistral",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        layer_types=("sliding_attention",) * 32,
        sliding_window=4096,
        bos_token_id=1,
        eos_token_ids=(2,),
        torch_dtype="bfloat16",
    ),
    "gemma-2-2b": ModelConfig(
        model_type="gemma2",
        vocab_size=256000,
        hidden_size=2304,
        intermediate_size=9216,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        layer_types=_every_nth_full(2, 26),
        sliding_window=4096,
        query_pre_attn_scalar=256.0,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        bos_token_id=2,
        eos_token_ids=(1,),
        torch_dtype="bfloat16",
    ),
    "gemma-3-1b": ModelConfig(
        model_type="gemma3_text",
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        sliding_rope=Rope(10000.0),
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        layer_types=_every_nth_full(6, 26),
        sliding_window=512,
        query_pre_attn_scalar=256.0,
        bos_token_id=2,
        eos_token_ids=(1,),
        torch_dtype="bfloat16",
    ),
    # No published model: the attention of DeepSeek-V2-Lite with dense layers, about a billion.
    "mla-small": ModelConfig(
        model_type="deepseek_v2",
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=16,
        num_heads=16,
        num_kv_heads=1,
        head_dim=576,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        latent=LatentConfig(
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        bos_token_id=100000,
        eos_token_ids=(100001,),
        torch_dtype="bfloat16",
    ),
    **DENSE_PRESETS,
    **EXPERT_PRESETS,
}
"""Name → shapes. The end-of-text tokens are those of the base models."""


def preset(name: str) -> ModelConfig:
    """Return the shapes of the named model. Raises `ConfigError`, which lists the names."""
    try:
        return PRESETS[name]
    except KeyError:
        known = ", ".join(PRESETS)
        raise ConfigError(f"no preset is called {name!r}; there are: {known}") from None
