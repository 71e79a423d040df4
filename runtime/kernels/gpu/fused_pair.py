"""Two linear layers of a decode step as one kernel: one that is added, and the normed next one.

    output + gate_up    x' = x + output(attended), then act(gate) * up of norm(x')
    down + norm_linear  x' = x + down(inner), then queries, keys and values of the layer behind

With both a layer has three kernels in place of five: two edges less, and two barriers of all
programs more (see "Edges" in docs/kernels.md). For one to four rows and models without a norm
between the product and the sum.

Shapes: T rows, K input features of the first product, D its output features (hidden_size), N output
features of the second (of gate and up F each).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .fused_pair_kernel import linear_pair
from .gate_up import reference_gate_up
from .launch import INTERPRETED, launch, num_multiprocessors
from .linear import FEW_ROWS, SCALE_BLOCK, STORAGES, GpuLinear, Norm, row_class
from .norm_linear import reference_norm_linear
from .quantised_cache import fp8_is_native
from .residual_linear import reference_residual_linear

__all__ = [
    "PairConfig",
    "PairShape",
    "candidate_pair_configs",
    "default_pair_config",
    "fused_pair",
    "new_barrier",
    "pair_shape",
    "reference_fused_pair",
]

_STEP_BYTES = 32 << 10
"""Of a weight that a program has in registers at a time: of 256 threads 128 bytes each. The next
step is as much, so that a multiprocessor waits for 64 KiB at once."""

_AHEAD_BYTES = 16 << 20
"""Of the second weight that is asked into the L2 cache at most, a third of an H100's: more than
what comes from memory while programs wait for the first product."""

_STATISTICS = 8192
"""Elements of all rows that are summed up at a time for the norm."""


@dataclass(frozen=True, slots=True)
class PairConfig:
    """How a pair of products is cut into steps: powers of two."""

    block_n: int
    """Output features of a tile of the first product."""
    block_k: int
    """Input features of a step of it."""
    next_block_n: int
    """Of the second product; of gate and up, so many of each."""
    next_block_k: int
    num_warps: int = 8
    ahead: bool = True
    """Ask for the weights of both products before the wait, into the L2 cache."""


@dataclass(frozen=True, slots=True)
class PairShape:
    """What sizes are chosen for."""

    rows: int
    hidden: int
    """D."""
    k: int
    """Input features of the first product."""
    n: int
    """Output features of the second; of gate and up those of each."""
    gated: bool
    weight_bytes: int
    """Of an element of both weights."""

    @property
    def bytes(self) -> int:
        """Of both weights, without scales."""
        return self.weight_bytes * self.hidden * (self.k + self.n * (2 if self.gated else 1))


def pair_shape(rows: int, first: GpuLinear, second: GpuLinear, *, gated: bool) -> PairShape:
    """Return the shape of a pair of layers."""
    hidden, k = first.weight.shape
    n = second.weight.shape[0] // (2 if gated else 1)
    size = max(first.weight.element_size(), second.weight.element_size())
    return PairShape(rows, hidden, k, n, gated, size)


def new_barrier(device: torch.device) -> Tensor:
    """Return the counter at which programs wait: one int32.

    It serves all pairs of a stream; launches that share it must not run at the same time. Its
    highest bit is turned by each launch, and what it is in between launches does not matter.
    """
    return torch.zeros(1, dtype=torch.int32, device=device)


def default_pair_config(shape: PairShape, multiprocessors: int) -> PairConfig:
    """Return what is launched where nothing was tuned, if a pair is launched at all.

    The program with the most output features of a product has few more than the others, and tiles
    are as large as that allows. Raises ValueError for more than four rows.
    """
    # Sums of more rows, and numbers made of bytes, take the registers of half of a step.
    small = row_class(shape.rows) > 1 or shape.weight_bytes == 1
    return _config(shape, multiprocessors, _STEP_BYTES // 2 if small else _STEP_BYTES)


def candidate_pair_configs(shape: PairShape, multiprocessors: int) -> list[PairConfig]:
    """Return what is worth timing, the default first. Raises ValueError for more than four rows."""
    default = default_pair_config(shape, multiprocessors)
    configs = [default]
    for step_bytes in (_STEP_BYTES // 2, _STEP_BYTES, 2 * _STEP_BYTES):
        for num_warps in (8, 16):
            for ahead in (True, False):
                sizes = _config(shape, multiprocessors, step_bytes)
                configs.append(
                    PairConfig(
                        sizes.block_n,
                        sizes.block_k,
                        sizes.next_block_n,
                        sizes.next_block_k,
                        num_warps,
                        ahead,
                    )
                )
    return list(dict.fromkeys(configs))


def _config(shape: PairShape, multiprocessors: int, step_bytes: int) -> PairConfig:
    if shape.rows > FEW_ROWS:
        raise ValueError(f"a pair of products takes at most {FEW_ROWS} rows, got {shape.rows}")
    elements = step_bytes // shape.weight_bytes
    halves = 2 if shape.gated else 1
    return PairConfig(
        *_tile(shape.hidden, shape.k, 1, elements, multiprocessors),
        *_tile(shape.n, shape.hidden, halves, elements, multiprocessors),
    )


def _tile(n: int, k: int, halves: int, elements: int, programs: int) -> tuple[int, int]:
    """Output features of a tile, of at most 16 rows of the weight, and input features of a step."""
    sizes = [size for size in (1, 2, 4, 8, 16) if size * halves <= 16]
    most = {size: triton.cdiv(triton.cdiv(n, size), programs) * size for size in sizes}
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
    norm: Norm,
    second: GpuLinear,
    out_TN: Tensor,
    barrier: Tensor,
    config: PairConfig | None = None,
    *,
    gated: bool,
    gelu: bool = False,
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
        config: None: the default.
        gated: which kind the second product is.
        gelu: of the activation; else silu.

    Raises ValueError for sizes that do not fit together or more rows, TypeError for a dtype of
    weights that kernels do not read.
    """
    name = "output_gate_up" if gated else "down_qkv"
    rows, hidden = x_TD.shape
    shape = pair_shape(rows, first, second, gated=gated)
    if (first.weight.shape[0], second.weight.shape[1]) != (hidden, hidden) or (
        a_TK.shape[1] != shape.k or out_TN.shape[1] != shape.n
    ):
        raise ValueError(
            f"{name}: weights of {tuple(first.weight.shape)} and {tuple(second.weight.shape)} make"
            f" no {tuple(x_TD.shape)} and {tuple(out_TN.shape)} of {tuple(a_TK.shape)}"
        )
    multiprocessors = num_multiprocessors(x_TD.device)
    config = config or default_pair_config(shape, multiprocessors)
    if rows > FEW_ROWS:
        raise ValueError(f"{name} takes at most {FEW_ROWS} rows, got {rows}")
    tiles = max(triton.cdiv(hidden, config.block_n), triton.cdiv(shape.n, config.next_block_n))
    programs = min(tiles, multiprocessors)
    ahead = _AHEAD_BYTES // programs if config.ahead else 0
    weight, sizes = _half(name, first, config.block_n, config.block_k, ahead)
    next_weight, next_sizes = _half(
        name, second, config.next_block_n, config.next_block_k, ahead // (2 if gated else 1)
    )
    sizes |= {f"NEXT_{key}": value for key, value in next_sizes.items()}
    # In the interpreter a program would wait for those that run after it.
    phases = ("first", "second") if INTERPRETED else ("both",)
    for phase in phases:
        launch(
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
            NATIVE_FP8=fp8_is_native(x_TD.device),
            OFFSET=norm.offset,
            GATED=gated,
            GELU=gelu,
            PHASE=phase,
            NAME=name,
            **sizes,
        )


