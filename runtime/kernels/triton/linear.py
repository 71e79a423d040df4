"""Linear layers on a GPU: weights, norms, configurations of products, and the references.

Shapes: T rows (tokens), N output features, K input features. A weight is `[N, K]`, as a checkpoint
has it. This module imports no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.linear import LinearTensors, linear_in_float32
from ..ops.norms import RMSNorm
from ..weights.stored import LEVEL_BYTES

ROW_CLASSES = (1, 2, 4)
"""Numbers of rows that kernels are compiled for; fewer rows run in the next larger class."""
FEW_ROWS = ROW_CLASSES[-1]
"""What the kernel without tensor cores takes at most."""
EXPERT_PRODUCTS = ("expert_gate_up", "expert_down")
"""The two products of a mixture of experts."""
STORAGES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.uint8: "codes",
}
"""How kernels call what a weight holds; `codes` have 4 bits, see `packed_codes.py`."""


def code_bits(dtype: torch.dtype) -> int:
    """Return the bits of a number of a weight that is stored in `dtype`."""
    return 4 if STORAGES[dtype] == "codes" else 8 * dtype.itemsize


def row_bytes(k: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row of a weight that is stored in `dtype`, without scales."""
    levels = LEVEL_BYTES if STORAGES[dtype] == "codes" else 0
    return k * code_bits(dtype) // 8 + levels


class GpuNorm(NamedTuple):
    """A root-mean-square norm, rounded as `ops.norms.RMSNorm` rounds."""

    weight: Tensor
    """`[K]` in the model's dtype."""
    eps: float
    offset: bool = False
    """It multiplies by one plus the weight, in float32."""


class Pending(NamedTuple):
    """What families that norm the outputs of attention and the MLP have yet to add to the rows:
    `x + norm(delta)` goes into `out`."""

    delta: Tensor
    """`[T, K]`."""
    norm: GpuNorm
    out: Tensor
    """`[T, K]`; must not alias an input, because other programs still read `x`."""


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


def row_class(rows: int) -> int:
    """The smallest of `ROW_CLASSES` that holds `rows`. Raises ValueError if none does."""
    for size in ROW_CLASSES:
        if rows <= size:
            return size
    raise ValueError(f"the kernel of few rows takes at most {FEW_ROWS}, got {rows}")


def reference_linear(x_TK: Tensor, linear: LinearTensors) -> Tensor:
    """The product in plain torch, accumulated in float32 and rounded once: `[T, N]`."""
    return linear_in_float32(x_TK, linear).to(x_TK.dtype)


def reference_norm(x_TK: Tensor, norm: GpuNorm | None) -> Tensor:
    """`ops.norms.RMSNorm`; the rows themselves without one."""
    if norm is None:
        return x_TK
    module = RMSNorm(norm.eps, offset=norm.offset)
    module.weight = nn.Parameter(norm.weight, requires_grad=False)
    found: Tensor = module(x_TK)
    return found
