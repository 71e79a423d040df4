"""Keys and values of a step's tokens into their slots of the cache, plain or on the way there.

Two kernels. `store_keys_and_values` takes keys and values as they are to be cached.
`rotate_and_store` takes the output of the fused projection, `[T, (H + 2G) * E]`, norms queries and
keys where the model does, rotates both, writes keys and values to the cache and returns the
queries: four kernels and four passes over memory in one.

Shapes: T tokens, H query heads, G kv heads, E head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..ops.attention import AttentionForm
from ..ops.batch import LayerPlace, RaggedBatch
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .quantised import cache_views, store_vectors
from .rotated_heads import (
    HeadRotation,
    load_norm,
    normed_and_turned,
    reciprocal_of_heads,
    tempered,
)

__all__ = [
    "rotate_and_store",
    "store_keys_and_values",
]

TILE = 2048
"""Elements of a program's heads: few enough that one warp, or four, keep them in registers."""


def store_keys_and_values(
    k_TGE: Tensor,
    v_TGE: Tensor | None,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_size: int,
    storage: str,
) -> None:
    """Write keys `[T, G, E]` and values (None where the arena has one side) to `arena[layer]`.

    `slots_T` is int64; padded tokens name slots of the null block, which all of them may write.
    Raises ValueError where `cache_views` does.
    """
    t, g, e = k_TGE.shape
    k_TGE = _dense_vectors(k_TGE)
    v_TGE = None if v_TGE is None else _dense_vectors(v_TGE)
    views = cache_views(arena[layer], e, block_size, storage)
    assert (views.values is None) == (v_TGE is None), "as many sides as tensors"
    heads, warps = _heads_of_program(g, e)
    call_kernel(
        _store_kernel,
        (t, triton.cdiv(g, heads)),
        k_TGE,
        v_TGE,
        slots_T,
        *views,
        k_TGE.stride(0),
        k_TGE.stride(1),
        0 if v_TGE is None else v_TGE.stride(0),
        0 if v_TGE is None else v_TGE.stride(1),
        G=g,
        E=e,
        HEADS=heads,
        BLOCK_E=triton.next_power_of_2(e),
        BLOCK_SIZE=block_size,
        STORAGE=storage,
        num_warps=warps,
    )


def rotate_and_store(
    qkv_TN: Tensor,
    arena: Tensor,
    place: LayerPlace,
    rotation: HeadRotation,
    batch: RaggedBatch,
    form: AttentionForm,
) -> Tensor:
    """Norm (if any) and rotate queries and keys, cache keys and values, return the queries
    `[T, H, E]`.

    Args:
        qkv_TN: `[T, (H + 2G) * E]`, contiguous: all query heads, then key heads, then value heads.
        arena: all layers' cache; keys and values go to `arena[place.position]`.
        place: the layer's.
        rotation: norms, angles and the temperature.
        batch: its write index and positions are what counts.
        form: storage and E (its value_dim) are what counts.
    """
    tokens, g, e = qkv_TN.shape[0], arena.shape[3], form.value_dim
    h = qkv_TN.shape[1] // e - 2 * g
    assert qkv_TN.is_contiguous()
    assert (rotation.q_norm is None) == (rotation.k_norm is None)
    out = qkv_TN.new_empty(tokens, h, e)
    heads, warps = _heads_of_program(max(h, g), e)
    call_kernel(
        _rotate_and_store_kernel,
        (tokens, triton.cdiv(h, heads) + triton.cdiv(g, heads)),
        qkv_TN,
        rotation.cos,
        rotation.sin,
        batch.slots[place.group],
        batch.positions,
        rotation.q_norm,
        rotation.k_norm,
        out,
        *cache_views(arena[place.position], e, batch.block_size, form.storage),
        rotation.eps,
        H=h,
        G=g,
        E=e,
        HEADS=heads,
        BLOCK_E=triton.next_power_of_2(e),
        BLOCK_SIZE=batch.block_size,
        STORAGE=form.storage,
        **rotation.constants,
        num_warps=warps,
    )
    return out


