"""Multi-head latent attention as operations."""

from __future__ import annotations

from collections.abc import Iterator

from ..kernels.ops.layer_operations import (
    LatentKeys,
    LatentRotate,
    LatentToValues,
    Norm,
    Operation,
    QueriesToLatent,
)
from ..kernels.ops.parameter import Parameter, Source
from .attention_plan import LayerKind, attend
from .config import LatentConfig, ModelConfig
from .plan_operations import linear, vector

__all__ = ["latent_attention"]

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention, independent of the config."""


def latent_attention(
    config: ModelConfig, kind: LayerKind, latent: LatentConfig
) -> Iterator[Operation]:
    """Multi-head latent attention (DeepSeek-V2), with the projections of keys and values absorbed.

    The cache has one vector per token, the normed latent and the rotated key. It is the key of all
    heads, and its first elements are the value. Instead of projecting each latent to a key, the
    query is projected to the latent space (q . (W c) = (W^T q) . c). Attention then returns a
    weighted sum of latents, which is projected to values.
    """
    heads, rank, hidden = config.num_heads, latent.kv_lora_rank, config.hidden_size
    queries = heads * latent.qk_head_dim
    # A direct query projection (without q_lora_rank) never has a bias.
    q_part = "self_attn.q_proj" if latent.q_lora_rank is None else "self_attn.q_a_proj"
    parts = {
        q_part: latent.q_lora_rank or queries,
        "self_attn.kv_a_proj_with_mqa": latent.cached_dim,
    }
    yield linear(
        "attention.q_kv",
        parts,
        hidden,
        lambda part: config.attention_bias and part != "self_attn.q_proj",
        split=(latent.q_lora_rank or queries, rank, latent.qk_rope_head_dim),
    )
    if latent.q_lora_rank is not None:
        q_norm = vector("attention.q_norm", "self_attn.q_a_layernorm", latent.q_lora_rank)
        yield Norm(name="q_norm", weight=q_norm, eps=_LATENT_NORM_EPS, part=0)
        up = {"self_attn.q_b_proj": queries}
        yield linear("attention.q_up", up, latent.q_lora_rank, part=0)
    yield LatentRotate(
        name="rotate",
        heads=heads,
        nope=latent.qk_nope_head_dim,
        rope=latent.qk_rope_head_dim,
        interleaved=latent.rope_interleave,
        kind=kind.rope_kind,
    )
    per_head = latent.qk_nope_head_dim + latent.v_head_dim
    kv_up = Parameter(
        "attention.kv_up.weight",
        (Source("self_attn.kv_b_proj.weight", (heads * per_head, rank)),),
        (heads, per_head, rank),
    )
    keys = latent.qk_nope_head_dim
    yield QueriesToLatent(name="queries_to_latent", kv_up=kv_up, keys=keys)
    latent_norm = vector("attention.latent_norm", "self_attn.kv_a_layernorm", rank)
    yield LatentKeys(name="latent_norm", weight=latent_norm, eps=_LATENT_NORM_EPS)
    scale = float(latent.qk_head_dim**-0.5) * config.rope_scaling.latent_score_scale
    yield attend(config, kind, scale=scale, value_dim=rank, shared_values=True)
    yield LatentToValues(name="latent_to_values", kv_up=kv_up, keys=keys)
    output = {"self_attn.o_proj": hidden}
    yield linear(
        "attention.output", output, heads * latent.v_head_dim, lambda part: config.attention_bias
    )
