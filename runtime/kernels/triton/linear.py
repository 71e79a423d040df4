"""Linear layers on a GPU: weights, norms, configurations of products, and the references.

Shapes: T rows (tokens), N output features, K input features.

A weight is `[N, K]`, as a checkpoint has it. The kernels serve the rows of a decode step, where the
time is that of reading the weight once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "EXPERT_PRODUCTS",
    "FEW_ROWS",
    "KINDS",
    "LIBRARY",
    "ROW_CLASSES",
    "SCALE_BLOCK",
    "STORAGES",
    "GpuLinear",
    "LinearConfig",
    "GpuNorm",
    "Pending",
    "reference_linear",
    "reference_norm",
    "row_class",
]

SCALE_BLOCK = 128
"""Input features that share a scale where an output feature has several."""

ROW_CLASSES = (1, 2, 4, 16, 32)
"""Numbers of rows that kernels are compiled for; fewer rows run in the next larger class."""

STORAGES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
"""How kernels call what a weight holds."""

FEW_ROWS = 4
"""What the kernel without tensor cores takes at most."""


class GpuLinear(NamedTuple):
    """A linear layer: `x @ (weight * scales).T + bias`."""

    weight: Tensor
    """`[N, K]`, contiguous, in the model's dtype, int8 or float8_e4m3fn."""
    scales: Tensor | None = None
    """float32 `[N]`, or `[N, ceil(K / 128)]`: a scale for each 128 input features."""
    bias: Tensor | None = None
    """`[N]` in the model's dtype."""


class GpuNorm(NamedTuple):
    """A root-mean-square norm, rounded as `models.modules.RMSNorm` rounds."""

    weight: Tensor
    """`[K]` in the model's dtype."""
    eps: float
    offset: bool = False
    """It multiplies by one plus the weight, in float32."""


class Pending(NamedTuple):
    """What a layer has yet to add to its rows: `x + norm(delta)` goes into `out`.

    Of families that norm what attention and the MLP return.
    """

    delta: Tensor
    """`[T, K]`."""
    norm: GpuNorm
    out: Tensor
    """`[T, K]`, no memory that this kernel reads: others read x while one writes this."""


KINDS = ("few_rows", "rows", "library", "pairs", "blocks")
"""Implementations of a product: see `LinearConfig.kind`."""


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Which implementation computes a product, and its tile sizes, powers of two."""

    block_n: int = 1
    """Output features of a program; of gate and up, so many of each."""
    block_k: int = 1
    """Input features of a tile; the next ones are loaded while it is multiplied."""
    num_warps: int = 4
    kind: str = "few_rows"
    """`few_rows`: one kernel, norms included, with sums on the float32 cores, row after row.
    `rows`: a kernel on tensor cores over rows that are normed before (`row_product.py`).
    `library`: the library's product, or `matmul.py` for weights of 8 bits; sizes are ignored.
    `pairs` and `blocks`: of experts, see `expert_pairs.py` and `expert_blocks.py`; `block_n` are
    rows of a weight."""
    stages: int = 1
    """Of `rows`, `pairs` and `blocks`: tiles that are loaded ahead or multiplied at a time."""
    splits: int = 1
    """Of `rows`: parts of the input features, each of other programs; more than one are summed
    by a second kernel."""
    prefetch: int = 0
    """Bytes of weights that each program requests into the L2 cache before the wait, at most all
    that it reads. `few_rows`: whole rows; half of them of gate and half of up. `rows`: the first
    features of each row, at least `stages` tiles. Other kinds ignore it."""

    def __str__(self) -> str:
        """The kind and the sizes that apply to it, for logs and tables."""
        if self.kind == "library":
            return self.kind
        text = f"{self.kind}, {self.block_n} x {self.block_k}, {self.num_warps} warps"
        if self.kind in ("rows", "pairs", "blocks"):
            text += f", {self.stages} stages"
        if self.kind == "rows":
            text += f", {self.splits} parts"
        return text + (f", {self.prefetch} bytes prefetched" if self.prefetch else "")


LIBRARY = LinearConfig(kind="library")
"""The library's product."""

EXPERT_PRODUCTS = ("expert_gate_up", "expert_down")
"""The two products of a mixture of experts."""


def row_class(rows: int) -> int:
    """The smallest of `ROW_CLASSES` that holds `rows`. Raises ValueError if none does."""
    for size in ROW_CLASSES:
        if rows <= size:
            return size
    raise ValueError(f"kernels of decode steps take at most {ROW_CLASSES[-1]} rows, got {rows}")


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


def reference_norm(x_TK: Tensor, norm: GpuNorm | None) -> Tensor:
    """`models.modules.RMSNorm`; the rows themselves without one."""
    if norm is None:
        return x_TK
    x = x_TK.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (x * (1.0 + norm.weight.float())).to(x_TK.dtype)
    return norm.weight * x.to(x_TK.dtype)
