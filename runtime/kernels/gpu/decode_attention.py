"""Attention of decode steps: norms, rotation, write to the cache and split attention as one kernel.

Shapes: T rows of the step, H query heads, G kv heads, E head_dim, V value_dim (E, or the latent
part of a key), S splits, D the width of a key (E, or latent and rotated part).

A program computes one kv head of one row over one of S runs of its positions ("flash decoding",
Dao et al. 2023; the running softmax is that of Milakov and Gimelshein 2018). The heads of a group
share the keys that it loads. S is fixed when a step is captured, the length of a run is that of
the row when the step runs: the tiles of the cached positions that the row sees (of its window, if
it has one) are dealt in equal runs, so short rows leave the last splits empty. What the splits
found is put together by `combine_splits`, or by the kernel that projects it (see `Partials`).

The new token's key and value do not go through memory: the first split without tiles, or the last
one, computes them, writes them to the slot, and starts its softmax from them (as they would be read
back, where the cache is quantised). The others read what earlier steps wrote. Positions that a row
does not see are masked when they are loaded: what stands there is never part of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import AttentionForm, reference_paged_attention
from .launch import INTERPRETED, launch, let_dependents_start, wait_for_inputs
from .quantised_cache import (
    cache_views,
    fp8_is_native,
    load_numbers,
    load_scales,
    scale_offset,
    store_vectors,
    vector_offset,
)

__all__ = [
    "Partials",
    "Tile",
    "choose_splits",
    "choose_tile",
    "combine_splits",
    "decode_attention",
    "decode_ready_attention",
    "new_partials",
    "reference_combine_splits",
    "reference_decode_attention",
]

LINE_BYTES = 128
"""Of a line of the L2 cache."""

MOST_SPLITS = 32

MOST_NEAR_BYTES = 16 << 20
"""Of the next weight that are brought near: a part of the cache (50 MiB) that is not yet read from
when the next kernel needs it."""

NO_WINDOW = 1 << 30


class Partials(NamedTuple):
    """What the splits of a row found: workspace, float32.

    The result is `sum_s 2^(m_s - M) acc_s / sum_s 2^(m_s - M) l_s` with M the maximum of m.
    """

    acc: Tensor
    """`[T, H, S, V]`: sums of values weighed by 2^(score - m). Anything where l = 0."""
    m: Tensor
    """`[T, H, S]`: the maximum of the scores, in units of log 2; -inf for a split without any.
    These come last."""
    l: Tensor  # noqa: E741  (the name in the literature)
    """`[T, H, S]`: sums of 2^(score - m); 0 for a split without positions."""


def new_partials(
    tokens: int, heads: int, splits: int, value_dim: int, device: torch.device
) -> Partials:
    """Workspace for `tokens` rows, uninitialised."""
    shape = (tokens, heads, splits)
    acc, m, denominator = (
        torch.empty(shape_, dtype=torch.float32, device=device)
        for shape_ in ((*shape, value_dim), shape, shape)
    )
    return Partials(acc, m, denominator)


class Tile(NamedTuple):
    """How a program works through its run."""

    heads: int
    """Query heads of a program, a power of two of at least 16 (a matrix product's smallest)."""
    positions: int
    """Loaded and multiplied at a time."""
    num_warps: int
    num_stages: int
    """Tiles in flight, of keys and of values."""


def choose_tile(group: int, head_dim: int, value_dim: int, element_bytes: int) -> Tile:
    """Sizes for a group of query heads over keys `[head_dim]` of so many bytes an element.

    A tile of keys and values of 16 KiB is read in half a microsecond by one of 132 processors that
    share 4.3 TB/s, which is about what a tile's arithmetic takes; more in flight hides latency.
    """
    heads = max(16, triton.next_power_of_2(group))
    width = triton.next_power_of_2(head_dim)
    if head_dim != value_dim:  # latent: one wide side, which is kept once for both products
        return Tile(min(heads, 64), 32 if element_bytes < 4 else 16, 8, 2)
    positions = max(16, min(64, 8192 // (width * element_bytes)))
    return Tile(min(heads, 64), positions, 4, 3)


def choose_splits(
    rows: int, kv_heads: int, most_positions: int, multiprocessors: int, tile_positions: int = 64
) -> int:
    """How many splits a captured step of `rows` rows gets.

    As many programs as processors for few rows, where each split costs the kernel that combines
    them more than a second program on a processor brings; twice as many for more rows. No more
    than there can be tiles.
    """
    programs = multiprocessors * (1 if rows <= 2 else 2)
    tiles = -(-most_positions // tile_positions)
    return max(1, min(programs // (rows * kv_heads), tiles, MOST_SPLITS))


@triton.jit
def _bring_near(  # type: ignore[no-untyped-def]
    weight_ptr, lines, lines_each, program, LANES: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """Ask for this program's share of a weight's lines to be brought to the L2 cache."""
    for start in range(0, lines_each, LANES):
        line = tl.minimum(program * lines_each + start + tl.arange(0, LANES), lines - 1)
        address = weight_ptr.to(tl.uint64, bitcast=True) + line.to(tl.uint64) * LINE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _scaled(x, rms, weights, dtype: tl.constexpr, OFFSET_NORMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x / rms * weights`, rounded where `modules.RMSNorm` rounds; float32."""
    x = x * rms[:, None]
    if OFFSET_NORMS:
        y = (x * (1.0 + weights[None, :])).to(dtype)
    else:
        y = (x.to(dtype).to(tl.float32) * weights[None, :]).to(dtype)
    return y.to(tl.float32)


@triton.jit
def _normed_and_turned(  # type: ignore[no-untyped-def]
    x_ptr, starts, inside, weights, weights_opposite, cos, sin, eps,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OFFSET_NORMS: tl.constexpr,
):  # fmt: skip
    """Vectors `[N, BLOCK_E]` that begin at `starts`, normed if there are weights, and rotated.

    The pair of element i is i +- E / 2: it is loaded a second time, in the order in which it is
    needed. In the dtype of memory, zeros in the padding.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK_E)
    opposite = tl.where(i < E // 2, i + E // 2, i - E // 2)
    mask = inside[:, None] & (i < E)[None, :]
    x = tl.load(x_ptr + starts[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + starts[:, None] + opposite[None, :], mask=mask, other=0.0).to(tl.float32)
    if weights is not None:
        rms = tl.rsqrt(tl.sum(x * x, axis=1) / E + eps)
        x = _scaled(x, rms, weights, dtype, OFFSET_NORMS)
        y = _scaled(y, rms, weights_opposite, dtype, OFFSET_NORMS)
    turned = x * cos[None, :] + tl.where((i < E // 2)[None, :], -y, y) * sin[None, :]
    return tl.where(mask, turned, 0.0).to(dtype)


@triton.jit
def _in_log2(scores, scale, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of queries and keys as scores in units of log 2."""
    if SOFTCAP > 0.0:
        # tanh x = 1 - 2 / (1 + e^2x), which neither overflow nor underflow of the power harms.
        power = tl.exp2(scores * (scale * (2.0 * 1.4426950408889634 / SOFTCAP)))
        scores = (SOFTCAP * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + power))
    else:
        scores = scores * (scale * 1.4426950408889634)
    return scores


@triton.jit
def _split_tiles(first, end, split, splits, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The run of a split over the tiles of the positions first ... end - 1: its first tile, the
    one behind its last, and the first split without tiles (or the last one)."""
    first_tile = first // TILE
    tiles = tl.where(end > first, tl.cdiv(end, TILE) - first_tile, 0)
    each = tl.cdiv(tiles, splits)
    begin = first_tile + tl.minimum(split * each, tiles)
    behind = first_tile + tl.minimum((split + 1) * each, tiles)
    return begin, behind, tl.minimum(tl.cdiv(tiles, tl.maximum(each, 1)), splits - 1)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, q_rest, m, total, acc,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, head,
    first, end, begin, behind, scale,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Go on with the softmax (m, total, acc) over the tiles begin ... behind - 1.

    Without `values_ptr` the first V elements of the keys are the values, and `q_rest` meets the
    rest of them.
    """
    dtype: tl.constexpr = q.dtype
    # The scale of a value goes to its weight; of the 16-bit types bfloat16 has room for that.
    narrow: tl.constexpr = STORAGE != "model" and dtype == tl.float16
    weight_dtype: tl.constexpr = tl.bfloat16 if narrow else dtype
    i = tl.arange(0, BLOCK_V)
    rest = tl.arange(0, BLOCK_REST)
    for tile in range(begin, behind):
        n = tile * TILE + tl.arange(0, TILE)
        seen = (n >= first) & (n < end)
        block = tl.load(table_ptr + n // BLOCK_SIZE, mask=seen, other=0)
        at = vector_offset(block, head, n % BLOCK_SIZE, G, D, BLOCK_SIZE, STORAGE)
        scale_at = scale_offset(block, head, n % BLOCK_SIZE, G, D, BLOCK_SIZE)
        mask = seen[:, None] if V == BLOCK_V else seen[:, None] & (i < V)[None, :]
        here = at[:, None] + i[None, :]
        keys = load_numbers(keys_ptr, here, mask, dtype, STORAGE, NATIVE_FP8)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if values_ptr is None:
            inside = seen[:, None] & (V + rest < D)[None, :]
            there = at[:, None] + V + rest[None, :]
            keys_rest = load_numbers(keys_ptr, there, inside, dtype, STORAGE, NATIVE_FP8)
            scores = tl.dot(q_rest, tl.trans(keys_rest), scores, input_precision="ieee")
            values = keys.to(weight_dtype)
        else:
            values = load_numbers(values_ptr, here, mask, weight_dtype, STORAGE, NATIVE_FP8)
        if STORAGE != "model":
            key_scales = load_scales(key_scales_ptr, scale_at, seen)
            scores *= key_scales[None, :]
        scores = tl.where(seen[None, :], _in_log2(scores, scale, SOFTCAP), float("-inf"))
        # Every tile of a run has a position that is seen: the maximum is a number.
        top = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.sum(weights, axis=1)
        if STORAGE != "model":
            if values_ptr is None:
                weights *= key_scales[None, :]
            else:
                weights *= load_scales(value_scales_ptr, scale_at, seen)[None, :]
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(weight_dtype), values, acc, input_precision="ieee")
        m = top
    return m, total, acc


@triton.jit
def _store_partials(  # type: ignore[no-untyped-def]
    acc_ptr, m_ptr, l_ptr, m, total, acc, at, inside, V: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Store what a split found of the heads whose places are `at`."""
    i = tl.arange(0, BLOCK_V)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(l_ptr + at, total, mask=inside)
    mask = inside[:, None] & (i < V)[None, :]
    tl.store(acc_ptr + at[:, None] * V + i[None, :], acc, mask=mask)


@triton.jit
def _decode_attention(  # type: ignore[no-untyped-def]
    qkv_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, q_norm_ptr, k_norm_ptr,
    cos_ptr, sin_ptr, slots_ptr, tables_ptr, token_rows_ptr, positions_ptr,
    acc_ptr, m_ptr, l_ptr, weight_ptr, table_stride, window, eps, scale, lines, lines_each,
    GROUP: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr, SOFTCAP: tl.constexpr,
    OFFSET_NORMS: tl.constexpr, BLOCK_E: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    LANES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (g, s, t): kv head g of row t, split s."""
    g, split, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    i = tl.arange(0, BLOCK_E)
    opposite = tl.where(i < E // 2, i + E // 2, i - E // 2)
    q_weights, q_weights_opposite, k_weights, k_weights_opposite = None, None, None, None
    if q_norm_ptr is not None:
        q_weights = tl.load(q_norm_ptr + i, mask=i < E, other=0.0).to(tl.float32)
        q_weights_opposite = tl.load(q_norm_ptr + opposite, mask=i < E, other=0.0).to(tl.float32)
        k_weights = tl.load(k_norm_ptr + i, mask=i < E, other=0.0).to(tl.float32)
        k_weights_opposite = tl.load(k_norm_ptr + opposite, mask=i < E, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        program = (t * splits + split) * G + g
        _bring_near(weight_ptr, lines, lines_each, program, LANES, LINE)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    position = tl.load(positions_ptr + t).to(tl.int32)
    first = tl.maximum(position - window + 1, 0)
    begin, behind, owner = _split_tiles(first, position, split, splits, TILE)
    h = tl.arange(0, HEADS)
    inside = h < GROUP
    at = ((t.to(tl.int64) * (G * GROUP) + g * GROUP + h) * splits) + split
    if split > owner:
        tl.store(m_ptr + at, tl.full([HEADS], float("-inf"), tl.float32), mask=inside)
        tl.store(l_ptr + at, tl.zeros([HEADS], tl.float32), mask=inside)
    else:
        table_ptr = tables_ptr + tl.load(token_rows_ptr + t) * table_stride
        pair = tl.where(i < E // 2, i, opposite)
        cos = tl.load(cos_ptr + t * (E // 2) + pair, mask=i < E, other=0.0)
        sin = tl.load(sin_ptr + t * (E // 2) + pair, mask=i < E, other=0.0)
        row = t.to(tl.int64) * ((GROUP + 2) * G * E)
        q = _normed_and_turned(
            qkv_ptr, row + (g * GROUP + h) * E, inside, q_weights, q_weights_opposite, cos, sin,
            eps, E, BLOCK_E, OFFSET_NORMS,
        )  # fmt: skip
        m = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, BLOCK_E], tl.float32)
        if split == owner:
            one = tl.full([1], 1, tl.int1)
            k_start = row + (GROUP * G + g) * E + tl.zeros([1], tl.int64)
            key = _normed_and_turned(
                qkv_ptr, k_start, one, k_weights, k_weights_opposite, cos, sin, eps, E, BLOCK_E,
                OFFSET_NORMS,
            ).to(tl.float32)  # fmt: skip
            v_at = (k_start + G * E)[:, None] + i[None, :]
            value = tl.load(qkv_ptr + v_at, mask=(i < E)[None, :], other=0.0).to(tl.float32)
            slot = tl.load(slots_ptr + t) + tl.zeros([1], tl.int64)
            key = store_vectors(
                keys_ptr, key_scales_ptr, key, slot, g, one, G, E, BLOCK_SIZE, STORAGE
            )
            value = store_vectors(
                values_ptr, value_scales_ptr, value, slot, g, one, G, E, BLOCK_SIZE, STORAGE
            )
            m = _in_log2(tl.sum(q.to(tl.float32) * key, axis=1), scale, SOFTCAP)
            total += 1.0
            acc += value
        m, total, acc = _attend(
            q, None, m, total, acc, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
            table_ptr, g, first, position, begin, behind, scale, G, E, E, BLOCK_SIZE, STORAGE,
            NATIVE_FP8, SOFTCAP, BLOCK_E, 1, TILE,
        )  # fmt: skip
        _store_partials(acc_ptr, m_ptr, l_ptr, m, total, acc, at, inside, E, BLOCK_E)


@triton.jit
def _decode_ready_attention(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, tables_ptr, token_rows_ptr,
    positions_ptr, acc_ptr, m_ptr, l_ptr, q_stride_T, q_stride_H, table_stride, window, scale,
    GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (g and a tile of its heads, s, t): row t, split s; all keys are written."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    g, split, t = tl.program_id(0) // HEAD_TILES, tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    position = tl.load(positions_ptr + t).to(tl.int32)
    first = tl.maximum(position - window + 1, 0)
    begin, behind, _ = _split_tiles(first, position + 1, split, splits, TILE)
    h = (tl.program_id(0) % HEAD_TILES) * HEADS + tl.arange(0, HEADS)
    inside = h < GROUP
    at = ((t.to(tl.int64) * (G * GROUP) + g * GROUP + h) * splits) + split
    m = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if begin == behind:
        tl.store(m_ptr + at, m, mask=inside)
        tl.store(l_ptr + at, total, mask=inside)
    else:
        table_ptr = tables_ptr + tl.load(token_rows_ptr + t) * table_stride
        i = tl.arange(0, BLOCK_V)
        rest = tl.arange(0, BLOCK_REST)
        q_at = q_ptr + t.to(tl.int64) * q_stride_T + (g * GROUP + h)[:, None] * q_stride_H
        q = tl.load(q_at + i[None, :], mask=inside[:, None] & (i < V)[None, :], other=0.0)
        q_rest = None
        if values_ptr is None:
            mask = inside[:, None] & (V + rest < D)[None, :]
            q_rest = tl.load(q_at + V + rest[None, :], mask=mask, other=0.0)
        m, total, acc = _attend(
            q, q_rest, m, total, tl.zeros([HEADS, BLOCK_V], tl.float32),
            keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, g,
            first, position + 1, begin, behind, scale, G, D, V, BLOCK_SIZE, STORAGE, NATIVE_FP8,
            SOFTCAP, BLOCK_V, BLOCK_REST, TILE,
        )  # fmt: skip
        _store_partials(acc_ptr, m_ptr, l_ptr, m, total, acc, at, inside, V, BLOCK_V)


@triton.jit
def _combine_splits(  # type: ignore[no-untyped-def]
    acc_ptr, m_ptr, l_ptr, out_ptr, splits, H: tl.constexpr, V: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, t, part): elements of one head of row t."""
    head = tl.program_id(1).to(tl.int64) * H + tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    i = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    m = tl.load(m_ptr + head * splits + s, mask=s < splits, other=float("-inf"))
    total = tl.load(l_ptr + head * splits + s, mask=s < splits, other=0.0)
    used = (total != 0.0)[:, None] & (i < V)[None, :]
    acc = tl.load(acc_ptr + (head * splits + s)[:, None] * V + i[None, :], mask=used, other=0.0)
    weight = tl.exp2(m - tl.max(m, axis=0))
    out = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out_ptr + head * V + i, out.to(out_ptr.dtype.element_ty), mask=i < V)


def decode_attention(
    qkv_TN: Tensor,
    arena: Tensor,
    layer: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset_norms: bool,
    cos_TE: Tensor,
    sin_TE: Tensor,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    form: AttentionForm,
    partials: Partials,
    *,
    next_weight: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Write the step's keys and values and find the partials of its attention.

    Arguments as in `reference_decode_attention`; besides:
        partials: workspace of T rows, whose number of splits is that of the launch.
        next_weight: what the next kernel reads, contiguous: programs ask for its first 16 MiB to be
            brought to the L2 cache while they wait for what earlier kernels write.
        tile: sizes, where those of `choose_tile` are not wanted.
    """
    kv = arena[layer]
    tokens, features = qkv_TN.shape
    kv_heads, head_dim = kv.shape[2], form.value_dim
    group = features // head_dim // kv_heads - 2
    views = cache_views(kv, head_dim, form.block_size, form.storage)
    tile = tile or choose_tile(group, head_dim, head_dim, views.keys.element_size())
    splits = partials.m.shape[2]
    lines = lines_each = 0
    if INTERPRETED or next_weight is None:
        next_weight = None
    else:
        lines = min(next_weight.nbytes, MOST_NEAR_BYTES) // LINE_BYTES
        lines_each = triton.cdiv(lines, tokens * splits * kv_heads)
    launch(
        _decode_attention, (kv_heads, splits, tokens),
        qkv_TN, *views, q_norm, k_norm, cos_TE, sin_TE, slots_T, block_tables, token_rows_T,
        positions_T, *partials, next_weight, block_tables.stride(0), form.window or NO_WINDOW,
        eps, form.scale, lines, lines_each,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        GROUP=group, G=kv_heads, E=head_dim, BLOCK_SIZE=form.block_size, STORAGE=form.storage,
        NATIVE_FP8=fp8_is_native(qkv_TN.device), SOFTCAP=form.softcap, OFFSET_NORMS=offset_norms,
        BLOCK_E=_padded(head_dim), HEADS=max(tile.heads, triton.next_power_of_2(group)),
        TILE=tile.positions, LANES=32 * tile.num_warps, LINE=LINE_BYTES,
    )  # fmt: skip


def decode_ready_attention(
    q_THD: Tensor,
    arena: Tensor,
    layer: int,
    block_tables: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    form: AttentionForm,
    partials: Partials,
    *,
    tile: Tile | None = None,
) -> None:
    """The partials of queries that are ready, over keys and values that are all written.

    For latent attention and for models that norm and rotate by themselves. Arguments as in
    `reference_paged_attention` and `decode_attention`; the elements of a query are contiguous.
    """
    kv = arena[layer]
    tokens, heads, head_dim = q_THD.shape
    kv_heads, value_dim = kv.shape[2], form.value_dim
    views = cache_views(kv, head_dim, form.block_size, form.storage)
    group = heads // kv_heads
    tile = tile or choose_tile(group, head_dim, value_dim, views.keys.element_size())
    launch(
        _decode_ready_attention,
        (kv_heads * triton.cdiv(group, tile.heads), partials.m.shape[2], tokens),
        q_THD, *views, block_tables, token_rows_T, positions_T, *partials,
        q_THD.stride(0), q_THD.stride(1), block_tables.stride(0), form.window or NO_WINDOW,
        form.scale,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        GROUP=group, G=kv_heads, D=head_dim, V=value_dim, BLOCK_SIZE=form.block_size,
        STORAGE=form.storage, NATIVE_FP8=fp8_is_native(q_THD.device), SOFTCAP=form.softcap,
        BLOCK_V=_padded(value_dim), BLOCK_REST=_padded(head_dim - value_dim), HEADS=tile.heads,
        TILE=tile.positions,
    )  # fmt: skip


def combine_splits(partials: Partials, out_TN: Tensor) -> None:
    """Put the splits together: `out_TN` `[T, H * V]`, contiguous, in the model's dtype."""
    tokens, heads, splits, value_dim = partials.acc.shape
    block = min(_padded(value_dim), 128)
    launch(
        _combine_splits, (heads, tokens, triton.cdiv(value_dim, block)), *partials, out_TN, splits,
        H=heads, V=value_dim, BLOCK_S=triton.next_power_of_2(splits), BLOCK_V=block,
    )  # fmt: skip


def reference_combine_splits(partials: Partials, out_TN: Tensor) -> None:
    """`combine_splits` in plain torch."""
    acc, m, total = partials
    weight = torch.where(total == 0, 0.0, torch.exp2(m - m.amax(-1, keepdim=True)))
    values = torch.where((total == 0)[..., None], 0.0, acc)
    out = (values * weight[..., None]).sum(2) / (total * weight).sum(2, keepdim=True)
    out_TN.copy_(out.flatten(1))


def reference_decode_attention(
    qkv_TN: Tensor,
    arena: Tensor,
    layer: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset_norms: bool,
    cos_TE: Tensor,
    sin_TE: Tensor,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    read_blocks: int,
    form: AttentionForm,
) -> Tensor:
    """What `decode_attention` and `combine_splits` compute, in plain torch: `[T, H * E]`.

    Args:
        qkv_TN: queries, keys and values of each row, `[T, (H + 2G) * E]`, contiguous.
        arena: all layers' cache.
        layer: the first coordinate of this one's.
        q_norm: weights `[E]` of the norm of queries, or None.
        k_norm: of keys, or None.
        eps: of these norms.
        offset_norms: they multiply by one plus their weight, see `models/modules.py`.
        cos_TE: float32 `[T, E / 2]`, of the angles of the rows' positions.
        sin_TE: likewise.
        slots_T: where each row writes; this and the rest as for `reference_paged_attention`.
        block_tables: of the layer's group.
        token_rows_T: the row of the block table of each row of the step.
        positions_T: of the new tokens.
        read_blocks: columns of the block tables to read; kernels need no such bound.
        form: what attention this is.
    """
    kv_heads, head_dim = arena.shape[3], form.value_dim
    qkv = qkv_TN.view(qkv_TN.shape[0], -1, head_dim)
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = (_normed(x, w, eps, offset_norms) for x, w in ((q, q_norm), (k, k_norm)))
    q, k = (_turned(x, cos_TE, sin_TE) for x in (q, k))
    out = reference_paged_attention(
        q, k, v, arena, layer, slots_T, block_tables, token_rows_T, token_rows_T, positions_T,
        read_blocks, form,
    )  # fmt: skip
    return out.flatten(1)


def _normed(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """`models.modules.RMSNorm`, which is not to be had from here."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).to(x.dtype) if offset else weight * y.to(x.dtype)


def _turned(x: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """`models.rope.rotate`."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos_TE[:, None], sin_TE[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _padded(size: int) -> int:
    """A power of two that matrix products take."""
    return max(16, triton.next_power_of_2(size))
