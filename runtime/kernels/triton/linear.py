"""Linear layers on a GPU: weights, norms, configurations of products, and the references.

Shapes: T rows (tokens), N output features, K input features.

A weight is `[N, K]`, as a checkpoint has it. The kernels serve the rows of a decode step, where the
time is that of reading the weight once.

Default configurations of the products of a decode step, and the candidates for tuning.

Sizes are chosen from shapes and the number of multiprocessors. With the default sizes no kernel of
the presets spills registers (docs/gpu-predictions.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "EXPERT_PRODUCTS",
    "FEW_ROWS",
    "GpuLinear",
    "GpuNorm",
    "KINDS",
    "LIBRARY",
    "LinearConfig",
    "PREFETCH_BUDGET",
    "Pending",
    "ROW_CLASSES",
    "SCALE_BLOCK",
    "STORAGES",
    "bounded_prefetch",
    "candidate_configs",
    "config_error",
    "default_config",
    "reference_linear",
    "reference_norm",
    "row_class",
    "weight_rows",
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
    `pairs` and `blocks`: of experts, see `experts.py` and `expert_blocks.py`; `block_n` are
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


PREFETCH_BUDGET = 24 << 20
"""Bytes of a weight that are requested into the L2 cache ahead at most: half of an H100's. By
default a larger weight is not prefetched at all; tuning also tries to prefetch this much of it."""

_MOST_PREFETCHED = 1 << 30
"""Bytes that a program may prefetch: the kernels have sizes of requests in 32 bits."""

_STAGE = 16 << 10
"""Bytes of a tile of which three on their way are enough."""

_LEAST_PART = 256
"""Least input features of a part of a product: below, the sums take longer than it saves."""

_LIMITS = {"block_n": 512, "block_k": 16384, "num_warps": 16, "stages": 8, "splits": 32}
"""The largest sizes that a configuration may have."""


def default_config(
    kernel: str,
    rows: int,
    n: int,
    k: int,
    weight_bytes: int,
    multiprocessors: int,
    *,
    tight: bool = False,
    library: bool = True,
) -> LinearConfig:
    """Return the configuration of `kernel` where nothing was tuned.

    Up to four rows: `few_rows`. Above: `library`, or `rows` for weights of 8 bits, for which the
    library has no product.

    Args:
        kernel: `norm_linear`, `gate_up`, `residual_linear`, `combine_output` or `head`.
        rows: T, or its class.
        n: output features; of gate_up those of the result (F).
        k: input features.
        weight_bytes: of an element of the weight.
        multiprocessors: of the device.
        tight: the kernel needs more registers than others of these sizes; see `tuning.is_tight`.
        library: whether the library may be chosen; else the sizes of a kernel of this package.
    """
    if row_class(rows) <= FEW_ROWS:
        return _few_rows_config(kernel, rows, n, k, weight_bytes, multiprocessors, tight)
    if library and weight_bytes > 1:
        return LIBRARY
    return _rows_config(kernel, n, k, weight_bytes, multiprocessors)


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
    """Return the configurations to time, the default first; arguments as for `default_config`."""
    sizes = (n, k, weight_bytes, multiprocessors)
    configs = [default_config(kernel, rows, *sizes, tight=tight)]
    if row_class(rows) <= FEW_ROWS:
        configs += _few_rows_candidates(configs[0], kernel, n, k, weight_bytes)
    if kernel != "combine_output":
        configs.append(LIBRARY)
        if row_class(rows) > FEW_ROWS:
            configs += _rows_candidates(kernel, *sizes)
        elif rows > 1:
            configs.append(_rows_config(kernel, *sizes))
    return [config for config in dict.fromkeys(configs) if not config_error(config, kernel, rows)]


def config_error(config: LinearConfig, kernel: str, rows: int) -> str | None:
    """Return why `kernel` does not run with this configuration and `rows` rows, or None."""
    if config.kind not in KINDS:
        return f"kind must be one of {', '.join(KINDS)}, not {config.kind!r}"
    for name, most in _LIMITS.items():
        size = getattr(config, name)
        power = size > 0 and not size & (size - 1)
        if not 1 <= size <= most or not (power or name == "stages"):
            kind = "integer" if name == "stages" else "power of two"
            return f"{name} must be a positive {kind} up to {most}, not {size}"
    if not 0 <= config.prefetch <= _MOST_PREFETCHED:
        return f"prefetch must be from 0 to {_MOST_PREFETCHED} bytes, not {config.prefetch}"
    if (config.kind in ("pairs", "blocks")) != (kernel in EXPERT_PRODUCTS):
        return f"kind {config.kind!r} does not apply to {kernel}"
    if config.kind in ("few_rows", "pairs"):
        if rows > FEW_ROWS:
            return f"kind {config.kind!r} takes at most {FEW_ROWS} rows, not {rows}"
    elif kernel == "combine_output":
        return f"kind {config.kind!r} does not combine splits"
    if config.kind == "blocks" and min(config.block_k, config.block_n) < 32:
        return "tensor cores need tiles of at least 32 x 32"
    if kernel in EXPERT_PRODUCTS and config.block_n < 2:
        return "block_n must be at least 2: a row of gate and one of up"
    if config.kind == "rows":
        if config.splits > 1 and kernel == "head":
            return "the head does not support splits"
        if config.block_k < 16 or config.block_n * weight_rows(kernel) < 16:
            return "tensor cores need tiles of at least 16 x 16"
    return None


def weight_rows(kernel: str) -> int:
    """Rows of the weight for each output feature: two of gate_up."""
    return 2 if kernel == "gate_up" else 1


def bounded_prefetch(
    config: LinearConfig, kernel: str, n: int, k: int, weight_bytes: int, budget_bytes: int
) -> LinearConfig:
    """Return `config` with programs that together prefetch at most `budget_bytes` of the weight.

    They prefetch all of a weight that is not larger. Programs of `rows` request their first tiles
    even if these exceed the budget. Arguments as for `default_config`.
    """
    feature_bytes = weight_rows(kernel) * k * weight_bytes
    share = config.block_n * feature_bytes
    if n * feature_bytes > budget_bytes:
        share = min(share, budget_bytes // (-(-n // config.block_n) * config.splits))
    if config.kind == "few_rows":
        share -= share % feature_bytes
    return replace(config, prefetch=share)


def _few_rows_config(
    kernel: str,
    rows: int,
    n: int,
    k: int,
    weight_bytes: int,
    multiprocessors: int,
    tight: bool,
) -> LinearConfig:
    """Of the kernel without tensor cores."""
    rows, halves = row_class(rows), weight_rows(kernel)
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
    config = LinearConfig(block_n, block_k, num_warps)
    weight_size = n * halves * k * weight_bytes
    budget = PREFETCH_BUDGET if block_k < k and weight_size <= PREFETCH_BUDGET else 0
    return bounded_prefetch(config, kernel, n, k, weight_bytes, budget)


def _few_rows_candidates(
    default: LinearConfig, kernel: str, n: int, k: int, weight_bytes: int
) -> list[LinearConfig]:
    """Sizes around the default ones."""
    configs = []
    for size_n in (0.5, 1, 2):
        for size_k in (0.5, 1, 2):
            block_n, block_k = int(default.block_n * size_n), int(default.block_k * size_k)
            if block_n < 1 or block_k < 16:
                continue
            for num_warps in (4, 8) if size_n == 1 else (4,):
                config = LinearConfig(block_n, block_k, num_warps)
                configs += _prefetches(config, kernel, n, k, weight_bytes)
    return configs


def _prefetches(
    config: LinearConfig, kernel: str, n: int, k: int, weight_bytes: int
) -> list[LinearConfig]:
    """The configuration with nothing of the weight prefetched, a bounded part, and all."""
    budgets = (0, PREFETCH_BUDGET, n * weight_rows(kernel) * k * weight_bytes)
    return [bounded_prefetch(config, kernel, n, k, weight_bytes, budget) for budget in budgets]


def _rows_config(
    kernel: str,
    n: int,
    k: int,
    weight_bytes: int,
    multiprocessors: int,
    *,
    height: int = 0,
    width: int = 0,
    split_factor: float = 1,
) -> LinearConfig:
    """Of the kernel on tensor cores; `height` rows of the weight and `width` features a tile."""
    stored_n = n * weight_rows(kernel)
    if not height:
        # Twice the rows of the weight are half the reads of the input, if no processor is idle.
        height = 128 if -(-stored_n // 128) >= 0.9 * multiprocessors else 64
    programs = -(-stored_n // height)
    splits = 1
    while programs * splits < 0.7 * multiprocessors and k >= 2 * splits * _LEAST_PART:
        splits *= 2
    splits = 1 if kernel == "head" else max(1, int(splits * split_factor))
    if not width:
        width = SCALE_BLOCK if height == 64 else 64
        if weight_bytes == 4:  # which tensor cores do not multiply: operands are in registers
            width = 32
    block_k = _tile_width(-(-k // splits), 16, width)
    config = LinearConfig(
        height // weight_rows(kernel),
        block_k,
        4,
        "rows",
        # 40 to 48 KiB of weights on their way, in less shared memory than any processor has.
        stages=4 if block_k * height * weight_bytes >= _STAGE else 6,
        splits=splits,
    )
    budget = PREFETCH_BUDGET if stored_n * k * weight_bytes <= PREFETCH_BUDGET else 0
    return bounded_prefetch(config, kernel, n, k, weight_bytes, budget)


def _rows_candidates(
    kernel: str, n: int, k: int, weight_bytes: int, multiprocessors: int
) -> list[LinearConfig]:
    """Sizes around the default ones."""
    sizes = (kernel, n, k, weight_bytes, multiprocessors)
    default = _rows_config(*sizes)
    configs = [default, *_prefetches(default, kernel, n, k, weight_bytes)]
    for height in (64, 128):
        for width in (64, 128):
            for factor in (0.5, 1, 2):
                configs.append(
                    _rows_config(*sizes, height=height, width=width, split_factor=factor)
                )
        configs.append(replace(_rows_config(*sizes, height=height), num_warps=8))
    return configs


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
