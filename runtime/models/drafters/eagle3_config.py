"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840) in their published layouts.

A head fuses the hidden states of three layers of the target. Its first layer takes the fused state
of a token joined with the embedding of the next one. Two layouts are read: that of the authors and
of SGLang (`LlamaForCausalLMEagle3`, the layer is `midlayer`), and that of the library speculators
(`speculators_config`, the layers are `layers.N`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ...bounded_repr import bounded_repr
from ...errors import CheckpointError, ConfigError
from ...kernels.ops.layer_operations import JoinNorms, Linear, Norm, Operation
from ...kernels.ops.layer_plan import LayerPlan, ModelPlan
from ...kernels.ops.parameter import Parameter
from ..config import ModelConfig
from ..decoder_model import DecoderConfig
from ..families import FAMILIES, Json, read_field, read_optional
from ..plan import matrix, model_plan, vector
from .drafter_config import MOST_DRAFTS, DrafterConfig

__all__ = ["Eagle3Parts", "eagle3_config", "is_eagle3"]

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_LAYER_TYPES = ("llama", "qwen3")
_VARIANTS = ("norm_before_fc", "fc_norm", "norm_output")
"""Flags of later variants that change what a head computes."""
_EMBEDDING, _HEAD, TO_TARGET = "embed_tokens.weight", "lm_head.weight", "d2t"


@dataclass(frozen=True)
class Eagle3Parts:
    """What an EAGLE-3 head has of its own."""

    fuse: Parameter
    """Of the features to the hidden size of the head."""
    embedding: Parameter | None
    """None: that of the target."""
    head: Parameter | None
    """To logits of its own vocabulary; None: that of the target."""
    input_norm: Norm | None
    """Of the hidden states before the first layer, where its residual is normed, too."""
    target_ids: str | None
    """The tensor with the distance of each token of its vocabulary to that of the target; None: it
    has the vocabulary of the target."""


def is_eagle3(config: Json) -> bool:
    """Whether a `config.json` is that of an EAGLE-3 head."""
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    return config.get("speculators_model_type") == "eagle3" or any(
        name in _ARCHITECTURES for name in named
    )


def eagle3_config(
    name: str, directory: Path, config: Json, names: Container[str], target: DecoderConfig
) -> DrafterConfig:
    """Read the `config.json` of a head.

    Args:
        name: as given by the user.
        directory: the checkpoint.
        config: its `config.json`.
        names: of its tensors.
        target: the model that it drafts for.

    Raises:
        CheckpointError: a field is missing, mistyped or of an unsupported variant.
        ConfigError: it does not fit the target.
    """
    if not isinstance(target, ModelConfig):
        raise ConfigError(
            f"{name} reads hidden states of layers, which a model that transformers runs"
            f" ({bounded_repr(target.model_type, 60)}) does not return: use a model of a native"
            " family, or speculation='suffix'"
        )
    speculators = config.get("speculators_model_type") is not None
    layer = config.get("transformer_layer_config") if speculators else config
    if not isinstance(layer, dict):
        raise CheckpointError(f"transformer_layer_config must be an object, not {type(layer)}")
    for flag in _VARIANTS:
        if read_optional(config, flag, bool):
            raise CheckpointError(
                f"{flag} is set: this variant of EAGLE-3 is not supported, use a head without it"
            )
    model = _layer_config(layer)
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the head {name} has vocab_size = {model.vocab_size}, the model that it drafts for"
            f" {target.vocab_size}: use a head that was trained for this model"
        )
    draft_vocab = read_field(config, "draft_vocab_size", int, model.vocab_size)
    if not 1 <= draft_vocab <= model.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size = {draft_vocab} must be from 1 to vocab_size = {model.vocab_size}"
        )
    of_target = read_field(config, "target_hidden_size", int, target.hidden_size)
    if of_target != target.hidden_size:
        raise ConfigError(
            f"the head {name} reads hidden states of target_hidden_size = {of_target}, those of"
            f" the model have {target.hidden_size}: use a head that was trained for this model"
        )
    taps = _taps(config, target)
    residual_normed = read_field(config, "norm_before_residual", bool, speculators)
    parts = _parts(name, model, target, draft_vocab, len(taps), names, residual_normed)
    plan = _plan(model, draft_vocab, residual_normed)
    prefix = "layers." if "layers.0.hidden_norm.weight" in names else "midlayer."
    if prefix == "midlayer." and model.num_layers > 1:
        raise CheckpointError(
            f"num_hidden_layers = {model.num_layers}, but a head with a midlayer has one layer"
        )
    if parts.input_norm is not None:
        stored = vector("input_norm", f"{_layer_name(prefix, 0)}hidden_norm", model.hidden_size)
        parts = replace(parts, input_norm=replace(parts.input_norm, weight=stored))
    return DrafterConfig(
        kind="eagle3",
        name=name,
        directory=directory,
        model=model,
        plan=plan,
        parameters=tuple(_parameters(plan, parts, prefix)),
        taps=taps,
        most_drafts=MOST_DRAFTS,
        parts=parts,
    )


