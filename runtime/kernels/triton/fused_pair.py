"""Two linear layers of a decode step as one kernel: one that is added, and the normed next one.

    output + gate_up    x' = x + output(attended), then act(gate) * up of norm(x')
    down + norm_linear  x' = x + down(inner), then queries, keys and values of the next layer

With both a layer has three kernels instead of five: two edges less, and two grid barriers more (see
"Edges" in docs/gpu-predictions.md). For one to four rows, and models that do not norm the outputs
of attention and the MLP.

Shapes: T rows, K input features of the first product, D its output features (hidden_size), N output
features of the second (of gate and up F each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from .fused_pair_kernel import linear_pair
from .gate_up import reference_gate_up
from .kernel_calls import call_kernel, num_multiprocessors, runs_in_turn
from .kernel_weights import kernel_weight, may_prefetch
from .linear import FEW_ROWS, STORAGES, GpuLinear, GpuNorm, LinearConfig, row_class
from .norm_linear import reference_norm_linear
from .residual_linear import reference_residual_linear

__all__ = [
    "PairShape",
    "PairTiles",
    "default_pair_config",
    "fused_pair",
    "new_barrier",
    "pair_tiles",
    "reference_fused_pair",
]

_STEP_BYTES = 32 << 10
"""Of a weight that a program has in registers at a time: of 256 threads 128 bytes each. The next
step is as much, so that a multiprocessor waits for 64 KiB at once."""

_TALLEST = 16
"""Rows of a weight in a step at most: all threads together sum up each of them."""

_AHEAD_BYTES = 16 << 20
"""Bytes of each weight that all programs request into the L2 cache by default, a third of an
H100's: more than what comes from memory while programs wait for the first product."""

_STATISTICS = 8192
"""Elements of all rows that are summed up at a time for the norm."""


@dataclass(frozen=True, slots=True)
class PairShape:
    """What sizes are chosen for."""

    rows: int
    k: int
    """Input features of the first product."""
    hidden: int
    """D."""
    n: int
    """Output features of the second; of gate and up those of each."""
    gated: bool
    weight_bytes: int
    """Of an element of both weights."""

    @classmethod
    def of(cls, rows: int, first: GpuLinear, second: GpuLinear, *, gated: bool) -> PairShape:
        """Return the shape of a pair of layers."""
        hidden, k = first.weight.shape
        n = second.weight.shape[0] // (2 if gated else 1)
        size = max(first.weight.element_size(), second.weight.element_size())
        return cls(rows, k, hidden, n, gated, size)

    @property
    def name(self) -> str:
        """Of the operation."""
        return "output_gate_up" if self.gated else "down_qkv"


@dataclass(frozen=True, slots=True)
class PairTiles:
    """How a pair of products is cut into steps of programs: powers of two."""

    block_n: int
    """Output features of a tile of the first product."""
    block_k: int
    """Input features of a step of it."""
    next_block_n: int
    """Of the second product; of gate and up, of each."""
    next_block_k: int


def new_barrier(device: torch.device) -> Tensor:
    """Return the counter at which programs wait: one int32.

    All pairs of a stream share it; launches that share it must not run at the same time. Each
    launch flips its highest bit; either state is valid between launches.
    """
    return torch.zeros(1, dtype=torch.int32, device=device)


