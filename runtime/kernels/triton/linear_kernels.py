"""The kernel of all linear layers of a decode step of up to 4 rows.

Shapes: T rows, N output features, K input features, R rows of the weight that a program reads, S
splits of attention, E value head_dim.

A program multiplies all rows by R rows of the weight, `BLOCK_K` input features at a time, and has
the weights of the next tile in flight while it multiplies with these. The first tile, norms, biases
and scales are on their way before it waits for what the kernel before it writes. Of gate and up a
program reads the rows of the same features, gate and up in turn.

What is multiplied is the input as it is, or summed with what is pending and normed, or put together
from the splits of attention. Every program does that itself: up to 4 rows are few bytes compared
with the weights, and in the L2 cache. For more rows see `row_product.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import FEW_ROWS, GpuLinear, GpuNorm, LinearConfig, Pending, row_class
from .linear_tiles import (
    activate,
    appended,
    as_numbers,
    capped,
    combined_slice,
    input_tile,
    largest_of,
    load_stage,
    prefetch_rows,
    row_statistics,
    scaled,
)
from .quantised import kernel_weight, load_channels, may_prefetch, operation_name

__all__ = ["call_few_rows"]

_STATISTICS = 8192
"""Elements of all rows that are summed up at a time for a norm."""


@triton.jit
def _row_tile(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, max_ptr, sum_ptr, row, start, k, reciprocal, post_reciprocal,
    norm, K: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr, V: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Input features from `start` on of one row: `[BLOCK_K / V, V]` in float32."""
    if max_ptr is not None:
        first = start + tl.arange(0, k.shape[0])[:, None] * V
        x = combined_slice(x_ptr, max_ptr, sum_ptr, row, first, start + k, K, E, SPLITS, EVEN)
        x = x.to(dtype).to(tl.float32)
    else:
        x = input_tile(
            x_ptr, delta_ptr, post_ptr, row, start + k, start + k < K, reciprocal,
            post_reciprocal, norm, K, EVEN, NORM, OFFSET, POST_OFFSET, dtype,
        )  # fmt: skip
    return x


