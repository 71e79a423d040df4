"""Linear layers on a GPU: weights, norms, configurations of products, and the references.

Shapes: T rows (tokens), N output features, K input features.

A weight is `[N, K]`, as a checkpoint has it. The kernels serve the rows of a decode step, where the
time is spent on reading the weight once.

Default configurations of the products of up to four rows, and the candidates for tuning; products
of more rows are the library's (`linear_kernels.py`).

Sizes are chosen from shapes and the number of multiprocessors. With the default sizes no kernel of
the presets spills registers (docs/gpu-predictions.md).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.linear import reference_linear as linear_of_weight
from ..ops.norms import RMSNorm

__all__ = [
    "EXPERT_PRODUCTS",
    "FEW_ROWS",
    "GpuLinear",
    "GpuNorm",
    "LinearConfig",
    "PREFETCH_BUDGET",
    "Pending",
    "ProductSizes",
    "ROW_CLASSES",
    "SCALE_BLOCK",
    "STORAGES",
    "bounded_prefetch",
    "candidate_configs",
    "default_config",
    "reference_linear",
    "reference_norm",
    "row_class",
]

SCALE_BLOCK = 128
"""Input features that share a scale where an output feature has several."""

ROW_CLASSES = (1, 2, 4)
"""Numbers of rows that kernels are compiled for; fewer rows run in the next larger class."""

FEW_ROWS = ROW_CLASSES[-1]
"""What the kernel without tensor cores takes at most."""

STORAGES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
"""How kernels call what a weight holds."""


class GpuLinear(NamedTuple):
    """A linear layer: `x @ (weight * scales).T + bias`."""

    weight: Tensor
    """`[N, K]`, contiguous, in the model's dtype, int8 or float8_e4m3fn."""
    scales: Tensor | None = None
    """float32 `[N]`, or `[N, ceil(K / 128)]`: a scale for each 128 input features."""
    bias: Tensor | None = None
    """`[N]` in the model's dtype."""


