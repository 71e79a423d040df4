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
    "FEW_ROWS",
    "ROW_CLASSES",
    "SCALE_BLOCK",
    "STORAGES",
    "GpuLinear",
    "LinearConfig",
    "Norm",
    "Pending",
    "candidate_configs",
    "default_config",
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


_PREFETCHED = 24 << 20
"""Bytes of a weight that are asked into the L2 cache ahead at most: half of an H100's."""


class GpuLinear(NamedTuple):
    """A linear layer: `x @ (weight * scales).T + bias`."""

    weight: Tensor
    """`[N, K]`, contiguous, in the model's dtype, int8 or float8_e4m3fn."""
    scales: Tensor | None = None
    """float32 `[N]`, or `[N, ceil(K / 128)]`: a scale for each 128 input features."""
    bias: Tensor | None = None
    """`[N]` in the model's dtype."""


class Norm(NamedTuple):
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
    norm: Norm
    out: Tensor
    """`[T, K]`, no memory that this kernel reads: others read x while one writes this."""


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How a product is cut into programs: powers of two, or 0 where that is said."""

    block_n: int
    """Output features of a program; of gate and up, so many of each."""
    block_k: int
    """Input features that a program loads at a time, the next while it multiplies with these."""
    num_warps: int = 4
    parts: int = 0
    """0: sums on the cores that do float32, one row after the other. Else tensor cores: `block_k`
    is cut into so many parts, summed apart, so that every warp has products of its own."""
    prefetch: bool = False
    """Ask for all tiles before the wait, into the L2 cache; else for the first, into registers."""


def row_class(rows: int) -> int:
    """The smallest of `ROW_CLASSES` that holds `rows`. Raises ValueError if none does."""
    for size in ROW_CLASSES:
        if rows <= size:
            return size
    raise ValueError(f"kernels of decode steps take at most {ROW_CLASSES[-1]} rows, got {rows}")


def default_config(
    kernel: str,
    rows: int,
    n: int,
    k: int,
    weight_bytes: int,
    multiprocessors: int,
    *,
    tight: bool = False,
) -> LinearConfig:
    """What `kernel` is launched with where nothing was tuned.

    Args:
        kernel: `norm_linear`, `gate_up`, `residual_linear` or `combine_output`.
        rows: T, or its class.
        n: output features; of gate_up those of the result (F).
        k: input features.
        weight_bytes: of an element of the weight.
        multiprocessors: of the device.
        tight: the kernel needs more registers than others of these sizes; see `tuning.is_tight`.

    No such kernel spills registers, of the models and devices that are known.
    """
    rows = row_class(rows)
    halves = 2 if kernel == "gate_up" else 1
    if rows > FEW_ROWS:
        # A tile of weights and one of the input pass through registers and shared memory.
        block_n = max(16 // halves, _smallest_wave(n, 2 * multiprocessors, 32 // halves))
        width = min(512, 8192 // rows, 8192 // (block_n * halves))
        # A program that has a multiprocessor to itself, or small weights, has twice the warps.
        alone = -(-n // block_n) <= multiprocessors
        wide = rows == 16 and (weight_bytes == 1 or alone)
        num_warps = 8 if wide else 4
        block_k = _tile_width(k, 64, width * num_warps // 4)
        masked = weight_bytes == 1 and k % block_k > 0  # which takes registers
        short = block_n * halves == 32 and k <= 4 * block_k  # a loop of few rounds is unrolled
        if rows == 32 and (tight or short or (weight_bytes == 1 and block_n * halves == 16)):
            num_warps = 8  # of a tile that is no wider
        elif rows == 16 and k > 2 * block_k:  # there is a loop
            # Programs of 8-bit weights that are not alone can be two on a multiprocessor instead.
            low = block_n * halves == 16
            if (tight and (low or masked)) or (low and weight_bytes == 1 and not alone):
                block_k //= 2
        parts = min(num_warps, block_k // 16)
        ahead = block_k < k and n * halves * k * weight_bytes <= _PREFETCHED
        return LinearConfig(block_n, block_k, num_warps, parts, ahead)
    if kernel == "combine_output":
        # Each program reads all that the splits left, so there are few of them.
        block_n = _smallest_wave(n, multiprocessors, 32)
        return LinearConfig(block_n, _tile_width(k, 16, 65536 // (block_n * weight_bytes)), 8)
    # Four programs to a multiprocessor, each with 16 KiB of weights on their way: in one tile, or
    # in two of half the size where there are more to come. More rows have more sums in registers.
    block_n = _smallest_wave(n, 4 * multiprocessors, 32)
    width = 8192 // (block_n * halves * weight_bytes)
    if rows == 1 and k <= 4 * width and (weight_bytes > 1 or k <= 2 * width):
        width *= 2
    elif rows == 4 and (halves == 2 or weight_bytes == 1):
        width //= 2
    block_k = _tile_width(k, 16, width)
    scarce = rows == 4 or (rows == 2 and k % block_k == 0)  # two rows of masked tiles fit
    num_warps = 8 if tight and scarce and block_n * halves >= 32 else 4
    ahead = block_k < k and n * halves * k * weight_bytes <= _PREFETCHED
    return LinearConfig(block_n, block_k, num_warps, prefetch=ahead)


def candidate_configs(
    kernel: str,
    rows: int,
    n: int,
    k: int,
    weight_bytes: int,
    multiprocessors: int,
    *,
    tight: bool = False,
) -> list[LinearConfig]:
    """What is worth timing, the default first; arguments as for `default_config`."""
    sizes = (n, k, weight_bytes, multiprocessors)
    default = default_config(kernel, rows, *sizes, tight=tight)
    configs = [default]
    for size_n in (0.5, 1, 2):
        for size_k in (0.5, 1, 2):
            block_n, block_k = int(default.block_n * size_n), int(default.block_k * size_k)
            if block_n < 1 or block_k < 16 * max(1, default.parts):
                continue
            for num_warps in (4, 8):
                for ahead in (False, True):
                    configs.append(LinearConfig(block_n, block_k, num_warps, default.parts, ahead))
    if 1 < row_class(rows) <= FEW_ROWS and kernel != "combine_output":
        configs.append(default_config(kernel, FEW_ROWS + 1, *sizes, tight=tight))
    return list(dict.fromkeys(configs))


def _smallest_wave(n: int, programs: int, most: int) -> int:
    """The smallest power of two whose blocks of `n` are at most `programs`, but at most `most`."""
    size = 1
    while size < most and -(-n // size) > programs:
        size *= 2
    return size


def _tile_width(k: int, least: int, most: int) -> int:
    """A power of two: the smallest that holds `k`, but at least `least` and at most `most`."""
    size = least
    while size < k and size < most:
        size *= 2
    return size


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


def reference_norm(x_TK: Tensor, norm: Norm | None) -> Tensor:
    """`models.modules.RMSNorm`; the rows themselves without one."""
    if norm is None:
        return x_TK
    x = x_TK.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (x * (1.0 + norm.weight.float())).to(x_TK.dtype)
    return norm.weight * x.to(x_TK.dtype)
