"""Replaces the linear layers of a transformers model by projections with our kernels.

Layers with the same input are one product: the first to be called computes it for all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import Kernels, PackedMemory
from ..modules import Projection
from .plan import LinearGroup

__all__ = ["make_projection", "stacked_bias", "stacked_weight", "stand_ins", "stored_values"]


class SharedProduct(nn.Module):
    """Linear layers with the same input as one product."""

    def __init__(self, projection: Projection, sizes: list[int]) -> None:
        """`sizes` are the output features of the layers, in the order in which they are called."""
        super().__init__()
        self.projection = projection
        self.sizes = sizes
        self._parts: list[Tensor] = []
        """Results of layers that are not called yet."""

    def first(self, x: Tensor) -> Tensor:
        """Compute the product of `[..., in_features]`; return the result of the first layer."""
        out_TN: Tensor = self.projection(x.reshape(-1, x.shape[-1]))
        out = out_TN.view(*x.shape[:-1], out_TN.shape[-1])
        if len(self.sizes) == 1:
            return out
        parts: list[Tensor] = list(out.split(self.sizes, dim=-1))
        self._parts = parts[1:]
        return parts[0]

    def next(self) -> Tensor:
        """Return the result of the next layer."""
        return self._parts.pop(0)


class FirstOfProduct(nn.Module):
    """Stands in the place of the first linear layer of a group."""

    def __init__(self, product: SharedProduct) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.product.first(x)
        return first


class NextOfProduct(nn.Module):
    """Stands in the place of another linear layer of a group."""

    def __init__(self, product: SharedProduct) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        following: Tensor = self.product.next()
        return following


def stand_ins(projection: Projection, group: LinearGroup) -> list[nn.Module]:
    """Return the modules that stand in the places of the members of a group."""
    product = SharedProduct(projection, [member.out_features for member in group.members])
    following: list[nn.Module] = [NextOfProduct(product) for _ in group.members[1:]]
    return [FirstOfProduct(product), *following]


def stacked_weight(model: nn.Module, group: LinearGroup) -> Tensor:
    """Return the weights of a group, `[out_features, in_features]`."""
    weights = []
    for member in group.members:
        weight: Any = model.get_submodule(member.module).weight
        weights.append(weight.data.T if member.transposed else weight.data)
    return weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)


def stacked_bias(model: nn.Module, group: LinearGroup) -> Tensor | None:
    """Return the biases of a group, with zeros for members without; None if none has one."""
    if not group.bias:
        return None
    parts = []
    for member in group.members:
        module: Any = model.get_submodule(member.module)
        has = member.bias
        parts.append(module.bias.data if has else module.weight.new_zeros(member.out_features))
    return torch.cat(parts)


def stored_values(
    projection: Projection, weight_NK: Tensor, bias_N: Tensor | None, device: torch.device
) -> dict[str, Tensor]:
    """Return the values of the parameters of a projection, as the kernels want them.

    Raises ValueError for NaN or infinity in a weight to quantise.
    """
    stored = projection.as_stored(weight_NK, device)
    if bias_N is not None:
        stored["bias"] = bias_N.to(device)
    return stored


def make_projection(
    kernels: Kernels,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    memory: PackedMemory | None,
) -> Projection:
    """Return a projection that stores a weight as the kernels want.

    Raises ValueError for NaN or infinity in a weight to quantise.
    """
    projection = Projection(kernels, *weight_NK.shape)
    projection.dtype = dtype
    stored = stored_values(projection, weight_NK, bias_N, device)
    if memory is not None:
        stored["weight"] = memory.place(stored["weight"])
    for leaf, value in stored.items():
        setattr(projection, leaf, nn.Parameter(value, requires_grad=False))
    return projection