def default_pair_config(shape: PairShape, multiprocessors: int) -> LinearConfig:
    """Return the sizes of a pair that was not tuned."""
    # Sums of more rows, and numbers made of bytes, take the registers of half of a step.
    small = row_class(shape.rows) > 1 or shape.weight_bytes == 1
    step_bytes = _STEP_BYTES // 2 if small else _STEP_BYTES
    block_k = step_bytes // (_TALLEST * shape.weight_bytes)
    config = LinearConfig(_TALLEST, block_k, 8, "pair")
    programs = _programs(shape, pair_tiles(shape, config, multiprocessors), multiprocessors)
    return replace(config, prefetch=_AHEAD_BYTES // programs)


def pair_tiles(shape: PairShape, config: LinearConfig, multiprocessors: int) -> PairTiles:
    """Return the tiles of both products.

    A step is of at most `config.block_n` rows of the weight and of `block_n * block_k` elements.
    Tiles are as tall as they can be while no program has many more features than the others.
    """
    limits = (config.block_n, config.block_n * config.block_k, multiprocessors)
    return PairTiles(
        *_tile(shape.hidden, shape.k, 1, *limits),
        *_tile(shape.n, shape.hidden, 2 if shape.gated else 1, *limits),
    )


def _programs(shape: PairShape, tiles: PairTiles, multiprocessors: int) -> int:
    """Programs of a launch: none without a tile, and all run at the same time."""
    first = triton.cdiv(shape.hidden, tiles.block_n)
    second = triton.cdiv(shape.n, tiles.next_block_n)
    programs: int = min(max(first, second), multiprocessors)
    return programs


def _tile(
    n: int, k: int, halves: int, tallest: int, elements: int, programs: int
) -> tuple[int, int]:
    """Output features of a tile, and input features of a step."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size == 1 or size * halves <= tallest]
    most = {size: min(n, triton.cdiv(triton.cdiv(n, size), programs) * size) for size in sizes}
    block_n = max(size for size in sizes if most[size] <= 1.04 * min(most.values()))
    block_k: int = min(triton.next_power_of_2(k), max(16, elements // (block_n * halves)))
    divisor = k & -k
    if divisor < block_k and 4 * divisor * block_n * halves >= elements:
        block_k = divisor  # whole steps need no masks
    return block_n, block_k


def fused_pair(
    a_TK: Tensor,
    first: GpuLinear,
    residual_TD: Tensor,
    x_TD: Tensor,
    norm: GpuNorm,
    second: GpuLinear,
    out_TN: Tensor,
    barrier: Tensor,
    config: LinearConfig | None = None,
    *,
    gated: bool,
    gelu: bool = False,
    tiles: PairTiles | None = None,
) -> None:
    """`x = residual + first(a)` and `out = second(norm(x))`, rounded as the separate kernels do.

    All contiguous; activations in the model's dtype.

    Args:
        a_TK: at most 4 rows.
        first: `[D, K]`.
        residual_TD: no memory that is written here.
        x_TD: written.
        norm: of x.
        second: `[N, D]`, or gate and up `[2N, D]` if `gated`.
        out_TN: written: the product, or act(gate) * up.
        barrier: see `new_barrier`.
        config: of kind `pair`; None: the default.
        gated: which kind the second product is.
        gelu: of the activation; else silu.
        tiles: None: those of `config`.

    Raises ValueError for sizes that do not fit together or more rows, TypeError for a dtype of
    weights that kernels do not read.
    """
    rows, hidden = x_TD.shape
    shape = PairShape.of(rows, first, second, gated=gated)
    if (first.weight.shape[0], second.weight.shape[1]) != (hidden, hidden) or (
        a_TK.shape[1] != shape.k or out_TN.shape[1] != shape.n
    ):
        raise ValueError(
            f"{shape.name}: weights of {tuple(first.weight.shape)} and"
            f" {tuple(second.weight.shape)} do not map inputs of {tuple(a_TK.shape)} to"
            f" {tuple(x_TD.shape)} and {tuple(out_TN.shape)}"
        )
    if rows > FEW_ROWS:
        raise ValueError(f"{shape.name} takes at most {FEW_ROWS} rows, got {rows}")
    for linear in (first, second):
        if linear.weight.dtype not in STORAGES:
            raise TypeError(f"{shape.name}: no kernel for weights of {linear.weight.dtype}")
    multiprocessors = num_multiprocessors(x_TD.device)
    config = config or default_pair_config(shape, multiprocessors)
    tiles = tiles or pair_tiles(shape, config, multiprocessors)
    programs = _programs(shape, tiles, multiprocessors)
    weight, sizes = _half(first, tiles.block_n, tiles.block_k, config.prefetch)
    next_ahead = config.prefetch // (2 if gated else 1)
    next_weight, next_sizes = _half(second, tiles.next_block_n, tiles.next_block_k, next_ahead)
    native_fp8 = sizes.pop("NATIVE_FP8")
    next_sizes.pop("NATIVE_FP8")
    sizes |= {f"NEXT_{key}": value for key, value in next_sizes.items()}
    # A program would wait for those that run after it.
    phases = ("first", "second") if runs_in_turn() else ("both",)
    for phase in phases:
        call_kernel(
            linear_pair,
            (programs,),
            a_TK,
            weight,
            first.scales,
            first.bias,
            residual_TD,
            x_TD,
            norm.weight,
            next_weight,
            second.scales,
            second.bias,
            out_TN,
            barrier,
            rows,
            hidden,
            shape.n,
            norm.eps,
            num_warps=config.num_warps,
            cooperative=True,
            ROWS=row_class(rows),
            STATISTICS=min(triton.next_power_of_2(hidden), _STATISTICS // row_class(rows)),
            NATIVE_FP8=native_fp8,
            OFFSET=norm.offset,
            GATED=gated,
            GELU=gelu,
            PHASE=phase,
            NAME=shape.name,
            **sizes,
        )


def _half(
    linear: GpuLinear, block_n: int, block_k: int, ahead_bytes: int
) -> tuple[Tensor, dict[str, Any]]:
    """The weight as the kernel reads it, and the constants of a product."""
    weight, constants = kernel_weight(linear)
    k, size = weight.shape[1], weight.element_size()
    vector, word = min(16 // size, block_k), 4 // size
    ahead = ahead_bytes // (k * size) if may_prefetch(weight) else 0
    if k % word or vector % word:
        word = 1  # a row begins within a word
    else:
        weight = weight.view(torch.int32)
    sizes = {"K": k, "BLOCK_N": block_n, "BLOCK_K": block_k, "V": vector, "WORD": word}
    return weight, constants | sizes | {"ROW_BYTES": k * size, "AHEAD": ahead}


def reference_fused_pair(
    a_TK: Tensor,
    first: GpuLinear,
    residual_TD: Tensor,
    norm: GpuNorm,
    second: GpuLinear,
    *,
    gated: bool,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `fused_pair` makes, in plain torch: x and the second product."""
    x_TD = reference_residual_linear(a_TK, first, residual_TD)
    if gated:
        return x_TD, reference_gate_up(x_TD, norm, second, gelu=gelu)
    return x_TD, reference_norm_linear(x_TD, norm, second)