@triton.jit(repr=operation_name)
def linear_of_few_rows(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, x_out_ptr, norm_ptr, max_ptr, sum_ptr, w_ptr, scale_ptr, bias_ptr,
    residual_ptr, out_ptr, best_ptr, best_id_ptr, T, N, eps, post_eps,
    K: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, V: tl.constexpr, STATISTICS: tl.constexpr,
    WORD: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr, SCALE_BLOCKS: tl.constexpr,
    OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ROW_BYTES: tl.constexpr, PREFETCH: tl.constexpr,
    NAME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to `ROWS` rows, one after the other over each tile: `[BLOCK_K / V, R, V]`.

    A thread loads V weights at once (16 bytes) and sums up their products for itself. Triton puts
    the threads of a warp along the first dimension: they load from one row of the weight.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    NORM: tl.constexpr = norm_ptr is not None
    HALVES: tl.constexpr = 2 if GATED else 1
    R: tl.constexpr = BLOCK_N * HALVES
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    let_dependents_start(PDL)

    n = tl.program_id(0) * BLOCK_N + tl.arange(0, R) // HALVES
    # What stands behind the last feature is the last one once more, and not stored.
    weight_n = tl.minimum(n, N - 1) + tl.arange(0, R) % HALVES * N
    group = tl.arange(0, BLOCK_K // V)[:, None]
    k = group * V + tl.arange(0, V)[None, :]
    word = (group * (V // WORD) + tl.arange(0, V // WORD)[None, :])[:, None, :]
    w_rows = w_ptr + weight_n.to(tl.int64)[None, :, None] * (K // WORD) + word
    scale_rows = scale_ptr
    if SCALE_BLOCKS:
        scale_rows = scale_ptr + weight_n[None, :] * SCALE_BLOCKS
    w, norm, scales = load_stage(
        w_rows, word, norm_ptr, k, scale_rows, group * V, 0, K, WORD, EVEN, SCALE_BLOCKS
    )  # fmt: skip
    if PREFETCH:  # rows, of gate and up of each
        first = tl.program_id(0) * BLOCK_N
        here = tl.minimum(N - first, PREFETCH)
        prefetch_rows(w_ptr, first, here, ROW_BYTES, PDL)
        if GATED:
            prefetch_rows(w_ptr, N + first, here, ROW_BYTES, PDL)
    channel_scales, bias = load_channels(scale_ptr, bias_ptr, weight_n, SCALE_BLOCKS)

    wait_for_inputs(PDL)
    t = tl.arange(0, ROWS)
    reciprocals, post_reciprocals = row_statistics(
        x_ptr, delta_ptr, post_ptr, x_out_ptr, tl.minimum(t, T - 1), t < T,
        tl.program_id(0) == 0, eps, post_eps, K, STATISTICS, NORM, POST_OFFSET, dtype,
    )  # fmt: skip
    reciprocal = ()
    post_reciprocal = ()
    residual = ()
    sums = ()
    for row in tl.static_range(ROWS):
        reciprocal = appended(reciprocal, tl.sum(tl.where(t == row, reciprocals, 0.0)))
        post = tl.sum(tl.where(t == row, post_reciprocals, 0.0))
        post_reciprocal = appended(post_reciprocal, post)
        sums = appended(sums, tl.zeros([BLOCK_K // V, R], tl.float32))
        if residual_ptr is not None:
            pointers = residual_ptr + tl.minimum(row, T - 1) * N + tl.minimum(n, N - 1)
            residual = appended(residual, tl.load(pointers).to(tl.float32))

    # Two tiles in turn, so that none is moved to other registers: that would wait for its load.
    for start in range(0, (TILES - 1) // 2 * 2 * BLOCK_K, 2 * BLOCK_K):
        w_odd, norm_odd, scales_odd = load_stage(
            w_rows, word, norm_ptr, k, scale_rows, group * V, start + BLOCK_K, K, WORD, EVEN,
            SCALE_BLOCKS,
        )  # fmt: skip
        tl.debug_barrier()  # else the compiler moves the load after the products
        sums = _grown(
            sums, w, norm, scales, start, x_ptr, delta_ptr, post_ptr, max_ptr, sum_ptr, T, k,
            reciprocal, post_reciprocal, K, E, SPLITS, ROWS, V, EVEN, NORM, OFFSET, POST_OFFSET,
            STORAGE, NATIVE_FP8, SCALE_BLOCKS, dtype,
        )  # fmt: skip
        w, norm, scales = load_stage(
            w_rows, word, norm_ptr, k, scale_rows, group * V, start + 2 * BLOCK_K, K, WORD, EVEN,
            SCALE_BLOCKS,
        )  # fmt: skip
        tl.debug_barrier()
        sums = _grown(
            sums, w_odd, norm_odd, scales_odd, start + BLOCK_K, x_ptr, delta_ptr, post_ptr,
            max_ptr, sum_ptr, T, k, reciprocal, post_reciprocal, K, E, SPLITS, ROWS, V, EVEN, NORM,
            OFFSET, POST_OFFSET, STORAGE, NATIVE_FP8, SCALE_BLOCKS, dtype,
        )  # fmt: skip
    LAST: tl.constexpr = (TILES - 1) * BLOCK_K
    if TILES % 2 == 0:
        w_odd, norm_odd, scales_odd = load_stage(
            w_rows, word, norm_ptr, k, scale_rows, group * V, LAST, K, WORD, EVEN, SCALE_BLOCKS
        )  # fmt: skip
        tl.debug_barrier()
        sums = _grown(
            sums, w, norm, scales, LAST - BLOCK_K, x_ptr, delta_ptr, post_ptr, max_ptr, sum_ptr, T,
            k, reciprocal, post_reciprocal, K, E, SPLITS, ROWS, V, EVEN, NORM, OFFSET, POST_OFFSET,
            STORAGE, NATIVE_FP8, SCALE_BLOCKS, dtype,
        )  # fmt: skip
        w = w_odd
        norm = norm_odd
        scales = scales_odd
    sums = _grown(
        sums, w, norm, scales, LAST, x_ptr, delta_ptr, post_ptr, max_ptr, sum_ptr, T, k,
        reciprocal, post_reciprocal, K, E, SPLITS, ROWS, V, EVEN, NORM, OFFSET, POST_OFFSET,
        STORAGE, NATIVE_FP8, SCALE_BLOCKS, dtype,
    )  # fmt: skip

    for row in tl.static_range(ROWS):
        out = tl.sum(sums[row], axis=0) * channel_scales + bias
        if GATED:
            gate, up = tl.split(tl.reshape(out, [BLOCK_N, 2]))
            out = activate(gate, up, GELU, dtype)
        elif residual_ptr is not None:
            out = residual[row] + scaled(out, SCALE, dtype).to(dtype).to(tl.float32)
        else:
            out = scaled(out, SCALE, dtype)
            if SOFTCAP > 0.0:
                out = capped(out, SOFTCAP, dtype)
        stored_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (stored_n < N) & (row < T)
        tl.store(out_ptr + row * N + stored_n, out.to(dtype), mask=mask)
        if best_ptr is not None:
            best_place = row * tl.num_programs(0) + tl.program_id(0)
            best, best_id = largest_of(out.to(dtype).to(tl.float32), stored_n, N, axis=0)
            tl.store(best_ptr + best_place, best, mask=row < T)
            tl.store(best_id_ptr + best_place, best_id, mask=row < T)


@triton.jit
def _grown(  # type: ignore[no-untyped-def]
    sums, w, norm, scales, start, x_ptr, delta_ptr, post_ptr, max_ptr, sum_ptr, T, k,
    reciprocal, post_reciprocal, K: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr, STORAGE: tl.constexpr,
    NATIVE_FP8: tl.constexpr, SCALE_BLOCKS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`sums` of all rows, and the products of their features from `start` on."""
    numbers = as_numbers(w, STORAGE, NATIVE_FP8)
    grown = ()
    for row in tl.static_range(ROWS):
        x = _row_tile(
            x_ptr, delta_ptr, post_ptr, max_ptr, sum_ptr, tl.minimum(row, T - 1), start, k,
            reciprocal[row], post_reciprocal[row], norm, K, E, SPLITS, V, EVEN, NORM, OFFSET,
            POST_OFFSET, dtype,
        )  # fmt: skip
        product = tl.sum(numbers * x[:, None, :], axis=2)
        if SCALE_BLOCKS:
            product = product * scales
        grown = appended(grown, sums[row] + product)
    return grown


def call_few_rows(
    name: str,
    x: Tensor,
    linear: GpuLinear,
    out_TN: Tensor,
    config: LinearConfig,
    *,
    norm: GpuNorm | None = None,
    pending: Pending | None = None,
    splits: tuple[Tensor, Tensor] | None = None,
    residual_TN: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
    best: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Call the kernel as the operation `name`; arguments as for `dispatch_linear`.

    Raises ValueError for more than `FEW_ROWS` rows.
    """
    rows, n = out_TN.shape
    k = linear.weight.shape[1]
    row_count = row_class(rows)
    if row_count > FEW_ROWS:
        raise ValueError(f"{name}: {rows} rows need a configuration of kind 'rows' or 'library'")
    weight, storage = kernel_weight(linear)
    row_bytes = k * weight.element_size()
    ahead = 0
    if may_prefetch(weight):
        ahead = min(config.block_n, config.prefetch // (row_bytes * (2 if gated else 1)))
    vector = min(16 // weight.element_size(), config.block_k)
    head_dim = 1
    if splits is not None:
        head_dim = x.shape[3]
        vector = math.gcd(vector, head_dim)
    word = 4 // weight.element_size()
    if k % word or vector % word:
        word = 1  # a row begins within a word, or a head does
    else:
        weight = weight.view(torch.int32)
    post = None if pending is None else pending.norm
    call_kernel(
        linear_of_few_rows,
        (-(-n // config.block_n),),
        x,
        None if pending is None else pending.delta,
        None if post is None else post.weight,
        None if pending is None else pending.out,
        None if norm is None else norm.weight,
        *(splits or (None, None)),
        weight,
        linear.scales,
        linear.bias,
        residual_TN,
        out_TN,
        *(best or (None, None)),
        rows,
        n,
        0.0 if norm is None else norm.eps,
        0.0 if post is None else post.eps,
        num_warps=config.num_warps,
        K=k,
        E=head_dim,
        SPLITS=1 if splits is None else splits[0].shape[2],
        ROWS=row_count,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        V=vector,
        STATISTICS=min(triton.next_power_of_2(k), _STATISTICS // row_count),
        WORD=word,
        OFFSET=norm is not None and norm.offset,
        POST_OFFSET=post is not None and post.offset,
        GATED=gated,
        GELU=gelu,
        SCALE=scale,
        SOFTCAP=softcap,
        ROW_BYTES=row_bytes,
        PREFETCH=ahead,
        NAME=name,
        **storage,
    )
