"""The kernel of two linear layers of a decode step with a barrier of the whole grid between them.

Shapes: T rows, K input features, N output features, R rows of a weight that a program reads at a
time, V elements of a weight that a thread loads at once. The first product makes `x'` [T, N] and
the second one has `x'` as its input, so K of the second is N of the first.

Every program owns a run of output tiles of each product, and each run is a row of steps: a step is
`BLOCK_K` input features of one tile. The weights of the next step are in flight while a step is
multiplied. The first step of the second product is loaded before the barrier, and the rest of it is
on its way to the L2 cache from the start of the kernel: weights keep coming while programs wait.

All programs have to run at the same time, or those that have arrived keep the multiprocessors that
the others need: the grid has at most a program for each multiprocessor, and the launch is
cooperative, so that the device starts all programs or none. Source of the barrier: the grid
barrier of CUDA's cooperative groups (`sync_grids`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel_calls import let_dependents_start, wait_for_inputs
from .kernel_weights import load_channels, operation_name
from .linear_tiles import (
    activate,
    appended,
    as_numbers,
    input_tile,
    load_tile,
    load_weights,
    prefetch_rows,
    row_statistics,
)

__all__ = ["linear_pair"]


@triton.jit
def _run_of_tiles(N, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """First output tile of this program and how many it has; programs differ by one at most."""
    tiles = tl.cdiv(N, BLOCK_N)
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program * tiles // programs
    return first, (program + 1) * tiles // programs - first


@triton.jit
def _prefetch_run(  # type: ignore[no-untyped-def]
    w_ptr, first, tiles, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr, ROW_BYTES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Request the first `AHEAD` rows of a program's run into the L2 cache."""
    if AHEAD > 0:
        row = tl.minimum(first * BLOCK_N, N)
        rows = tl.minimum(tl.minimum(tiles * BLOCK_N, N - row), AHEAD)
        prefetch_rows(w_ptr, row, rows, ROW_BYTES, PDL)
        if GATED:
            prefetch_rows(w_ptr, N + row, rows, ROW_BYTES, PDL)