def _half(
    name: str, linear: GpuLinear, block_n: int, block_k: int, ahead_bytes: int
) -> tuple[Tensor, dict[str, Any]]:
    """The weight as the kernel reads it, and the constants of a product."""
    weight = linear.weight
    if weight.dtype not in STORAGES:
        raise TypeError(f"{name}: no kernel for weights of {weight.dtype}")
    storage, k = STORAGES[weight.dtype], weight.shape[1]
    row_bytes = k * weight.element_size()
    vector, word = min(16 // weight.element_size(), block_k), 4 // weight.element_size()
    if storage == "fp8":
        weight = weight.view(torch.uint8)
    if k % word or vector % word:
        word = 1  # a row begins within a word
    else:
        weight = weight.view(torch.int32)
    blocked = linear.scales is not None and linear.scales.dim() == 2
    return weight, {
        "K": k,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "V": vector,
        "WORD": word,
        "STORAGE": storage,
        "SCALE_BLOCKS": triton.cdiv(k, SCALE_BLOCK) if blocked else 0,
        "ROW_BYTES": row_bytes,
        "AHEAD": ahead_bytes // row_bytes if row_bytes % 16 == 0 else 0,
    }


def reference_fused_pair(
    a_TK: Tensor,
    first: GpuLinear,
    residual_TD: Tensor,
    norm: Norm,
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
