"""Which tensors of a Hugging Face checkpoint make which parameter of ours.

The model multiplies once where the checkpoint has several matrices over the same input, so q, k, v
and gate, up are stored as one tensor each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .config import LatentConfig, ModelConfig

if TYPE_CHECKING:
    import torch

__all__ = ["FusedTensor", "fused_layout", "weights_per_step"]

Shape = tuple[int, ...]


class FusedTensor(NamedTuple):
    """A parameter of ours: tensors of a checkpoint stacked along the first dimension.

    Those with two dimensions, and only those, are the weights of linear layers, which kernels may
    quantise and pack; what is read otherwise is stored as it is.
    """

    sources: tuple[str | None, ...]
    """Names in the checkpoint; None stands for zeros."""
    source_shapes: tuple[Shape, ...]
    viewed_as: Shape | None = None
    """The shape that the stack is given, if it is another."""

    @property
    def stacked_shape(self) -> Shape:
        """The shape of the stack."""
        return (sum(shape[0] for shape in self.source_shapes), *self.source_shapes[0][1:])

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        return self.viewed_as or self.stacked_shape

    def parts(self, parameter: torch.Tensor) -> Iterator[tuple[str | None, torch.Tensor]]:
        """Yield each source's name and the view of a parameter of this shape that it makes."""
        sizes = [shape[0] for shape in self.source_shapes]
        yield from zip(self.sources, parameter.view(self.stacked_shape).split(sizes), strict=True)


def fused_layout(config: ModelConfig) -> dict[str, FusedTensor]:
    """Return the parameters of the model by our name, in the order a forward pass needs them.

    Each says which tensors of a Hugging Face checkpoint make it, in which order, and their shapes.
    With tied embeddings there is no `lm_head.weight`.
    """
    builder = _Builder(config)
    builder.single("embed_tokens.weight", "model.embed_tokens", config.vocab_size)
    for layer in range(config.num_layers):
        builder.layer(f"layers.{layer}", f"model.layers.{layer}")
    builder.norm("norm", "model.norm", config.hidden_size)
    if not config.tie_word_embeddings:
        builder.single("lm_head.weight", "lm_head", config.vocab_size)
    return builder.layout


def weights_per_step(config: ModelConfig) -> int:
    """Return how many parameters a decode step multiplies with, however they are stored.

    An untied input embedding is left out: a step reads one of its rows per sequence.
    """
    tied = config.tie_word_embeddings
    return sum(
        math.prod(fused.shape)
        for name, fused in fused_layout(config).items()
        if tied or name != "embed_tokens.weight"
    )


class _Builder:
    """Collects the layout; `ours` and `theirs` are names, or prefixes of names."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.layout: dict[str, FusedTensor] = {}

    def single(self, ours: str, theirs: str, rows: int) -> None:
        """A weight over the hidden states."""
        shape = (rows, self.config.hidden_size)
        self.layout[ours] = FusedTensor((f"{theirs}.weight",), (shape,))

    def norm(self, ours: str, theirs: str, size: int) -> None:
        self.layout[f"{ours}.weight"] = FusedTensor((f"{theirs}.weight",), ((size,),))

    def linear(
        self, ours: str, theirs: str, parts: dict[str, int], columns: int, biases: tuple[str, ...]
    ) -> None:
        """A linear layer of `parts` by name and rows; those of `biases` have a bias."""
        rows = tuple(parts.values())
        self.layout[f"{ours}.weight"] = FusedTensor(
            tuple(f"{theirs}.{part}.weight" for part in parts), tuple((n, columns) for n in rows)
        )
        if biases:
            self.layout[f"{ours}.bias"] = FusedTensor(
                tuple(f"{theirs}.{part}.bias" if part in biases else None for part in parts),
                tuple((n,) for n in rows),
            )

    def layer(self, ours: str, theirs: str) -> None:
        config, output_norms = self.config, self.config.family.output_norms
        hidden, inner = config.hidden_size, config.intermediate_size
        self.norm(f"{ours}.input_norm", f"{theirs}.input_layernorm", hidden)
        if config.latent is None:
            self.attention(f"{ours}.attention", f"{theirs}.self_attn")
        else:
            self.latent_attention(f"{ours}.attention", f"{theirs}.self_attn", config.latent)
        # With norms on both sides, transformers' post_attention_layernorm is of what attention
        # returns; without, of what the MLP takes.
        if output_norms:
            self.norm(f"{ours}.attention_output_norm", f"{theirs}.post_attention_layernorm", hidden)
            self.norm(f"{ours}.mlp_norm", f"{theirs}.pre_feedforward_layernorm", hidden)
        else:
            self.norm(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", hidden)
        gate_up, down = {"gate_proj": inner, "up_proj": inner}, {"down_proj": hidden}
        biased = config.mlp_bias
        self.linear(f"{ours}.gate_up", f"{theirs}.mlp", gate_up, hidden, (*gate_up,) * biased)
        self.linear(f"{ours}.down", f"{theirs}.mlp", down, inner, (*down,) * biased)
        if output_norms:
            self.norm(f"{ours}.mlp_output_norm", f"{theirs}.post_feedforward_layernorm", hidden)

    def attention(self, ours: str, theirs: str) -> None:
        config, biased = self.config, self.config.attention_bias
        qkv = {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        self.linear(f"{ours}.qkv", theirs, qkv, config.hidden_size, (*qkv,) * biased)
        if config.family.qk_norm:
            self.norm(f"{ours}.q_norm", f"{theirs}.q_norm", config.head_dim)
            self.norm(f"{ours}.k_norm", f"{theirs}.k_norm", config.head_dim)
        output = {"o_proj": config.hidden_size}
        self.linear(f"{ours}.output", theirs, output, config.query_size, (*output,) * biased)

    def latent_attention(self, ours: str, theirs: str, latent: LatentConfig) -> None:
        config, biased = self.config, self.config.attention_bias
        heads, rank = config.num_heads, latent.kv_lora_rank
        queries = heads * latent.qk_head_dim
        # A projection of the queries at once never has a bias.
        q_part = "q_proj" if latent.q_lora_rank is None else "q_a_proj"
        parts = {q_part: latent.q_lora_rank or queries, "kv_a_proj_with_mqa": latent.cached_dim}
        biases = tuple(part for part in parts if biased and part != "q_proj")
        self.linear(f"{ours}.q_kv", theirs, parts, config.hidden_size, biases)
        if latent.q_lora_rank is not None:
            self.norm(f"{ours}.q_norm", f"{theirs}.q_a_layernorm", latent.q_lora_rank)
            up = {"q_b_proj": queries}
            self.linear(f"{ours}.q_up", theirs, up, latent.q_lora_rank, ())
        self.norm(f"{ours}.latent_norm", f"{theirs}.kv_a_layernorm", rank)
        per_head = latent.qk_nope_head_dim + latent.v_head_dim
        self.layout[f"{ours}.kv_up.weight"] = FusedTensor(
            (f"{theirs}.kv_b_proj.weight",), ((heads * per_head, rank),), (heads, per_head, rank)
        )
        output = {"o_proj": config.hidden_size}
        values = heads * latent.v_head_dim
        self.linear(f"{ours}.output", theirs, output, values, (*output,) * biased)
