"""Attention of decode steps, and paged attention as an operator of torch.

Shapes: T rows of the step, H query heads, G kv heads, E head_dim, S splits.

`decode_attention` is one kernel: norms, rotation, write to the cache and split attention. The
positions that a row sees are shared out among splits, see `split_attention.py`; the last program of
a row's kv head to be done puts them together. The new token's key and value do not go through
memory: the first split without tiles, or the last one, computes them, writes them to the slot, and
starts its softmax from them (as they would be read back, where the cache is quantised). The others
read what earlier steps wrote.

With programmatic dependent launch a program has time before its inputs are there. It asks for its
share of the weight that the next kernel reads to be brought to the L2 cache meanwhile.

`triton_paged_attention` is the operation `stepgraph::triton_paged_attention`: write, then attend,
with queries that are ready. It serves latent attention, and models that norm and rotate by
themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.attention import AttentionForm, define_paged_attention, reference_paged_attention
from ..ops.batch import LayerPlace, RaggedBatch
from .kernel_calls import (
    call_kernel,
    is_aligned,
    let_dependents_start,
    num_multiprocessors,
    prefetch,
    wait_for_inputs,
)
from .prefill_attention import prefill_attention, prefill_tiles, prefill_tiling
from .quantised import cache_views, store_vectors
from .split_attention import (
    NO_WINDOW,
    Partials,
    Tile,
    attend_run,
    choose_splits,
    choose_tile,
    combine_as_last,
    combine_splits,
    first_seen,
    in_log2,
    load_sinks,
    new_partials,
    padded,
    split_tiles,
    store_partials,
    table_entries,
)
from .store import (
    HeadRotation,
    load_norm,
    normed_and_turned,
    reciprocal_of_heads,
    reference_rotated,
    store_keys_and_values,
    tempered,
)

_MOST_NEAR_BYTES = 16 << 20
"""Of the next weight that are brought near: a part of the cache (50 MiB) that is not yet read from
when the next kernel needs it."""


@triton.jit(do_not_specialize=["near", "share"])
def _decode_attention(  # type: ignore[no-untyped-def]
    qkv_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, q_norm_ptr, k_norm_ptr,
    cos_ptr, sin_ptr, sinks_ptr, slots_ptr, tables_ptr, token_rows_ptr, positions_ptr,
    acc_ptr, m_ptr, l_ptr, counters_ptr, out_ptr, weight_ptr, table_stride, window,
    eps, scale, near, share,
    GROUP: tl.constexpr, CACHE: tl.constexpr, SOFTCAP: tl.constexpr, CHUNK: tl.constexpr,
    OFFSET_NORMS: tl.constexpr, ALL_HEADS: tl.constexpr, FLOOR: tl.constexpr,
    TEMPERATURE: tl.constexpr, BLOCK_E: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    COMBINED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (g, s, t): kv head g of row t, split s."""
    G: tl.constexpr = CACHE.heads
    E: tl.constexpr = CACHE.width
    g, split, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    i = tl.arange(0, BLOCK_E)
    h = tl.arange(0, HEADS)
    inside = h < GROUP
    q_weights, k_weights = None, None
    if q_norm_ptr is not None:
        q_heads = g * GROUP + tl.minimum(h, GROUP - 1)
        q_weights = load_norm(q_norm_ptr, q_heads, E, BLOCK_E, ALL_HEADS)
        k_head = g + tl.zeros([1], tl.int32)
        k_weights = load_norm(k_norm_ptr, k_head, E, BLOCK_E, ALL_HEADS)
    sink = 0.0
    if sinks_ptr is not None:
        sink = load_sinks(sinks_ptr + g * GROUP + h, inside)
    if PDL and weight_ptr is not None:
        program = (t * splits + split) * G + g
        start = tl.minimum(program.to(tl.int64) * share, near - share)
        prefetch(weight_ptr.to(tl.int64) + start, share, PDL)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    position = tl.load(positions_ptr + t).to(tl.int32)
    first = first_seen(position, window, CHUNK)
    begin, behind, owner = split_tiles(first, position, split, splits, TILE)
    head = t.to(tl.int64) * (G * GROUP) + g * GROUP
    at = (head + h) * splits + split
    if split <= owner:
        table_ptr = tables_ptr + tl.load(token_rows_ptr + t) * table_stride
        block = table_entries(table_ptr, first, position, begin, CACHE.block_size, TILE)
        pair = i % (E // 2)
        cos = tl.load(cos_ptr + t * (E // 2) + pair, mask=i < E, other=0.0)
        sin = tl.load(sin_ptr + t * (E // 2) + pair, mask=i < E, other=0.0)
        row = t.to(tl.int64) * ((GROUP + 2) * G * E)
        q_reciprocal = None
        if ALL_HEADS:
            q_reciprocal = reciprocal_of_heads(qkv_ptr, row, eps, GROUP * G * E)
        q = normed_and_turned(
            qkv_ptr, row + (g * GROUP + h) * E, inside, q_weights, q_reciprocal, cos, sin, eps, E,
            BLOCK_E, OFFSET_NORMS,
        )  # fmt: skip
        q = tempered(q, position, FLOOR, TEMPERATURE)
        m = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, BLOCK_E], tl.float32)
        if split == owner:
            one = tl.full([1], 1, tl.int1)
            k_start = row + (GROUP * G + g) * E + tl.zeros([1], tl.int64)
            k_reciprocal = None
            if ALL_HEADS:
                k_reciprocal = reciprocal_of_heads(qkv_ptr, row + GROUP * G * E, eps, G * E)
            key = normed_and_turned(
                qkv_ptr, k_start, one, k_weights, k_reciprocal, cos, sin, eps, E, BLOCK_E,
                OFFSET_NORMS,
            ).to(tl.float32)  # fmt: skip
            v_at = (k_start + G * E)[:, None] + i[None, :]
            value = tl.load(qkv_ptr + v_at, mask=(i < E)[None, :], other=0.0).to(tl.float32)
            slot = tl.load(slots_ptr + t) + tl.zeros([1], tl.int64)
            key = store_vectors(keys_ptr, key_scales_ptr, key, slot, g, one, CACHE)
            value = store_vectors(values_ptr, value_scales_ptr, value, slot, g, one, CACHE)
            m = in_log2(tl.sum(q.to(tl.float32) * key, axis=1), scale, SOFTCAP)
            total += 1.0
            acc += value
            if sinks_ptr is not None:
                # One more term of the denominator, in the one split that has the new token.
                top = tl.maximum(m, sink)
                shrink = tl.exp2(m - top)
                total = shrink + tl.exp2(sink - top)
                acc *= shrink[:, None]
                m = top
        m, total, acc = attend_run(
            q, None, m, total, acc, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
            table_ptr, block, g, first, position, begin, behind, scale, E, CACHE, SOFTCAP, BLOCK_E,
            1, TILE,
        )  # fmt: skip
        if counters_ptr is None:  # there is one split
            store_partials(acc_ptr, m_ptr, l_ptr, out_ptr, m, total, acc, at, inside, E, BLOCK_E)
        elif owner == 0:
            store_partials(
                acc_ptr, m_ptr, l_ptr, out_ptr, m, total, acc, head + h, inside, E, BLOCK_E
            )
        else:
            store_partials(acc_ptr, m_ptr, l_ptr, None, m, total, acc, at, inside, E, BLOCK_E)
            combine_as_last(
                acc_ptr, m_ptr, l_ptr, counters_ptr + t * G + g, out_ptr, head, splits, owner + 1,
                GROUP, E, BLOCK_E, COMBINED,
            )  # fmt: skip


def decode_attention(
    qkv_TN: Tensor,
    arena: Tensor,
    place: LayerPlace,
    rotation: HeadRotation,
    batch: RaggedBatch,
    form: AttentionForm,
    partials: Partials,
    counters: Tensor | None,
    attended_TN: Tensor,
    *,
    next_weight: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Write the step's keys and values, and attend.

    Args:
        qkv_TN: queries, keys and values of each row, `[T, (H + 2G) * E]`, contiguous.
        arena: all layers' cache.
        place: this one's part of it.
        rotation: norms, angles of the rows, and the temperature.
        batch: uniform, one token a row: none sees another's key. Needs no `read_blocks`.
        form: what attention this is.
        partials: workspace of T rows, with as many splits as the launch.
        counters: `new_counters`, which are zeros before and after; to combine more than one split.
            No two launches that share them may run at the same time.
        attended_TN: written, `[T, H * E]` in the dtype of `qkv_TN`, contiguous.
        next_weight: that the next kernel reads, contiguous: programs ask for its first 16 MiB to be
            brought to the L2 cache while they wait for what earlier kernels write.
        tile: sizes; None: what `choose_tile` returns.
    """
    assert batch.tokens_per_row == 1
    kv, block_tables = arena[place.position], batch.block_tables[place.group]
    tokens, features = qkv_TN.shape
    kv_heads, head_dim = kv.shape[2], form.value_dim
    assert block_tables.is_contiguous()
    group = features // head_dim // kv_heads - 2
    views, cache = cache_views(kv, head_dim, batch.block_size, form.storage)
    tile = tile or choose_tile(group, head_dim, head_dim, views.keys.element_size())
    splits = partials.m.shape[2]
    near = 0
    if next_weight is not None and is_aligned(next_weight):
        near = min(next_weight.nbytes, _MOST_NEAR_BYTES) // 16 * 16
        next_weight = next_weight.view(torch.uint8)  # not every device knows float8
    share = triton.cdiv(near, 16 * tokens * splits * kv_heads) * 16
    combined = 0
    if splits == 1:
        counters = None
    else:
        assert counters is not None
        assert counters.numel() >= tokens * kv_heads
        # Eight numbers a thread of each of the four splits that are in flight.
        threads = 32 * tile.num_warps
        combined = min(triton.next_power_of_2(group), max(1, 8 * threads // padded(head_dim)))
    call_kernel(
        _decode_attention, (kv_heads, splits, tokens),
        qkv_TN, *views, rotation.q_norm, rotation.k_norm, rotation.cos, rotation.sin,
        form.sinks, batch.slots[place.group], block_tables, batch.token_rows, batch.positions,
        *partials, counters, attended_TN, next_weight if near else None,
        block_tables.shape[1], form.window or NO_WINDOW, rotation.eps, form.scale, near, share,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        GROUP=group, CACHE=cache, SOFTCAP=form.softcap, CHUNK=form.chunk, **rotation.constants,
        BLOCK_E=padded(head_dim), HEADS=max(tile.heads, triton.next_power_of_2(group)),
        TILE=tile.positions, COMBINED=combined,
    )  # fmt: skip


def reference_decode_attention(
    qkv_TN: Tensor,
    arena: Tensor,
    place: LayerPlace,
    rotation: HeadRotation,
    batch: RaggedBatch,
    form: AttentionForm,
) -> Tensor:
    """What `decode_attention` computes, in plain torch: `[T, H * E]`."""
    kv_heads, head_dim = arena.shape[3], form.value_dim
    qkv = qkv_TN.unflatten(1, (-1, head_dim))
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    q, k = reference_rotated(q, k, rotation, batch.positions)
    return reference_paged_attention(q, k, v, arena, place, batch, form).flatten(1)


# Queries that are ready ---------------------------------------------------------------------------


@triton.jit
def _decode_ready_attention(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, sinks_ptr, tables_ptr,
    token_rows_ptr, positions_ptr, acc_ptr, m_ptr, l_ptr, out_ptr, q_stride_T, q_stride_H,
    table_stride, window, scale,
    GROUP: tl.constexpr, V: tl.constexpr, CACHE: tl.constexpr, SOFTCAP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (g and a tile of its heads, s, t): row t, split s; all keys are written."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    g, split, t = tl.program_id(0) // HEAD_TILES, tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    position = tl.load(positions_ptr + t).to(tl.int32)
    first = first_seen(position, window, CHUNK)
    begin, behind, _ = split_tiles(first, position + 1, split, splits, TILE)
    h = (tl.program_id(0) % HEAD_TILES) * HEADS + tl.arange(0, HEADS)
    inside = h < GROUP
    at = ((t.to(tl.int64) * (CACHE.heads * GROUP) + g * GROUP + h) * splits) + split
    m = tl.full([HEADS], float("-inf"), tl.float32)
    if begin == behind:
        tl.store(m_ptr + at, m, mask=inside)
        tl.store(l_ptr + at, tl.zeros([HEADS], tl.float32), mask=inside)
    else:
        table_ptr = tables_ptr + tl.load(token_rows_ptr + t) * table_stride
        block = table_entries(table_ptr, first, position + 1, begin, CACHE.block_size, TILE)
        i = tl.arange(0, BLOCK_V)
        rest = tl.arange(0, BLOCK_REST)
        q_at = q_ptr + t.to(tl.int64) * q_stride_T + (g * GROUP + h)[:, None] * q_stride_H
        q = tl.load(q_at + i[None, :], mask=inside[:, None] & (i < V)[None, :], other=0.0)
        q_rest = None
        if values_ptr is None:
            mask = inside[:, None] & (V + rest < CACHE.width)[None, :]
            q_rest = tl.load(q_at + V + rest[None, :], mask=mask, other=0.0)
        total = tl.zeros([HEADS], tl.float32)
        if sinks_ptr is not None:
            # One more term of the denominator, in the split that is never empty.
            m = tl.where(split == 0, load_sinks(sinks_ptr + g * GROUP + h, inside), m)
            total += tl.where(split == 0, 1.0, 0.0)
        m, total, acc = attend_run(
            q, q_rest, m, total, tl.zeros([HEADS, BLOCK_V], tl.float32),
            keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, block, g,
            first, position + 1, begin, behind, scale, V, CACHE, SOFTCAP, BLOCK_V, BLOCK_REST, TILE,
        )  # fmt: skip
        store_partials(acc_ptr, m_ptr, l_ptr, out_ptr, m, total, acc, at, inside, V, BLOCK_V)


def decode_ready_attention(
    q_THD: Tensor,
    arena: Tensor,
    place: LayerPlace,
    batch: RaggedBatch,
    form: AttentionForm,
    splits: int,
    tile: Tile,
) -> Tensor:
    """Attend to keys that are all written, one token a row: `[T, H, E]`. The elements of a query
    are contiguous."""
    kv, block_tables = arena[place.position], batch.block_tables[place.group]
    tokens, heads, head_dim = q_THD.shape
    kv_heads, value_dim = kv.shape[2], form.value_dim
    group = heads // kv_heads
    views, cache = cache_views(kv, head_dim, batch.block_size, form.storage)
    partials = new_partials(tokens, heads, splits, value_dim, q_THD.device)
    out = q_THD.new_empty(tokens, heads, value_dim)
    call_kernel(
        _decode_ready_attention, (kv_heads * triton.cdiv(group, tile.heads), splits, tokens),
        q_THD, *views, form.sinks, block_tables, batch.token_rows, batch.positions, *partials,
        out if splits == 1 else None, q_THD.stride(0), q_THD.stride(1), block_tables.stride(0),
        form.window or NO_WINDOW, form.scale,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        GROUP=group, V=value_dim, CACHE=cache, SOFTCAP=form.softcap, CHUNK=form.chunk,
        BLOCK_V=padded(value_dim), BLOCK_REST=padded(head_dim - value_dim), HEADS=tile.heads,
        TILE=tile.positions,
    )  # fmt: skip
    if splits > 1:
        combine_splits(partials, out)
    return out


def triton_paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor | None,
    v_TGE: Tensor | None,
    arena: Tensor,
    place: LayerPlace,
    batch: RaggedBatch,
    form: AttentionForm,
) -> Tensor:
    """Arguments and result as in `reference_paged_attention`: `[T, H, E]`.

    A batch of one token a row is attended to as a decode step, any other one as a prefill step.
    Each token costs what its own length (or window) asks for, whatever `read_blocks` is. No
    argument is read by the host. Raises ValueError for quantised blocks whose scales stand at odd
    addresses.
    """
    if q_THD.stride(-1) != 1:
        q_THD = q_THD.contiguous()
    (tokens, heads, head_dim), device = q_THD.shape, q_THD.device
    kv_heads, slots_T, storage = arena.shape[3], batch.slots[place.group], form.storage
    if k_TGD is not None:
        at = arena, place.position, slots_T, batch.block_size, storage
        store_keys_and_values(k_TGD, v_TGE, *at)
    if batch.tokens_per_row != 1:
        tiling = prefill_tiling(tokens, heads, kv_heads, head_dim, q_THD.dtype, storage, device)
        tokens_of_tile = tiling.tokens(heads // kv_heads)
        tiles = prefill_tiles(batch.token_rows, batch.rows.shape[0], tokens_of_tile)
        return prefill_attention(q_THD, arena, place, batch, form, tiles, tiling)
    tile = choose_tile(heads // kv_heads, head_dim, form.value_dim, arena.element_size())
    reach = (batch.read_blocks * batch.block_size, form.window, form.chunk)
    longest = min(filter(None, reach))
    splits = choose_splits(tokens, kv_heads, longest, num_multiprocessors(device), tile.positions)
    return decode_ready_attention(q_THD, arena, place, batch, form, splits, tile)


paged_attention_on_gpu = define_paged_attention("triton_paged_attention", triton_paged_attention)
"""`triton_paged_attention` as an operation that torch.compile does not look into."""
