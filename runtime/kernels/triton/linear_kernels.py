"""Linear layers: one kernel for up to four rows, the library or a kernel of any rows for more.

Shapes: T rows, N output features, K input features, F features of gate and of up, R rows of the
weight that a program reads.

**Up to four rows.** A program multiplies all rows by R rows of the weight, `BLOCK_K` input features
at a time, and has the weights of the next tile in flight while it multiplies with these. The first
tile, norms, biases and scales are on their way before it waits for what the kernel before it
writes. Of gate and up a program reads the rows of the same features, gate and up in turn.

What is multiplied is the input as it is, or summed with what is pending and normed. Every program
does that itself: up to 4 rows are few bytes compared with the weights, and in the L2 cache. More
rows are normed by a kernel before the library's product, and one after it activates the result or
adds it.

**Any rows.** Weights in the model's dtype go to the library's matrix product. Weights of 8 bits are
brought to the model's dtype on the way to the tensor cores, tile by tile, which is exact; sums are
multiplied by the scales. Codes of fewer bits, of small groups or with minimums are multiplied by
their scales first (`quantised.decoded_tile`). The same kernel computes the logits of a router, and
all products of a batch-invariant engine: a row of the result is one chain of tensor-core products
over blocks of input features in ascending order, and there sizes follow from the shape of the
weight, so the same machine code multiplies a row in any step. Input features are not split
(split-K): partial sums would need memory for T rows each.

The rows are the left operand, 64 of them, as many as a warp group of Hopper multiplies. With few
rows most of the operand is zeros that are not loaded, and the time is still the time of reading the
weight; so blocks of the weight are small where large ones would leave processors idle.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.activation import Activate
from ..ops.linear import LinearTensors
from ..weights.stored import in_features
from .kernel_calls import (
    call_kernel,
    is_aligned,
    let_dependents_start,
    num_multiprocessors,
    prefetch,
    wait_for_inputs,
)
from .linear import (
    FEW_ROWS,
    STORAGES,
    GpuNorm,
    LinearConfig,
    Pending,
    code_bits,
    reference_linear,
    row_class,
)
from .quantised import (
    as_numbers,
    as_operand,
    decoded_tile,
    kernel_weight,
    load_groups,
    load_levels,
)
from .rowwise import (
    Gating,
    activate,
    activate_rows,
    input_tile,
    load_tile,
    norm_arguments,
    norm_rows,
    reference_activate_rows,
    reference_norm_rows,
    row_statistics,
    scaled,
)
from .tuning import Product, best_config

_STATISTICS = 8192
"""Elements of all rows that are summed up at a time for a norm."""


def _operation_name(specialization: Any) -> str:
    """Name of a compiled kernel, as profilers show it: the operation's."""
    name: str = specialization.constants["NAME"]
    return name