def _dense_vectors(x: Tensor) -> Tensor:
    """With its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads_of_program(heads: int, head_dim: int) -> tuple[int, int]:
    """Heads that a program takes, a power of two, and its warps (16 elements a thread)."""
    width = triton.next_power_of_2(head_dim)
    count = max(1, min(triton.next_power_of_2(heads), TILE // width))
    return count, 4 if count * width > 1024 else 1


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, slots_ptr,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of heads)."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slots = tl.load(slots_ptr + token) + tl.zeros_like(head)
    e = tl.arange(0, BLOCK_E)
    there = head < G
    inside = there[:, None] & (e < E)[None, :]
    k_at = k_ptr + token * k_token_stride + head[:, None] * k_head_stride + e[None, :]
    k = tl.load(k_at, mask=inside, other=0.0)
    store_vectors(keys_ptr, key_scales_ptr, k, slots, head, there, G, E, BLOCK_SIZE, STORAGE)
    if v_ptr is not None:
        v_at = v_ptr + token * v_token_stride + head[:, None] * v_head_stride + e[None, :]
        v = tl.load(v_at, mask=inside, other=0.0)
        store_vectors(
            values_ptr, value_scales_ptr, v, slots, head, there, G, E, BLOCK_SIZE, STORAGE
        )


@triton.jit
def _rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr, q_norm_ptr, k_norm_ptr, out_ptr,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
    eps,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr,
    OFFSET_NORMS: tl.constexpr, ALL_HEADS: tl.constexpr, FLOOR: tl.constexpr,
    TEMPERATURE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of heads): tiles of queries first, then tiles of keys and values."""
    Q_TILES: tl.constexpr = (H + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    i = tl.arange(0, BLOCK_E)
    weights, weights_opposite, reciprocal = None, None, None
    if q_norm_ptr is not None:
        norm_ptr, first, heads = q_norm_ptr, tile * HEADS, H
        if tile >= Q_TILES:
            norm_ptr, first, heads = k_norm_ptr, (tile - Q_TILES) * HEADS, G
        normed_heads = tl.minimum(first + tl.arange(0, HEADS), heads - 1)
        weights, weights_opposite = load_norm(norm_ptr, normed_heads, E, BLOCK_E, ALL_HEADS)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    angle = token * (E // 2) + i % (E // 2)
    cos = tl.load(cos_ptr + angle, mask=i < E, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=i < E, other=0.0)
    row = token * ((H + 2 * G) * E)
    if tile < Q_TILES:
        head = tile * HEADS + tl.arange(0, HEADS)
        there = head < H
        if ALL_HEADS:
            reciprocal = reciprocal_of_heads(qkv_ptr, row, eps, H * E)
        q = normed_and_turned(
            qkv_ptr, row + head * E, there, weights, weights_opposite, reciprocal, cos, sin, eps,
            E, BLOCK_E, OFFSET_NORMS,
        )  # fmt: skip
        if FLOOR > 0:
            q = tempered(q, tl.load(positions_ptr + token), FLOOR, TEMPERATURE)
        out_at = out_ptr + token * (H * E) + head[:, None] * E + i[None, :]
        tl.store(out_at, q, mask=there[:, None] & (i < E)[None, :])
    else:
        head = (tile - Q_TILES) * HEADS + tl.arange(0, HEADS)
        there = head < G
        slots = tl.load(slots_ptr + token) + tl.zeros_like(head)
        if ALL_HEADS:
            reciprocal = reciprocal_of_heads(qkv_ptr, row + H * E, eps, G * E)
        k = normed_and_turned(
            qkv_ptr, row + (H + head) * E, there, weights, weights_opposite, reciprocal, cos, sin,
            eps, E, BLOCK_E, OFFSET_NORMS,
        )  # fmt: skip
        store_vectors(keys_ptr, key_scales_ptr, k, slots, head, there, G, E, BLOCK_SIZE, STORAGE)
        v_at = qkv_ptr + row + (H + G + head)[:, None] * E + i[None, :]
        v = tl.load(v_at, mask=there[:, None] & (i < E)[None, :], other=0.0)
        store_vectors(
            values_ptr, value_scales_ptr, v, slots, head, there, G, E, BLOCK_SIZE, STORAGE
        )
