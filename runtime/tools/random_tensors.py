"""Random weights, activations and caches of a model's shapes, for running its kernels alone.

On the device "meta" they have shapes and no memory. Needs triton.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...cache.arena import Arena
from ..engine.startup import layer_groups
from ..kernels import RaggedBatch, WeightStorage, quantise_weight
from ..kernels.ops.kv_storage import read_blocks
from ..kernels.triton.linear import GpuLinear, GpuNorm
from ..kernels.triton.store import store_keys_and_values
from ..models.config import ModelConfig
from ..resolved_config import ResolvedConfig

__all__ = ["RandomCache", "RandomTensors"]

_FILLED_TOKENS = 8192
"""Tokens whose keys and values are written to a cache at a time."""


class RandomTensors:
    """Creates tensors from a generator with a fixed seed."""

    def __init__(self, dtype: torch.dtype, weights: WeightStorage, device: torch.device) -> None:
        """Take the dtype of activations, the storage of weights, and where tensors are."""
        self.dtype, self.device, self._weights = dtype, device, weights
        self._generator: torch.Generator | None = None
        if device.type != "meta":
            self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed numbers, by default in the dtype of activations."""
        return torch.randn(
            shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype
        )

    def norm(self, features: int, eps: float = 1e-5, *, offset: bool = False) -> GpuNorm:
        """Return a norm with weights near 1."""
        return GpuNorm(1 + 0.1 * self.normal(features), eps, offset)

    def linear(self, n: int, k: int, *, bias: bool = False) -> GpuLinear:
        """Return a layer of `k` input and `n` output features, with its weight as stored.

        Outputs have about the standard deviation of inputs.
        """
        weight = self.normal(n, k).mul_(k**-0.5)
        bias_N = self.normal(n) if bias else None
        if self._weights == "model":
            return GpuLinear(weight, None, bias_N)
        return GpuLinear(*quantise_weight(weight, self._weights), bias_N)


class RandomCache:
    """A cache that holds the context of all rows, in randomly ordered blocks.

    Attributes:
        arena: as in `cache/arena.py`, of `layers` layers in one group.
        batch: a decode step of the rows, one token each at the last position of the context.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ResolvedConfig,
        device: torch.device,
        *,
        rows: int,
        context: int,
        layers: int,
    ) -> None:
        size, self._storage = config.block_size, config.storage
        blocks = -(-context // size)
        (group, *_) = layer_groups(model, config)
        group = dataclasses.replace(group, layers=tuple(range(layers)))
        arena = Arena([group], rows * blocks + 1, size, config.dtype, device, config.storage)
        self.arena = arena.tensor
        order = torch.randperm(rows * blocks, device=device).to(torch.int32) + 1
        tables = order.view(rows, blocks)
        token_rows = torch.arange(rows, device=device)
        self.batch = RaggedBatch(
            positions=torch.full((rows,), context - 1, device=device),
            slots=(tables[:, -1].to(torch.int64) * size + (context - 1) % size)[None],
            token_rows=token_rows,
            rows=token_rows,
            block_tables=tables[None],
            read_blocks=blocks,
            block_size=size,
            tokens_per_row=1,
        )
        if device.type != "meta":
            self._fill(model, config.dtype)

    def newest(self, arena: Tensor) -> Tensor:
        """Return keys and values in the last block of each row, first layer, dequantised.

        `arena` is this cache's, or a copy of it.
        """
        last, size = self.batch.block_tables[0, :, -1:], self.batch.block_size
        return torch.stack([read_blocks(side, last, size, self._storage) for side in arena[0]])

    def _fill(self, model: ModelConfig, dtype: torch.dtype) -> None:
        """Write keys and values to all slots."""
        size, device = self.batch.block_size, self.arena.device
        for layer in range(self.arena.shape[0]):
            for slots_T in torch.arange(self.arena.shape[2] * size, device=device).split(
                _FILLED_TOKENS
            ):
                shape = (2, len(slots_T), model.num_kv_heads, model.head_dim)
                k, v = torch.randn(shape, device=device, dtype=dtype)
                store_keys_and_values(k, v, self.arena, layer, slots_T, size, self._storage)
