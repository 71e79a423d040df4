"""Attention of a decoder layer: from hidden states to hidden states, through the cache.

Shape suffixes: T tokens of a step, H query heads, G key/value heads, E head_dim, D hidden_size, R
kv_lora_rank, C what latent attention caches of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ...cache.arena import Storage
from ..kernels import AttentionForm, Kernels, LayerPlace, RaggedBatch
from ..operation_scopes import operation
from .config import LatentConfig, ModelConfig
from .modules import HeadProjection, Projection, RMSNorm
from .rope import rotate

__all__ = ["Attention", "LatentAttention", "Place"]

_LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever the config says of the others."""


class Place(NamedTuple):
    """Where a layer finds its part of the cache."""

    group: int
    """Its layer group."""
    position: int
    """Its position in the group: the first coordinate of the arena."""
    storage: Storage


class _CachedAttention(nn.Module):
    """What both kinds of attention share: the call of the kernel."""

    def __init__(self, config: ModelConfig, kernels: Kernels, layer: int, place: Place) -> None:
        super().__init__()
        self.kernels = kernels
        self.place = place
        self.scale = config.score_scale
        self.window = config.window(layer) or 0
        self.softcap = config.attn_logit_softcapping or 0.0
        self.value_dim = config.value_dim

    def attend(
        self,
        q_THE: torch.Tensor,
        k_TGE: torch.Tensor,
        v_TGE: torch.Tensor | None,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> torch.Tensor:
        """Write keys and values, then attend: `[T, H, value_dim]`."""
        group, position, storage = self.place
        with operation("attention"):
            return self.kernels.attention(
                q_THE,
                k_TGE,
                v_TGE,
                arena,
                LayerPlace(group, position),
                batch,
                AttentionForm(self.scale, self.window, self.softcap, storage, self.value_dim),
            )


class Attention(_CachedAttention):
    """Grouped-query attention (Ainslie et al. 2023), with norms of queries and keys or without."""

    def __init__(self, config: ModelConfig, kernels: Kernels, layer: int, place: Place) -> None:
        super().__init__(config, kernels, layer, place)
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        hidden, family = config.hidden_size, config.family
        self.qkv = Projection(kernels, config.query_size + 2 * config.kv_size, hidden)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if family.qk_norm:
            self.q_norm = RMSNorm(config.rms_norm_eps, offset=family.offset_norms)
            self.k_norm = RMSNorm(config.rms_norm_eps, offset=family.offset_norms)
        self.output = Projection(kernels, hidden, config.query_size)

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TE: torch.Tensor,
        sin_TE: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> torch.Tensor:
        tokens = x_TD.shape[0]
        with operation("qkv_linear"):
            qkv = self.qkv(x_TD).view(tokens, -1, self.head_dim)
        q_THE, k_TGE, v_TGE = qkv.split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            with operation("qk_norm"):
                q_THE, k_TGE = self.q_norm(q_THE), self.k_norm(k_TGE)
        with operation("rotate"):
            q_THE, k_TGE = rotate(q_THE, cos_TE, sin_TE), rotate(k_TGE, cos_TE, sin_TE)
            v_TGE = v_TGE.contiguous()
        attended_THE = self.attend(q_THE, k_TGE, v_TGE, arena, batch)
        with operation("output_linear"):
            out_TD: torch.Tensor = self.output(attended_THE.reshape(tokens, -1))
        return out_TD


class LatentAttention(_CachedAttention):
    """Multi-head latent attention (DeepSeek-V2), with the projections of keys and values absorbed.

    Of a token the normed latent and the rotated key are cached, as one vector that stands for the
    keys of all heads; its first R elements stand for the values (see `HeadProjection`).
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        layer: int,
        place: Place,
        latent: LatentConfig,
    ) -> None:
        super().__init__(config, kernels, layer, place)
        self.latent = latent
        self.num_heads = config.num_heads
        hidden, queries = config.hidden_size, config.num_heads * latent.qk_head_dim
        q_rank = latent.q_lora_rank
        self.widths = (q_rank or queries, latent.kv_lora_rank, latent.qk_rope_head_dim)
        self.q_kv = Projection(kernels, sum(self.widths), hidden)
        self.q_norm: RMSNorm | None = None
        self.q_up: Projection | None = None
        if q_rank is not None:
            self.q_norm = RMSNorm(_LATENT_NORM_EPS)
            self.q_up = Projection(kernels, queries, q_rank)
        self.latent_norm = RMSNorm(_LATENT_NORM_EPS)
        self.kv_up = HeadProjection(latent.qk_nope_head_dim)
        self.output = Projection(kernels, hidden, config.num_heads * latent.v_head_dim)

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TE: torch.Tensor,
        sin_TE: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> torch.Tensor:
        tokens, latent = x_TD.shape[0], self.latent
        with operation("q_kv_linear"):
            q_TD, latent_TR, key_TE = self.q_kv(x_TD).split(self.widths, dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            with operation("q_norm"):
                q_TD = self.q_norm(q_TD)
            with operation("q_up_linear"):
                q_TD = self.q_up(q_TD)
        q_THE = q_TD.view(tokens, self.num_heads, latent.qk_head_dim)
        plain_THE, turned_THE = q_THE.split(
            (latent.qk_nope_head_dim, latent.qk_rope_head_dim), dim=-1
        )
        mixed = latent.rope_interleave
        with operation("rotate"):
            turned_THE = rotate(turned_THE, cos_TE, sin_TE, interleaved=mixed)
            key_T1E = rotate(key_TE[:, None], cos_TE, sin_TE, interleaved=mixed)
        with operation("queries_to_latent"):
            q_THC = torch.cat((self.kv_up.queries_to_latent(plain_THE), turned_THE), dim=-1)
        with operation("latent_norm"):
            k_T1C = torch.cat((self.latent_norm(latent_TR)[:, None], key_T1E), dim=-1)
        attended_THR = self.attend(q_THC, k_T1C, None, arena, batch)
        with operation("latent_to_values"):
            values = self.kv_up.latent_to_values(attended_THR)
        with operation("output_linear"):
            out_TD: torch.Tensor = self.output(values.reshape(tokens, -1))
        return out_TD