def _layer_config(layer: Json) -> ModelConfig:
    model_type = read_field(layer, "model_type", str)
    if model_type not in _LAYER_TYPES:
        raise CheckpointError(
            f"the layer of the head has model_type {bounded_repr(model_type, 60)}; supported:"
            f" {', '.join(_LAYER_TYPES)}"
        )
    architectures = [FAMILIES[model_type].architecture]
    return ModelConfig.from_hf(
        {**layer, "architectures": architectures, "tie_word_embeddings": False}
    )


def _taps(config: Json, target: ModelConfig) -> tuple[int, ...]:
    """The layers whose outputs the head reads.

    `eagle_config` lists them, as SGLang reads it. At the top level, and by default, vLLM lists the
    layers whose inputs they are.
    """
    layers = target.num_layers
    nested = config.get("eagle_config")
    listed = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    if isinstance(nested, dict) and nested.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            "eagle_config has use_aux_hidden_state = false: this variant is not supported"
        )
    offset = 0
    if listed is None:
        listed, offset = config.get("eagle_aux_hidden_state_layer_ids"), 1
    if listed is None:
        listed = [2, layers // 2, layers - 3]
    layer_ids = listed if isinstance(listed, list) else []
    taps = tuple(i - offset for i in layer_ids if type(i) is int)
    ascending = all(before < after for before, after in pairwise((-1, *taps, layers)))
    if not taps or len(taps) != len(layer_ids) or not ascending:
        raise ConfigError(
            f"the head reads the outputs of layers {bounded_repr(listed, 100)} (less {offset}),"
            f" which must be ascending layers of the model, 0 to {layers - 1}: use a head that was"
            " trained for this model, or set eagle_config.eagle_aux_hidden_state_layer_ids in its"
            " config.json"
        )
    return taps


def _parts(
    name: str,
    model: ModelConfig,
    target: ModelConfig,
    draft_vocab: int,
    taps: int,
    names: Container[str],
    residual_normed: bool,
) -> Eagle3Parts:
    hidden, vocab = model.hidden_size, model.vocab_size
    own_embedding, own_head = _EMBEDDING in names, _HEAD in names
    if not (own_embedding and own_head) and hidden != target.hidden_size:
        raise ConfigError(
            f"the head {name} has hidden_size = {hidden}, the model {target.hidden_size}, so it"
            f" needs an embedding and an output projection of its own ({_EMBEDDING}, {_HEAD})"
        )
    if not own_head and draft_vocab != vocab:
        raise CheckpointError(
            f"the head has draft_vocab_size = {draft_vocab} of {vocab} tokens, but no {_HEAD}"
        )
    if draft_vocab != vocab and TO_TARGET not in names:
        raise CheckpointError(
            f"the head has draft_vocab_size = {draft_vocab} of {vocab} tokens, but no tensor"
            f" {TO_TARGET} that maps them to those of the model"
        )
    norm = Norm(name="input_norm", weight=vector("input_norm", "", hidden), eps=model.rms_norm_eps)
    return Eagle3Parts(
        fuse=matrix("fc", "fc", hidden, taps * target.hidden_size),
        embedding=matrix("embed_tokens", "embed_tokens", vocab, hidden) if own_embedding else None,
        head=matrix("lm_head", "lm_head", draft_vocab, hidden) if own_head else None,
        input_norm=norm if residual_normed else None,
        target_ids=TO_TARGET if TO_TARGET in names else None,
    )


def _plan(model: ModelConfig, draft_vocab: int, residual_normed: bool) -> ModelPlan:
    plan, hidden = model_plan(model), model.hidden_size
    first = LayerPlan(tuple(_first_layer(plan.layers[0], hidden, residual_normed)))
    return replace(
        plan,
        layers=(first, *plan.layers[1:]),
        norm=replace(plan.norm, weight=vector("norm", "norm", hidden)),
        head=Linear(name="head", weight=matrix("lm_head", "lm_head", draft_vocab, hidden)),
    )


def _first_layer(layer: LayerPlan, hidden: int, residual_normed: bool) -> Iterator[Operation]:
    """The operations of the layer that takes the embedding and the hidden states."""
    norm, qkv, *others = layer.operations
    assert isinstance(norm, Norm)
    assert isinstance(qkv, Linear)
    yield JoinNorms(
        name=norm.name,
        embeddings=norm.weight,
        hidden=None if residual_normed else vector("hidden_norm", "hidden_norm", hidden),
        eps=norm.eps,
    )
    sources = tuple(
        source._replace(shape=(source.shape[0], 2 * hidden)) for source in qkv.weight.sources
    )
    yield replace(qkv, weight=qkv.weight._replace(sources=sources))
    yield from others


def _parameters(plan: ModelPlan, parts: Eagle3Parts, prefix: str) -> Iterator[Parameter]:
    if parts.embedding is not None:
        yield parts.embedding
    yield parts.fuse
    if parts.input_norm is not None:
        yield parts.input_norm.weight
    for index, layer in enumerate(plan.layers):
        for parameter in layer.parameters:
            yield parameter.within(f"layers.{index}.", _layer_name(prefix, index))
    yield plan.norm.weight
    if parts.head is not None:
        yield parts.head


def _layer_name(prefix: str, index: int) -> str:
    return prefix if prefix == "midlayer." else f"{prefix}{index}."
