"""The product of 5 to 32 rows of a decode step on tensor cores, and the sum of its parts.

Shapes: T rows, N output features, K input features, R rows of the weight that a program reads, S
parts of the input features, ROWS the row class.

The product is bound by reading the weight once. So a kernel of `rowwise.py` norms the rows before,
and no program norms them again: for R = 64 and 32 rows a program reads half as many bytes of inputs
as of weights. The weight is the left operand: tensor cores take 64 of its rows at a time, and as
few as 8 rows of the input. Tiles of both are loaded `STAGES` ahead into shared memory; an iteration
has one barrier.

Where N / R programs are fewer than the multiprocessors, the input features are cut into S parts
(split-K). Each part's programs write float32 sums, and `sum_parts` adds them in the order of the
parts. The alternative is a counter of finished programs, the last of which adds: it needs counters,
which engines on two streams must not share, and costs a fence, an atomic operation and a second
read where the second kernel costs an edge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import FEW_ROWS, SCALE_BLOCK, GpuLinear, LinearConfig, row_class
from .linear_tiles import activate, as_operand, capped, largest_of, scaled
from .quantised import (
    kernel_weight,
    load_channels,
    may_prefetch,
    operation_name,
    prefetch_segments,
)

__all__ = ["call_row_product", "sum_parts"]

_SUMMED = 512
"""Features that a program sums."""


@triton.jit(repr=operation_name, do_not_specialize=["T"])
def product_of_rows(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, best_ptr, best_id_ptr, T, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, AHEAD: tl.constexpr, NAME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, split): the rows of the weight for `BLOCK_N` features, times all rows.

    With more than one split the result is a float32 sum `[S, T, R programs]`, without scales of
    channels and bias. Before the wait the first `AHEAD` features of the program's weights are
    requested into the L2 cache.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    HALVES: tl.constexpr = 2 if GATED else 1
    R: tl.constexpr = BLOCK_N * HALVES
    PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    let_dependents_start(PDL)

    # Of gate and up the rows of the same features, in turn. Past the last feature the last one is
    # read again, and not stored.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, R) // HALVES
    half = tl.arange(0, R) % HALVES * N
    weight_n = tl.minimum(n, N - 1) + half
    w_rows = w_ptr + weight_n.to(tl.int64)[:, None] * K
    begin = tl.program_id(1) * PART
    end = tl.minimum(begin + PART, K)
    if AHEAD:
        prefetch_segments(w_ptr, weight_n, begin, tl.minimum(begin + AHEAD, end), K, PDL)
    channel_scales, bias = load_channels(scale_ptr, bias_ptr, weight_n[:, None], SCALE_BLOCKS)

    wait_for_inputs(PDL)
    t = tl.arange(0, ROWS)
    there = (t < T)[None, :]
    mask = (n < N)[:, None] & there
    if residual_ptr is not None:  # in flight while the products are made
        residual_place = residual_ptr + t[None, :] * N + n[:, None]
        residual = tl.load(residual_place, mask=mask, other=0.0)
    x_rows = x_ptr + t[None, :] * K
    sums = tl.zeros([R, ROWS], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_rows + k[:, None], mask=there, other=0.0)
        else:
            inside = k < K
            w = tl.load(
                w_rows + k[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first"
            )
            x = tl.load(x_rows + k[:, None], mask=inside[:, None] & there, other=0.0)
        w = as_operand(w, STORAGE, NATIVE_FP8, dtype)
        if SCALE_BLOCKS:
            scales = tl.load(scale_ptr + weight_n * SCALE_BLOCKS + start // 128)
            sums += tl.dot(w, x, input_precision="ieee") * scales[:, None]
        else:
            sums = tl.dot(w, x, sums, input_precision="ieee")

    if SPLITS > 1:
        part = tl.program_id(1) * T + t
        place = part[None, :] * (N * HALVES) + (n + half)[:, None]
        tl.store(out_ptr + place, sums, mask=mask)
    else:
        out = sums * channel_scales + bias
        stored_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(out, [BLOCK_N, 2, ROWS]), [0, 2, 1]))
            out = activate(gate, up, GELU, dtype)
        elif residual_ptr is not None:
            out = residual.to(tl.float32) + scaled(out, SCALE, dtype).to(dtype).to(tl.float32)
        else:
            out = scaled(out, SCALE, dtype)
            if SOFTCAP > 0.0:
                out = capped(out, SOFTCAP, dtype)
        out = out.to(dtype)
        tl.store(out_ptr + t[None, :] * N + stored_n, out, mask=(stored_n < N) & there)
        if best_ptr is not None:
            best, best_id = largest_of(out.to(tl.float32), stored_n, N, axis=0)
            best_place = t * tl.num_programs(0) + tl.program_id(0)
            tl.store(best_ptr + best_place, best, mask=t < T)
            tl.store(best_id_ptr + best_place, best_id, mask=t < T)


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, N, part_stride, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, t): `BLOCK` features of row t."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    let_dependents_start(PDL)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    inside = n < N
    at = tl.minimum(n, N - 1)
    scales, bias = load_channels(scale_ptr, bias_ptr, at, False)
    HALVES: tl.constexpr = 2 if GATED else 1
    if GATED:
        up_scales, up_bias = load_channels(scale_ptr, bias_ptr, at + N, False)
    wait_for_inputs(PDL)
    first = parts_ptr + row * (N * HALVES) + n
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * N + n, mask=inside, other=0.0).to(tl.float32)
    out = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        out += tl.load(first + part * part_stride, mask=inside, other=0.0).to(tl.float32)
    out = out * scales + bias
    if GATED:
        up = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            up += tl.load(first + N + part * part_stride, mask=inside, other=0.0).to(tl.float32)
        out = activate(out, up * up_scales + up_bias, GELU, dtype)
    else:
        out = scaled(out, SCALE, dtype)
        if residual_ptr is not None:
            out = residual + out.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * N + n, out.to(dtype), mask=inside)


def call_row_product(
    name: str,
    x_TK: Tensor,
    linear: GpuLinear,
    out_TN: Tensor,
    config: LinearConfig,
    *,
    residual_TN: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
    best: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compute the product over rows that are normed, and the sum of its parts if it has several.

    Arguments as for `dispatch_linear`; `config` is of kind `rows`. Raises ValueError for several
    parts with `best`.
    """
    rows, n = out_TN.shape
    stored_n, k = linear.weight.shape
    weight, storage = kernel_weight(linear)
    splits, block_k = config.splits, config.block_k
    blocks = storage["SCALE_BLOCKS"] > 0
    result, scales, bias, residual = out_TN, linear.scales, linear.bias, residual_TN
    if splits > 1:
        if best is not None:
            raise ValueError(
                f"{name}: the best results of {splits} parts are unknown: use splits=1"
            )
        result = x_TK.new_empty((splits, rows, stored_n), dtype=torch.float32)
        scales, bias, residual = (scales if blocks else None), None, None
    if blocks:
        block_k = min(block_k, SCALE_BLOCK)
    ahead = 0
    if may_prefetch(weight):
        height = config.block_n * (2 if gated else 1)
        row_bytes = config.prefetch // height // 16 * 16  # as requests are
        ahead = min(k, max(config.stages * block_k, row_bytes // weight.element_size()))
    call_kernel(
        product_of_rows,
        (triton.cdiv(n, config.block_n), splits),
        x_TK,
        weight,
        scales,
        bias,
        residual,
        result,
        *(best or (None, None)),
        rows,
        n,
        num_warps=config.num_warps,
        K=k,
        ROWS=row_class(max(rows, FEW_ROWS + 1)),
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        STAGES=config.stages,
        SPLITS=splits,
        GATED=gated,
        GELU=gelu,
        SCALE=scale,
        SOFTCAP=softcap,
        AHEAD=ahead,
        NAME=name,
        **storage,
    )
    if splits > 1:
        channels = None if blocks else linear.scales
        sums = (result, out_TN, channels, linear.bias, residual_TN)
        sum_parts(*sums, gated=gated, gelu=gelu, scale=scale)


def sum_parts(
    parts: Tensor,
    out_TN: Tensor,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    residual_TN: Tensor | None = None,
    *,
    gated: bool = False,
    gelu: bool = False,
    scale: float = 1.0,
) -> None:
    """`out = residual + scale * (sum of parts * scales + bias)`, or `act(gate) * up` of the sum.

    Args:
        parts: `[S, T, N]`, contiguous, float32 or the model's dtype; `[S, T, 2N]` if `gated`.
        out_TN: written; may be `residual_TN`. Sums are rounded before and after they are scaled.
        scales: float32 `[N]` (`[2N]`).
        bias: `[N]` (`[2N]`).
        residual_TN: not with `gated`.
        gated: gate comes first.
        gelu: of the activation; else silu.
        scale: not with `gated`.
    """
    rows, n = out_TN.shape
    block = min(_SUMMED, triton.next_power_of_2(n))
    call_kernel(
        sum_kernel,
        (triton.cdiv(n, block), rows),
        parts,
        scales,
        bias,
        residual_TN,
        out_TN,
        n,
        parts[0].numel(),
        PARTS=parts.shape[0],
        BLOCK=block,
        GATED=gated,
        GELU=gelu,
        SCALE=scale,
    )