class GpuNorm(NamedTuple):
    """A root-mean-square norm, rounded as `ops.norms.RMSNorm` rounds."""

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


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Which implementation computes a product, and its tile sizes, powers of two."""

    block_n: int = 1
    """Output features of a program; of gate and up, this many of each."""
    block_k: int = 1
    """Input features of a tile; the next ones are loaded while it is multiplied."""
    num_warps: int = 4
    kind: str = "few_rows"
    """`few_rows`: one kernel, norms included, with sums on the float32 cores, row after row.
    `pairs` and `blocks`: of experts, see `experts.py` and `expert_blocks.py`; `block_n` are
    rows of a weight."""
    stages: int = 1
    """Of `pairs` and `blocks`: tiles that are loaded ahead or multiplied at a time."""
    prefetch: int = 0
    """Of `few_rows`: bytes of weights that each program requests into the L2 cache before the wait,
    whole rows, half of them of gate and half of up; at most all that it reads."""

    def __str__(self) -> str:
        """The kind and the sizes that apply to it, for logs and tables."""
        text = f"{self.kind}, {self.block_n} x {self.block_k}, {self.num_warps} warps"
        if self.kind != "few_rows":
            text += f", {self.stages} stages"
        return text + (f", {self.prefetch} bytes prefetched" if self.prefetch else "")


EXPERT_PRODUCTS = ("expert_gate_up", "expert_down")
"""The two products of a mixture of experts."""


def row_class(rows: int) -> int:
    """The smallest of `ROW_CLASSES` that holds `rows`. Raises ValueError if none does."""
    for size in ROW_CLASSES:
        if rows <= size:
            return size
    raise ValueError(f"the kernel of few rows takes at most {FEW_ROWS}, got {rows}")


def reference_linear(x_TK: Tensor, linear: GpuLinear) -> Tensor:
    """The product in plain torch, accumulated in float32 and rounded once: `[T, N]`."""
    weight = linear.weight if linear.scales is not None else linear.weight.float()
    bias = None if linear.bias is None else linear.bias.float()
    out_TN = linear_of_weight(x_TK.float(), weight, bias, len(weight), linear.scales)
    return out_TN.to(x_TK.dtype)


def reference_norm(x_TK: Tensor, norm: GpuNorm | None) -> Tensor:
    """`ops.norms.RMSNorm`; the rows themselves without one."""
    if norm is None:
        return x_TK
    module = RMSNorm(norm.eps, offset=norm.offset)
    module.weight = nn.Parameter(norm.weight, requires_grad=False)
    found: Tensor = module(x_TK)
    return found


PREFETCH_BUDGET = 24 << 20
"""Bytes of a weight that are requested into the L2 cache ahead at most: half of an H100's. By
default a larger weight is not prefetched at all; tuning also tries to prefetch this much of it."""


class ProductSizes(NamedTuple):
    """What the configuration of a product of up to four rows depends on."""

    kernel: str
    """`norm_linear`, `gate_up` or `residual_linear`."""
    rows: int
    """T, or its class."""
    n: int
    """Output features; of gate_up, features of the result (F)."""
    k: int
    """Input features."""
    weight_bytes: int
    """Of an element of the weight."""
    multiprocessors: int
    """Of the device."""
    tight: bool = False
    """Whether the kernel needs more registers than others of these sizes; see `tuning.is_tight`."""

    @property
    def halves(self) -> int:
        """Rows of the weight for each output feature: two of gate_up."""
        return 2 if self.kernel == "gate_up" else 1

    @property
    def feature_bytes(self) -> int:
        """Bytes of the weight for each output feature."""
        return self.halves * self.k * self.weight_bytes


def default_config(sizes: ProductSizes) -> LinearConfig:
    """Return the configuration of a product of up to four rows where nothing was tuned."""
    rows, halves = row_class(sizes.rows), sizes.halves
    n, k, weight_bytes = sizes.n, sizes.k, sizes.weight_bytes
    # Four programs to a multiprocessor, each with 16 KiB of weights on their way: in one tile, or
    # in two of half the size where there are more to come. More rows have more sums in registers.
    block_n = 1
    while block_n < 32 and -(-n // block_n) > 4 * sizes.multiprocessors:
        block_n *= 2
    width = 8192 // (block_n * halves * weight_bytes)
    if rows == 1 and k <= 4 * width and (weight_bytes > 1 or k <= 2 * width):
        width *= 2
    elif rows == 4 and (halves == 2 or weight_bytes == 1):
        width //= 2
    block_k = 16
    while block_k < k and block_k < width:
        block_k *= 2
    scarce = rows == 4 or (rows == 2 and k % block_k == 0)  # two rows of masked tiles fit
    num_warps = 8 if sizes.tight and scarce and block_n * halves >= 32 else 4
    config = LinearConfig(block_n, block_k, num_warps)
    fits = n * sizes.feature_bytes <= PREFETCH_BUDGET
    return bounded_prefetch(config, sizes, PREFETCH_BUDGET if block_k < k and fits else 0)


def candidate_configs(sizes: ProductSizes) -> list[LinearConfig]:
    """Return the configurations to time, the default first.

    They have sizes around the default ones, and prefetch nothing of the weight, a bounded part, or
    all.
    """
    default = default_config(sizes)
    configs = [default]
    budgets = (0, PREFETCH_BUDGET, sizes.n * sizes.feature_bytes)
    for size_n, size_k, budget in itertools.product((0.5, 1, 2), (0.5, 1, 2), budgets):
        block_n, block_k = int(default.block_n * size_n), int(default.block_k * size_k)
        for num_warps in (4, 8) if size_n == 1 else (4,):
            config = LinearConfig(block_n, block_k, num_warps)
            if block_n >= 1 and block_k >= 16:
                configs.append(bounded_prefetch(config, sizes, budget))
    return list(dict.fromkeys(configs))


def bounded_prefetch(config: LinearConfig, sizes: ProductSizes, budget_bytes: int) -> LinearConfig:
    """Return `config` with programs that together prefetch at most `budget_bytes` of the weight.

    They prefetch all of a weight that is not larger.
    """
    share = config.block_n * sizes.feature_bytes
    if sizes.n * sizes.feature_bytes > budget_bytes:
        share = min(share, budget_bytes // -(-sizes.n // config.block_n))
    return replace(config, prefetch=share - share % sizes.feature_bytes)
