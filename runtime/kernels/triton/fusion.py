"""Which kernels a layer of a plan is: neighbouring operations that one kernel computes.

Knows shapes and no tensors; imports no triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from ..ops.activation import gated_activation
from ..ops.layer_operations import (
    KNOWN_TO_LAYERS,
    UNEQUAL_LAYERS,
    Activate,
    Attend,
    Linear,
    Norm,
    Operation,
    QKNorm,
    Residual,
    Rotate,
    unsupported,
)
from ..ops.layer_plan import LayerPlan, ModelPlan

__all__ = [
    "Activation",
    "Attention",
    "Fused",
    "GateUp",
    "NormLinear",
    "ResidualLinear",
    "fuse",
    "fusion_obstacle",
    "kernel_obstacle",
    "product_pairs",
]


@dataclass(frozen=True)
class NormLinear:
    """A norm and the linear layer over it."""

    norm: Norm
    linear: Linear
    name: str = "norm_linear"

    @property
    def features(self) -> int:
        """Features of the result."""
        return self.linear.out_features


@dataclass(frozen=True)
class GateUp:
    """A norm, the linear layer over it and the gated activation."""

    norm: Norm
    linear: Linear
    activate: Activate
    name: str = "gate_up"

    @property
    def features(self) -> int:
        """Features of the result."""
        return self.activate.features

    @property
    def gelu(self) -> bool:
        """Whether the activation is gelu; else silu."""
        return self.activate.function == "gelu_tanh"


@dataclass(frozen=True)
class Attention:
    """Norms of queries and keys, rotation, write to the cache and attention."""

    qk_norm: QKNorm | None
    rotate: Rotate
    attend: Attend
    name: str = "decode_attention"


@dataclass(frozen=True)
class ResidualLinear:
    """A linear layer whose result is added to the hidden states, after a norm or without."""

    linear: Linear
    norm: Norm | None
    name: str = "down"


@dataclass(frozen=True)
class Activation:
    """A gated activation that is no part of a product: plain torch, which knows every trait."""

    activate: Activate
    name: str = "activate"

    def run(self, gate_up_TF: Tensor) -> Tensor:
        """Return the activation `[T, F]` of `[T, 2F]`."""
        return gated_activation(self.activate)(*gate_up_TF.chunk(2, dim=-1))


Fused = NormLinear | GateUp | Attention | ResidualLinear | Activation

_PATTERNS: list[tuple[tuple[type[Operation], ...], Callable[..., Fused]]] = [
    ((Norm, Linear, Activate), GateUp),
    ((Norm, Linear), NormLinear),
    ((QKNorm, Rotate, Attend), Attention),
    ((Rotate, Attend), lambda rotate, attend: Attention(None, rotate, attend)),
    ((Linear, Norm, Residual), lambda linear, norm, _: ResidualLinear(linear, norm)),
    ((Linear, Residual), lambda linear, _: ResidualLinear(linear, None)),
    ((Activate,), Activation),
]
"""The first that fits the next operations of a layer is one kernel."""


def _fits(kinds: tuple[type[Operation], ...], operations: Sequence[Operation]) -> bool:
    """Whether the next operations are of these kinds, and a kernel knows their traits.

    Attention and an activation by itself have a plain version, which knows every trait.
    """
    if len(operations) < len(kinds) or not all(map(isinstance, operations, kinds)):
        return False
    alone = operations[0] if len(kinds) == 1 else None
    return all(
        isinstance(op, Attend) or op is alone or unsupported(op, KNOWN_TO_LAYERS) is None
        for op in operations[: len(kinds)]
    )


def fuse(layer: LayerPlan) -> tuple[Fused, ...]:
    """Return the kernels of a layer in order, as decode steps of few rows run them.

    The product after attention, which may combine its splits, is called `combine_output`.

    Raises:
        ValueError: an operation has no kernel where it stands; the message is its title.
    """
    left, found = list(layer.operations), list[Fused]()
    while left:
        for kinds, make in _PATTERNS:
            if _fits(kinds, left):
                fused = make(*left[: len(kinds)])
                break
        else:
            unknown = (op for op in left if type(op) not in KNOWN_TO_LAYERS)
            raise ValueError(next(unknown, left[0]).title)
        if isinstance(fused, ResidualLinear) and found and isinstance(found[-1], Attention):
            fused = replace(fused, name="combine_output")
        found.append(fused)
        del left[: len(kinds)]
    return tuple(found)


def fusion_obstacle(plan: ModelPlan) -> str | None:
    """Return what keeps the layers of a model from the kernels of this package, or None."""
    try:
        for layer in dict.fromkeys(plan.layers):
            fuse(layer)
    except ValueError as error:
        return str(error)
    return None if plan.is_uniform else UNEQUAL_LAYERS


def kernel_obstacle(plan: ModelPlan) -> str | None:
    """Return what of the layers of a model runs in plain torch on a GPU, or None."""
    missing = (unsupported(operation, KNOWN_TO_LAYERS) for operation in plan.operations)
    return next(filter(None, missing), None) or fusion_obstacle(plan)


def product_pairs(
    layers: Sequence[Sequence[Fused]],
) -> Iterator[tuple[ResidualLinear, GateUp | NormLinear]]:
    """Yield the products that one kernel may compute: the second norms the sum of the first.

    Of each pair of neighbours in the chain of all layers once; none where a norm comes before the
    sum, which the next kernel then computes, and none where an activation is no part of a product.
    """
    chain = [fused for layer in layers for fused in layer]
    if any(isinstance(fused, Activation) for fused in chain):
        return
    for first, second in dict.fromkeys(pairwise(chain)):
        if not isinstance(first, ResidualLinear) or first.norm is not None:
            continue
        if isinstance(second, GateUp | NormLinear):
            yield first, second
