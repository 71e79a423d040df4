"""Sizes of the two products of a mixture of experts: defaults, candidates for tuning, errors.

The defaults follow from a model of the device, not from measurements. A product of few tokens is
bound by reading weights. At a bandwidth b and a latency l, b * l bytes must be on their way: 36 KiB
on each of the 132 multiprocessors of an H200 (4.8 TB/s, about 1 µs under load). So there are at
least three programs for each multiprocessor, and their stages together hold that many bytes.

Shapes: T tokens, K experts of a token, N = T * K pairs, D hidden_size, F features of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton

from ..ops.experts import Experts
from .fusion import runs_by_pair
from .kernel_calls import num_multiprocessors
from .linear import EXPERT_PRODUCTS, FEW_ROWS, SCALE_BLOCK, LinearConfig
from .tuning import TuningKey, lookup, tuning_key

__all__ = [
    "ANY_PAIRS",
    "ExpertSizes",
    "block_rows",
    "block_tiles",
    "candidate_tiles",
    "default_tiles",
    "expert_tiles",
]

_IN_FLIGHT = 40 << 10
"""Bytes of weights that are on their way to a multiprocessor."""
_RESIDENT = 5
"""Programs of 128 threads and at most 96 registers on a multiprocessor, with room for others."""
_LEAST_PROGRAMS = 3
"""For each multiprocessor."""
_TILE_BYTES = 8 << 10
"""Of a program for pairs, at a time."""
_WIDEST, _TALLEST = 256, 32
"""Input features and rows of a weight of such a tile at most."""
_STAGES = (3, 8)
_MOST_ROWS = 128
"""Pairs of a block at most."""
ANY_PAIRS = 32
"""Pairs of a block that do not depend on the step: few have to be padded, and many share the reads
of a weight."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """What the sizes of a mixture's products depend on."""

    tokens: int
    per_token: int
    """Experts of a token."""
    experts: int
    """All of them, shared ones included."""
    hidden: int
    features: int
    by_pair: bool
    """Whether the default is a product by pair, see `fusion.runs_by_pair`."""
    dtype: torch.dtype
    """Of activations."""
    weight_dtype: torch.dtype
    scale_blocks: bool
    """Whether each 128 input features have a scale."""
    device: torch.device

    @classmethod
    def of(
        cls,
        op: Experts,
        tokens: int,
        dtype: torch.dtype,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> ExpertSizes:
        """Return the sizes of a mixture; weight and scales belong to one of its products."""
        hidden, features = op.router.shape[1], op.activate.features
        return cls(
            tokens=tokens,
            per_token=op.per_token,
            experts=op.total,
            hidden=hidden,
            features=features,
            by_pair=runs_by_pair(op, tokens, 3 * features * hidden * weight.itemsize),
            dtype=dtype,
            weight_dtype=weight.dtype,
            scale_blocks=scales is not None and scales.dim() == 2,
            device=weight.device,
        )

    @property
    def pairs(self) -> int:
        """N."""
        return self.tokens * self.per_token

    def product(self, kernel: str) -> tuple[int, int]:
        """Return the rows of an expert's weight, and its input features."""
        if kernel == EXPERT_PRODUCTS[0]:
            return 2 * self.features, self.hidden
        return self.hidden, self.features

    def key(self, kernel: str) -> TuningKey:
        """Return the key under which a product is tuned."""
        rows, k = self.product(kernel)
        return tuning_key(
            kernel, self.tokens, rows, k, self.dtype, self.weight_dtype, self.device,
            experts=self.experts, per_token=self.per_token,
        )  # fmt: skip


def block_rows(pairs: int, total: int) -> int:
    """Pairs of a block: about as many as an expert has, but no fewer than tensor cores take."""
    rows: int = triton.next_power_of_2(-(-pairs // total))
    return max(16, min(_MOST_ROWS, rows))


def expert_tiles(sizes: ExpertSizes) -> tuple[LinearConfig, LinearConfig]:
    """Return the sizes of both products, as tuned or by default; they are of one kind."""
    gate_up, down = EXPERT_PRODUCTS
    first = lookup(sizes.key(gate_up), lambda: candidate_tiles(gate_up, sizes))
    if first is None:
        first = default_tiles(gate_up, sizes)
    kind = first.kind
    second = lookup(sizes.key(down), lambda: candidate_tiles(down, sizes, kind))
    if second is None or second.kind != kind:
        second = default_tiles(down, sizes, kind)
    return first, second


def default_tiles(kernel: str, sizes: ExpertSizes, kind: str | None = None) -> LinearConfig:
    """Return the sizes of a product that was not tuned; `kind` None: the default one."""
    if (kind or ("pairs" if sizes.by_pair else "blocks")) == "blocks":
        return block_tiles(sizes.pairs, sizes.experts, sizes.dtype)
    return _pair_tiles(kernel, sizes)


def _pair_tiles(kernel: str, sizes: ExpertSizes) -> LinearConfig:
    """Of `experts.py`."""
    rows, k = sizes.product(kernel)
    itemsize, processors = sizes.weight_dtype.itemsize, num_multiprocessors(sizes.device)
    width = min(SCALE_BLOCK if sizes.scale_blocks else _WIDEST, max(16, triton.next_power_of_2(k)))
    halves = 2 if kernel == EXPERT_PRODUCTS[0] else 1
    columns = sizes.pairs if halves == 2 else sizes.tokens
    height = min(_TALLEST, _TILE_BYTES // (width * itemsize))
    while height > 2 * halves and columns * -(-rows // height) < _LEAST_PROGRAMS * processors:
        height //= 2
    programs = columns * -(-rows // height)
    resident = max(1, min(_RESIDENT, programs // processors))
    ahead = -(-_IN_FLIGHT // (resident * height * width * itemsize))
    stages = max(_STAGES[0], min(_STAGES[1], 1 + ahead))
    return LinearConfig(height, width, 4, "pairs", stages=stages)


def block_tiles(pairs: int, total: int, dtype: torch.dtype) -> LinearConfig:
    """Return the default sizes of `expert_blocks.py`."""
    rows = block_rows(pairs, total)
    wide = dtype == torch.float32  # multiplied by the ordinary units
    height = 64 if rows == 16 or wide else 128
    block_k = 32 if wide else (SCALE_BLOCK if rows == 16 else 64)
    stages = 2 if wide else 4 if rows == 16 else 3
    return LinearConfig(height, block_k, 8 if height == 128 else 4, "blocks", stages=stages)


def candidate_tiles(kernel: str, sizes: ExpertSizes, kind: str | None = None) -> list[LinearConfig]:
    """Return the sizes to time, the default first; with `kind` only sizes of one kind."""
    kinds = [kind] if kind else ["pairs", "blocks"]
    if sizes.tokens > FEW_ROWS:
        kinds = ["blocks"]
    configs = [default_tiles(kernel, sizes, kind)]
    for one in kinds:
        configs += _around(default_tiles(kernel, sizes, one), sizes)
    return list(dict.fromkeys(configs))


def _around(default: LinearConfig, sizes: ExpertSizes) -> Iterator[LinearConfig]:
    yield default
    least = 16 if default.kind == "blocks" else 2
    widths = (default.block_k // 2, default.block_k, 2 * default.block_k)
    for block_n in (default.block_n // 2, default.block_n, 2 * default.block_n):
        for block_k in widths:
            if block_n >= least and block_k >= 16 and not _crosses_scales(block_k, sizes):
                yield replace(default, block_n=block_n, block_k=block_k)
    for stages in (default.stages - 1, default.stages + 1, default.stages + 2):
        if 2 <= stages <= _STAGES[1]:
            yield replace(default, stages=stages)
    yield replace(default, num_warps=8 if default.num_warps == 4 else 4)


def _crosses_scales(block_k: int, sizes: ExpertSizes) -> bool:
    return sizes.scale_blocks and block_k > SCALE_BLOCK
