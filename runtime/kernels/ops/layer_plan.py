"""The plan of a decoder, without tensors: embedding, layers of operations, and head.

The plan determines the shapes that a loader expects, the memory footprint and the bytes of a step.
A `BoundModel` adds the tensors; backends create their operations from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ....cache.spec import PagedState, RowPlace, RowState
from ...errors import ConfigError
from .attention import Attend
from .batch import LayerPlace
from .collectives import Collectives
from .experts import Experts, ExpertTensors
from .latent import LatentQueries
from .linear import Linear, LinearTensors
from .norms import Norm
from .operation import LAYER_INPUT, Operation
from .parameter import Parameter


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer."""

    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        """Check the names of values.

        Raises:
            ConfigError: an operation reads a value that none before it writes, or two write one
                name.
        """
        written = {LAYER_INPUT: "the layer"}
        for op in self.operations:
            for name in op.reads:
                if name not in written:
                    later = [other.name for other in self.operations if other.writes == name]
                    why = (
                        f"operation {later[0]!r} writes only later"
                        if later
                        else "no operation writes"
                    )
                    raise ConfigError(f"operation {op.name!r} reads {name!r}, which {why}")
            if op.writes in written:
                raise ConfigError(
                    f"operations {written[op.writes]!r} and {op.name!r} both write {op.writes!r}"
                )
            if op.writes:
                written[op.writes] = op.name

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of all operations, each once."""
        return tuple(dict.fromkeys(p for op in self.operations for p in op.parameters))


class Shard(NamedTuple):
    """The part of a model that one rank of a tensor-parallel group holds."""

    rank: int
    ranks: int
    vocab: range
    """Its rows of the embedding and of the head."""
    vocab_sizes: tuple[int, ...]
    """Rows of each rank; ranks hold consecutive rows, in the order of ranks."""


@dataclass(frozen=True)
class ModelPlan:
    """A decoder from token ids to logits. Equal layers are the same object."""

    embedding: Parameter
    """`[vocab_size, hidden_size]`."""
    embedding_scale: float
    """Factor of the embeddings, rounded to the model's dtype."""
    layers: tuple[LayerPlan, ...]
    norm: Norm
    """The norm after the last layer."""
    head: Linear
    """Projection to logits; its weight is the embedding if the two are tied."""
    logit_softcap: float
    """Logits l become softcap * tanh(l / softcap); 0: off."""
    logit_scale: float
    """Factor of the logits before the soft cap."""
    rope_kinds: int
    """Number of different rotations (RoPE parameters) of the layers."""
    rope_by_length: bool = False
    """Whether rotations depend on the length of the sequence, not only on the position."""
    shard: Shard | None = None
    """The part of the model that this plan describes; None: all of it."""
    full_names: bool = False
    """Whether names in layers are full names, as in plans of transformers, and not relative."""
    layer_inputs: LayerPlan | None = None
    """Makes `LayerStep.layer_inputs` of the embeddings of the tokens; None: layers have none."""
    before: LayerPlan | None = None
    """Makes the input of the first layer of these embeddings; None: it is the embeddings."""
    after: LayerPlan | None = None
    """Makes the input of the norm of the output of the last layer; None: it is the output."""

    @property
    def surroundings(self) -> dict[str, LayerPlan]:
        """The operations outside of the layers, by the names of their modules."""
        plans = {"layer_inputs": self.layer_inputs, "before": self.before, "after": self.after}
        return {name: plan for name, plan in plans.items() if plan is not None}

    @cached_property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated, in the layers with the largest heads."""
        parts = (op.rope for op in self.operations if isinstance(op, LatentQueries))
        heads = (op.head_dim for op in self.operations if isinstance(op, Attend))
        return next(parts, 0) or max(heads)

    @cached_property
    def attend(self) -> Attend:
        """The first attention of its layers."""
        return next(op for op in self.operations if isinstance(op, Attend))

    @property
    def states(self) -> list[PagedState]:
        """What the operations of the layers keep, in order."""
        return [s for layer in self.layers for op in layer.operations for s in op.states]

    @property
    def row_states(self) -> list[RowState]:
        """The recurrent state of the operations of the layers, in order."""
        states = (op.row_state for layer in self.layers for op in layer.operations)
        return [state for state in states if state is not None]

    @property
    def hidden_size(self) -> int:
        """Features of the hidden states."""
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, other ranks' included."""
        return self.embedding.shape[0] if self.shard is None else sum(self.shard.vocab_sizes)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head.weight == self.embedding

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of all layers and around them, without duplicates."""
        plans = dict.fromkeys((*self.layers, *self.surroundings.values()))
        return tuple(dict.fromkeys(op for plan in plans for op in plan.operations))

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters under their full names, in the order a forward pass needs them."""
        yield self.embedding
        for name, plan in self.surroundings.items():
            yield from (p.within(f"{name}.", "model.") for p in plan.parameters)
        for index, layer in enumerate(self.layers):
            ours = "" if self.full_names else f"layers.{index}."
            theirs = ours and f"model.{ours}"
            yield from (parameter.within(ours, theirs) for parameter in layer.parameters)
        yield from self.norm.parameters
        yield from (parameter for parameter in self.head.parameters if parameter != self.embedding)


