"""What a step needs of a drafter, whoever implements it.

After a step has sampled, a drafter first takes in what the step computed (`follow`), then proposes
the tokens that follow the newest one of each row (`propose`). It has keys and values of its own, in
an arena of its own, whose blocks have the ids of the target model's: the drafter needs no block
tables.

    tokens of a verify step       e  x  y  z         newest token and 3 drafts, at 4 5 6 7
    sampled after them            x  y  q  r         z is rejected
    follow                        (e x) (x y) (y q) (z r)       token and the one after it
    propose                       after q, which is at 7

What it stores for rejected tokens is overwritten later, as the keys and values of the target are.
Drafts are never more than guesses: whatever a drafter returns, outputs stay the same.

Shape suffixes: T tokens of a step, B rows, F features of the target model, K drafts, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

from ....cache.spec import LayerGroup
from ...bounded_repr import bounded_repr
from ...errors import CheckpointError, ConfigError
from ...kernels import Kernels, RaggedBatch
from ...kernels.cpu.sampling import fused_most_likely
from ...kernels.ops.attention import Attend
from ...kernels.ops.layer_plan import LayerPlan, ModelPlan
from ...kernels.ops.linear import Projection
from ...kernels.ops.operation import Operation
from ...kernels.ops.parameter import Parameter, Shape
from ...kernels.weights import INT4, MODEL
from ..config import ModelConfig
from ..config_keys import Json, read_field, read_optional
from ..decoder import Decoder, LayerStack
from ..families import FAMILIES
from ..layer_kinds import rope_kinds
from ..plan import parameter_bytes
from ..sharding import ShardedVocabulary

# What the engine must know of a drafter before it reads weights.

DrafterKind = Literal["draft_model", "eagle3", "mtp", "dflash"]

MOST_DRAFTS = 15
"""Most drafts of a drafter that computes them one by one: as many as a step verifies."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A drafter that was found and fits its target: see `find_drafter`."""

    kind: DrafterKind
    name: str
    """The checkpoint as given by the user."""
    directory: Path | None = None
    """The checkpoint; None for a preset, whose weights are random."""
    model: ModelConfig
    """The config of its decoder layers."""
    plan: ModelPlan
    parameters: tuple[Parameter, ...]
    """Those of its own; what it shares with the target is not among them."""
    aux_layers: tuple[int, ...]
    """See `Drafter.aux_layers`."""
    most_drafts: int = MOST_DRAFTS
    """See `Drafter.most_drafts`."""
    target_ids: str | None = None
    """The tensor with the distance of each token of its vocabulary to the target's token; None: it
    has the vocabulary of the target."""
    mask_id: int = -1
    """The token of the positions that a block-parallel drafter fills."""
    causal: bool = False
    """Whether tokens of its blocks attend only to those before them."""
    codes: Mapping[str, int] = field(default_factory=dict)
    """See `Kernels.codes`; of draft models only."""

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Its layers, each of which has a cache."""
        return self.plan.layers

    def layer_group(self, index: int, window: int | None = None) -> LayerGroup:
        """Return its layers as a group.

        Its layers attend to at most `window` tokens, as the layer group of the target whose block
        table it uses. Raises `ConfigError` if its attention cannot have a window.
        """
        attend = self.plan.attend
        if attend.shared_values and window is not None:
            raise ConfigError(
                f"the drafter {self.name} has latent attention over all tokens, but all layers of"
                f" the model have windows of at most {window} tokens: use another drafter"
            )
        states = tuple(replace(state, window=window) for state in self.plan.states)
        return LayerGroup(index, tuple(range(len(states))), states)

    def kernels(self, of_target: Kernels) -> Kernels:
        """Return its kernels: it has no sums over ranks, no int4, and codes of its own."""
        weights = MODEL if of_target.weights == INT4 else of_target.weights
        return replace(of_target, weights=weights, codes=self.codes, collectives=None)

    def weight_bytes(self, kernels: Kernels, dtype: torch.dtype) -> int:
        """Return the bytes of its own parameters; `kernels` are the target's."""
        own = self.kernels(kernels)
        return sum(parameter_bytes(parameter, own, dtype) for parameter in self.parameters)


ReadDrafter: TypeAlias = Callable[[str, Json, Mapping[str, Shape], ModelConfig], DrafterConfig]
"""Reads a drafter that shares modules with its target, from its name as given by the user, its
`config.json`, the names and shapes of its tensors and the config of the target. Raises
`CheckpointError` if a field is missing, mistyped or of an unsupported variant, and `ConfigError` if
it does not fit the target."""


def check_fits(name: str, sizes: Mapping[str, tuple[object, object]]) -> None:
    """Raise `ConfigError` for the first field (name -> value in the drafter and in the model that
    it drafts for) in which the drafter `name` differs."""
    for key, (ours, theirs) in sizes.items():
        if ours != theirs:
            raise ConfigError(
                f"the drafter {name} has {key} = {bounded_repr(ours, 60)}, the model that it"
                f" drafts for {bounded_repr(theirs, 60)}: use a drafter that was made for this"
                " model"
            )


