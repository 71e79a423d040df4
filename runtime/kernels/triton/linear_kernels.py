"""The linear layers of a decode step: one kernel for up to four rows, else the library.

Shapes: T rows, N output features, K input features, F features of gate and of up, R rows of the
weight that a program reads.

A program multiplies all rows by R rows of the weight, `BLOCK_K` input features at a time, and has
the weights of the next tile in flight while it multiplies with these. The first tile, norms, biases
and scales are on their way before it waits for what the kernel before it writes. Of gate and up a
program reads the rows of the same features, gate and up in turn.

What is multiplied is the input as it is, or summed with what is pending and normed. Every program
does that itself: up to 4 rows are few bytes compared with the weights, and in the L2 cache. More
rows are normed by a kernel before the library's product, and one after it activates the result or
adds it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.activation import Activate
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import (
    FEW_ROWS,
    STORAGES,
    GpuLinear,
    GpuNorm,
    LinearConfig,
    Pending,
    reference_linear,
    row_class,
)
from .linear_tiles import (
    activate,
    appended,
    as_numbers,
    input_tile,
    load_stage,
    prefetch_rows,
    row_statistics,
    scaled,
)
from .matmul import library_linear
from .quantised import kernel_weight, load_channels, may_prefetch, operation_name
from .rowwise import (
    activate_rows,
    activation_constants,
    norm_rows,
    reference_activate_rows,
    reference_norm_rows,
)
from .tuning import best_config

__all__ = [
    "gate_up",
    "linear_product",
    "norm_linear",
    "reference_product",
    "residual_linear",
]

_STATISTICS = 8192
"""Elements of all rows that are summed up at a time for a norm."""


@triton.jit(repr=operation_name)
def linear_of_few_rows(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, x_out_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr,
    out_ptr, T, N, eps, post_eps, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, V: tl.constexpr, STATISTICS: tl.constexpr,
    WORD: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr, SCALE_BLOCKS: tl.constexpr,
    OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    SCALE: tl.constexpr, ROW_BYTES: tl.constexpr, PREFETCH: tl.constexpr,
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
            sums, w, norm, scales, start, x_ptr, delta_ptr, post_ptr, T, k, reciprocal,
            post_reciprocal, K, ROWS, EVEN, NORM, OFFSET, POST_OFFSET, STORAGE, NATIVE_FP8,
            SCALE_BLOCKS, dtype,
        )  # fmt: skip
        w, norm, scales = load_stage(
            w_rows, word, norm_ptr, k, scale_rows, group * V, start + 2 * BLOCK_K, K, WORD, EVEN,
            SCALE_BLOCKS,
        )  # fmt: skip
        tl.debug_barrier()
        sums = _grown(
            sums, w_odd, norm_odd, scales_odd, start + BLOCK_K, x_ptr, delta_ptr, post_ptr, T, k,
            reciprocal, post_reciprocal, K, ROWS, EVEN, NORM, OFFSET, POST_OFFSET, STORAGE,
            NATIVE_FP8, SCALE_BLOCKS, dtype,
        )  # fmt: skip
    LAST: tl.constexpr = (TILES - 1) * BLOCK_K
    if TILES % 2 == 0:
        w_odd, norm_odd, scales_odd = load_stage(
            w_rows, word, norm_ptr, k, scale_rows, group * V, LAST, K, WORD, EVEN, SCALE_BLOCKS
        )  # fmt: skip
        tl.debug_barrier()
        sums = _grown(
            sums, w, norm, scales, LAST - BLOCK_K, x_ptr, delta_ptr, post_ptr, T, k, reciprocal,
            post_reciprocal, K, ROWS, EVEN, NORM, OFFSET, POST_OFFSET, STORAGE, NATIVE_FP8,
            SCALE_BLOCKS, dtype,
        )  # fmt: skip
        w = w_odd
        norm = norm_odd
        scales = scales_odd
    sums = _grown(
        sums, w, norm, scales, LAST, x_ptr, delta_ptr, post_ptr, T, k, reciprocal, post_reciprocal,
        K, ROWS, EVEN, NORM, OFFSET, POST_OFFSET, STORAGE, NATIVE_FP8, SCALE_BLOCKS, dtype,
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
        stored_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (stored_n < N) & (row < T)
        tl.store(out_ptr + row * N + stored_n, out.to(dtype), mask=mask)


@triton.jit
def _grown(  # type: ignore[no-untyped-def]
    sums, w, norm, scales, start, x_ptr, delta_ptr, post_ptr, T, k, reciprocal, post_reciprocal,
    K: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr, STORAGE: tl.constexpr,
    NATIVE_FP8: tl.constexpr, SCALE_BLOCKS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`sums` of all rows, and the products of their features from `start` on."""
    numbers = as_numbers(w, STORAGE, NATIVE_FP8)
    grown = ()
    for row in tl.static_range(ROWS):
        x = input_tile(
            x_ptr, delta_ptr, post_ptr, tl.minimum(row, T - 1), start + k, start + k < K,
            reciprocal[row], post_reciprocal[row], norm, K, EVEN, NORM, OFFSET, POST_OFFSET, dtype,
        )  # fmt: skip
        product = tl.sum(numbers * x[:, None, :], axis=2)
        if SCALE_BLOCKS:
            product = product * scales
        grown = appended(grown, sums[row] + product)
    return grown


