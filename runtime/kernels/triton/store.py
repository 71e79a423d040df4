"""Norm, rotation and storage of heads: keys and values of a step's tokens into their cache slots.

`store_keys_and_values` takes keys and values as they are to be cached. `rotate_and_store` takes the
output of the fused projection, `[T, (H + 2G) * E]`, norms queries and keys where the model does,
rotates both, writes keys and values to the cache and returns the queries: four kernels and four
passes over memory in one. Decode steps use the same device functions (`decode_attention.py`).

Shapes: T tokens, H query heads, G kv heads, E head_dim, N vectors. Numbers are rounded to the dtype
of memory where the model rounds them (`ops/norms.RMSNorm`, `ops/rotation.rotate`): after the norm,
after the rotation, and after the temperature of queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..ops.attention import AttentionForm, AttentionTemperature
from ..ops.attention import tempered as tempered_queries
from ..ops.batch import LayerPlace, RaggedBatch
from ..ops.rotation import rotate
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import GpuNorm, reference_norm
from .quantised import cache_views, store_vectors
from .rowwise import normed

_TILE = 2048
"""Elements of a program's heads: few enough that one warp, or four, keep them in registers."""
_BLOCK = tl.constexpr(1024)
"""Elements of all heads that are summed up at a time."""


class HeadRotation(NamedTuple):
    """Norm and rotation of a layer's queries and keys."""

    q_norm: Tensor | None
    """Weights `[E]` of the norm of queries; None: there is none, of keys neither. `[H * E]` if all
    heads of a token are normed together, and the weights of keys are `[G * E]`."""
    k_norm: Tensor | None
    eps: float
    """Of these norms."""
    offset_norms: bool
    """They multiply by one plus their weight, see `ops/norms.py`."""
    cos: Tensor
    """float32 `[T, E / 2]`, of the angles of the tokens' positions; a pair is (i, i + E / 2)."""
    sin: Tensor
    temperature: AttentionTemperature | None = None
    """Of queries, after the rotation."""

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        floor, scale = self.temperature or (0, 0.0)
        norms = {"OFFSET_NORMS": self.offset_norms, "ALL_HEADS": self.all_heads}
        return {**norms, "FLOOR": floor, "TEMPERATURE": scale}

    @property
    def all_heads(self) -> bool:
        """Whether all heads of a token are normed together."""
        return self.q_norm is not None and self.q_norm.shape[0] != 2 * self.cos.shape[1]


