"""Heads that draft one token per pass from features of the target.

The entry of a token at position p is made of its features and of the embedding of the next token.
Its keys and values lie in the slot of p.

    tokens          a   b   c   d        d is the newest one
    entries         a+b b+c c+d          at the positions of a, b, c
    first draft     e, from the entry c+d
    second draft    f, from the entry of d: the output of c+d, and e

Shape suffixes: T tokens, B rows, D hidden_size, V tokens of the head's vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from ....cache.spec import LayerGroup
from ...bounded_repr import bounded_repr
from ...errors import CheckpointError, ConfigError
from ...kernels import Kernels, RaggedBatch
from ...kernels.ops.layer_plan import LayerPlan
from ...kernels.ops.linear import Linear
from ...kernels.ops.norms import JoinNorms, Norm, RMSNorm
from ...kernels.ops.operation import Operation, per_token
from ...kernels.ops.parameter import Shape
from ...kernels.ops.stack import DecoderStack
from ..config import ModelConfig
from ..config_keys import Json, read_field
from ..decoder import Decoder
from ..families import FAMILIES, text_part
from ..layers.tensors import matrix, vector
from ..plan import model_plan, mtp_layers
from .drafter import (
    DrafterConfig,
    Drafts,
    FollowedTokens,
    NewestTokens,
    SampledTokens,
    SharedLayers,
    StepOperator,
    TokenProjection,
    ascending_layers,
    check_fits,
    check_neutral,
    layer_config,
)

# EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840) in their published layouts.
#
# A head fuses the hidden states of three layers of the target. Its first layer takes the fused
# state of a token joined with the embedding of the next one. Two layouts are read: that of the
# authors and of SGLang (`LlamaForCausalLMEagle3`, the layer is `midlayer`), and that of the library
# speculators (`speculators_config`, the layers are `layers.N`).

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")

_LAYER_TYPES = ("llama", "qwen3")

_VARIANTS = ("norm_before_fc", "fc_norm", "norm_output")
"""Flags of later variants that change what a head computes."""

_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"

_EMBEDDING, _HEAD, _TO_TARGET = "embed_tokens.weight", "lm_head.weight", "d2t"


def is_eagle3(config: Json) -> bool:
    """Whether a `config.json` describes an EAGLE-3 head."""
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    return config.get("speculators_model_type") == "eagle3" or any(
        name in _ARCHITECTURES for name in named
    )


def eagle3_config(
    name: str, config: Json, names: Container[str], target: ModelConfig
) -> DrafterConfig:
    """Read the `config.json` of a head: see `ReadDrafter`."""
    speculators = config.get("speculators_model_type") is not None
    layer = config.get("transformer_layer_config") if speculators else config
    if not isinstance(layer, dict):
        raise CheckpointError(f"transformer_layer_config must be an object, not {type(layer)}")
    check_neutral(config, dict.fromkeys(_VARIANTS, False))
    model = layer_config(layer, _LAYER_TYPES)
    of_target = read_field(config, "target_hidden_size", int, target.hidden_size)
    sizes = {
        "vocab_size": (model.vocab_size, target.vocab_size),
        "target_hidden_size": (of_target, target.hidden_size),
    }
    check_fits(name, sizes)
    draft_vocab = read_field(config, "draft_vocab_size", int, model.vocab_size)
    if not 1 <= draft_vocab <= model.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size = {draft_vocab} must be from 1 to vocab_size = {model.vocab_size}"
        )
    aux_layers = _aux_layers(config, target)
    residual_normed = read_field(config, "norm_before_residual", bool, speculators)
    prefix = "layers." if "layers.0.hidden_norm.weight" in names else "midlayer."
    if prefix == "midlayer." and model.num_layers > 1:
        raise CheckpointError(
            f"num_hidden_layers = {model.num_layers}, but a head with a midlayer has one layer"
        )
    hidden, vocab = model.hidden_size, model.vocab_size
    own_embedding, own_head = _EMBEDDING in names, _HEAD in names
    if not (own_embedding and own_head) and hidden != target.hidden_size:
        raise ConfigError(
            f"the head {name} has hidden_size = {hidden}, the model {target.hidden_size}, so it"
            f" needs an embedding and an output projection of its own ({_EMBEDDING}, {_HEAD})"
        )
    for needed, use in ((_HEAD, ""), (_TO_TARGET, " that maps them to the model's token ids")):
        if draft_vocab != vocab and needed not in names:
            raise CheckpointError(
                f"the head has draft_vocab_size = {draft_vocab} of {vocab} tokens, but no tensor"
                f" {needed}{use}"
            )
    head = matrix("lm_head", "lm_head", draft_vocab, hidden)
    plan = model_plan(model)
    first = LayerPlan(tuple(_first_layer(plan.layers[0], hidden, residual_normed)))
    plan = replace(
        plan,
        layers=(first, *plan.layers[1:]),
        norm=replace(plan.norm, weight=vector("norm", "norm", hidden)),
        head=Linear(name="head", weight=head),
    )
    modules = ["midlayer."]
    if prefix != "midlayer.":
        modules = [f"{prefix}{index}." for index in range(len(plan.layers))]
    parameters = [matrix("fc", "fc", hidden, len(aux_layers) * target.hidden_size)]
    if own_embedding:
        parameters.insert(0, matrix("embed_tokens", "embed_tokens", vocab, hidden))
    if residual_normed:
        parameters.append(vector("input_norm", f"{modules[0]}hidden_norm", hidden))
    for index, layer in enumerate(plan.layers):
        parameters += [p.within(f"layers.{index}.", modules[index]) for p in layer.parameters]
    parameters += [plan.norm.weight, *([head] if own_head else [])]
    return DrafterConfig(
        kind="eagle3",
        name=name,
        model=model,
        plan=plan,
        parameters=tuple(parameters),
        aux_layers=aux_layers,
        target_ids=_TO_TARGET if _TO_TARGET in names else None,
    )


def _aux_layers(config: Json, target: ModelConfig) -> tuple[int, ...]:
    """The layers whose outputs the head reads.

    `eagle_config` lists them, as SGLang reads it. At the top level, and by default, vLLM lists the
    layers whose inputs they are.
    """
    layers, listed, offset = target.num_layers, config.get(_AUX_LAYERS), 1
    if isinstance(nested := config.get("eagle_config"), dict):
        check_neutral(nested, {"use_aux_hidden_state": True})
        if (own := nested.get(_AUX_LAYERS)) is not None:
            listed, offset = own, 0
    if listed is None:
        listed = [2, layers // 2, layers - 3]
    return ascending_layers(_AUX_LAYERS, listed, layers, offset)


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


class FeatureHead(SharedLayers, ABC):
    """Layers between features and tokens; subclasses define what a pass computes."""

    target_ids: torch.Tensor | None = None
    """int64 `[V]`: tokens of the target; None: the same vocabulary."""

    def start(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[T, D]` that `advance` takes of features."""
        return features_TF

    @abstractmethod
    def advance(
        self,
        hidden_TD: torch.Tensor,
        next_ids_T: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers; return their output, normed and not normed, `[T, D]` each."""

    def follow(
        self, tokens: FollowedTokens, arena: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Drafter.follow`. Returns what `advance` does."""
        assert tokens.features is not None
        return self.advance(self.start(tokens.features), tokens.next_ids, arena, tokens.batch)

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """See `Drafter.propose`."""
        normed_TD, output_TD = self.follow(tokens, arena)
        normed_BD = normed_TD.index_select(0, newest.index)
        output_BD = output_TD.index_select(0, newest.index)
        ids: list[torch.Tensor] = []
        probabilities: list[torch.Tensor] = []
        for place in range(count):
            if place > 0:
                batch = newest.batch(place - 1, 1)
                normed_BD, output_BD = self.advance(output_BD, ids[-1], arena, batch)
            ids_B, probability_B = self._head.most_likely(self, normed_BD)
            ids.append(ids_B if self.target_ids is None else self.target_ids[ids_B])
            probabilities.append(probability_B)
        return Drafts(torch.stack(ids, dim=1), torch.stack(probabilities, dim=1))


# EAGLE-3 heads. Shape suffixes: T tokens, D hidden_size, F features, V tokens of the head's
# vocabulary.


class Eagle3(FeatureHead):
    """An EAGLE-3 head."""

    def __init__(
        self, config: DrafterConfig, target: Decoder, kernels: Kernels, group: LayerGroup
    ) -> None:
        """See `load_drafter`; the head shares with `target` what it has no weights for."""
        super().__init__(config, target, kernels, group)
        self._weights: tuple[torch.Tensor | float | None, ...] = ()
        """The weights that `operator` takes, from its first call on."""
        self.fc, own = self._projection("fc"), self._own_parameters
        self.input_norm: RMSNorm | None = None
        if "input_norm.weight" in own:
            self.input_norm = RMSNorm(config.model.rms_norm_eps)
        if _EMBEDDING in own:
            self.embed_tokens = self._projection("embed_tokens")
            self._embedding = TokenProjection(self.embed_tokens)
        if _HEAD in own:
            self.lm_head = self._projection("lm_head")
            self._head = TokenProjection(self.lm_head)

    @property
    def operator(self) -> StepOperator | None:
        """See `Drafter.operator`. The C++ stack has one, for rotations of fixed frequencies, and
        an embedding and an output projection that are not split over ranks."""
        if not isinstance(self.stack, DecoderStack) or self._frequencies_by_length is not None:
            return None
        if self._embedding.vocabulary is not None or self._head.vocabulary is not None:
            return None
        return self._propose_natively

    def _propose_natively(self, step: SampledTokens, arena: torch.Tensor, count: int) -> Drafts:
        tokens = step.tokens
        drafts_BK, probabilities_BK = torch.ops.stepgraph.head_drafts.default(
            *(tokens.features, tokens.next_ids),
            *(tokens.batch.positions, tokens.batch.slots, tokens.batch.token_rows),
            *(step.rows, step.positions, step.first, step.stops),
            *(tokens.batch.block_tables, tokens.batch.read_blocks, tokens.batch.block_size),
            *(arena, count, *(self._weights or self._bound_weights())),
        )
        return Drafts(drafts_BK, probabilities_BK)

    def _bound_weights(self) -> tuple[torch.Tensor | float | None, ...]:
        """The weights, which `overwrite` leaves where they are."""
        assert isinstance(self.stack, DecoderStack)
        norm, embedding = self.input_norm, self._embedding.projection
        head = self._head.projection
        self._weights = (
            self.fc.weight,
            *((None, 0.0) if norm is None else (norm.weight, norm.eps)),
            *(self.fc.out_features, embedding.weight, self.stack.handle),
            *(self.inverse_frequencies, self.amplitudes),
            *(head.weight, head.bias, head.out_features, self.target_ids),
        )
        return self._weights

    def start(self, features_TF: torch.Tensor) -> torch.Tensor:
        """See `FeatureHead.start`."""
        hidden_TD: torch.Tensor = self.fc(features_TF)
        return hidden_TD

    def advance(
        self,
        hidden_TD: torch.Tensor,
        next_ids_T: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FeatureHead.advance`."""
        if self.input_norm is not None:
            hidden_TD = per_token(self.kernels, self.input_norm)(hidden_TD)
        embeddings_TD = self._embedding.rows(next_ids_T)
        normed_TD, output_TD = self.run_layers(
            hidden_TD, arena, batch, (len(self.layers) - 1,), embeddings_TD
        )
        assert output_TD is not None, "the last layer is read"
        return normed_TD, output_TD


# Modules for multi-token prediction, in the layouts of `families.py`.
#
# Such a module is a layer in the checkpoint of the target itself. It shares embedding and output
# projection with the target.


def is_unused_by_mtp(name: str, drafter: DrafterConfig) -> bool:
    """Whether a tensor of a checkpoint is none of the module's own."""
    layout = drafter.model.family.mtp
    assert layout is not None
    return not layout.is_first(name, drafter.model.num_layers)


def has_module(names: Iterable[str], target: ModelConfig) -> bool:
    """Whether the tensors of the target's checkpoint have a module in the layout of its family."""
    layout = target.family.mtp
    if layout is None:
        return False
    fuse = layout.first(f"{layout.fuse}.", target.num_layers)
    return any(name.startswith(fuse) for name in names)


def mtp_config(
    name: str, config: Json, names: Mapping[str, Shape], target: ModelConfig
) -> DrafterConfig:
    """Read the first module of the target's checkpoint; see `ReadDrafter`."""
    layout, number = target.family.mtp, target.num_layers
    if layout is None:
        supported = ", ".join(name for name, family in FAMILIES.items() if family.mtp is not None)
        raise ConfigError(
            f"models of type {bounded_repr(target.model_type, 60)} have no modules for multi-token"
            f" prediction that are supported, those of type {supported} have: use another method of"
            " speculation, such as 'suffix'"
        )
    ours = ModelConfig.from_hf(text_part(config))
    fields = ("model_type", "hidden_size", "vocab_size", "num_layers", "latent", "experts")
    check_fits(name, {field: (getattr(ours, field), getattr(target, field)) for field in fields})
    fuse = layout.first(layout.fuse, number)
    if not has_module(names, target):
        raise CheckpointError(
            f"no tensor is named {fuse}.*: the checkpoint was saved without its module for"
            " multi-token prediction, or has none. Use one that has it, or another method of"
            " speculation, such as 'suffix'"
        )
    hidden, plan = target.hidden_size, model_plan(target.whole)
    prefixes, layers = zip(*mtp_layers(target.whole), strict=True)
    stored_norm = layout.first(layout.norm, number) if layout.norm else target.family.final_norm
    final = vector("norm", stored_norm, hidden)
    parameters = (
        vector("enorm", layout.first(layout.embedding_norm, number), hidden),
        vector("hnorm", layout.first(layout.hidden_norm, number), hidden),
        matrix("eh_proj", fuse, hidden, 2 * hidden),
        *(
            parameter.renamed(layout.renamed).within(f"layers.{index}.", prefix)
            for index, (prefix, layer) in enumerate(zip(prefixes, layers, strict=True))
            for parameter in layer.parameters
        ),
        final,
    )
    return DrafterConfig(
        kind="mtp",
        name=name,
        model=target,
        plan=replace(plan, layers=layers, norm=replace(plan.norm, weight=final)),
        parameters=tuple(parameter.stored_in(names) for parameter in parameters),
        aux_layers=(number if layout.normed else number - 1,),
    )


# Modules for multi-token prediction. Shape suffixes: T tokens, D hidden_size.
#
# A module was trained to predict the token after the next one. For further drafts it takes its own
# output in place of the target's hidden state, normed as that is.


class MultiTokenPrediction(FeatureHead):
    """Layers of the target's kinds, on its last hidden states and the next tokens."""

    def __init__(
        self, config: DrafterConfig, target: Decoder, kernels: Kernels, group: LayerGroup
    ) -> None:
        """See `load_drafter`."""
        super().__init__(config, target, kernels, group)
        layout, like = config.model.family.mtp, config.plan.norm
        assert layout is not None
        self.enorm, self.hnorm = like.module(), like.module()
        self.eh_proj = self._projection("eh_proj")
        self._layout = layout

    def advance(
        self,
        hidden_TD: torch.Tensor,
        next_ids_T: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FeatureHead.advance`."""
        embeddings_TD = per_token(self.kernels, self.enorm)(self._embedding.rows(next_ids_T))
        hidden_TD = per_token(self.kernels, self.hnorm)(hidden_TD)
        pair = (embeddings_TD, hidden_TD)
        x_TD = self.eh_proj(torch.cat(pair[::-1] if self._layout.hidden_first else pair, dim=-1))
        if self._layout.normed:
            normed_TD, _ = self.run_layers(x_TD, arena, batch)
            return normed_TD, normed_TD
        normed_TD, output_TD = self.run_layers(x_TD, arena, batch, (len(self.layers) - 1,))
        assert output_TD is not None, "the last layer is read"
        return normed_TD, output_TD
