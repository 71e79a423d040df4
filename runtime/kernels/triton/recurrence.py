"""The recurrence of linear attention (`ops/recurrence.py`) over the state of rows.

Shapes: T tokens, G key heads, H value heads, K and V elements of a key and of a value, X decays of
a head (1 or K), C tokens of a block. A tile is the consecutive tokens that are computed together:
B of them, the largest divisor of C up to 16, in 16 rows. A key is P pieces of E elements, one for
each warp. A slice of the values has N elements.

A program has a slice of the values of one head, and the state `[K, slice]` of one lane, which no
other program needs. It begins at the lane's snapshot, or at the one before it where the lane's is
not stored yet, and goes through the tiles from there on. What a tile of tokens does to the state is
one product, of keys that decay until the end of the tile and of updates u (`_advanced`). The state
at the beginning of a block is stored where the row's table has a place for it.

`_few_tokens` is the kernel of decode and verify steps. Tokens of a lane are computed one by one
from the state at the beginning of their tile and the inputs since, as the reference does. A decode
step reads the state once, and writes it when a block begins.

`_many_tokens` computes the tokens of a tile together (the chunked form of Yang et al., arXiv
2412.06464, section 3.3; Dao and Gu, arXiv 2405.21060, section 6). With A[t, i] = k_t . k_i times
the decay between tokens i and t, and w = v - (k_t . S times the decay since the tile began), the
delta rule is a unit lower triangular system

    u_t + beta_t sum over i < t of A[t, i] u_i = beta_t w_t

which is solved from its first row on. Sums over a tile have its 16 rows, whether the step computes
a row or an earlier one did, so the result for a token has the same bits however its sequence is cut
into steps. Sums of log decays are sums of the terms between two tokens, not differences of longer
sums, which would lose the small ones next to a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....cache.spec import RowPlace
from ..ops.batch import RaggedBatch
from ..ops.recurrence import RECURRENCE_ARGUMENTS, Recurrence
from ..ops.row_states import StateBatch, define_state_operator
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .row_states import entry_of, first_column, lane_of, state_arguments

_TILE = tl.constexpr(16)
"""Rows of a tile, the least that a product has."""
_PIECE = 16
"""Most elements of a key that one warp multiplies."""
_SLICE = 32
"""Most values of a program."""
_MANY_PROGRAMS = 128
"""Of a lane, about the processors of an H100. With fewer, slices are half as wide, as they
are for long keys, of which the registers hold no more."""


class _Shape(NamedTuple):
    """Sizes of a recurrence: a constant of its kernels."""

    heads: int
    groups: int
    key_dim: int
    value_dim: int
    decays: int
    """X."""
    block_size: int
    """C."""
    tile: int
    """B."""
    pieces: int
    """P."""
    piece: int
    """E."""
    slice: int
    """N."""

    @property
    def programs(self) -> int:
        """Of a lane."""
        return self.heads * -(-self.value_dim // self.slice)


@triton.jit
def _advanced(state, k, u, after, total):  # type: ignore[no-untyped-def]
    """The state after a tile: keys and updates of its tokens, sums of log decays after each, and of
    all of them."""
    k = tl.permute(k * tl.exp(after), (0, 2, 1))
    u = tl.broadcast_to(u[None], (state.shape[0], u.shape[0], u.shape[1]))
    return _product(k, u, state * tl.exp(total)[:, :, None])


@triton.jit
def _product(a, b, c):  # type: ignore[no-untyped-def]
    """Products of matrices on tensor cores, added to `c`, with the precision of float32."""
    return tl.dot(a, b, c, input_precision="tf32x3")


@triton.jit
def _products(a, b):  # type: ignore[no-untyped-def]
    """The product of matrices `[P, M, E]` and `[P, E, N]`: summed over P and E."""
    zeros = tl.zeros([a.shape[0], a.shape[1], b.shape[2]], tl.float32)
    return tl.sum(_product(a, b, zeros), axis=0)


@triton.jit
def _sums(g, AFTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of the log decays of a tile, `[P, tile, E]` or `[1, tile, 1]`, up to each token, or
    (AFTER) of the tokens after it."""
    r = tl.arange(0, _TILE)
    if g.shape[2] == 1:  # by a matrix, because Triton 3.6 scans no tensor of one column
        terms = tl.reshape(g, [1, _TILE])
        chosen = r[None, :] > r[:, None] if AFTER else r[None, :] <= r[:, None]
        return tl.reshape(tl.sum(tl.where(chosen, terms, 0.0), axis=1), [1, _TILE, 1])
    if AFTER:
        following = tl.minimum(r + 1, _TILE - 1)[None, :, None]
        g = tl.gather(g, tl.broadcast_to(following, g.shape), axis=1)
        g = tl.where((r < _TILE - 1)[None, :, None], g, 0.0)
    return tl.cumsum(g, axis=1, reverse=AFTER)


