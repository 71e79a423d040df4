"""Decode attention of queries that are ready, over keys and values that are all written.

For latent attention and for models that norm and rotate by themselves. See `split_attention.py`.

Paged attention in Triton, the operation `stepgraph::triton_paged_attention`: write, then attend.

The reference is `ops/attention.reference_paged_attention`, whose signature this has. A batch of one
token a row is attended to as a decode step, any other one as a prefill step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..ops.attention import AttentionForm, define_paged_attention
from ..ops.batch import LayerPlace, RaggedBatch
from .kernel_calls import call_kernel, let_dependents_start, num_multiprocessors, wait_for_inputs
from .prefill_attention import prefill_attention, prefill_tiles, prefill_tiling
from .quantised import cache_views, fp8_is_native
from .split_attention import (
    NO_WINDOW,
    Partials,
    Tile,
    attend_run,
    choose_splits,
    choose_tile,
    combine_splits,
    first_seen,
    load_sinks,
    new_partials,
    padded,
    split_tiles,
    store_partials,
    table_entries,
)
from .store import store_keys_and_values

__all__ = [
    "decode_ready_attention",
    "paged_attention_on_gpu",
    "triton_paged_attention",
]


@triton.jit
def _decode_ready_attention(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, sinks_ptr, tables_ptr,
    token_rows_ptr, positions_ptr, acc_ptr, m_ptr, l_ptr, out_ptr, q_stride_T, q_stride_H,
    table_stride, window, scale,
    GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr,
    SOFTCAP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
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
    at = ((t.to(tl.int64) * (G * GROUP) + g * GROUP + h) * splits) + split
    m = tl.full([HEADS], float("-inf"), tl.float32)
    if begin == behind:
        tl.store(m_ptr + at, m, mask=inside)
        tl.store(l_ptr + at, tl.zeros([HEADS], tl.float32), mask=inside)
    else:
        table_ptr = tables_ptr + tl.load(token_rows_ptr + t) * table_stride
        block = table_entries(table_ptr, first, position + 1, begin, BLOCK_SIZE, TILE)
        i = tl.arange(0, BLOCK_V)
        rest = tl.arange(0, BLOCK_REST)
        q_at = q_ptr + t.to(tl.int64) * q_stride_T + (g * GROUP + h)[:, None] * q_stride_H
        q = tl.load(q_at + i[None, :], mask=inside[:, None] & (i < V)[None, :], other=0.0)
        q_rest = None
        if values_ptr is None:
            mask = inside[:, None] & (V + rest < D)[None, :]
            q_rest = tl.load(q_at + V + rest[None, :], mask=mask, other=0.0)
        total = tl.zeros([HEADS], tl.float32)
        if sinks_ptr is not None:
            # One more term of the denominator, in the split that is never empty.
            m = tl.where(split == 0, load_sinks(sinks_ptr + g * GROUP + h, inside), m)
            total += tl.where(split == 0, 1.0, 0.0)
        m, total, acc = attend_run(
            q, q_rest, m, total, tl.zeros([HEADS, BLOCK_V], tl.float32),
            keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, block, g,
            first, position + 1, begin, behind, scale, G, D, V, BLOCK_SIZE, STORAGE, NATIVE_FP8,
            SOFTCAP, BLOCK_V, BLOCK_REST, TILE,
        )  # fmt: skip
        store_partials(acc_ptr, m_ptr, l_ptr, out_ptr, m, total, acc, at, inside, V, BLOCK_V)


def decode_ready_attention(
    q_THD: Tensor,
    arena: Tensor,
    place: LayerPlace,
    batch: RaggedBatch,
    form: AttentionForm,
    partials: Partials,
    *,
    attended_TN: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Find the partials of one token a row. Arguments as in `reference_paged_attention`, which
    writes besides, and in `decode_attention`; the elements of a query are contiguous.
    """
    kv, block_tables = arena[place.position], batch.block_tables[place.group]
    tokens, heads, head_dim = q_THD.shape
    kv_heads, value_dim = kv.shape[2], form.value_dim
    views = cache_views(kv, head_dim, batch.block_size, form.storage)
    group = heads // kv_heads
    tile = tile or choose_tile(group, head_dim, value_dim, views.keys.element_size())
    only = attended_TN if partials.m.shape[2] == 1 else None
    call_kernel(
        _decode_ready_attention,
        (kv_heads * triton.cdiv(group, tile.heads), partials.m.shape[2], tokens),
        q_THD, *views, form.sinks, block_tables, batch.token_rows, batch.positions, *partials, only,
        q_THD.stride(0), q_THD.stride(1), block_tables.stride(0), form.window or NO_WINDOW,
        form.scale,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        GROUP=group, G=kv_heads, D=head_dim, V=value_dim, BLOCK_SIZE=batch.block_size,
        STORAGE=form.storage, NATIVE_FP8=fp8_is_native(), SOFTCAP=form.softcap,
        CHUNK=form.chunk, BLOCK_V=padded(value_dim), BLOCK_REST=padded(head_dim - value_dim),
        HEADS=tile.heads, TILE=tile.positions,
    )  # fmt: skip
    if attended_TN is not None and only is None:
        combine_splits(partials, attended_TN)


def triton_paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor | None,
    arena: Tensor,
    place: LayerPlace,
    batch: RaggedBatch,
    form: AttentionForm,
) -> Tensor:
    """Arguments and result as in `reference_paged_attention`: `[T, H, E]`.

    Each token costs what its own length (or window) asks for, whatever `read_blocks` is. No
    argument is read by the host. Raises ValueError for quantised blocks whose scales stand at odd
    addresses.
    """
    if q_THD.stride(-1) != 1:
        q_THD = q_THD.contiguous()
    slots_T = batch.slots[place.group]
    store_keys_and_values(
        k_TGD, v_TGE, arena, place.position, slots_T, batch.block_size, form.storage
    )
    if batch.tokens_per_row == 1:
        return _decode(q_THD, arena, place, batch, form)
    tokens, heads, head_dim = q_THD.shape
    group = heads // k_TGD.shape[1]
    tiling = prefill_tiling(
        tokens, heads, k_TGD.shape[1], head_dim, q_THD.dtype, form.storage, q_THD.device
    )
    tiles = prefill_tiles(batch.token_rows, batch.rows.shape[0], tiling.tokens(group))
    return prefill_attention(q_THD, arena, place, batch, form, tiles, tiling)


def _decode(
    q_THD: Tensor, arena: Tensor, place: LayerPlace, batch: RaggedBatch, form: AttentionForm
) -> Tensor:
    """One token a row, whose key and value are written."""
    tokens, heads, head_dim = q_THD.shape
    kv_heads, device = arena.shape[3], q_THD.device
    tile = choose_tile(heads // kv_heads, head_dim, form.value_dim, arena.element_size())
    longest = batch.read_blocks * batch.block_size
    for most in filter(None, (form.window, form.chunk)):
        longest = min(longest, most)
    splits = choose_splits(tokens, kv_heads, longest, num_multiprocessors(device), tile.positions)
    partials = new_partials(tokens, heads, splits, form.value_dim, device)
    out = q_THD.new_empty(tokens, heads * form.value_dim)
    decode_ready_attention(q_THD, arena, place, batch, form, partials, attended_TN=out, tile=tile)
    return out.view(tokens, heads, form.value_dim)


paged_attention_on_gpu = define_paged_attention("triton_paged_attention", triton_paged_attention)
"""`triton_paged_attention` as an operation that torch.compile does not look into."""