# A plan with its tensors, for a backend to run.


@dataclass(frozen=True)
class BoundLayer:
    """A layer plan with its tensors and its place in the cache."""

    plan: LayerPlan
    tensors: Mapping[str, Tensor]
    """Tensors of the whole model by full name."""
    index: int
    place: LayerPlace | None
    """None: it keeps nothing in the cache."""
    row_places: Mapping[Operation, RowPlace]
    """Places of its operations with recurrent state."""

    def tensor(self, parameter: Parameter) -> Tensor:
        """The tensor of a parameter of the plan."""
        return self.tensors[f"layers.{self.index}.{parameter.name}"]

    def linear(self, linear: Linear) -> LinearTensors:
        """The tensors of a linear operation."""
        return _linear_tensors(self.tensors, f"layers.{self.index}.{linear.weight.name}")

    def experts(self, op: Experts) -> ExpertTensors:
        """The tensors of a mixture of experts."""

        def optional(parameter: Parameter | None) -> Tensor | None:
            return None if parameter is None else self.tensor(parameter)

        return ExpertTensors(
            self.tensor(op.router),
            optional(op.router_bias),
            optional(op.correction),
            optional(op.expert_scales),
            _linear_tensors(self.tensors, f"layers.{self.index}.{op.gate_up.name}"),
            _linear_tensors(self.tensors, f"layers.{self.index}.{op.down.name}"),
        )


@dataclass(frozen=True)
class BoundModel:
    """A plan with its tensors, for a backend to run."""

    plan: ModelPlan
    tensors: Mapping[str, Tensor]
    """Tensors by full name; a quantised weight `NAME.weight` has scales `NAME.scales`."""
    places: tuple[LayerPlace, ...]
    """Places in the cache of the states of layers, in order."""
    row_places: tuple[RowPlace, ...]
    """Places of the recurrent state of operations, in order."""
    storage: str
    """Storage of vectors in the arena: `model`, `int8` or `fp8`."""
    embedding_factor: float
    """`ModelPlan.embedding_scale`, rounded to the model's dtype."""
    frequencies: Tensor
    """float32 `[rope_kinds, rope_dim / 2]`: rotation of each pair of elements, radians/position."""
    amplitudes: Tensor
    """float32 `[rope_kinds, rope_dim / 2]`: factor of cosines and sines; 1 where the frequency is
    zero."""
    collectives: Collectives | None = None
    """Of the tensor-parallel group; None: the model is on one device."""

    @property
    def layers(self) -> list[BoundLayer]:
        """The layers in order."""
        places, row_places = iter(self.places), iter(self.row_places)
        layers = []
        for index, plan in enumerate(self.plan.layers):
            own = [next(places) for op in plan.operations for _ in op.states]
            rows = {op: next(row_places) for op in plan.operations if op.row_state is not None}
            layers.append(BoundLayer(plan, self.tensors, index, next(iter(own), None), rows))
        return layers

    @property
    def norm(self) -> Tensor:
        """Weight of the final norm."""
        return self.tensors[self.plan.norm.weight.name]

    @property
    def embedding(self) -> LinearTensors:
        """The embedding as stored."""
        return _linear_tensors(self.tensors, self.plan.embedding.name)

    @property
    def head(self) -> LinearTensors:
        """The projection to the vocabulary."""
        return _linear_tensors(self.tensors, self.plan.head.weight.name)


def _linear_tensors(tensors: Mapping[str, Tensor], weight: str) -> LinearTensors:
    module = weight.removesuffix("weight")
    return LinearTensors(
        tensors[weight], tensors.get(module + "scales"), tensors.get(module + "bias")
    )
