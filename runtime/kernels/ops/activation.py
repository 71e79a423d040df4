"""Gated activations and outputs. Shapes: T tokens, F features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .operation import Binding, NeededUnits, Operation, Run, ShardedLayer, per_token

ActivationName = Literal["silu", "gelu_tanh", "relu2"]

Gated = Callable[[Tensor, Tensor], Tensor]


def activation(operation: Activate) -> Callable[..., Tensor]:
    """Return the function of the parts of the value, `[T, F]` each, that an operation computes."""
    return gated_activation(operation) if operation.gated else lambda x_TF: F.relu(x_TF).square()


def gated_activation(operation: Activate) -> Gated:
    """Return the function of gate and up, `[T, F]` each, that an operation computes."""
    limit, alpha, offset = operation.limit, operation.alpha, operation.up_offset
    gelu = operation.function == "gelu_tanh"
    deviations = NormalDist().inv_cdf(operation.sparsity) if operation.sparsity else None

    def gated(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        if deviations is not None:
            spread_T1, mean_T1 = torch.std_mean(gate_TF, -1, correction=0, keepdim=True)
            gate_TF = F.relu(gate_TF - (mean_T1 + spread_T1 * deviations))
        if limit:
            gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
        if offset:
            up_TF = up_TF + offset
        if gelu:
            return F.gelu(gate_TF, approximate="tanh") * up_TF
        if alpha == 1.0:
            return F.silu(gate_TF) * up_TF
        return gate_TF * torch.sigmoid(alpha * gate_TF) * up_TF

    return gated


@dataclass(frozen=True, kw_only=True)
class Activate(Operation):
    """`function(gate) * (up + up_offset)` of the two parts of the value, `[T, F]`."""

    function: ActivationName
    features: int
    limit: float = 0.0
    """The gate is clamped to at most this value, `up` to +- this value; 0: off."""
    alpha: float = 1.0
    """Factor of the gate inside the sigmoid of silu."""
    up_offset: float = 0.0
    sparsity: float = 0.0
    """Share of the gates that become zero, if they are normally distributed: those below the mean
    plus this quantile of standard deviations, which is subtracted from the others (Gemma 3n)."""
    gated: bool = True
    """Whether there are two parts; else the value is one tensor, and the result relu(x) ** 2
    (Nemotron)."""

    @property
    def parts(self) -> int:
        """Parts of the value."""
        return 2 if self.gated else 1

    def bind(self, to: Binding) -> Run:
        function = per_token(to.kernels, activation(self))
        if not self.gated:
            return lambda x_TF, step: function(x_TF)
        return lambda gate_up, step: function(*gate_up)

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if self.features % ranks:
            yield f"{ranks} does not divide {self.features} features of an MLP (intermediate_size)"
        if self.sparsity and ranks > 1:
            yield "the sparsity of its activations depends on all features of an MLP"

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        yield replace(self, features=len(layer.rank.part(self.features)))

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        return [layer.rank.part(features) for features in split]

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * ((4 if eager else 3) * self.features + 3 * hidden)


@dataclass(frozen=True, kw_only=True)
class GateOutput(Operation):
    """`x * sigmoid(gate)` of the two values that it reads: x `[T, F]`, and the gate `[T, F]` or
    `[T, 1]`."""

    features: int
    """F."""
    per_feature: bool = True
    """Whether the gate has F features, and not one."""

    @property
    def title(self) -> str:
        return "gated outputs"

    def bind(self, to: Binding) -> Run:
        sigmoid = per_token(to.kernels, torch.sigmoid)
        return lambda parts, step: parts[0] * sigmoid(parts[1])

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        own = len(layer.rank.part(self.features)) if self.per_feature else self.features
        yield replace(self, features=own)

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        return [layer.rank.part(features) for features in split] if self.per_feature else None

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * (2 * hidden + 4 * self.features)
