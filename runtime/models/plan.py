"""Builds the plan of a model from its config; the only place that orders a layer's operations.

Parameter names are ours; source names are those of a Hugging Face checkpoint. Matrices with the
same input (q, k, v and gate, up) are stacked into one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ..kernels.ops.layer_operations import Linear, Operation, Residual
from ..kernels.ops.layer_plan import LayerPlan, ModelPlan
from .attention_plan import LayerKind, attention
from .config import ModelConfig, Rope
from .decoder_model import DecoderConfig, PlannedConfig
from .experts_plan import experts
from .latent_plan import latent_attention
from .mlp_plan import gated_mlp
from .plan_operations import matrix, norm
from .sharding import check_ranks, shard_plan

__all__ = ["model_plan", "plan_of", "rope_kinds", "shard_config"]


@lru_cache(maxsize=8)  # thousands of experts have hundreds of thousands of tensors
def model_plan(config: ModelConfig) -> ModelPlan:
    """Return the plan of a model, or of its shard; layers of one kind share a plan.

    Raises:
        ConfigError: the model cannot be split over so many ranks.
    """
    if config.shard is not None:
        return shard_plan(model_plan(config.whole), *config.shard)
    ropes = rope_kinds(config)
    kinds = [
        LayerKind(config.window(layer), rope, ropes.index(rope), config.is_mixture(layer))
        for layer, rope in enumerate(map(config.rope, range(config.num_layers)))
    ]
    layers = {kind: LayerPlan(tuple(_layer(config, kind))) for kind in dict.fromkeys(kinds)}
    embedding = matrix("embed_tokens", "model.embed_tokens", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tie_word_embeddings:
        head = matrix("lm_head", "lm_head", config.vocab_size, config.hidden_size)
    scale = config.embedding_multiplier
    if config.family.scaled_embeddings:
        scale = config.hidden_size**0.5
    return ModelPlan(
        embedding=embedding,
        embedding_scale=scale,
        layers=tuple(layers[kind] for kind in kinds),
        norm=norm(config, "norm", "model.norm", name="final_norm"),
        head=Linear(name="head", weight=head),
        logit_softcap=config.final_logit_softcapping or 0.0,
        logit_scale=1.0 / config.logits_scaling,
        rope_kinds=len(ropes),
        rope_by_length=any(rope.scaling.by_length for rope in ropes),
    )


def plan_of(config: DecoderConfig) -> ModelPlan:
    """Return the plan of a model of a native family, or of transformers."""
    if isinstance(config, ModelConfig):
        return model_plan(config)
    assert isinstance(config, PlannedConfig)
    return config.plan


def shard_config(config: DecoderConfig, rank: int, ranks: int) -> DecoderConfig:
    """Return the config whose plan is that of one rank; of a single one it is `config`.

    Raises:
        ConfigError: as `check_ranks`.
    """
    check_ranks(plan_of(config), ranks)
    if ranks == 1:
        return config
    assert isinstance(config, ModelConfig), "others were refused"
    return replace(config, shard=(rank, ranks))


def rope_kinds(config: ModelConfig) -> list[Rope]:
    """Return the distinct rotations of the layers, indexed by `Rotate.kind`."""
    return list(dict.fromkeys(config.rope(layer) for layer in range(config.num_layers)))


def _layer(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    norms, scale = config.family.layer_norms, config.residual_multiplier
    if norms.input is not None:
        yield norm(config, "input_norm", norms.input)
    if config.latent is None:
        yield from attention(config, kind)
    else:
        yield from latent_attention(config, kind, config.latent)
    if norms.attention_output is not None:
        yield norm(config, "attention_output_norm", norms.attention_output)
    yield Residual(name="residual", scale=scale)
    if norms.mlp is not None:
        yield norm(config, "mlp_norm", norms.mlp)
    if kind.mixture:
        assert config.experts is not None, "a layer with experts"
        yield experts(config, config.experts)
    else:
        yield from gated_mlp(config)
    if norms.mlp_output is not None:
        yield norm(config, "mlp_output_norm", norms.mlp_output)
    yield Residual(name="residual", scale=scale)
