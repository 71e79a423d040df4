"""Weights of linear layers on a GPU, and the sizes that kernels over them are launched with.

Shapes: T rows (tokens), N output features, K input features.

A weight is `[N, K]`, as a checkpoint has it. The kernels serve the few rows of a decode step, where
the time is that of reading the weight once: a program reads `block_n` whole rows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ROW_CLASSES",
    "SCALE_BLOCK",
    "GpuLinear",
    "LinearConfig",
    "candidate_configs",
    "default_config",
    "reference_linear",
    "row_class",
]

SCALE_BLOCK = 128
"""Input features that share a scale where an output feature has several."""

ROW_CLASSES = (1, 2, 4, 16, 32, 64)
"""Numbers of rows that kernels are compiled for; fewer rows run in the next larger class."""


class GpuLinear(NamedTuple):
    """A linear layer: `x @ (weight * scales).T + bias`."""

    weight: Tensor
    """`[N, K]`, contiguous, in the model's dtype, int8 or float8_e4m3fn."""
    scales: Tensor | None = None
    """float32 `[N]`, or `[N, ceil(K / 128)]`: a scale for each 128 input features."""
    bias: Tensor | None = None
    """`[N]` in the model's dtype."""


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How a product is cut into programs; all are powers of two, `parts` may be 0."""

    block_n: int
    """Output features of a program; of gate and up, so many of each."""
    block_k: int
    """Input features that a program loads at a time, the next while it multiplies with these."""
    num_warps: int = 4
    parts: int = 0
    """0: sums on the cores that do float32, one row after the other. Else tensor cores: `block_k`
    is cut into so many parts, summed apart, so that every warp has products of its own."""


def row_class(rows: int) -> int:
    """The smallest of `ROW_CLASSES` that holds `rows`. Raises ValueError if none does."""
    for size in ROW_CLASSES:
        if rows <= size:
            return size
    raise ValueError(f"kernels of decode steps take at most {ROW_CLASSES[-1]} rows, got {rows}")


def default_config(
    kernel: str, rows: int, n: int, k: int, weight_bytes: int, multiprocessors: int
) -> LinearConfig:
    """What `kernel` is launched with where nothing was tuned.

    Args:
        kernel: `norm_linear`, `gate_up`, `residual_linear` or `combine_output`.
        rows: T, or its class.
        n: output features; of gate_up those of the result (F).
        k: input features.
        weight_bytes: of an element of the weight.
        multiprocessors: of the device.
    """
    raise NotImplementedError


def candidate_configs(
    kernel: str, rows: int, n: int, k: int, weight_bytes: int, multiprocessors: int
) -> list[LinearConfig]:
    """What is worth timing, the default first; arguments as for `default_config`."""
    raise NotImplementedError


def reference_linear(x_TK: Tensor, linear: GpuLinear) -> Tensor:
    """The product in plain torch, accumulated in float32 and rounded once: `[T, N]`."""
    weight_NK = linear.weight.float()
    if linear.scales is not None and linear.scales.dim() == 2:
        scale_NK = linear.scales.repeat_interleave(SCALE_BLOCK, 1)[:, : weight_NK.shape[1]]
        weight_NK = weight_NK * scale_NK
    out_TN = x_TK.float() @ weight_NK.T
    if linear.scales is not None and linear.scales.dim() == 1:
        out_TN = out_TN * linear.scales
    if linear.bias is not None:
        out_TN = out_TN + linear.bias.float()
    return out_TN.to(x_TK.dtype)
