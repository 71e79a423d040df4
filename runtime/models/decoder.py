"""The Llama-family decoder, described by `ModelConfig`.

Shape suffixes: T tokens of a step, R rows of a step, H query heads, G key/value heads, E head_dim,
D hidden_size, F intermediate_size, V vocab_size, B sampled positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ...cache.spec import FullAttentionSpec
from ..kernels import Kernels, packed_embedding
from .config import ModelConfig, rope_inverse_frequencies

__all__ = ["AttentionInputs", "Decoder"]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the tokens of one forward pass stand and where their keys and values go."""

    positions: torch.Tensor
    """int64 `[T]`: position of each token in its sequence."""
    slots: torch.Tensor
    """int64 `[T]`, the write index: slot of each token; padding writes to the null block."""
    token_rows: torch.Tensor
    """int64 `[T]`: row of each token."""
    rows: torch.Tensor
    """int64 `[R]`: the distinct rows of the pass, padded with the null row. R = T when decoding."""
    block_tables: torch.Tensor
    """int32 `[max_rows + 1, max_blocks_per_row]`: the read index of every row."""
    read_blocks: int
    """Columns of the block tables that may be read: all positions lie below them."""


class Projection(nn.Module):
    """A linear layer whose weight is stored the way the chosen kernels want it."""

    def __init__(self, kernels: Kernels, out_features: int, in_features: int) -> None:
        super().__init__()
        self.kernels = kernels
        self.out_features = out_features
        self.in_features = in_features
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None

    def store(self, weight: torch.Tensor, device: torch.device) -> None:
        """Take the weight `[out_features, in_features]`, packed if the kernels pack."""
        packed = weight if self.kernels.pack is None else self.kernels.pack(weight)
        self.weight = nn.Parameter(packed.to(device), requires_grad=False)

    def rows(self, index_T: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, `[T, in_features]`: the layer used as an embedding."""
        assert self.weight is not None
        if self.kernels.pack is None:
            return F.embedding(index_T, self.weight)
        return packed_embedding(index_T, self.weight, self.in_features)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return self.kernels.linear(x_TD, self.weight, self.bias, self.out_features)


class RMSNorm(nn.Module):
    """Root-mean-square norm, accumulated in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight: nn.Parameter | None = None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        x = x_TD.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(x_TD.dtype)


def rotate(x_TNE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions (Su et al. 2021) in the half-split layout of Hugging Face weights."""
    x = x_TNE.float()
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos_TE[:, None], sin_TE[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_TNE.dtype)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, kernels: Kernels, index: int) -> None:
        super().__init__()
        self.kernels = kernels
        self.index = index
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.input_norm = RMSNorm(config.rms_norm_eps)
        self.qkv = Projection(kernels, q_size + 2 * kv_size, hidden)
        self.output = Projection(kernels, hidden, q_size)
        self.post_attention_norm = RMSNorm(config.rms_norm_eps)
        self.gate_up = Projection(kernels, 2 * inner, hidden)
        self.down = Projection(kernels, hidden, inner)

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TE: torch.Tensor,
        sin_TE: torch.Tensor,
        arena: torch.Tensor,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        tokens = x_TD.shape[0]
        qkv = self.qkv(self.input_norm(x_TD)).view(tokens, -1, self.head_dim)
        q_THE, k_TGE, v_TGE = qkv.split(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1
        )
        attended_THE = self.kernels.attention(
            rotate(q_THE, cos_TE, sin_TE),
            rotate(k_TGE, cos_TE, sin_TE),
            v_TGE.contiguous(),
            arena,
            self.index,
            inputs.slots,
            inputs.block_tables,
            inputs.token_rows,
            inputs.rows,
            inputs.positions,
            self.scale,
            inputs.read_blocks,
        )
        x_TD = x_TD + self.output(attended_THE.reshape(tokens, -1))
        gate_TF, up_TF = self.gate_up(self.post_attention_norm(x_TD)).chunk(2, dim=-1)
        out_TD: torch.Tensor = x_TD + self.down(F.silu(gate_TF) * up_TF)
        return out_TD


class Decoder(nn.Module):
    """Token ids to hidden states to logits, reading and writing the arena.

    Built empty; `store` gives it its weights one by one, under the names of
    `loading.fused_layout`.
    """

    def __init__(
        self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.embed_tokens = Projection(kernels, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, kernels, index) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.rms_norm_eps)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else Projection(kernels, config.vocab_size, config.hidden_size)
        )
        frequencies = rope_inverse_frequencies(config).to(device)
        self.inverse_frequencies = nn.Buffer(frequencies, persistent=False)

    def store(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take every weight; those of linear layers are packed as the kernels want them."""
        for name, tensor in weights:
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            tensor = tensor.to(self.dtype)
            if isinstance(module, Projection) and leaf == "weight":
                module.store(tensor, self.device)
            else:
                assert leaf in ("weight", "bias"), name
                setattr(module, leaf, nn.Parameter(tensor.to(self.device), requires_grad=False))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as stored, a tied embedding counted once."""
        return sum(p.nbytes for p in self.parameters())

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of the parameters that a decode step reads in full.

        An untied input embedding is left out: a step reads one of its rows per sequence.
        """
        if self.lm_head is self.embed_tokens:
            return self.weight_bytes
        return self.weight_bytes - sum(p.nbytes for p in self.embed_tokens.parameters())

    def forward(
        self, token_ids_T: torch.Tensor, arena: torch.Tensor, inputs: AttentionInputs
    ) -> torch.Tensor:
        """Return the final hidden states `[T, hidden_size]`; writes the tokens' keys and values."""
        x_TD = self.embed_tokens.rows(token_ids_T)
        angles_TE = inputs.positions[:, None].float() * self.inverse_frequencies
        cos_TE, sin_TE = angles_TE.cos(), angles_TE.sin()
        for layer in self.layers:
            x_TD = layer(x_TD, cos_TE, sin_TE, arena, inputs)
        normed: torch.Tensor = self.norm(x_TD)
        return normed

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return logits `[B, vocab_size]` in the model's dtype."""
        logits: torch.Tensor = self.lm_head(hidden_BD)
        return logits


def attention_specs(config: ModelConfig, element_bytes: int) -> list[FullAttentionSpec]:
    """Return what each layer stores in the cache."""
    spec = FullAttentionSpec(config.num_kv_heads, config.head_dim, element_bytes)
    return [spec] * config.num_layers
