"""A plan with its tensors, for a backend to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .batch import LayerPlace
from .layer_operations import Linear, Parameter
from .layer_plan import LayerPlan, ModelPlan


class LinearTensors(NamedTuple):
    """A linear layer as it is stored: its weight, and what its sums are multiplied by and added to.

    The weight is packed where kernels pack; scales are those of `quantise_weight`.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class BoundLayer:
    """A layer with its tensors and its place in the cache."""

    plan: LayerPlan
    tensors: Mapping[str, Tensor]
    """Of the whole model by their full names."""
    index: int
    place: LayerPlace

    def tensor(self, parameter: Parameter) -> Tensor:
        """The tensor of a parameter of the plan."""
        return self.tensors[f"layers.{self.index}.{parameter.name}"]

    def linear(self, linear: Linear) -> LinearTensors:
        """The tensors of a linear operation."""
        return _linear_tensors(self.tensors, f"layers.{self.index}.{linear.weight.name}")


@dataclass(frozen=True)
class BoundModel:
    """A plan with its tensors, for a backend to run."""

    plan: ModelPlan
    tensors: Mapping[str, Tensor]
    """By full names; a quantised weight `NAME.weight` has scales `NAME.scales`."""
    places: tuple[LayerPlace, ...]
    """Of the layers."""
    storage: str
    """How the arena stores vectors: `model`, `int8` or `fp8`."""
    embedding_factor: float
    """`embedding_scale` as a number of the model's dtype."""
    frequencies: Tensor
    """float32 `[rope_kinds, rope_dim / 2]`: radians that pairs of elements turn a position."""
    amplitudes: Tensor
    """float32 `[rope_kinds]`: cosines and sines are multiplied by it."""

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
        """The embedding as it is stored."""
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
