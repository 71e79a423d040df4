"""What kernels of split attention share: the loop over a run of positions, and how runs are joined.

Shapes: T rows of the step, H query heads, G kv heads, V value_dim (head_dim, or the latent part of
a key), D the width of a key (V, or latent and rotated part), S splits.

A program computes one kv head of one row over one of S runs of its positions ("flash decoding",
Dao et al. 2023; the running softmax is from Milakov and Gimelshein 2018). The heads of a group
share the keys that it loads. S is fixed when a step is captured, the length of a run depends on
the row when the step runs: the tiles of the positions that the row sees (of its window, if it has
one) are dealt in equal runs, so short rows leave the last splits empty. What the splits found is
put together by the program that is done last (`combine_as_last`), or by `combine_splits`.

Positions that a row does not see are masked when they are loaded: what stands there is never part
of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import (
    arrives_last,
    call_kernel,
    let_dependents_start,
    num_multiprocessors,
    wait_for_inputs,
)
from .quantised import load_scales, load_vectors, scale_offset, vector_offset

MOST_SPLITS = 32
NO_WINDOW = 1 << 30
"""Tokens of the window of a layer that has none."""


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
    shapes = ((tokens, heads, splits, value_dim), *((tokens, heads, splits),) * 2)
    return Partials(*(torch.empty(s, dtype=torch.float32, device=device) for s in shapes))


def new_counters(device: torch.device) -> Tensor:
    """Workspace of `combine_as_last`: int32 zeros, one for each row and kv head that can be split.

    `choose_splits` makes at most two programs a processor, so at most as many rows times heads have
    two splits as there are processors.
    """
    return torch.zeros(num_multiprocessors(device), dtype=torch.int32, device=device)


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
    """Sizes for a group of query heads over keys `[head_dim]` of this many bytes an element.

    One of 132 processors that share 4.3 TB/s reads a tile of keys and values of 16 KiB in half a
    microsecond, which is about what the tile's arithmetic takes; two more tiles in flight hide the
    latency. Larger tiles of queries or keys than these spill registers (ptxas 12.8).
    """
    heads = max(16, triton.next_power_of_2(group))
    if head_dim != value_dim:  # latent: one wide side, which is kept once for both products
        quantised = element_bytes == 1
        positions = 32 if element_bytes < 4 else 16
        return Tile(16 if quantised else min(heads, 32), positions, 8, 2 if heads > 16 else 3)
    width = triton.next_power_of_2(head_dim)
    positions = max(16, min(64, 8192 // (width * element_bytes)))
    return Tile(heads, positions, 8 if element_bytes == 1 or width > 128 else 4, 4)


def padded(size: int) -> int:
    """A power of two that matrix products take."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