@triton.jit
def _keys(SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a key, `[P, E]`."""
    E: tl.constexpr = SHAPE.piece
    return tl.arange(0, SHAPE.pieces)[:, None] * E + tl.arange(0, E)[None, :]


@triton.jit
def _decays(SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decays of a head, `[P, E]` or `[1, 1]`."""
    return _keys(SHAPE) if SHAPE.decays > 1 else tl.zeros([1, 1], tl.int32)


@triton.jit
def _vectors(ptr, stride, tokens, elements, N: tl.constexpr, there):  # type: ignore[no-untyped-def]
    """Vectors of N elements of tokens, `[P, tile, E]`, which are `stride` apart; zeros where there
    are none."""
    at = tokens[None, :, None] * stride + elements[:, None, :]
    return tl.load(ptr + at, mask=there[None, :, None] & (elements < N)[:, None, :], other=0.0)


@triton.jit
def _store_vectors(ptr, stride, tokens, elements, N: tl.constexpr, there, x):  # type: ignore[no-untyped-def]
    """Store what `_vectors` loads."""
    at = tokens[None, :, None] * stride + elements[:, None, :]
    tl.store(ptr + at, x, mask=there[None, :, None] & (elements < N)[:, None, :])


@triton.jit
def _values(ptr, stride, tokens, v, N: tl.constexpr, there):  # type: ignore[no-untyped-def]
    """Values `[tile, N]` of tokens."""
    at = tokens[:, None] * stride + v[None, :]
    return tl.load(ptr + at, mask=there[:, None] & (v < N)[None, :], other=0.0)


@triton.jit
def _state_pointers(state_ptr, entry, stride, v, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers `[P, E, N]` to the state in a snapshot, and which of them belong to it."""
    key = _keys(SHAPE)[:, :, None]
    pointers = state_ptr + entry * stride + key * SHAPE.value_dim + v[None, None, :]
    return pointers, (key < SHAPE.key_dim) & (v < SHAPE.value_dim)[None, None, :]


@triton.jit
def _kept_tile(k_ptr, u_ptr, g_ptr, offset, count, v, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys, updates and log decays that are kept of the first `count` tokens of a tile at an offset
    of its block; zeros for other tokens."""
    r = tl.arange(0, _TILE)
    there = r < count
    keys: tl.constexpr = SHAPE.groups * SHAPE.key_dim
    values: tl.constexpr = SHAPE.heads * SHAPE.value_dim
    decays: tl.constexpr = SHAPE.heads * SHAPE.decays
    k = _vectors(k_ptr, keys, offset + r, _keys(SHAPE), SHAPE.key_dim, there)
    u = _values(u_ptr, values, offset + r, v, SHAPE.value_dim, there)
    g = _vectors(g_ptr, decays, offset + r, _decays(SHAPE), SHAPE.decays, there)
    return k, u, g


@triton.jit
def _few_tokens(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, out_ptr,
    q_stride, k_stride, v_stride, g_stride, beta_stride,
    snapshots_ptr, inputs_ptr, snapshot_tables_ptr, input_tables_ptr, stored_ptr, positions_ptr,
    rows_ptr, starts_ptr, columns, snapshot_stride, input_stride, state_at, k_at, u_at, g_at,
    TOKENS: tl.constexpr, SHAPE: tl.constexpr, BETA_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head and slice of its values, lane): TOKENS tokens, one after the other.

    With `a_log_ptr`, queries, keys and gates are as the layer computes them: see `ops/delta_rule`.
    """
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    B: tl.constexpr = SHAPE.tile
    C: tl.constexpr = SHAPE.block_size
    K: tl.constexpr = SHAPE.key_dim
    V: tl.constexpr = SHAPE.value_dim
    X: tl.constexpr = SHAPE.decays
    N: tl.constexpr = SHAPE.slice
    SLICES: tl.constexpr = (V + N - 1) // N
    GROUP: tl.constexpr = SHAPE.heads // SHAPE.groups
    KEYS: tl.constexpr = SHAPE.groups * K
    VALUES: tl.constexpr = SHAPE.heads * V
    DECAYS: tl.constexpr = SHAPE.heads * X
    h, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    group = h // GROUP
    lane = tl.program_id(1)
    key, x, r = _keys(SHAPE), _decays(SHAPE), tl.arange(0, _TILE)
    v = part * N + tl.arange(0, N)
    state_ptr = snapshots_ptr + state_at + h * (K * V)
    kept_k_ptr = inputs_ptr + k_at + group * K
    kept_u_ptr = inputs_ptr + u_at + h * V
    kept_g_ptr = inputs_ptr + g_at + h * X

    row = tl.load(rows_ptr + lane)
    start = tl.load(positions_ptr + lane * TOKENS).to(tl.int32)
    column = first_column(row, start, stored_ptr, C)
    entry = entry_of(snapshot_tables_ptr, row, columns, column, column > 0)
    pointers, inside = _state_pointers(state_ptr, entry, snapshot_stride, v, SHAPE)
    state = tl.load(pointers, mask=inside & (column > 0), other=0.0)
    tile = start // B * B
    for begin in range(column * C, tile, B):
        block = entry_of(input_tables_ptr, row, columns, begin // C, True) * input_stride
        k, u, g = _kept_tile(
            kept_k_ptr + block, kept_u_ptr + block, kept_g_ptr + block, begin % C, B, v, SHAPE
        )  # fmt: skip
        state = _advanced(state, k, u, _sums(g, True), tl.sum(g, axis=1))
        if (begin + B) % C == 0:
            entry = entry_of(snapshot_tables_ptr, row, columns, (begin + B) // C, True)
            pointers, inside = _state_pointers(state_ptr, entry, snapshot_stride, v, SHAPE)
            tl.store(pointers, state, mask=inside & (entry > 0))

    block = entry_of(input_tables_ptr, row, columns, tile // C, True) * input_stride
    count = start - tile
    k, u, g = _kept_tile(
        kept_k_ptr + block, kept_u_ptr + block, kept_g_ptr + block, tile % C, count, v, SHAPE
    )  # fmt: skip
    after, total = _sums(g, True), tl.sum(g, axis=1)
    for i in range(TOKENS):
        t = (lane * TOKENS + i).to(tl.int64)
        position = start + i
        valid = tl.load(positions_ptr + t) == position
        if TOKENS > 1:  # noqa: SIM102 - decided at compile time
            if (count == B) & valid:
                state = _advanced(state, k, u, after, total)
                k, u = tl.zeros_like(k), tl.zeros_like(u)
                after, total = tl.zeros_like(after), tl.zeros_like(total)
                count = 0
                if position % C == 0:
                    block = entry_of(input_tables_ptr, row, columns, position // C, True)
                    block *= input_stride
                    entry = entry_of(snapshot_tables_ptr, row, columns, position // C, True)
                    pointers, inside = _state_pointers(state_ptr, entry, snapshot_stride, v, SHAPE)
                    tl.store(pointers, state, mask=inside & (entry > 0))
        own_k = tl.load(k_ptr + t * k_stride + group * K + key, mask=key < K, other=0.0)
        own_q = tl.load(q_ptr + t * q_stride + group * K + key, mask=key < K, other=0.0)
        own_u = tl.load(v_ptr + t * v_stride + h * V + v, mask=v < V, other=0.0)
        own_g = tl.load(g_ptr + t * g_stride + h * X + x, mask=x < X, other=0.0)
        own_k, own_q = own_k.to(tl.float32), own_q.to(tl.float32)
        own_u, own_g = own_u.to(tl.float32), own_g.to(tl.float32)
        if a_log_ptr is not None:
            own_k = _unit(own_k)
            own_q = _unit(own_q) * (K**-0.5)
            own_g += tl.load(dt_bias_ptr + h * X + x, mask=x < X, other=0.0)
            # softplus, as torch computes it
            softplus = tl.where(own_g > 20.0, own_g, _log1p_exp(tl.minimum(own_g, 20.0)))
            own_g = tl.where(x < X, -tl.exp(tl.load(a_log_ptr + h)) * softplus, 0.0)
        after += own_g[:, None, :]
        total += own_g
        decayed = k * tl.exp(after)
        of_state = tl.exp(total)
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + t * beta_stride + h)
            if a_log_ptr is not None:
                dtype: tl.constexpr = beta_ptr.dtype.element_ty
                sigmoid = 1.0 / (1.0 + tl.exp(-beta.to(tl.float32)))
                beta = (sigmoid.to(dtype).to(tl.float32) * BETA_SCALE).to(dtype).to(tl.float32)
            seen = _read(own_k, own_k * of_state, state, decayed, u)
            own_u = beta * (own_u - seen)
        out = _read(own_q, own_q * of_state, state, decayed, u)
        out += tl.sum(tl.sum(own_q * own_k, axis=1), axis=0) * own_u
        out = tl.where(valid, out, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t * VALUES + h * V + v, out, mask=v < V)

        kept = valid & (block > 0)
        offset = position % C
        tl.store(kept_u_ptr + block + offset * VALUES + v, own_u, mask=kept & (v < V))
        if part == 0:
            tl.store(kept_g_ptr + block + offset * DECAYS + x, own_g, mask=kept & (x < X))
            if h % GROUP == 0:
                tl.store(kept_k_ptr + block + offset * KEYS + key, own_k, mask=kept & (key < K))
        if TOKENS > 1:
            newest = (r == count)[None, :, None]
            k = tl.where(newest, own_k[:, None, :], k)
            after = tl.where(newest, 0.0, after)
            u = tl.where((r == count)[:, None], own_u[None, :], u)
            count += 1


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    """A vector `[P, E]` of length 1; 1e-6 is `_LEAST_SQUARES` of `ops/delta_rule`."""
    return x * tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) + 1e-6)


@triton.jit
def _log1p_exp(x):  # type: ignore[no-untyped-def]
    """log(1 + e^x), also where e^x is far below 1 (Kahan)."""
    e = tl.exp(x)
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _read(x, of_state, state, decayed, u):  # type: ignore[no-untyped-def]
    """What a vector `x` reads of the state and of a tile of updates whose keys have decayed."""
    weights = tl.sum(tl.sum(decayed * x[:, None, :], axis=2), axis=0)
    out = tl.sum(tl.sum(of_state[:, :, None] * state, axis=1), axis=0)
    return out + tl.sum(weights[:, None] * u, axis=0)


@triton.jit(do_not_specialize=["lanes", "T"])
def _many_tokens(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr,
    snapshots_ptr, inputs_ptr, snapshot_tables_ptr, input_tables_ptr, stored_ptr, positions_ptr,
    rows_ptr, starts_ptr, columns, snapshot_stride, input_stride, state_at, k_at, u_at, g_at,
    lanes, T, TOKENS: tl.constexpr, SHAPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head and slice of its values, lane); of a ragged batch (TOKENS 0) the last lane is
    the padding."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    B: tl.constexpr = SHAPE.tile
    C: tl.constexpr = SHAPE.block_size
    K: tl.constexpr = SHAPE.key_dim
    V: tl.constexpr = SHAPE.value_dim
    X: tl.constexpr = SHAPE.decays
    N: tl.constexpr = SHAPE.slice
    P: tl.constexpr = SHAPE.pieces
    E: tl.constexpr = SHAPE.piece
    SLICES: tl.constexpr = (V + N - 1) // N
    GROUP: tl.constexpr = SHAPE.heads // SHAPE.groups
    KEYS: tl.constexpr = SHAPE.groups * K
    VALUES: tl.constexpr = SHAPE.heads * V
    DECAYS: tl.constexpr = SHAPE.heads * X
    h, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    group = h // GROUP
    lane = tl.program_id(1)
    key, x, r = _keys(SHAPE), _decays(SHAPE), tl.arange(0, _TILE)
    v = part * N + tl.arange(0, N)
    state_ptr = snapshots_ptr + state_at + h * (K * V)
    kept_k_ptr = inputs_ptr + k_at + group * K
    kept_u_ptr = inputs_ptr + u_at + h * V
    kept_g_ptr = inputs_ptr + g_at + h * X
    first, tokens, last = lane_of(positions_ptr, starts_ptr, lane, lanes, T, TOKENS)
    for begin in range(first + tokens, last, _TILE):  # padding
        t = (begin + r).to(tl.int64)
        out_at = out_ptr + h * V + t[:, None] * VALUES + v[None, :]
        zeros = tl.zeros([_TILE, N], tl.float32)
        tl.store(out_at, zeros, mask=(t < last)[:, None] & (v < V)[None, :])
    if tokens == 0:
        return

    row = tl.load(rows_ptr + lane)
    start = tl.load(positions_ptr + first).to(tl.int32)
    end = start + tokens
    column = first_column(row, start, stored_ptr, C)
    entry = entry_of(snapshot_tables_ptr, row, columns, column, column > 0)
    pointers, inside = _state_pointers(state_ptr, entry, snapshot_stride, v, SHAPE)
    state = tl.load(pointers, mask=inside & (column > 0), other=0.0)
    for begin in range(column * C, end, B):
        block = entry_of(input_tables_ptr, row, columns, begin // C, True) * input_stride
        earlier = tl.minimum(tl.maximum(start - begin, 0), B)
        k, u, g = _kept_tile(
            kept_k_ptr + block, kept_u_ptr + block, kept_g_ptr + block, begin % C, earlier, v,
            SHAPE,
        )  # fmt: skip
        if begin + B > start:
            position = begin + r
            own = (r >= earlier) & (r < B) & (position < end)
            t = (position - start + first).to(tl.int64)
            own_k = _vectors(k_ptr + group * K, KEYS, t, key, K, own)
            q = _vectors(q_ptr + group * K, KEYS, t, key, K, own)
            own_u = _values(v_ptr + h * V, VALUES, t, v, V, own)
            g += _vectors(g_ptr + h * X, DECAYS, t, x, X, own)
            k += own_k
            # Products of a token, down, with each token of the tile up to it, across.
            of_k = tl.zeros([_TILE, _TILE], tl.float32)
            if X == 1:
                steps = tl.where(r[:, None] > r[None, :], tl.reshape(g, [_TILE, 1]), 0.0)
                decays = tl.exp(tl.cumsum(steps, axis=0))
                across_k = tl.permute(k, (0, 2, 1))
                of_q = _products(q, across_k) * decays
                if beta_ptr is not None:
                    of_k = _products(own_k, across_k) * decays
            else:
                between = tl.zeros([P, _TILE, E], tl.float32)
                of_q = tl.zeros([_TILE, _TILE], tl.float32)
                for back in range(B):
                    i = B - 1 - back
                    chosen = (r == i)[None, :, None]
                    k_i = tl.sum(tl.where(chosen, k, 0.0), axis=1)
                    g_i = tl.sum(tl.where(chosen, g, 0.0), axis=1)
                    decayed = k_i[:, None, :] * tl.exp(between)
                    across = (r == i)[None, :]
                    weights = tl.sum(tl.sum(q * decayed, axis=2), axis=0)
                    of_q = tl.where(across, weights[:, None], of_q)
                    if beta_ptr is not None:
                        weights = tl.sum(tl.sum(own_k * decayed, axis=2), axis=0)
                        of_k = tl.where(across, weights[:, None], of_k)
                    between += tl.where((r >= i)[None, :, None], g_i[:, None, :], 0.0)
            of_q = tl.where(r[:, None] >= r[None, :], of_q, 0.0)
            since = tl.exp(_sums(g, False))
            if beta_ptr is not None:
                beta = tl.load(beta_ptr + t * SHAPE.heads + h, mask=own, other=0.0)
                u += beta[:, None] * (own_u - _products(own_k * since, state))
                of_k = of_k * beta[:, None]
                for i in range(earlier, tl.minimum(end - begin, B)):
                    down = (r == i)[:, None]
                    weights = tl.sum(tl.where(down, of_k, 0.0), axis=0)
                    terms = tl.where((r < i)[:, None], weights[:, None] * u, 0.0)
                    u = tl.where(down, u - tl.sum(terms, axis=0)[None, :], u)
            else:
                u += own_u
            # A token that is not finite must not reach earlier ones.
            finite = tl.abs(u) < float("inf")
            out = _product(of_q, tl.where(finite, u, 0.0), _products(q * since, state))
            spoiled = tl.cumsum(tl.where(finite, 0, 1), axis=0) > 0
            out_at = out_ptr + h * V + t[:, None] * VALUES + v[None, :]
            inside_v = own[:, None] & (v < V)[None, :]
            tl.store(out_at, tl.where(spoiled, float("nan"), out), mask=inside_v)

            kept = own & (block > 0)
            offset = begin % C + r
            u_at_tile = kept_u_ptr + block + offset[:, None] * VALUES + v[None, :]
            tl.store(u_at_tile, u, mask=inside_v & kept[:, None])
            if part == 0:
                _store_vectors(kept_g_ptr + block, DECAYS, offset, x, X, kept, g)
                if h % GROUP == 0:
                    _store_vectors(kept_k_ptr + block, KEYS, offset, key, K, kept, k)
        if begin + B < end:
            state = _advanced(state, k, u, _sums(g, True), tl.sum(g, axis=1))
            if (begin + B) % C == 0:
                entry = entry_of(snapshot_tables_ptr, row, columns, (begin + B) // C, True)
                pointers, inside = _state_pointers(state_ptr, entry, snapshot_stride, v, SHAPE)
                tl.store(pointers, state, mask=inside & (entry > 0))


def _shape_of(k_TGK: Tensor, v_THV: Tensor, decays: int, block_size: int) -> _Shape:
    (_, groups, key), (_, heads, value) = k_TGK.shape, v_THV.shape
    tile = next(size for size in range(min(16, block_size), 0, -1) if block_size % size == 0)
    width = max(16, min(_SLICE, triton.next_power_of_2(value)))
    padded = max(16, triton.next_power_of_2(key))
    if padded > 128 or heads * -(-value // width) < _MANY_PROGRAMS:
        width = 16
    piece = min(_PIECE, padded)
    return _Shape(
        *(heads, groups, key, value, decays, block_size, tile), padded // piece, piece, width
    )


def _recurrence(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_THX: Tensor,
    beta_TH: Tensor | None,
    batch_invariant: bool,
    *given: Any,
) -> Tensor:
    """`given` is a `StateBatch`."""
    batch = StateBatch(*given)
    tensors = [None if x is None else x.contiguous() for x in (q_TGK, k_TGK, v_THV, g_THX, beta_TH)]
    lanes, tokens_per_row = batch.rows.shape[0], batch.tokens_per_row
    if tokens_per_row is not None and not batch_invariant:
        return _few(tensors, (None, None), 1.0, batch)
    shape = _shape_of(k_TGK, v_THV, g_THX.shape[2], batch.block_size)
    out_THV = v_THV.new_empty(v_THV.shape)
    call_kernel(
        _many_tokens, (shape.programs, lanes + (tokens_per_row is None)),
        *tensors, out_THV, *state_arguments(batch, torch.float32), lanes, v_THV.shape[0],
        num_warps=min(shape.pieces, 8), TOKENS=tokens_per_row or 0, SHAPE=shape,
    )  # fmt: skip
    return out_THV


def _few(
    tensors: Sequence[Tensor | None],
    gates: tuple[Tensor | None, Tensor | None],
    beta_scale: float,
    batch: StateBatch,
) -> Tensor:
    """Call `_few_tokens` with q, k, v, g and beta, whose tokens may be parts of larger vectors."""
    _, k_TGK, v_THV, g_THX, _ = tensors
    assert k_TGK is not None and v_THV is not None and g_THX is not None  # noqa: PT018
    shape = _shape_of(k_TGK, v_THV, g_THX.shape[2], batch.block_size)
    out_THV = v_THV.new_empty(v_THV.shape)
    call_kernel(
        _few_tokens, (shape.programs, batch.rows.shape[0]),
        *tensors, *gates, out_THV, *(0 if x is None else x.stride(0) for x in tensors),
        *state_arguments(batch, torch.float32),
        num_warps=min(shape.pieces, 8), TOKENS=batch.tokens_per_row, SHAPE=shape,
        BETA_SCALE=beta_scale,
    )  # fmt: skip
    return out_THV


def _delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    a_THX: Tensor,
    b_TH: Tensor,
    a_log_H: Tensor,
    dt_bias: Tensor,
    beta_scale: float,
    *given: Any,
) -> Tensor:
    """`given` is a `StateBatch`."""
    tensors = [x if x[:1].is_contiguous() else x.contiguous()
               for x in (q_TGK, k_TGK, v_THV, a_THX, b_TH)]  # fmt: skip
    return _few(tensors, (a_log_H, dt_bias), beta_scale, StateBatch(*given))


def triton_delta_rule(*given: Any) -> Tensor:
    """As `Kernels.delta_rule`."""
    *own, batch, place = given
    return _delta_rule(*own, *StateBatch.of(batch, place))


delta_rule_on_gpu = define_state_operator(
    "triton_delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias,"
    " float beta_scale",
    _delta_rule,
    like=2,
    devices=("CUDA",),
)
"""`triton_delta_rule` as an operation that torch.compile does not look into."""


def triton_recurrence(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_THX: Tensor,
    beta_TH: Tensor | None,
    batch: RaggedBatch,
    place: RowPlace,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """As `ops.recurrence.recurrence`, by the kernels of this file. No argument is read by the host.

    With `batch_invariant` all steps have one kernel, so the result of a token has the same bits
    whatever else is in its step.
    """
    tensors = (q_TGK, k_TGK, v_THV, g_THX, beta_TH)
    return _recurrence(*tensors, batch_invariant, *StateBatch.of(batch, place))


_operator = define_state_operator(
    "triton_recurrence",
    f"{RECURRENCE_ARGUMENTS}, bool batch_invariant",
    _recurrence,
    like=2,
    devices=("CUDA",),
)


def recurrence_on_gpu(*, batch_invariant: bool) -> Recurrence:
    """Return `triton_recurrence` as an operation that torch.compile does not look into."""

    def run(
        q_TGK: Tensor,
        k_TGK: Tensor,
        v_THV: Tensor,
        g_THX: Tensor,
        beta_TH: Tensor | None,
        batch: RaggedBatch,
        place: RowPlace,
    ) -> Tensor:
        return _operator(q_TGK, k_TGK, v_THV, g_THX, beta_TH, batch_invariant, batch, place)

    return run
