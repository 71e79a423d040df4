"""A plan with its tensors, for a backend to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .batch import LayerPlace
from .collectives import Collectives
from .expert_operations import Experts
from .experts import ExpertTensors
from .layer_operations import Linear
from .layer_plan import LayerPlan, ModelPlan
from .parameter import Parameter


class LinearTensors(NamedTuple):
    """A linear layer as stored: weight, scales and bias.

    The weight is packed if the kernels pack weights; scales are those of `quantise_weight`.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class BoundLayer:
    """A layer plan with its tensors and its place in the cache."""

    plan: LayerPlan
    tensors: Mapping[str, Tensor]
    """Tensors of the whole model by full name."""
    index: int
    place: LayerPlace

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

        gate_up, down = (
            _linear_tensors(self.tensors, f"layers.{self.index}.{parameter.name}")
            for parameter in (op.gate_up, op.down)
        )
        return ExpertTensors(
            self.tensor(op.router),
            optional(op.router_bias),
            optional(op.correction),
            *gate_up,
            *down,
        )


@dataclass(frozen=True)
class BoundModel:
    """A plan with its tensors, for a backend to run."""

    plan: ModelPlan
    tensors: Mapping[str, Tensor]
    """Tensors by full name; a quantised weight `NAME.weight` has scales `NAME.scales`."""
    places: tuple[LayerPlace, ...]
    """Place of each layer in the cache."""
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
        return [
            BoundLayer(plan, self.tensors, index, place)
            for index, (plan, place) in enumerate(zip(self.plan.layers, self.places, strict=True))
        ]

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
