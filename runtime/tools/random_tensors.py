"""Random weights, norms and activations for running kernels alone. Needs triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import WeightStorage, quantise_weight
from ..kernels.triton.linear import GpuLinear, GpuNorm

__all__ = ["RandomTensors", "cloned"]


class RandomTensors:
    """Creates tensors from a generator with a fixed seed."""

    def __init__(self, dtype: torch.dtype, weights: WeightStorage, device: torch.device) -> None:
        """Take the dtype of activations, the storage of weights, and the device of all tensors."""
        self._dtype, self._weights, self._device = dtype, weights, device
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed numbers, by default in the dtype of activations."""
        return torch.randn(
            shape, generator=self._generator, device=self._device, dtype=dtype or self._dtype
        )

    def norm(self, features: int) -> GpuNorm:
        """Return a norm with weights near 1."""
        return GpuNorm(1 + 0.1 * self.normal(features), 1e-5)

    def linear(self, n: int, k: int) -> GpuLinear:
        """Return a layer of `k` input and `n` output features, with its weight as stored.

        Outputs have about the standard deviation of inputs.
        """
        weight = self.normal(n, k).mul_(k**-0.5)
        if self._weights == "model":
            return GpuLinear(weight)
        return GpuLinear(*quantise_weight(weight, self._weights))


def cloned(linear: GpuLinear) -> GpuLinear:
    """Return a copy of a layer, in memory of its own."""
    weight, scales, bias = linear
    return GpuLinear(
        weight.clone(),
        None if scales is None else scales.clone(),
        None if bias is None else bias.clone(),
    )
