"""Attention of many tokens a row over the paged cache: the chunks of a prefill step.

`ops/attention.py` says what is computed; keys and values of the step's own tokens are in the
cache already. Shapes: T tokens, R rows, H query heads, G kv heads (G divides H), D head_dim, E
value_dim.

A program takes a tile: BLOCK_M queries, the heads of one group of some neighbouring tokens of one
row, over BLOCK_N positions at a time, from the first of the window to the last that one of them
sees (FlashAttention-2, Dao 2023, with scores in units of log2). The tiles of a step are laid out on
the device, once for all its layers: `prefill_tiles` cuts the tokens wherever the row changes and at
every multiple of B tokens, which makes at most ceil(T / B) + R pieces for R rows and padding. With
B = 4 and rows 7 7 7 2 2 2 . . (null row 9):

    token_rows   7 7 7 2 2 2 9 9        tiles   0 3 4 6 8 8 8 ...   (a tile ends where the next
                                                                     begins; past T it is empty)

With `PrefillTiling.split` the context is cut into parts of that many positions. A part is summed
alone and then added to the parts before it, by the same program or by a kernel of its own: the
result of a token has the same bits in both cases, and whatever else is in its tile.

Contract: the tokens of a row are neighbours, and their positions follow one another. Memory that no
token of a tile sees is not read; scores that a token does not see are selected away.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.attention import AttentionForm
from ..ops.batch import LayerPlace, RaggedBatch
from .kernel_calls import (
    call_kernel,
    compute_capability,
    let_dependents_start,
    num_multiprocessors,
    wait_for_inputs,
)
from .quantised import (
    cache_views,
    load_scales,
    load_vectors,
    scale_offset,
    vector_offset,
)
from .split_attention import first_seen, in_log2, load_sinks, padded

_SCAN = 1024
"""Tokens that the kernel of tiles looks at together."""
_MOST_PART_BYTES = 32 << 20
"""Of partial results: where they would be more, one program sums all parts of its tile."""
SPLIT = 1024
"""Positions of a part of the context in steps whose parts are the same in all steps."""


class PrefillTiling(NamedTuple):
    """Sizes of the attention kernel for a shape of model and step."""

    block_m: int
    """Queries (token, head of the group) of a program."""
    block_n: int
    """Positions of an iteration."""
    num_warps: int
    num_stages: int
    split: int = 0
    """Positions of a part of the context, a multiple of `block_n`: parts are summed alone, and then
    together in their order. Scores are masked in all of them. 0: the context is one part, where
    positions that all queries see have a loop of their own, without masks."""

    def heads(self, group: int) -> int:
        """Query heads of a tile, of `group` that share a kv head."""
        return min(group, self.block_m)

    def tokens(self, group: int) -> int:
        """Most tokens of a tile."""
        return self.block_m // self.heads(group)


def prefill_tiling(
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    storage: str,
    device: torch.device,
) -> PrefillTiling:
    """Sizes for a step of `tokens`; the same for the same arguments.

    Heads of usual width get 128 queries, two warp groups of Hopper, or 64, the least that a warp
    group multiplies. 64 queries read keys and values faster than the L2 cache gives them: 16 KiB
    for half a million multiplications, 0.14 us of a multiprocessor at its peak, 15 TB/s together.
    They pay only where 128 would leave more than a quarter of the device idle.

    Of the stages one is for the block table, the others hold keys and values. None of these spills
    registers.
    """
    small = any_tiling(head_dim, dtype, storage)
    if dtype == torch.float32 or head_dim > 128:
        return small
    wide = 128 if head_dim <= 64 else 64
    large = PrefillTiling(128, 32 if storage != "model" else wide, 8, 3)
    group = num_heads // num_kv_heads
    programs = triton.cdiv(tokens, large.tokens(group)) * num_kv_heads
    return large if 4 * programs >= 3 * num_multiprocessors(device) else small


def any_tiling(head_dim: int, dtype: torch.dtype, storage: str) -> PrefillTiling:
    """Sizes that do not depend on the step: of few queries, because a decode step has few."""
    if dtype == torch.float32:  # multiplied by the ordinary units: as small as products can be
        return PrefillTiling(16, 32 if head_dim <= 64 else 16, 8 if head_dim > 128 else 4, 1)
    quantised = storage != "model"
    if head_dim > 128:
        # From compute capability 9 on products read both operands from shared memory.
        tight = head_dim > 256 and compute_capability() < 90
        return PrefillTiling(32 if quantised else 64, 16 if tight else 32, 8, 3)
    if quantised:
        return PrefillTiling(64, 32, 8, 3)
    return PrefillTiling(64, 64 if head_dim <= 64 else 32, 4, 3)


def prefill_tiles(token_rows_T: Tensor, rows: int, tokens_of_tile: int) -> Tensor:
    """First token of each tile, then T, int32; tiles are enough for any partition into `rows` rows
    besides the null row. Equal `token_rows_T`, int64, are neighbours."""
    tokens = token_rows_T.shape[0]
    count = triton.cdiv(tokens, tokens_of_tile) + rows + 1
    out = torch.empty(count, dtype=torch.int32, device=token_rows_T.device)
    sizes = {"TOKENS": tokens_of_tile, "BLOCK": _SCAN}
    call_kernel(_tiles_kernel, (1,), token_rows_T, out, tokens, count, **sizes)
    return out


@triton.jit(do_not_specialize=["T", "COUNT"])
def _tiles_kernel(  # type: ignore[no-untyped-def]
    token_rows_ptr, tiles_ptr, T, COUNT,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the i-th token where a tile begins is written to place i, the rest are T."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    found = 0
    for start in range(0, T, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < T
        row = tl.load(token_rows_ptr + token, mask=there, other=0)
        before = tl.load(token_rows_ptr + token - 1, mask=there & (token > 0), other=-1)
        begins = (there & ((token % TOKENS == 0) | (row != before))).to(tl.int32)
        place = found + tl.cumsum(begins, axis=0) - 1
        tl.store(tiles_ptr + place, token, mask=(begins != 0) & (place < COUNT))
        found += tl.sum(begins, axis=0)
    for start in range(found, COUNT, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(tiles_ptr + place, tl.zeros_like(place) + T, mask=place < COUNT)


def prefill_attention(
    q_THD: Tensor,
    arena: Tensor,
    place: LayerPlace,
    batch: RaggedBatch,
    form: AttentionForm,
    tiles: Tensor,
    tiling: PrefillTiling,
) -> Tensor:
    """Attend to what `arena[place.position]` holds: `[T, H, E]`, finite for padded tokens too.

    Queries are rotated, in the model's dtype, and the step's own keys and values are written. Tiles
    are what `prefill_tiles` returns for `tiling.tokens(H // G)`; the scale of `form` is above 0.
    """
    t, h, d = q_THD.shape
    g, e = arena.shape[3], form.value_dim
    group = h // g
    if q_THD.stride(-1) != 1:
        q_THD = q_THD.contiguous()
    out = q_THD.new_empty(t, h, e)
    assert form.scale > 0
    views, cache = cache_views(arena[place.position], d, batch.block_size, form.storage)
    block_tables = batch.block_tables[place.group]
    latent = views.values is None
    block_d, block_rest = _pieces(d)
    heads = tiling.heads(group)
    grid: tuple[int, ...] = (tiles.shape[0] - 1, g * triton.cdiv(group, heads))
    parts, maxima, sums, partial = 1, None, None, None
    if tiling.split:
        assert not latent, "the context of latent attention is one part"
        parts = triton.cdiv(block_tables.shape[1] * batch.block_size, tiling.split)
        shape = (t, h, parts)
        apart = parts > 1 and 4 * t * h * parts * e <= _MOST_PART_BYTES
        maxima, sums = (
            q_THD.new_empty(shape if apart else 1, dtype=torch.float32) for _ in range(2)
        )
        partial = q_THD.new_empty((*shape, e) if apart else 1, dtype=torch.float32)
        grid = (*grid, parts if apart else 1)
    call_kernel(
        _attention_kernel, grid,
        q_THD, *views, form.sinks, block_tables, batch.token_rows, batch.positions, tiles, out,
        maxima, sums, partial, form.scale, q_THD.stride(0), q_THD.stride(1), block_tables.stride(0),
        parts,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, GROUP=group, HEADS=heads, E=e,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_D=block_d, BLOCK_REST=block_rest,
        BLOCK_E=padded(e), CACHE=cache, WINDOW=form.window, CHUNK=form.chunk, SOFTCAP=form.softcap,
        LATENT=latent, SPLIT=tiling.split,
    )  # fmt: skip
    if len(grid) == 3 and grid[2] > 1:
        call_kernel(
            _combine_parts, (t, h),
            maxima, sums, partial, form.sinks, batch.positions, out, form.scale, parts,
            H=h, E=e, BLOCK_E=padded(e), SPLIT=tiling.split,
            PLAIN=form.softcap == 0.0 and form.storage == "model",
        )  # fmt: skip
    return out


def _pieces(width: int) -> tuple[int, int]:
    """Powers of two, at least 16, that hold a vector: one (and 0), or two where they are fewer.

    576 are 512 + 64, 80 are 64 + 16, 64 are 64 + 0, 120 are 128 + 0.
    """
    whole, rest = padded(width), padded(width - padded(width) // 2)
    return (whole // 2, rest) if 32 <= whole // 2 < width and rest < whole // 2 else (whole, 0)


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, sinks_ptr,
    block_tables_ptr, token_rows_ptr, positions_ptr, tiles_ptr, out_ptr,
    m_ptr, l_ptr, acc_ptr, scale, q_token_stride, q_head_stride, table_stride, parts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_E: tl.constexpr,
    CACHE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    LATENT: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head and tile of its query heads); later tiles, which see more, first.

    With `SPLIT` there are as many of them as parts, of which each sums one, or one that sums all.
    """
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    G: tl.constexpr = CACHE.heads
    D: tl.constexpr = CACHE.width
    BLOCK_SIZE: tl.constexpr = CACHE.block_size
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_token = tl.load(tiles_ptr + tile)
    end_token = tl.load(tiles_ptr + tile + 1)
    if first_token >= end_token:
        return
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = tl.program_id(1) % HEAD_TILES * HEADS

    # What is beyond the tile repeats its last token and head: it loads what exists.
    m = tl.arange(0, BLOCK_M)
    token = first_token + m // HEADS
    in_group = first_head + m % HEADS
    inside = (token < end_token) & (in_group < GROUP)
    token = tl.minimum(token, end_token - 1).to(tl.int64)
    head = kv_head * GROUP + tl.minimum(in_group, GROUP - 1)
    position = tl.load(positions_ptr + token).to(tl.int32)
    earliest, latest = tl.min(position, axis=0), tl.max(position, axis=0)
    table_ptr = block_tables_ptr + tl.load(token_rows_ptr + first_token) * table_stride

    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + token * q_token_stride + head * q_head_stride
    q = tl.load(q_at[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
    if BLOCK_REST:
        rest = BLOCK_D + tl.arange(0, BLOCK_REST)
        q_rest = tl.load(q_at[:, None] + rest[None, :], mask=rest[None, :] < D, other=0.0)
    e = tl.arange(0, BLOCK_E)

    # Scores are in units of log2 once they are multiplied by `unit`. The running maximum begins at
    # a number far below all scores: what is subtracted is finite while nothing is seen.
    # A value's scale goes to its weight, for which bfloat16 has room and float16 has not.
    QUANTISED: tl.constexpr = CACHE.storage != "model"
    WIDE: tl.constexpr = QUANTISED and dtype == tl.float16
    weight_dtype: tl.constexpr = tl.bfloat16 if WIDE else dtype
    PLAIN: tl.constexpr = SOFTCAP == 0.0 and not QUANTISED
    unit = scale * 1.4426950408889634 if PLAIN else 1.0
    largest = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if SPLIT:  # of the parts before
        alone = tl.num_programs(2) == 1
        whole_largest, whole_total, whole_acc = largest, total, acc
        if sinks_ptr is not None:
            sink = load_sinks(sinks_ptr + head, inside) / unit
            whole_largest = tl.where(alone, sink, whole_largest)
            whole_total += tl.where(alone, 1.0, 0.0)
    elif sinks_ptr is not None:  # one more term of the denominator
        largest = load_sinks(sinks_ptr + head, inside) / unit
        total += 1.0

    # Positions that all queries see lie between two spans that only some of them do.
    end = latest + 1
    LIMITED: tl.constexpr = WINDOW > 0 or CHUNK > 0
    window: tl.constexpr = WINDOW if WINDOW else 1 << 30
    if LIMITED:
        first = first_seen(position, window, CHUNK)
        earliest_seen = first_seen(earliest, window, CHUNK)
        begin = earliest_seen // BLOCK_N * BLOCK_N
        shared = tl.cdiv(first_seen(latest, window, CHUNK), BLOCK_N) * BLOCK_N
    else:
        begin = 0
        shared = 0
    shared_end = tl.maximum((earliest + 1) // BLOCK_N * BLOCK_N, shared)
    ONE_LOOP: tl.constexpr = LATENT or SPLIT > 0
    FIRST_SPAN: tl.constexpr = 2 if ONE_LOOP else (0 if LIMITED else 1)
    if SPLIT:
        part_begin = tl.where(alone, 0, tl.program_id(2) * SPLIT)
        begin = tl.maximum(begin, part_begin)
        end = tl.where(alone, end, tl.minimum(end, part_begin + SPLIT))
    if ONE_LOOP:
        shared_end = begin
    for SPAN in tl.static_range(FIRST_SPAN, 3):
        MASKED = SPAN != 1
        if SPAN == 0:
            low, high = begin, tl.minimum(shared, end)
        elif SPAN == 1:
            low, high = shared, shared_end
        else:
            low, high = shared_end, end
        for start in range(low, high, BLOCK_N):
            if SPLIT:  # noqa: SIM102 - decided at compile time
                if start % SPLIT == 0:
                    whole_largest, whole_total, whole_acc = _merged(
                        whole_largest, whole_total, whole_acc, largest, total, acc, unit
                    )
                    largest = tl.full([BLOCK_M], -1e30, tl.float32)
                    total = tl.zeros([BLOCK_M], tl.float32)
                    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
            n = start + tl.arange(0, BLOCK_N)
            stored = n < end if MASKED else tl.full([BLOCK_N], True, tl.int1)
            if LIMITED and MASKED:
                stored &= n >= earliest_seen
            if BLOCK_SIZE % BLOCK_N == 0:
                block = tl.load(table_ptr + start // BLOCK_SIZE)
            else:
                block = tl.load(table_ptr + n // BLOCK_SIZE, mask=stored, other=0)
            place = n % BLOCK_SIZE
            at = vector_offset(block, kv_head, place, CACHE)

            k = load_vectors(keys_ptr, at, d, stored, D, dtype, CACHE)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if BLOCK_REST:
                k_rest = load_vectors(keys_ptr, at, rest, stored, D, dtype, CACHE)
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
            if QUANTISED:
                scales_at = scale_offset(block, kv_head, place, CACHE)
                key_scale = load_scales(key_scales_ptr, scales_at, stored)
                scores *= key_scale[None, :]
            if not PLAIN:
                scores = in_log2(scores, scale, SOFTCAP)
            if MASKED:
                seen = n[None, :] <= position[:, None]
                if LIMITED:
                    seen &= n[None, :] >= first[:, None]
                scores = tl.where(seen, scores, float("-inf"))

            larger = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp2(scores * unit - (larger * unit)[:, None])
            shrink = tl.exp2((largest - larger) * unit)
            total = total * shrink + tl.sum(weights, axis=1)
            largest = larger

            if LATENT and E == BLOCK_D:
                v = k.to(weight_dtype)
            else:
                v_ptr = keys_ptr if LATENT else values_ptr
                v = load_vectors(v_ptr, at, e, stored, E, weight_dtype, CACHE)
            if QUANTISED:
                if LATENT:
                    weights *= key_scale[None, :]
                else:
                    weights *= load_scales(value_scales_ptr, scales_at, stored)[None, :]
            acc = tl.dot(weights.to(weight_dtype), v, acc * shrink[:, None], input_precision="ieee")

    columns = (e < E)[None, :]
    if SPLIT:
        largest, total, acc = _merged(
            whole_largest, whole_total, whole_acc, largest, total, acc, unit
        )
        # Of tokens that do not see the part nothing is read.
        partly = inside & (position >= part_begin) & (tl.num_programs(2) > 1)
        cell = (token * (GROUP * G) + head) * parts + tl.program_id(2)
        tl.store(m_ptr + cell, largest, mask=partly)
        tl.store(l_ptr + cell, total, mask=partly)
        tl.store(acc_ptr + cell[:, None] * E + e[None, :], acc, mask=partly[:, None] & columns)
        inside &= alone
        total = tl.where(alone, total, 1.0)
    out_at = (out_ptr + token * (GROUP * G * E) + head * E)[:, None] + e[None, :]
    tl.store(out_at, (acc / total[:, None]).to(dtype), mask=inside[:, None] & columns)


@triton.jit
def _merged(largest, total, acc, other_largest, other_total, other_acc, unit):  # type: ignore[no-untyped-def]
    """Maxima, denominators and numerators of two parts of the context together, the first first.

    Which product is rounded before the sum is written out, so that all compilations do the same.
    """
    larger = tl.maximum(largest, other_largest)
    shrink = tl.exp2((largest - larger) * unit)
    other_shrink = tl.exp2((other_largest - larger) * unit)
    total = tl.fma(total, shrink, other_total * other_shrink)
    shrinks = tl.broadcast_to(shrink[:, None], acc.shape)
    acc = tl.fma(acc, shrinks, other_acc * other_shrink[:, None])
    return larger, total, acc


@triton.jit
def _combine_parts(  # type: ignore[no-untyped-def]
    m_ptr, l_ptr, acc_ptr, sinks_ptr, positions_ptr, out_ptr, scale, parts,
    H: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, SPLIT: tl.constexpr,
    PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the parts in their order, as a program that sums all of them."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = tl.zeros([1], tl.int32)
    e = tl.arange(0, BLOCK_E)[None, :]
    unit = scale * 1.4426950408889634 if PLAIN else 1.0
    largest = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_E], tl.float32)
    if sinks_ptr is not None:
        largest = load_sinks(sinks_ptr + head + one, one == 0) / unit
        total += 1.0
    last = tl.load(positions_ptr + token).to(tl.int32) // SPLIT
    for part in range(0, last + 1):
        cell = (token * H + head) * parts + part + one
        other = tl.load(acc_ptr + cell[:, None] * E + e, mask=e < E, other=0.0)
        largest, total, acc = _merged(
            largest, total, acc, tl.load(m_ptr + cell), tl.load(l_ptr + cell), other, unit
        )
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * H + head) * E + e, out, mask=e < E)