def layer_config(layer: Json, supported: Sequence[str]) -> ModelConfig:
    """Read the config of a drafter's layers, which must be of a supported `model_type`.

    Raises `CheckpointError` if it is of another one, or a field is missing or mistyped.
    """
    model_type = read_field(layer, "model_type", str)
    if model_type not in supported:
        raise CheckpointError(
            f"the layers of the drafter have model_type {bounded_repr(model_type, 60)}; supported:"
            f" {', '.join(supported)}"
        )
    architectures = [FAMILIES[model_type].architecture]
    return ModelConfig.from_hf(
        {**layer, "architectures": architectures, "tie_word_embeddings": False}
    )


def check_neutral(config: Json, neutral: Mapping[str, bool | float]) -> None:
    """Raise `CheckpointError` for the first key that has another value than the one at which it
    changes nothing."""
    for key, value in neutral.items():
        if read_optional(config, key, type(value)) not in (None, value):
            raise CheckpointError(
                f"{key} = {config[key]} of a drafter is not supported, only {value} is: use a"
                " drafter without it"
            )


def ascending_layers(key: str, listed: object, layers: int, offset: int = 0) -> tuple[int, ...]:
    """Return layers of the target less `offset`, from a list with its key in `config.json`.

    Raises `ConfigError` if there are none, or they are not ascending, or not layers.
    """
    given = listed if isinstance(listed, list) else []
    found = tuple(layer - offset for layer in given if type(layer) is int)
    ascending = all(before < after for before, after in pairwise((-1, *found, layers)))
    if not found or not ascending or len(found) != len(given):
        raise ConfigError(
            f"{key} = {bounded_repr(listed, 100)} must be ascending layers of the model, {offset}"
            f" to {layers - 1 + offset}: use a drafter that was trained for this model, or correct"
            " the key in its config.json"
        )
    return found


def within_window(plan: ModelPlan, window: int | None) -> ModelPlan:
    """Return a plan whose layers attend to the last `window` tokens at most; None: unchanged."""
    if window is None:
        return plan

    def limited(op: Operation) -> Operation:
        if not isinstance(op, Attend):
            return op
        return replace(op, window=min(filter(None, (op.window, window))))

    layers = {
        layer: LayerPlan(tuple(map(limited, layer.operations)))
        for layer in dict.fromkeys(plan.layers)
    }
    return replace(plan, layers=tuple(layers[layer] for layer in plan.layers))


# Greedy drafts. Shapes: B rows, V tokens of the drafter's vocabulary.