@triton.jit
def in_log2(scores, scale, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of queries and keys as scores in units of log 2."""
    if SOFTCAP > 0.0:
        # tanh x = 1 - 2 / (1 + e^2x), which neither overflow nor underflow of the power harms.
        power = tl.exp2(scores * (scale * (2.0 * 1.4426950408889634 / SOFTCAP)))
        scores = (SOFTCAP * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + power))
    else:
        scores = scores * (scale * 1.4426950408889634)
    return scores


@triton.jit
def first_seen(position, window, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first position that a token attends to: where its window or its chunk begins."""
    first = tl.maximum(position - window + 1, 0)
    if CHUNK:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def load_sinks(pointers, mask):  # type: ignore[no-untyped-def]
    """Attention sinks as scores in units of log 2."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def split_tiles(first, end, split, splits, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The run of a split over the tiles of the positions first ... end - 1: its first tile, the
    one behind its last, and the first split without tiles (or the last one)."""
    first_tile = first // TILE
    tiles = tl.where(end > first, tl.cdiv(end, TILE) - first_tile, 0)
    each = tl.cdiv(tiles, splits)
    begin = first_tile + tl.minimum(split * each, tiles)
    behind = first_tile + tl.minimum((split + 1) * each, tiles)
    return begin, behind, tl.minimum(tl.cdiv(tiles, tl.maximum(each, 1)), splits - 1)


@triton.jit
def table_entries(  # type: ignore[no-untyped-def]
    table_ptr, first, end, tile, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The blocks in which the positions of a tile stand, of those among first ... end - 1."""
    n = tile * TILE + tl.arange(0, TILE)
    return tl.load(table_ptr + n // BLOCK_SIZE, mask=(n >= first) & (n < end), other=0)


@triton.jit
def attend_run(  # type: ignore[no-untyped-def]
    q, q_rest, m, total, acc,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table_ptr, block, head,
    first, end, begin, behind, scale,
    V: tl.constexpr, CACHE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Continue the softmax (m, total, acc) over the tiles begin ... behind - 1.

    `block` are the `table_entries` of the first tile: they are asked for early, because keys wait
    for them. Without `values_ptr` the first V elements of the keys are the values, and `q_rest`
    meets the rest of them.
    """
    dtype: tl.constexpr = q.dtype
    # The scale of a value goes to its weight; of the 16-bit types bfloat16 has room for that.
    QUANTISED: tl.constexpr = CACHE.storage != "model"
    weight_dtype: tl.constexpr = tl.bfloat16 if QUANTISED and dtype == tl.float16 else dtype
    i = tl.arange(0, BLOCK_V)
    rest = tl.arange(0, BLOCK_REST)
    for tile in range(begin, behind):
        n = tile * TILE + tl.arange(0, TILE)
        seen = (n >= first) & (n < end)
        at = vector_offset(block, head, n % CACHE.block_size, CACHE)
        scale_at = scale_offset(block, head, n % CACHE.block_size, CACHE)
        keys = load_vectors(keys_ptr, at, i, seen, V, dtype, CACHE)
        # Of the next tile, so that keys in flight wait for no table.
        block = table_entries(table_ptr, first, end, tile + 1, CACHE.block_size, TILE)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if values_ptr is None:
            keys_rest = load_vectors(keys_ptr, at + V, rest, seen, CACHE.width - V, dtype, CACHE)
            scores = tl.dot(q_rest, tl.trans(keys_rest), scores, input_precision="ieee")
            values = keys.to(weight_dtype)
        else:
            values = load_vectors(values_ptr, at, i, seen, V, weight_dtype, CACHE)
        if QUANTISED:
            key_scales = load_scales(key_scales_ptr, scale_at, seen)
            scores *= key_scales[None, :]
        scores = tl.where(seen[None, :], in_log2(scores, scale, SOFTCAP), float("-inf"))
        # Every tile of a run has a position that is seen: the maximum is a number.
        top = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.sum(weights, axis=1)
        if QUANTISED:
            if values_ptr is None:
                weights *= key_scales[None, :]
            else:
                weights *= load_scales(value_scales_ptr, scale_at, seen)[None, :]
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(weight_dtype), values, acc, input_precision="ieee")
        m = top
    return m, total, acc


@triton.jit
def store_partials(  # type: ignore[no-untyped-def]
    acc_ptr, m_ptr, l_ptr, out_ptr, m, total, acc, at, inside,
    V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store what a split found of the heads whose places are `at`; where it is the only one and
    there is an `out_ptr`, the result itself."""
    i = tl.arange(0, BLOCK_V)
    mask = inside[:, None] & (i < V)[None, :]
    if out_ptr is not None:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * V + i[None, :], out, mask=mask)
    else:
        tl.store(m_ptr + at, m, mask=inside)
        tl.store(l_ptr + at, total, mask=inside)
        tl.store(acc_ptr + at[:, None] * V + i[None, :], acc, mask=mask)


@triton.jit
def combine_as_last(  # type: ignore[no-untyped-def]
    acc_ptr, m_ptr, l_ptr, counter_ptr, out_ptr, head, splits, used, GROUP: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The last of `used` programs to count itself at `counter_ptr` puts together what all of them
    have stored of the heads `head` ... `head + GROUP - 1` of all rows, `ROWS` at a time.

    It does so in the order of the splits: the result is the same whoever is last. The counter is
    zero again for the next launch.
    """
    if arrives_last(counter_ptr, used):
        tl.store(counter_ptr, 0)
        i = tl.arange(0, BLOCK_V)
        for start in range(0, GROUP, ROWS):
            h = start + tl.arange(0, ROWS)
            inside = h < GROUP
            mask = inside[:, None] & (i < V)[None, :]
            m = tl.where(inside, float("-inf"), 0.0)
            total = tl.where(inside, 0.0, 1.0)
            acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
            for first in range(0, used, 4):
                for step in tl.static_range(4):  # in flight together
                    split = first + step
                    at = (head + h) * splits + split
                    there = inside & (split < used)
                    # The first split has positions, so the maximum is a number from there on.
                    m_split = tl.load(
                        m_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg"
                    )
                    l_split = tl.load(l_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
                    acc_split = tl.load(
                        acc_ptr + at[:, None] * V + i[None, :], mask=mask & (split < used),
                        other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    top = tl.maximum(m, m_split)
                    shrink, weight = tl.exp2(m - top), tl.exp2(m_split - top)
                    total = total * shrink + l_split * weight
                    acc = acc * shrink[:, None] + acc_split * weight[:, None]
                    m = top
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (head + h)[:, None] * V + i[None, :], out, mask=mask)


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


def combine_splits(partials: Partials, out_THV: Tensor) -> None:
    """Put the splits together in a contiguous tensor of the model's dtype."""
    tokens, heads, splits, value_dim = partials.acc.shape
    block = min(padded(value_dim), 128)
    call_kernel(
        _combine_splits, (heads, tokens, triton.cdiv(value_dim, block)), *partials, out_THV, splits,
        H=heads, V=value_dim, BLOCK_S=triton.next_power_of_2(splits), BLOCK_V=block,
    )  # fmt: skip