@triton.jit
def _features(BLOCK_K: tl.constexpr, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """First features of the groups of a step `[BLOCK_K / V, 1]`, and all of them, from 0 on."""
    group = tl.arange(0, BLOCK_K // V)[:, None] * V
    return group, group + tl.arange(0, V)[None, :]


@triton.jit
def _load_step(  # type: ignore[no-untyped-def]
    w_ptr, scale_ptr, bias_ptr, norm_ptr, first, step, steps, N, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, V: tl.constexpr, WORD: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """What a step multiplies by: weights, norm, scales of blocks; scales and biases of its tile.

    Past the last step nothing is read and weights are zeros.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    R: tl.constexpr = BLOCK_N * HALVES
    EVEN: tl.constexpr = K % BLOCK_K == 0
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    start = step % STEPS * BLOCK_K
    n = (first + step // STEPS) * BLOCK_N + tl.arange(0, R) // HALVES
    # Past the last feature the last one is read again, and not stored.
    weight_n = tl.minimum(n, N - 1) + tl.arange(0, R) % HALVES * N
    group, k = _features(BLOCK_K, V)
    word = (group // WORD + tl.arange(0, V // WORD)[None, :])[:, None, :]
    w_rows = w_ptr + weight_n.to(tl.int64)[None, :, None] * (K // WORD)
    inside = step < steps if EVEN else (step < steps) & (start // WORD + word < K // WORD)
    w = load_weights(w_rows + start // WORD + word, inside, False)
    norm = 0.0
    if norm_ptr is not None:
        norm = load_tile(norm_ptr + start + k, start + k < K, EVEN)
    scales = 0.0
    if SCALE_BLOCKS:
        scale_rows = scale_ptr + weight_n[None, :] * SCALE_BLOCKS
        scales = load_tile(scale_rows + (start + group) // 128, start + group < K, EVEN)
    channel_scales, bias = load_channels(scale_ptr, bias_ptr, weight_n, SCALE_BLOCKS)
    return w, norm, scales, channel_scales, bias


@triton.jit
def _multiply_step(  # type: ignore[no-untyped-def]
    sums, w, norm, scales, channel_scales, bias, x_ptr, residual_ptr, out_ptr, reciprocal, first,
    step, T, N, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, V: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """Sums of the tile with those of a step; the last step of a tile stores it and leaves zeros."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    start = step % STEPS * BLOCK_K
    n = (first + step // STEPS) * BLOCK_N + tl.arange(0, BLOCK_N)
    residual = ()
    if residual_ptr is not None:
        for row in tl.static_range(ROWS):
            pointers = residual_ptr + tl.minimum(row, T - 1) * N + n
            residual = appended(residual, tl.load(pointers, mask=n < N, other=0.0).to(tl.float32))
    _, k = _features(BLOCK_K, V)
    numbers = as_numbers(w, STORAGE, NATIVE_FP8)
    grown = ()
    for row in tl.static_range(ROWS):
        x = input_tile(
            x_ptr, None, None, tl.minimum(row, T - 1), start + k, start + k < K, reciprocal[row],
            0.0, norm, K, EVEN, NORM, OFFSET, False, dtype,
        )  # fmt: skip
        product = tl.sum(numbers * x[:, None, :], axis=2)
        if SCALE_BLOCKS:
            product = product * scales
        grown = appended(grown, sums[row] + product)
    ends = step % STEPS == STEPS - 1
    if ends:
        for row in tl.static_range(ROWS):
            out = tl.sum(grown[row], axis=0) * channel_scales + bias
            if GATED:
                gate, up = tl.split(tl.reshape(out, [BLOCK_N, 2]))
                out = activate(gate, up, GELU, dtype)
            elif residual_ptr is not None:
                out = residual[row] + out.to(dtype).to(tl.float32)
            tl.store(out_ptr + row * N + n, out.to(dtype), mask=(n < N) & (row < T))
    left = ()
    for row in tl.static_range(ROWS):
        left = appended(left, tl.where(ends, 0.0, grown[row]))
    return left


@triton.jit
def _multiply_run(  # type: ignore[no-untyped-def]
    w, norm, scales, channel_scales, bias, w_ptr, scale_ptr, bias_ptr, norm_ptr, x_ptr,
    residual_ptr, out_ptr, reciprocal, first, steps, T, N, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, V: tl.constexpr, WORD: tl.constexpr,
    STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr, SCALE_BLOCKS: tl.constexpr,
    OFFSET: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """All steps of a program's run; what the first one multiplies by is loaded already."""
    HALVES: tl.constexpr = 2 if GATED else 1
    NORM: tl.constexpr = norm_ptr is not None
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = appended(sums, tl.zeros([BLOCK_K // V, BLOCK_N * HALVES], tl.float32))
    # Two steps in turn, so that no tile is moved to other registers: that would wait for its load.
    for step in range(0, steps, 2):
        w_odd, norm_odd, scales_odd, channel_scales_odd, bias_odd = _load_step(
            w_ptr, scale_ptr, bias_ptr, norm_ptr, first, step + 1, steps, N, K, BLOCK_N, BLOCK_K,
            V, WORD, SCALE_BLOCKS, GATED,
        )  # fmt: skip
        tl.debug_barrier()  # else the compiler moves the load after the products
        sums = _multiply_step(
            sums, w, norm, scales, channel_scales, bias, x_ptr, residual_ptr, out_ptr, reciprocal,
            first, step, T, N, K, ROWS, BLOCK_N, BLOCK_K, V, STORAGE, NATIVE_FP8,
            SCALE_BLOCKS, NORM, OFFSET, GATED, GELU,
        )  # fmt: skip
        w, norm, scales, channel_scales, bias = _load_step(
            w_ptr, scale_ptr, bias_ptr, norm_ptr, first, step + 2, steps, N, K, BLOCK_N, BLOCK_K,
            V, WORD, SCALE_BLOCKS, GATED,
        )  # fmt: skip
        tl.debug_barrier()
        if step + 1 < steps:
            sums = _multiply_step(
                sums, w_odd, norm_odd, scales_odd, channel_scales_odd, bias_odd, x_ptr,
                residual_ptr, out_ptr, reciprocal, first, step + 1, T, N, K, ROWS, BLOCK_N,
                BLOCK_K, V, STORAGE, NATIVE_FP8, SCALE_BLOCKS, NORM, OFFSET, GATED, GELU,
            )  # fmt: skip


@triton.jit
def _arrive(barrier_ptr):  # type: ignore[no-untyped-def]
    """Count this program; return what the counter was.

    All programs together add 2**31: the highest bit flips when the last one has arrived, and the
    lower bits are zero again, so the counter needs no reset between launches. The stores of a
    program are visible to programs that see the bit flipped: the barrier orders the stores of its
    threads before the count, which releases them (PTX ISA, "Memory Consistency Model").
    """
    rest = (1 - tl.num_programs(0)) ^ -2147483648  # 2**31 less one for each other program
    tl.debug_barrier()
    count = tl.where(tl.program_id(0) == 0, rest, 1)
    return tl.atomic_add(barrier_ptr, count, sem="acq_rel", scope="gpu")


@triton.jit
def _wait_for_all(barrier_ptr, before):  # type: ignore[no-untyped-def]
    """Wait until the highest bit of the counter differs from `before`: one thread polls it."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t, v;
        mov.u32 t, %tid.x;
        setp.ne.u32 p, t, 0;
        @p bra met;
        look:
        ld.acquire.gpu.global.u32 v, [$1];
        xor.b32 v, v, $2;
        setp.ge.s32 p, v, 0;
        @p bra look;
        met:
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [barrier_ptr.to(tl.int64), before],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit(repr=operation_name)
def linear_pair(  # type: ignore[no-untyped-def]
    a_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, x_ptr, norm_ptr, next_w_ptr, next_scale_ptr,
    next_bias_ptr, out_ptr, barrier_ptr, T, N, NEXT_N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    V: tl.constexpr, WORD: tl.constexpr, STORAGE: tl.constexpr, SCALE_BLOCKS: tl.constexpr,
    ROW_BYTES: tl.constexpr, AHEAD: tl.constexpr,
    NEXT_K: tl.constexpr, NEXT_BLOCK_N: tl.constexpr, NEXT_BLOCK_K: tl.constexpr,
    NEXT_V: tl.constexpr, NEXT_WORD: tl.constexpr, NEXT_STORAGE: tl.constexpr,
    NEXT_SCALE_BLOCKS: tl.constexpr, NEXT_ROW_BYTES: tl.constexpr, NEXT_AHEAD: tl.constexpr,
    STATISTICS: tl.constexpr, NATIVE_FP8: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, PHASE: tl.constexpr, NAME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`x = residual + linear(a)`, a barrier, `out = linear(norm(x))` or its gated activation.

    PHASE is "both", or one of "first" and "second" where programs run one after the other: two
    launches, of which the first arrives at the barrier and the second has nothing to wait for.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    NEXT_STEPS: tl.constexpr = (NEXT_K + NEXT_BLOCK_K - 1) // NEXT_BLOCK_K
    # All programs run before a dependent can take the place of one.
    let_dependents_start(PDL)
    first, tiles = _run_of_tiles(N, BLOCK_N)
    next_first, next_tiles = _run_of_tiles(NEXT_N, NEXT_BLOCK_N)
    if PHASE != "second":
        w, norm, scales, channel_scales, bias = _load_step(
            w_ptr, scale_ptr, bias_ptr, None, first, 0, tiles, N, K, BLOCK_N, BLOCK_K, V, WORD,
            SCALE_BLOCKS, False,
        )  # fmt: skip
        _prefetch_run(w_ptr, first, tiles, N, BLOCK_N, False, ROW_BYTES, AHEAD, PDL)
        _prefetch_run(
            next_w_ptr, next_first, next_tiles, NEXT_N, NEXT_BLOCK_N, GATED, NEXT_ROW_BYTES,
            NEXT_AHEAD, PDL,
        )  # fmt: skip
    wait_for_inputs(PDL)
    if PHASE != "second":
        ones = ()
        for _ in tl.static_range(ROWS):
            ones = appended(ones, 1.0)
        _multiply_run(
            w, norm, scales, channel_scales, bias, w_ptr, scale_ptr, bias_ptr, None, a_ptr,
            residual_ptr, x_ptr, ones, first, tiles * STEPS, T, N, K, ROWS, BLOCK_N, BLOCK_K, V,
            WORD, STORAGE, NATIVE_FP8, SCALE_BLOCKS, False, False, False,
        )  # fmt: skip
    next_w, next_norm, next_scales, next_channel_scales, next_bias = _load_step(
        next_w_ptr, next_scale_ptr, next_bias_ptr, norm_ptr, next_first, 0, next_tiles, NEXT_N,
        NEXT_K, NEXT_BLOCK_N, NEXT_BLOCK_K, NEXT_V, NEXT_WORD, NEXT_SCALE_BLOCKS, GATED,
    )  # fmt: skip
    if PHASE != "second":
        before = _arrive(barrier_ptr)
        if PHASE == "both":
            _wait_for_all(barrier_ptr, before)
    if PHASE != "first":
        t = tl.arange(0, ROWS)
        reciprocals, _ = row_statistics(
            x_ptr, None, None, None, tl.minimum(t, T - 1), t < T, False, eps, 0.0, NEXT_K,
            STATISTICS, True, False, dtype,
        )  # fmt: skip
        reciprocal = ()
        for row in tl.static_range(ROWS):
            reciprocal = appended(reciprocal, tl.sum(tl.where(t == row, reciprocals, 0.0)))
        _multiply_run(
            next_w, next_norm, next_scales, next_channel_scales, next_bias, next_w_ptr,
            next_scale_ptr, next_bias_ptr, norm_ptr, x_ptr, None, out_ptr, reciprocal, next_first,
            next_tiles * NEXT_STEPS, T, NEXT_N, NEXT_K, ROWS, NEXT_BLOCK_N, NEXT_BLOCK_K, NEXT_V,
            NEXT_WORD, NEXT_STORAGE, NATIVE_FP8, NEXT_SCALE_BLOCKS, OFFSET, GATED, GELU,
        )  # fmt: skip