@triton.jit(repr=_operation_name)
def linear_of_few_rows(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, x_out_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr,
    out_ptr, T, N, eps, post_eps, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, V: tl.constexpr, STATISTICS: tl.constexpr,
    WORD: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr,
    GATING: tl.constexpr, SCALE: tl.constexpr, ROW_BYTES: tl.constexpr, PREFETCH: tl.constexpr,
    NAME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to `ROWS` rows, one after the other over each tile: `[BLOCK_K / V, R, V]`.

    A thread loads V weights at once (16 bytes) and sums up their products for itself. Triton puts
    the threads of a warp along the first dimension: they load from one row of the weight.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    NORM: tl.constexpr = norm_ptr is not None
    HALVES: tl.constexpr = 1 if GATING is None else 2
    R: tl.constexpr = BLOCK_N * HALVES
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    let_dependents_start(PDL)

    n = tl.program_id(0) * BLOCK_N + tl.arange(0, R) // HALVES
    # What stands behind the last feature is the last one once more, and not stored.
    weight_n = tl.minimum(n, N - 1) + tl.arange(0, R) % HALVES * N
    group = tl.arange(0, BLOCK_K // V)[:, None]
    k = group * V + tl.arange(0, V)[None, :]
    word = (group * (V // WORD) + tl.arange(0, V // WORD)[None, :])[:, None, :]
    STRIDE: tl.constexpr = K // 8 + 4 if FORM.storage == "codes" else K // WORD
    w_rows = w_ptr + weight_n.to(tl.int64)[None, :, None] * STRIDE + word
    levels = load_levels(w_ptr, K, FORM)
    weights = (w_rows, word, norm_ptr, k, scale_ptr, weight_n[None, :], group * V)
    stage = _load_stage(weights, 0, K, WORD, EVEN, FORM)
    if PREFETCH:  # rows, of gate and up of each
        first = tl.program_id(0) * BLOCK_N
        here = tl.minimum(N - first, PREFETCH)
        prefetch(w_ptr.to(tl.int64) + first.to(tl.int64) * ROW_BYTES, here * ROW_BYTES, PDL)
        if GATING is not None:
            up = w_ptr.to(tl.int64) + (N + first).to(tl.int64) * ROW_BYTES
            prefetch(up, here * ROW_BYTES, PDL)
    channel_scales = 1.0
    if scale_ptr is not None and not FORM.groups:
        channel_scales = tl.load(scale_ptr + weight_n)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_n).to(tl.float32)

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
    inputs = (x_ptr, delta_ptr, post_ptr, T, k, reciprocal, post_reciprocal)

    # Two tiles in turn, so that none is moved to other registers: that would wait for its load.
    LAST: tl.constexpr = (TILES - 1) * BLOCK_K
    PAIRS: tl.constexpr = (TILES - 1) // 2 * 2 * BLOCK_K
    for start in range(0, PAIRS, 2 * BLOCK_K):
        for step in tl.static_range(2):
            here = start + step * BLOCK_K
            following = _load_stage(weights, here + BLOCK_K, K, WORD, EVEN, FORM)
            tl.debug_barrier()  # else the compiler moves the load after the products
            sums = _grown(
                sums, stage, here, inputs, levels, K, ROWS, EVEN, NORM, OFFSET, POST_OFFSET, FORM,
                dtype,
            )  # fmt: skip
            stage = following
    for here in tl.static_range(PAIRS, LAST, BLOCK_K):  # once for an even number of tiles
        following = _load_stage(weights, LAST, K, WORD, EVEN, FORM)
        tl.debug_barrier()
        sums = _grown(
            sums, stage, here, inputs, levels, K, ROWS, EVEN, NORM, OFFSET, POST_OFFSET, FORM, dtype
        )
        stage = following
    sums = _grown(
        sums, stage, LAST, inputs, levels, K, ROWS, EVEN, NORM, OFFSET, POST_OFFSET, FORM, dtype
    )

    for row in tl.static_range(ROWS):
        out = tl.sum(sums[row], axis=0) * channel_scales + bias
        if GATING is not None:
            gate, up = tl.split(tl.reshape(out, [BLOCK_N, 2]))
            out = activate(gate, up, GATING, dtype)
        elif residual_ptr is not None:
            out = residual[row] + scaled(out, SCALE, dtype).to(dtype).to(tl.float32)
        else:
            out = scaled(out, SCALE, dtype)
        stored_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (stored_n < N) & (row < T)
        tl.store(out_ptr + row * N + stored_n, out.to(dtype), mask=mask)


@triton.jit
def appended(values, value):  # type: ignore[no-untyped-def]
    """A tuple with one more: how loops at compile time keep what each pass makes."""
    return values + (value,)


@triton.jit
def _load_stage(  # type: ignore[no-untyped-def]
    weights, start, K: tl.constexpr, WORD: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Weights from feature `start` on, and the norm's weights, scales and minimums of blocks that
    go along.

    `word` are words of a row, `k` features and `block` the first features of groups, from 0 on. A
    step reads a weight once: it makes no room for itself in the L1.
    """
    w_rows, word, norm_ptr, k, scale_ptr, rows, block = weights
    if EVEN:
        w = tl.load(w_rows + start // WORD, eviction_policy="evict_first")
    else:
        mask = start // WORD + word < K // WORD
        w = tl.load(w_rows + start // WORD, mask=mask, other=0, eviction_policy="evict_first")
    norm = 0.0
    if norm_ptr is not None:
        norm = load_tile(norm_ptr + start + k, start + k < K, EVEN)
    groups = (0.0, 0.0)
    if FORM.groups:
        at = start + block
        groups = load_groups(scale_ptr, rows, at, at < K, EVEN, FORM)
    return w, norm, groups


@triton.jit
def _grown(  # type: ignore[no-untyped-def]
    sums, stage, start, inputs, levels, K: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr, FORM: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """`sums` of all rows, and the products of their features from `start` on."""
    x_ptr, delta_ptr, post_ptr, T, k, reciprocal, post_reciprocal = inputs
    w, norm, groups = stage
    scales, minimums = groups
    numbers = as_numbers(w, FORM, levels)
    grown = ()
    for row in tl.static_range(ROWS):
        x = input_tile(
            x_ptr, delta_ptr, post_ptr, tl.minimum(row, T - 1), start + k, start + k < K,
            reciprocal[row], post_reciprocal[row], norm, K, EVEN, NORM, OFFSET, POST_OFFSET, dtype,
        )  # fmt: skip
        product = tl.sum(numbers * x[:, None, :], axis=2)
        if FORM.groups:
            product = product * scales
        if FORM.minimums:
            product -= minimums * tl.sum(x, axis=1)[:, None]
        grown = appended(grown, sums[row] + product)
    return grown


def linear_product(
    name: str,
    x_TK: Tensor,
    linear: LinearTensors,
    out_TN: Tensor,
    *,
    norm: GpuNorm | None = None,
    pending: Pending | None = None,
    residual_TN: Tensor | None = None,
    activate: Activate | None = None,
    scale: float = 1.0,
    config: LinearConfig | None = None,
    any_tokens: bool = False,
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
        residual_TN: not with an activation, and nor is `scale`.
        activate: without limit, alpha and offset.
        scale: factor of results.
        config: sizes for up to four rows; None: as tuned, or the default.
        any_tokens: as for `unfused_linear`, which multiplies more than four rows, and here any.

    Raises ValueError for sizes that do not fit together.
    """
    assert activate is None or not activate.traits
    gated = activate is not None
    rows, n = out_TN.shape
    stored_n, k = len(linear.weight), in_features(linear.weight)
    if stored_n != n * (2 if gated else 1) or x_TK.shape[1] != k:
        raise ValueError(
            f"{name}: a weight of {tuple(linear.weight.shape)} does not map inputs of"
            f" {tuple(x_TK.shape)} to outputs of {tuple(out_TN.shape)}"
        )
    if linear.weight.dtype not in STORAGES:
        raise TypeError(f"{name}: no kernel for weights of {linear.weight.dtype}")
    if any_tokens or rows > FEW_ROWS:
        if norm is not None or pending is not None:
            normed_TK = torch.empty_like(x_TK)
            norm_rows(x_TK, norm, normed_TK, pending)
            x_TK = normed_TK
        direct = not gated and residual_TN is None and scale == 1.0
        product_TN = out_TN if direct else x_TK.new_empty(rows, stored_n)
        unfused_linear(x_TK, linear, product_TN, any_tokens=any_tokens)
        if activate is not None:
            activate_rows(product_TN, out_TN, activate)
        elif residual_TN is not None:
            # Not addmm, which copies the residual first and so calls as many kernels.
            torch.add(residual_TN, product_TN if scale == 1.0 else product_TN * scale, out=out_TN)
        elif scale != 1.0:
            torch.mul(product_TN, scale, out=out_TN)
        return
    weight, form = kernel_weight(linear)
    if config is None:
        shape = (name, rows, n, k, out_TN.dtype, linear.weight.dtype, x_TK.device)
        config = best_config(Product(*shape, grouped=form.is_grouped), pending=pending is not None)
    row_count = row_class(rows)
    row_bytes = weight.shape[1] * weight.element_size()
    may_prefetch = row_bytes % 16 == 0 and is_aligned(weight)
    ahead = config.prefetch // (row_bytes * (2 if gated else 1)) if may_prefetch else 0
    word = 32 // code_bits(linear.weight.dtype)
    vector = min(4 * word, config.block_k, form.group)
    if form.is_grouped:  # fewer of each thread before threads without any
        tile = config.block_n * (2 if gated else 1) * config.block_k
        vector = min(vector, max(word, tile // (32 * config.num_warps)))
    if k % word or vector % word:
        word = 1  # a row begins within a word
    else:
        weight = weight.view(torch.int32)
    tensors, epsilons, constants = norm_arguments(norm, pending)
    call_kernel(
        linear_of_few_rows, (-(-n // config.block_n),),
        x_TK, *tensors, weight, linear.scales, linear.bias, residual_TN, out_TN, rows, n, *epsilons,
        num_warps=config.num_warps, K=k, ROWS=row_count, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, V=vector,
        STATISTICS=min(triton.next_power_of_2(k), _STATISTICS // row_count), WORD=word, FORM=form,
        GATING=Gating.of(activate), SCALE=scale, ROW_BYTES=row_bytes,
        PREFETCH=min(config.block_n, ahead), NAME=name, **constants,
    )  # fmt: skip


norm_linear = partial(linear_product, "norm_linear")
gate_up = partial(linear_product, "gate_up")
residual_linear = partial(linear_product, "residual_linear")


def reference_product(
    x_TK: Tensor,
    linear: LinearTensors,
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


# Any rows ----------------------------------------------------------------------------------------

_SHARE = 0.7
"""Programs for each multiprocessor that are enough to choose larger blocks."""


class RowSizes(NamedTuple):
    """Of the tiles of a product: rows, output features, input features and stages."""

    block_t: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int = 4


def unfused_linear(
    x_TK: Tensor, linear: LinearTensors, out_TN: Tensor, *, any_tokens: bool = False
) -> None:
    """`out = linear(x)`, any number of rows; all contiguous, activations in the model's dtype.

    With `any_tokens` the bits of a row do not depend on T, nor on the other rows.
    """
    if any_tokens or linear.scales is not None:
        rows, n = out_TN.shape
        multiprocessors = num_multiprocessors(x_TK.device)
        sizes = _sizes(n, x_TK.dtype, multiprocessors)
        many = rows > 64 and x_TK.dtype != torch.float32 and not any_tokens
        if many and -(-rows // 128) * -(-n // 128) >= _SHARE * multiprocessors:
            sizes = RowSizes(128, 128, 64, 4, num_warps=8)
        tiled_product(x_TK, linear, out_TN, sizes)
    elif linear.bias is None:
        torch.mm(x_TK, linear.weight.T, out=out_TN)
    else:
        torch.addmm(linear.bias, x_TK, linear.weight.T, out=out_TN)


def _sizes(n: int, dtype: torch.dtype, multiprocessors: int) -> RowSizes:
    """Return the sizes for a weight of N rows; none of them spills registers."""
    if dtype == torch.float32:  # multiplied by the ordinary units, from registers
        return RowSizes(16, 32, 32, 2)
    for block_n in (128, 64):
        if n >= _SHARE * multiprocessors * block_n:
            return RowSizes(64, block_n, 64, 4)
    return RowSizes(64, 32, 128, 4)


def tiled_product(x_TK: Tensor, linear: LinearTensors, out_TN: Tensor, sizes: RowSizes) -> None:
    """`out = linear(x)` in tiles of these sizes; of weights that are not quantised, `out` may have
    another dtype than `x`."""
    (rows, n), (weight, form) = out_TN.shape, kernel_weight(linear)
    call_kernel(
        product_of_any_rows, (triton.cdiv(rows, sizes.block_t), triton.cdiv(n, sizes.block_n)),
        x_TK, weight, linear.scales, linear.bias, out_TN, rows, n,
        num_warps=sizes.num_warps, K=x_TK.shape[1], BLOCK_T=sizes.block_t, BLOCK_N=sizes.block_n,
        BLOCK_K=sizes.block_k, STAGES=sizes.stages, FORM=form,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def product_of_any_rows(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, T, N,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j): `BLOCK_T` rows times `BLOCK_N` rows of the weight.

    Programs of the same rows of the weight are neighbours, so that memory is read once.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    let_dependents_start(PDL)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_n = tl.minimum(n, N - 1)  # past the last feature it is read again, and not stored
    there = (t < T)[:, None]
    x_rows = x_ptr + t.to(tl.int64)[:, None] * K
    w_rows = w_ptr + weight_n.to(tl.int64)[None, :] * K
    levels = load_levels(w_ptr, K, FORM)
    wait_for_inputs(PDL)
    sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = there if EVEN else there & (k < K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
        if FORM.is_grouped:
            w = decoded_tile(
                w_ptr, scale_ptr, levels, weight_n.to(tl.int64), start, K, BLOCK_K, FORM
            )
            w = tl.trans(w.to(dtype))
        else:
            w = load_tile(w_rows + k[:, None], (k < K)[:, None], EVEN)
            w = as_operand(w, FORM, dtype)
        if FORM.groups and not FORM.is_grouped:
            scales = tl.load(scale_ptr + weight_n * FORM.groups + start // 128)
            sums += tl.dot(x, w, input_precision="ieee") * scales[None, :]
        else:
            sums = tl.dot(x, w, sums, input_precision="ieee")
    if scale_ptr is not None and not FORM.groups:
        sums *= tl.load(scale_ptr + weight_n)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_n).to(tl.float32)[None, :]
    out_rows = out_ptr + t.to(tl.int64)[:, None] * N
    tl.store(out_rows + n[None, :], sums.to(dtype), mask=there & (n < N)[None, :])