@triton.jit
def load_norm(  # type: ignore[no-untyped-def]
    norm_ptr, heads, E: tl.constexpr, BLOCK_E: tl.constexpr, ALL_HEADS: tl.constexpr
):  # fmt: skip
    """Weights of the norm of `heads` [N], and weights of the elements opposite, in float32.

    `[1, BLOCK_E]`, or `[N, BLOCK_E]` if all heads are normed together; heads outside of the model
    must be forced into its range.
    """
    i = tl.arange(0, BLOCK_E)
    opposite = tl.where(i < E // 2, i + E // 2, i - E // 2)
    start = heads[:, None] * E if ALL_HEADS else 0
    mask = (i < E)[None, :]
    weights = tl.load(norm_ptr + start + i[None, :], mask=mask, other=0.0).to(tl.float32)
    weights_opposite = tl.load(norm_ptr + start + opposite[None, :], mask=mask, other=0.0)
    return weights, weights_opposite.to(tl.float32)


@triton.jit
def reciprocal_of_heads(x_ptr, start, eps, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the root mean square of the N elements of all heads of a token."""
    i = tl.arange(0, _BLOCK)
    squares = tl.zeros([_BLOCK], tl.float32)
    for first in tl.static_range(0, N, _BLOCK):  # all loads are in flight together
        x = tl.load(x_ptr + start + first + i, mask=first + i < N, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, axis=0) / N + eps)


@triton.jit
def normed_and_turned(  # type: ignore[no-untyped-def]
    x_ptr, starts, inside, weights, reciprocal, cos, sin, eps, E: tl.constexpr,
    BLOCK_E: tl.constexpr, OFFSET_NORMS: tl.constexpr,
):  # fmt: skip
    """Vectors `[N, BLOCK_E]` that begin at `starts`, normed if there are weights, and rotated.

    `load_norm` returns the weights; `reciprocal` is of all heads, None: of each vector. The pair of
    element i is i +- E / 2: it is loaded a second time, in the order in which it is needed. In the
    dtype of memory, zeros in the padding.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK_E)
    opposite = tl.where(i < E // 2, i + E // 2, i - E // 2)
    mask = inside[:, None] & (i < E)[None, :]
    x = tl.load(x_ptr + starts[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + starts[:, None] + opposite[None, :], mask=mask, other=0.0).to(tl.float32)
    if weights is not None:
        if reciprocal is None:
            reciprocal = tl.rsqrt(tl.sum(x * x, axis=1) / E + eps)[:, None]
        x = normed(x, reciprocal, weights[0], dtype, OFFSET_NORMS)
        y = normed(y, reciprocal, weights[1], dtype, OFFSET_NORMS)
    turned = x * cos[None, :] + tl.where((i < E // 2)[None, :], -y, y) * sin[None, :]
    return tl.where(mask, turned, 0.0).to(dtype)


@triton.jit
def tempered(q, position, FLOOR: tl.constexpr, TEMPERATURE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries at a position times their `AttentionTemperature`, rounded; FLOOR 0: as they are."""
    if FLOOR > 0:
        floors = ((position + 1) // FLOOR).to(tl.float32)
        q = (q.to(tl.float32) * (tl.log(floors + 1.0) * TEMPERATURE + 1.0)).to(q.dtype)
    return q


def reference_rotated(
    q_THE: Tensor, k_TGE: Tensor, rotation: HeadRotation, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed where the model norms them, and rotated; queries times their
    temperature."""
    rotated = []
    for x, weight in ((q_THE, rotation.q_norm), (k_TGE, rotation.k_norm)):
        if weight is not None:
            vectors = x.flatten(1) if rotation.all_heads else x
            norm = GpuNorm(weight, rotation.eps, rotation.offset_norms)
            x = reference_norm(vectors, norm).view(x.shape)
        rotated.append(rotate(x, rotation.cos, rotation.sin))
    q_THE, k_TGE = rotated
    if rotation.temperature is not None:
        q_THE = tempered_queries(rotation.temperature, q_THE, positions_T)
    return q_THE, k_TGE


# Kernels -----------------------------------------------------------------------------------------


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
    k_TGE = k_TGE if k_TGE.stride(-1) == 1 else k_TGE.contiguous()
    v_TGE = v_TGE if v_TGE is None or v_TGE.stride(-1) == 1 else v_TGE.contiguous()
    views, cache = cache_views(arena[layer], e, block_size, storage)
    assert (views.values is None) == (v_TGE is None), "as many sides as tensors"
    heads, warps = _heads_of_program(g, e)
    call_kernel(
        _store_kernel, (t, triton.cdiv(g, heads)),
        k_TGE, v_TGE, slots_T, *views, *k_TGE.stride()[:2],
        *((0, 0) if v_TGE is None else v_TGE.stride()[:2]),
        num_warps=warps, HEADS=heads, BLOCK_E=triton.next_power_of_2(e), CACHE=cache,
    )  # fmt: skip


def rotate_and_store(
    qkv_TN: Tensor,
    arena: Tensor,
    place: LayerPlace,
    rotation: HeadRotation,
    batch: RaggedBatch,
    form: AttentionForm,
) -> Tensor:
    """Norm (if any) and rotate queries and keys, write keys and values to `arena[place.position]`,
    and return the queries `[T, H, E]`.

    `qkv_TN` is contiguous: all query heads, then key heads, then value heads. Of `form` the storage
    and E (its value_dim) count.
    """
    tokens, g, e = qkv_TN.shape[0], arena.shape[3], form.value_dim
    h = qkv_TN.shape[1] // e - 2 * g
    assert qkv_TN.is_contiguous()
    assert (rotation.q_norm is None) == (rotation.k_norm is None)
    out = qkv_TN.new_empty(tokens, h, e)
    heads, warps = _heads_of_program(max(h, g), e)
    views, cache = cache_views(arena[place.position], e, batch.block_size, form.storage)
    call_kernel(
        _rotate_and_store_kernel, (tokens, triton.cdiv(h, heads) + triton.cdiv(g, heads)),
        qkv_TN, rotation.cos, rotation.sin, batch.slots[place.group], batch.positions,
        rotation.q_norm, rotation.k_norm, out, *views, rotation.eps,
        num_warps=warps, H=h, HEADS=heads, BLOCK_E=triton.next_power_of_2(e), CACHE=cache,
        **rotation.constants,
    )  # fmt: skip
    return out


def _heads_of_program(heads: int, head_dim: int) -> tuple[int, int]:
    """Heads that a program takes, a power of two, and its warps (16 elements a thread)."""
    width = triton.next_power_of_2(head_dim)
    count = max(1, min(triton.next_power_of_2(heads), _TILE // width))
    return count, 4 if count * width > 1024 else 1


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, slots_ptr,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    HEADS: tl.constexpr, BLOCK_E: tl.constexpr, CACHE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of heads)."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slots = tl.load(slots_ptr + token) + tl.zeros_like(head)
    e = tl.arange(0, BLOCK_E)
    there = head < CACHE.heads
    inside = there[:, None] & (e < CACHE.width)[None, :]
    k_at = k_ptr + token * k_token_stride + head[:, None] * k_head_stride + e[None, :]
    k = tl.load(k_at, mask=inside, other=0.0)
    store_vectors(keys_ptr, key_scales_ptr, k, slots, head, there, CACHE)
    if v_ptr is not None:
        v_at = v_ptr + token * v_token_stride + head[:, None] * v_head_stride + e[None, :]
        v = tl.load(v_at, mask=inside, other=0.0)
        store_vectors(values_ptr, value_scales_ptr, v, slots, head, there, CACHE)


@triton.jit
def _rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr, q_norm_ptr, k_norm_ptr, out_ptr,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, eps,
    H: tl.constexpr, HEADS: tl.constexpr, BLOCK_E: tl.constexpr, CACHE: tl.constexpr,
    OFFSET_NORMS: tl.constexpr, ALL_HEADS: tl.constexpr, FLOOR: tl.constexpr,
    TEMPERATURE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of heads): tiles of queries first, then tiles of keys and values."""
    G: tl.constexpr = CACHE.heads
    E: tl.constexpr = CACHE.width
    Q_TILES: tl.constexpr = (H + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    i = tl.arange(0, BLOCK_E)
    weights = None
    if q_norm_ptr is not None:
        norm_ptr, first, heads = q_norm_ptr, tile * HEADS, H
        if tile >= Q_TILES:
            norm_ptr, first, heads = k_norm_ptr, (tile - Q_TILES) * HEADS, G
        normed_heads = tl.minimum(first + tl.arange(0, HEADS), heads - 1)
        weights = load_norm(norm_ptr, normed_heads, E, BLOCK_E, ALL_HEADS)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    angle = token * (E // 2) + i % (E // 2)
    cos = tl.load(cos_ptr + angle, mask=i < E, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=i < E, other=0.0)
    row = token * ((H + 2 * G) * E)
    if tile < Q_TILES:
        head = tile * HEADS + tl.arange(0, HEADS)
        there = head < H
        q_reciprocal = None
        if ALL_HEADS:
            q_reciprocal = reciprocal_of_heads(qkv_ptr, row, eps, H * E)
        q = normed_and_turned(
            qkv_ptr, row + head * E, there, weights, q_reciprocal, cos, sin, eps, E, BLOCK_E,
            OFFSET_NORMS,
        )  # fmt: skip
        if FLOOR > 0:
            q = tempered(q, tl.load(positions_ptr + token), FLOOR, TEMPERATURE)
        out_at = out_ptr + token * (H * E) + head[:, None] * E + i[None, :]
        tl.store(out_at, q, mask=there[:, None] & (i < E)[None, :])
    else:
        head = (tile - Q_TILES) * HEADS + tl.arange(0, HEADS)
        there = head < G
        slots = tl.load(slots_ptr + token) + tl.zeros_like(head)
        k_reciprocal = None
        if ALL_HEADS:
            k_reciprocal = reciprocal_of_heads(qkv_ptr, row + H * E, eps, G * E)
        k = normed_and_turned(
            qkv_ptr, row + (H + head) * E, there, weights, k_reciprocal, cos, sin, eps, E,
            BLOCK_E, OFFSET_NORMS,
        )  # fmt: skip
        store_vectors(keys_ptr, key_scales_ptr, k, slots, head, there, CACHE)
        v_at = qkv_ptr + row + (H + G + head)[:, None] * E + i[None, :]
        v = tl.load(v_at, mask=there[:, None] & (i < E)[None, :], other=0.0)
        store_vectors(values_ptr, value_scales_ptr, v, slots, head, there, CACHE)