def most_likely(layers: LayerStack, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely token of each row, int64 `[B]`, and its probability, float32 `[B]`.

    `layers` are the drafter's: if they run in C++, so does this. If a logit is NaN, any
    token is returned.
    """
    if layers.runs_natively_on_cpu:
        return fused_most_likely(logits_BV)
    logits_BV = logits_BV.float()
    top_B, ids_B = logits_BV.max(-1)
    return ids_B, (top_B - logits_BV.logsumexp(-1)).exp()


# The embedding and the output projection of a drafter: its own, or its target's.
#
# Shape suffixes: T tokens, B rows, D hidden_size.


@dataclass(frozen=True)
class TokenProjection:
    """A linear layer with a row for each token. No module itself, so that a layer of the target is
    none of its drafter."""

    projection: Projection
    vocabulary: ShardedVocabulary | None = None
    """The part of a rank of a tensor-parallel group, all of which call the methods together; None:
    `projection` has all rows."""

    def rows(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens, `[T, D]`."""
        if self.vocabulary is None:
            return self.projection.rows(token_ids_T)
        return self.vocabulary.embed(token_ids_T, self.projection.rows)

    def most_likely(
        self, layers: LayerStack, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `most_likely` does, of the logits of all ranks."""
        logits_BW = self.projection(hidden_BD)
        if self.vocabulary is None:
            return most_likely(layers, logits_BW)
        return self.vocabulary.most_likely(logits_BW, partial(most_likely, layers))


@dataclass(frozen=True, slots=True)
class FollowedTokens:
    """The tokens that a step has computed."""

    token_ids: torch.Tensor
    """int64 `[T]`."""
    next_ids: torch.Tensor
    """int64 `[T]`: the token after each of them, sampled by the step or known before."""
    features: torch.Tensor | None
    """`[T, F]`: hidden states of the target's layers `Drafter.aux_layers`, concatenated."""
    batch: RaggedBatch
    """Their positions and slots. Padding, and drafts beyond a row's own, go to the null block."""
    of_prompts: bool = False
    """Whether they are chunks of prompts. Otherwise they are the newest token, and the drafts that
    were proposed after it."""


@dataclass(frozen=True, slots=True)
class NewestTokens:
    """Where each row stands after a step."""

    token_ids: torch.Tensor
    """int64 `[B]`: the newest token, which no model has computed yet."""
    previous_ids: torch.Tensor
    """int64 `[B]`: the token before it."""
    index: torch.Tensor
    """int64 `[B]`: index of the previous token in the `FollowedTokens`."""
    batch: Callable[[int, int], RaggedBatch]
    """`batch(first, count)`: `count` tokens per row, from the one `first` after the newest (-1: the
    one before it). Tokens for which a row has no slot go to the null block."""


class Drafts(NamedTuple):
    """What a drafter proposes."""

    token_ids: torch.Tensor
    """int64 `[B, K]`, ids of the target's vocabulary."""
    probabilities: torch.Tensor
    """float32 `[B, K]`: of each of them by the drafter, if those before it are right."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What `FollowedTokens` and `NewestTokens` are made of. R: rows of the state."""

    tokens: FollowedTokens
    """Of which `next_ids` may have `NON_FINITE`, and any shape."""
    rows: torch.Tensor
    """int64 `[B]`: the rows that get drafts."""
    positions: torch.Tensor
    """int64 `[R]`: of the newest token of each row."""
    first: torch.Tensor
    """int64 `[B]`: index of each row's first token."""
    stops: torch.Tensor
    """int64 `[B]`: the first position of each row that has no slot."""


StepOperator: TypeAlias = Callable[[SampledTokens, torch.Tensor, int], Drafts]
"""`Drafter.propose` of sampled tokens, the arena and a number of drafts."""


class Drafter(Protocol):
    """Proposes tokens with a small model or a head on the target model's hidden states."""

    aux_layers: tuple[int, ...]
    """Layers of the target whose outputs (before the final norm) are its features, ascending; the
    number of the target's layers stands for the final hidden state, after the norm. () for a
    drafter that reads token ids only."""
    most_drafts: int
    """Drafts that one call of `propose` can return at most."""

    @property
    def operator(self) -> StepOperator | None:
        """One operator of a CPU that finds the newest tokens and proposes; None: there is none."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own parameters as stored; those it shares with the target not counted."""

    def close(self) -> None:
        """Release what it holds outside of PyTorch. Steps must not follow."""

    def follow(self, tokens: FollowedTokens, arena: torch.Tensor) -> object:
        """Store keys and values of tokens of any step, prefill included."""

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """As `follow`, and return `count` drafts of each row."""


class SharedLayers(LayerStack):
    """The layers of a drafter that shares modules with its target. `store` gives it its weights."""

    def __init__(
        self, config: DrafterConfig, target: Decoder, kernels: Kernels, group: LayerGroup
    ) -> None:
        """See `load_drafter`; it may share embedding and output projection with `target`."""
        plan, ropes = within_window(config.plan, group.window), rope_kinds(config.model)
        device = target.device
        super().__init__(plan, ropes, kernels, target.dtype, device, [group], target.storage)
        self.aux_layers, self.most_drafts = config.aux_layers, config.most_drafts
        self._own_parameters = {parameter.name: parameter for parameter in config.parameters}
        self._embedding = TokenProjection(target.embed_tokens, target.vocabulary)
        self._head = TokenProjection(target.lm_head, target.vocabulary)

    @property
    def operator(self) -> StepOperator | None:
        """See `Drafter.operator`."""
        return None

    def layout(self) -> Iterator[Parameter]:
        """Yield the parameters that `store` expects."""
        return iter(self._own_parameters.values())

    def _projection(self, name: str) -> Projection:
        """Return the module of a matrix of its own."""
        return Projection(self.kernels, *self._own_parameters[f"{name}.weight"].shape)


# A smaller model with the vocabulary of the target. Shapes: B rows, T tokens, D hidden_size.


class DraftModel(Decoder):
    """Drafts with a whole decoder, one pass per draft.

    The first pass of `propose` has two tokens per row. Of the tokens of a verify step it has
    computed all before, when it drafted them, but the last draft, which may be the previous token
    now. This holds if the drafts of a step are those that it proposed after the step before. It
    computes the tokens of prompts first.
    """

    aux_layers: tuple[int, ...] = ()
    operator: StepOperator | None = None

    def __init__(
        self, config: DrafterConfig, target: Decoder, kernels: Kernels, group: LayerGroup
    ) -> None:
        """See `load_drafter`."""
        plan, device = within_window(config.plan, group.window), target.device
        sizes = target.dtype, device, [group], target.storage
        super().__init__(config.model, kernels, *sizes, plan=plan)
        self.most_drafts = config.most_drafts

    def follow(self, tokens: FollowedTokens, arena: torch.Tensor) -> None:
        """Store keys and values of the tokens."""
        self(tokens.token_ids, arena, tokens.batch)

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """See `Drafter.propose`."""
        if tokens.of_prompts:
            self.follow(tokens, arena)
        both_B2 = torch.stack((newest.previous_ids, newest.token_ids), dim=1)
        hidden_TD = self(both_B2.flatten(), arena, newest.batch(-1, 2))
        ids_B, probability_B = self._most_likely(hidden_TD[1::2])
        ids, probabilities = [ids_B], [probability_B]
        for place in range(1, count):
            hidden_BD = self(ids_B, arena, newest.batch(place, 1))
            ids_B, probability_B = self._most_likely(hidden_BD)
            ids.append(ids_B)
            probabilities.append(probability_B)
        return Drafts(torch.stack(ids, dim=1), torch.stack(probabilities, dim=1))

    def _most_likely(self, hidden_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return most_likely(self, self.logits(hidden_BD))
