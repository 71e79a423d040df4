"""Device functions that kernels of linear layers share: tiles of weights, normed rows.

Shapes: R rows, K input features. An `EVEN` tile has no feature outside of K, so it needs no masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quantised import decode_fp8

__all__ = [
    "activate",
    "appended",
    "as_numbers",
    "as_operand",
    "input_tile",
    "load_stage",
    "prefetch_rows",
    "row_statistics",
    "scaled",
]


@triton.jit
def appended(values, value):  # type: ignore[no-untyped-def]
    """A tuple with one more: how loops at compile time keep what each pass makes."""
    return values + (value,)


@triton.jit
def load_tile(pointers, mask, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """What stands there; 0 where masked, whatever the memory holds."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=mask, other=0)


@triton.jit
def load_weights(pointers, mask, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `load_tile`, of memory that a step reads once: it makes no room for itself in the L1."""
    if EVEN:
        tile = tl.load(pointers, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def load_stage(  # type: ignore[no-untyped-def]
    w_rows, word, norm_ptr, k, scale_rows, block, start, K: tl.constexpr, WORD: tl.constexpr,
    EVEN: tl.constexpr, SCALE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Weights from feature `start` on, and the norm's weights and scales of blocks that go along.

    `word` are words of a row, `k` features and `block` the first features of groups, from 0 on.
    """
    w = load_weights(w_rows + start // WORD, start // WORD + word < K // WORD, EVEN)
    norm = 0.0
    if norm_ptr is not None:
        norm = load_tile(norm_ptr + start + k, start + k < K, EVEN)
    scales = 0.0
    if SCALE_BLOCKS:
        scales = load_tile(scale_rows + (start + block) // 128, start + block < K, EVEN)
    return w, norm, scales


@triton.jit
def prefetch_rows(w_ptr, row, rows, ROW_BYTES: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for `rows` rows of weights to be brought to the L2 cache: one request of one thread.

    Nothing is kept in registers and nothing waits. Processors have this from compute capability 9
    on, as they have dependent launch. Rows are of whole 16 bytes.
    """
    if PDL:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .u32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [w_ptr.to(tl.int64) + row.to(tl.int64) * ROW_BYTES, rows * ROW_BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def as_numbers(tile, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stored weights in float32, without their scales: of words, all that they hold.

    Words are int32 and hold the elements that stand in them in memory, the lowest bits first; a
    tile `[..., W]` makes `[..., W * elements of a word]`. As a loop carries a tile from one pass to
    the next, each element of a tile of smaller elements would take a register of its own, and
    putting them there would wait for them.
    """
    if tile.dtype == tl.int32:
        if STORAGE == "float32":
            numbers = tile.to(tl.float32, bitcast=True)
        elif STORAGE == "bfloat16":
            low = (tile << 16).to(tl.float32, bitcast=True)
            numbers = _interleaved(low, (tile & -65536).to(tl.float32, bitcast=True))
        elif STORAGE == "float16":
            low = tile.to(tl.int16).to(tl.float16, bitcast=True)
            high = (tile >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            numbers = _interleaved(low, high).to(tl.float32)
        else:
            even = _interleaved(tile, tile >> 16)
            numbers = _byte_numbers(_interleaved(even, even >> 8).to(tl.uint8), STORAGE, NATIVE_FP8)
    elif STORAGE == "fp8" or STORAGE == "int8":
        numbers = _byte_numbers(tile.to(tl.uint8, bitcast=True), STORAGE, NATIVE_FP8)
    else:
        numbers = tile.to(tl.float32)
    return numbers


@triton.jit
def as_operand(  # type: ignore[no-untyped-def]
    tile, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr, dtype: tl.constexpr
):
    """Stored weights in the model's dtype, in which numbers of 8 bits are exact."""
    if STORAGE == "int8" or STORAGE == "fp8":
        operand = as_numbers(tile, STORAGE, NATIVE_FP8).to(dtype)
    else:
        operand = tile
    return operand


@triton.jit
def _interleaved(first, second):  # type: ignore[no-untyped-def]
    """`[A, B, C]` twice as `[A, B, 2 * C]`, an element of each in turn."""
    pairs = tl.join(first, second)
    return tl.reshape(pairs, [first.shape[0], first.shape[1], first.shape[2] * 2])


@triton.jit
def _byte_numbers(byte, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of bits (uint8) in float32."""
    if STORAGE == "fp8":
        numbers = decode_fp8(byte, NATIVE_FP8)
    else:
        # Processors convert few integers a cycle. 2**23 + 128 + i has i + 128 as its lowest bits.
        bits = (byte ^ 0x80).to(tl.int32) | 0x4B000000
        numbers = bits.to(tl.float32, bitcast=True) - 8388736.0
    return numbers


@triton.jit
def normed(x, reciprocal, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """`ops.norms.RMSNorm` of float32 `x`, rounded to `dtype`, in float32."""
    x = x * reciprocal
    out = x * (1.0 + weight) if OFFSET else x.to(dtype).to(tl.float32) * weight
    return out.to(dtype).to(tl.float32)


@triton.jit
def pending_tile(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, rows, k, mask, post_reciprocal,
    K: tl.constexpr, EVEN: tl.constexpr, POST_OFFSET: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Input features `k` of `rows` in float32, what was pending added."""
    x = load_tile(x_ptr + rows * K + k, mask, EVEN).to(tl.float32)
    if delta_ptr is not None:
        delta = load_tile(delta_ptr + rows * K + k, mask, EVEN).to(tl.float32)
        weight = load_tile(post_ptr + k, k < K, EVEN).to(tl.float32)
        delta = normed(delta, post_reciprocal, weight, dtype, POST_OFFSET)
        x = (x + delta).to(dtype).to(tl.float32)
    return x


@triton.jit
def input_tile(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, rows, k, mask, reciprocal, post_reciprocal, weight,
    K: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    POST_OFFSET: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What the weights are multiplied by: `pending_tile`, normed where there is a norm."""
    x = pending_tile(
        x_ptr, delta_ptr, post_ptr, rows, k, mask, post_reciprocal, K, EVEN, POST_OFFSET, dtype
    )  # fmt: skip
    if NORM:
        x = normed(x, reciprocal, weight.to(tl.float32), dtype, OFFSET)
    return x


@triton.jit
def row_statistics(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, sum_ptr, rows, valid, writes, eps, post_eps,
    K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, POST_OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Reciprocals of the root mean squares of `rows` [R] and of what is pending for them.

    A program that `writes` stores the sums of both in `sum_ptr` where rows are `valid`. Rows that
    are not are rows of the input too, so that they need no mask.
    """
    EVEN: tl.constexpr = K % BLOCK == 0
    reciprocal = tl.zeros(rows.shape, tl.float32)
    post_reciprocal = tl.zeros(rows.shape, tl.float32)
    if delta_ptr is not None:
        squares = tl.zeros(rows.shape, tl.float32)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)[None, :]
            delta = load_tile(delta_ptr + rows[:, None] * K + k, k < K, EVEN).to(tl.float32)
            squares += tl.sum(delta * delta, axis=1)
        post_reciprocal = tl.rsqrt(squares / K + post_eps)
    if NORM or delta_ptr is not None:
        squares = tl.zeros(rows.shape, tl.float32)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)[None, :]
            x = pending_tile(
                x_ptr, delta_ptr, post_ptr, rows[:, None], k, k < K, post_reciprocal[:, None],
                K, EVEN, POST_OFFSET, dtype,
            )  # fmt: skip
            squares += tl.sum(x * x, axis=1)
            if delta_ptr is not None:
                mask = (k < K) & valid[:, None] & writes
                tl.store(sum_ptr + rows[:, None] * K + k, x.to(dtype), mask=mask)
        reciprocal = tl.rsqrt(squares / K + eps)
    return reciprocal, post_reciprocal


@triton.jit
def activate(  # type: ignore[no-untyped-def]
    gate, up, GELU: tl.constexpr, dtype: tl.constexpr, LIMIT: tl.constexpr = 0.0,
    ALPHA: tl.constexpr = 1.0, UP_OFFSET: tl.constexpr = 0.0,
):  # fmt: skip
    """`act(gate) * up` of float32 numbers, each result rounded to `dtype`, in float32.

    The last three constants are traits of `Activate`.
    """
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if LIMIT > 0.0:  # NaN stays NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate).to(dtype).to(tl.float32)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        up = up.to(dtype).to(tl.float32)
    if UP_OFFSET != 0.0:
        up = (up + UP_OFFSET).to(dtype).to(tl.float32)
    if ALPHA != 1.0 and not GELU:
        logit = (gate * ALPHA).to(dtype).to(tl.float32)
        active = gate * (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
    else:
        # (1 + tanh(u)) / 2 is the logistic function of 2 u, u = sqrt(2 / pi) (x + 0.044715 x^3).
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
        active = gate / (1.0 + tl.exp(-logit))
    return active.to(dtype).to(tl.float32) * up


@triton.jit
def scaled(x, SCALE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """`SCALE` times float32 `x`, both rounded to `dtype`, in float32; 1: x as it is."""
    if SCALE != 1.0:
        x = (x.to(dtype).to(tl.float32) * SCALE).to(dtype).to(tl.float32)
    return x


@triton.jit
def largest_of(x, n, N, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of x along an axis and the lowest of the ids `n` it has; ids below N count.

    It is +inf where an x is NaN, whatever `tl.max` does with NaN."""
    x = tl.where(x == x, x, float("inf"))
    x = tl.where(n < N, x, float("-inf"))
    largest = tl.max(x, axis=axis, keep_dims=True)
    at = tl.min(tl.where((x == largest) & (n < N), n, N - 1), axis=axis)
    return tl.max(x, axis=axis), at