Product = Callable[[Tensor, GpuLinear, Tensor], None]
"""`product(x_TK, linear, out_TN)`, of any number of rows."""


def linear_product(
    name: str,
    x_TK: Tensor,
    linear: GpuLinear,
    out_TN: Tensor,
    *,
    norm: GpuNorm | None = None,
    pending: Pending | None = None,
    residual_TN: Tensor | None = None,
    activate: Activate | None = None,
    scale: float = 1.0,
    config: LinearConfig | None = None,
    product: Product | None = None,
) -> None:
    """`out = residual + scale * linear(norm(x))`, of up to four rows in one kernel.

    With `pending` of `x + pending.norm(pending.delta)`, which is kept. With `activate`
    `out = act(gate) * up` of a weight `[2N, K]`, gate first. Results are rounded to the model's
    dtype after the product, before and after `scale`, and after the activation.

    Args:
        name: of the operation.
        x_TK: contiguous, as all tensors; activations are in the model's dtype.
        linear: `[N, K]`, or `[2N, K]` with an activation.
        out_TN: written; may be `residual_TN` itself.
        norm: of the input; None: the rows as they are.
        pending: added before.
        residual_TN: what the product is added to; not with an activation.
        activate: without limit, alpha and offset.
        scale: factor of results; not with an activation.
        config: sizes for up to four rows; None: as tuned, or the default.
        product: computes the product of any number of rows, in a kernel of its own; None: the
            library does if there are more than four.

    Raises ValueError for sizes that do not fit together.
    """
    assert activate is None or not activate.traits
    gated = activate is not None
    rows, n = out_TN.shape
    stored_n, k = linear.weight.shape
    if stored_n != n * (2 if gated else 1) or x_TK.shape[1] != k:
        raise ValueError(
            f"{name}: a weight of {tuple(linear.weight.shape)} does not map inputs of"
            f" {tuple(x_TK.shape)} to outputs of {tuple(out_TN.shape)}"
        )
    if linear.weight.dtype not in STORAGES:
        raise TypeError(f"{name}: no kernel for weights of {linear.weight.dtype}")
    if product is None and rows > FEW_ROWS:
        product = library_linear
    if product is not None:
        if norm is not None or pending is not None:
            normed_TK = torch.empty_like(x_TK)
            norm_rows(x_TK, norm, normed_TK, pending)
            x_TK = normed_TK
        direct = not gated and residual_TN is None and scale == 1.0
        product_TN = out_TN if direct else x_TK.new_empty(rows, stored_n)
        product(x_TK, linear, product_TN)
        if activate is not None:
            activate_rows(product_TN, out_TN, activate)
        elif residual_TN is not None:
            # Not addmm, which copies the residual first and so calls as many kernels.
            torch.add(residual_TN, product_TN if scale == 1.0 else product_TN * scale, out=out_TN)
        elif scale != 1.0:
            torch.mul(product_TN, scale, out=out_TN)
        return
    if config is None:
        dtypes = (out_TN.dtype, linear.weight.dtype)
        config = best_config(name, rows, n, k, *dtypes, x_TK.device, pending=pending is not None)
    row_count = row_class(rows)
    weight, storage = kernel_weight(linear)
    row_bytes = k * weight.element_size()
    ahead = 0
    if may_prefetch(weight):
        ahead = min(config.block_n, config.prefetch // (row_bytes * (2 if gated else 1)))
    vector = min(16 // weight.element_size(), config.block_k)
    word = 4 // weight.element_size()
    if k % word or vector % word:
        word = 1  # a row begins within a word
    else:
        weight = weight.view(torch.int32)
    post = None if pending is None else pending.norm
    call_kernel(
        linear_of_few_rows,
        (-(-n // config.block_n),),
        x_TK,
        None if pending is None else pending.delta,
        None if post is None else post.weight,
        None if pending is None else pending.out,
        None if norm is None else norm.weight,
        weight,
        linear.scales,
        linear.bias,
        residual_TN,
        out_TN,
        rows,
        n,
        0.0 if norm is None else norm.eps,
        0.0 if post is None else post.eps,
        num_warps=config.num_warps,
        K=k,
        ROWS=row_count,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        V=vector,
        STATISTICS=min(triton.next_power_of_2(k), _STATISTICS // row_count),
        WORD=word,
        OFFSET=norm is not None and norm.offset,
        POST_OFFSET=post is not None and post.offset,
        GATED=gated,
        GELU=activation_constants(activate)["GELU"],
        SCALE=scale,
        ROW_BYTES=row_bytes,
        PREFETCH=ahead,
        NAME=name,
        **storage,
    )


norm_linear = partial(linear_product, "norm_linear")
gate_up = partial(linear_product, "gate_up")
residual_linear = partial(linear_product, "residual_linear")


def reference_product(
    x_TK: Tensor,
    linear: GpuLinear,
    *,
    norm: GpuNorm | None = None,
    pending: Pending | None = None,
    residual_TN: Tensor | None = None,
    activate: Activate | None = None,
    scale: float = 1.0,
) -> Tensor:
    """What `linear_product` computes, in plain torch."""
    product_TN = reference_linear(reference_norm_rows(x_TK, norm, pending), linear)
    if activate is not None:
        return reference_activate_rows(product_TN, activate)
    product_TN = product_TN * scale
    return product_TN if residual_TN is None else residual_TN + product_TN
