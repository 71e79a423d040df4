"""Columns, and best tokens, of all GPUs of a tensor-parallel group: one exchange each.

`peer_exchange.py` describes the exchange. Shapes: B rows, F features of a rank, C chunks of the
vocabulary, R rows of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.batch import NON_FINITE, Feedback
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .peer_exchange import (
    PROGRAMS,
    PeerRegions,
    begin_exchange,
    end_exchange,
    part_of,
    signal_peers,
    slot_at,
    wait_for_peers,
)

__all__ = ["gather_columns", "largest", "pick_of_ranks"]

_TILE_BYTES = 4096
_WARPS = 8
_BEST_BLOCK = 256
"""Rows of a program of `largest`; their values and ids take 3 KiB of a slot."""
_NON_FINITE = tl.constexpr(NON_FINITE)


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, bases_ptr, epochs_ptr, control_ptr, rank, rows, share,
    STARTS: tl.constexpr, WIDTH: tl.constexpr,
    RANKS: tl.constexpr, FLAGS: tl.constexpr, SLOT: tl.constexpr, DEVICE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has `share` elements of each rank's rows, as if all were `WIDTH` long."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * share
    own = tl.load(bases_ptr + rank)
    features = tl.zeros([], tl.int32)
    for peer in tl.static_range(RANKS):
        features = tl.where(rank == peer, STARTS[peer + 1] - STARTS[peer], features)
    let_dependents_start(PDL)
    wait_for_inputs(PDL)
    epoch = begin_exchange(epochs_ptr)
    at = slot_at(epoch, FLAGS, SLOT)
    slot = part_of(own, at, dtype)
    lane = tl.arange(0, BLOCK)
    for start in range(0, share, BLOCK):
        element = first + start + lane
        row, column = element // WIDTH, element % WIDTH
        held = (row < rows) & (column < features)
        x = tl.load(x_ptr + row * features + column, mask=held, other=0.0)
        tl.store(slot + start + lane, x)
    signal_peers(bases_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    wait_for_peers(bases_ptr, control_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    for peer in tl.static_range(RANKS):
        source = part_of(tl.load(bases_ptr + peer), at, dtype)
        for start in range(0, share, BLOCK):
            element = first + start + lane
            row, column = element // WIDTH, element % WIDTH
            held = (row < rows) & (column < STARTS[peer + 1] - STARTS[peer])
            x = tl.load(source + start + lane, cache_modifier=".cg")
            tl.store(out_ptr + row * STARTS[RANKS] + STARTS[peer] + column, x, mask=held)
    end_exchange(epochs_ptr, epoch)


def gather_columns(regions: PeerRegions, x_BF: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the columns of all ranks in their order, `[B, sum(sizes)]`; any number of rows."""
    x_BF = x_BF.contiguous()
    rows, width, size = x_BF.shape[0], max(sizes), x_BF.element_size()
    out = x_BF.new_empty(rows, sum(sizes))
    block = _TILE_BYTES // size
    slot = regions.slot_bytes // size // block * block
    if PROGRAMS * slot < width:  # not even one row fits
        raise ValueError(f"rows of {width} elements do not fit {PROGRAMS} slots of {slot}")
    at_once = PROGRAMS * slot // width
    for start in range(0, rows, at_once):
        count = min(rows - start, at_once)
        share = triton.cdiv(triton.cdiv(count * width, block), PROGRAMS) * block
        call_kernel(
            gather_kernel,
            (triton.cdiv(count * width, share),),
            x_BF[start : start + count],
            out[start : start + count],
            *regions.arguments,
            count,
            share,
            num_warps=_WARPS,
            STARTS=(0, *accumulate(sizes)),
            WIDTH=width,
            BLOCK=block,
            **regions.constants,
        )
    return out


@triton.jit
def _best_of_ranks(bases_ptr, at, lane, BLOCK: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest value of each lane over ranks, and its id; NaN counts as the largest."""
    base = tl.load(bases_ptr)
    best = tl.load(part_of(base, at, tl.float32) + lane, cache_modifier=".cg")
    best_id = tl.load(part_of(base, at + 4 * BLOCK, tl.int64) + lane, cache_modifier=".cg")
    for peer in tl.static_range(1, RANKS):
        base = tl.load(bases_ptr + peer)
        value = tl.load(part_of(base, at, tl.float32) + lane, cache_modifier=".cg")
        index = tl.load(part_of(base, at + 4 * BLOCK, tl.int64) + lane, cache_modifier=".cg")
        better = (value > best) | ((value != value) & (best == best))
        best = tl.where(better, value, best)
        best_id = tl.where(better, index, best_id)
    return best, best_id


@triton.jit
def largest_kernel(  # type: ignore[no-untyped-def]
    values_ptr, ids_ptr, best_ptr, best_id_ptr, bases_ptr, epochs_ptr, control_ptr, rank, rows,
    RANKS: tl.constexpr, FLAGS: tl.constexpr, SLOT: tl.constexpr, DEVICE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has `BLOCK` rows. Ids are 0 if it gave up: later kernels read rows by them."""
    lane = tl.arange(0, BLOCK)
    row = tl.program_id(0) * BLOCK + lane
    own = tl.load(bases_ptr + rank)
    let_dependents_start(PDL)
    wait_for_inputs(PDL)
    epoch = begin_exchange(epochs_ptr)
    at = slot_at(epoch, FLAGS, SLOT)
    value = tl.load(values_ptr + row, mask=row < rows, other=0.0)
    index = tl.load(ids_ptr + row, mask=row < rows, other=0)
    tl.store(part_of(own, at, tl.float32) + lane, value)
    tl.store(part_of(own, at + 4 * BLOCK, tl.int64) + lane, index)
    signal_peers(bases_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    complete = wait_for_peers(bases_ptr, control_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    best, best_id = _best_of_ranks(bases_ptr, at, lane, BLOCK, RANKS)
    tl.store(best_ptr + row, best, mask=row < rows)
    tl.store(best_id_ptr + row, tl.where(complete, best_id, 0), mask=row < rows)
    end_exchange(epochs_ptr, epoch)


def largest(regions: PeerRegions, values_B: Tensor, ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """See `Collectives.largest`."""
    values_B, ids_B = values_B.contiguous(), ids_B.contiguous()
    rows = values_B.shape[0]
    best_B, best_ids_B = torch.empty_like(values_B), torch.empty_like(ids_B)
    most = PROGRAMS * _BEST_BLOCK
    for start in range(0, rows, most):
        part = slice(start, min(rows, start + most))
        count = part.stop - start
        call_kernel(
            largest_kernel,
            (triton.cdiv(count, _BEST_BLOCK),),
            *(tensor[part] for tensor in (values_B, ids_B, best_B, best_ids_B)),
            *regions.arguments,
            count,
            BLOCK=_BEST_BLOCK,
            **regions.constants,
        )
    return best_B, best_ids_B


@triton.jit
def pick_of_ranks_kernel(  # type: ignore[no-untyped-def]
    maxima_ptr, ids_ptr, rows_ptr, positions_ptr, token_ids_ptr, state_positions_ptr, tokens_ptr,
    bases_ptr, epochs_ptr, control_ptr, rank, chunks, first, null_row,
    RANKS: tl.constexpr, FLAGS: tl.constexpr, SLOT: tl.constexpr, DEVICE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has a row: as `greedy._pick_greedy` of the rank's chunks, then the best rank's."""
    token = tl.program_id(0)
    own = tl.load(bases_ptr + rank)
    let_dependents_start(PDL)
    wait_for_inputs(PDL)
    epoch = begin_exchange(epochs_ptr)
    at = slot_at(epoch, FLAGS, SLOT)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, chunks, BLOCK):
        place = start + lane
        value = tl.load(
            maxima_ptr + token * chunks + place, mask=place < chunks, other=float("-inf")
        )
        better = value > best  # no later chunk replaces an equal one
        best = tl.where(better, value, best)
        best_at = tl.where(better, place, best_at)
    value = tl.max(best, 0)
    chunk = tl.min(tl.where(best == value, best_at, chunks - 1), 0)
    index = tl.load(ids_ptr + token * chunks + chunk).to(tl.int64) + first
    # One lane each, in the layout of `largest` for a block of four.
    tl.store(part_of(own, at, tl.float32), value)
    tl.store(part_of(own, at + 16, tl.int64), index)
    signal_peers(bases_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    complete = wait_for_peers(bases_ptr, control_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    value, index = _best_of_ranks(bases_ptr, at, 0, 4, RANKS)
    sound = complete & (value > float("-inf")) & (value < float("inf"))
    tl.store(tokens_ptr + token, tl.where(sound, index, _NON_FINITE))
    if rows_ptr is not None:
        row = tl.load(rows_ptr + token)
        position = tl.load(positions_ptr + token) + 1
        tl.store(token_ids_ptr + row, tl.where(sound, index, 0))
        tl.store(state_positions_ptr + row, tl.where(row == null_row, 0, position))
    end_exchange(epochs_ptr, epoch)


def pick_of_ranks(
    regions: PeerRegions,
    maxima_TC: Tensor,
    ids_TC: Tensor,
    first: int,
    feed: Feedback | None = None,
) -> Tensor:
    """As `greedy.pick_greedy`, over the chunks of all ranks; at most `PROGRAMS` rows.

    `first` is the first token of this rank's part of the vocabulary, from which its ids count.
    """
    rows, chunks = maxima_TC.shape
    assert rows <= PROGRAMS, rows
    tokens_T = torch.empty(rows, dtype=torch.int64, device=maxima_TC.device)
    call_kernel(
        pick_of_ranks_kernel,
        (rows,),
        maxima_TC,
        ids_TC,
        *((None,) * 4 if feed is None else feed),
        tokens_T,
        *regions.arguments,
        chunks,
        first,
        0 if feed is None else feed.token_ids.shape[0] - 1,
        BLOCK=min(1024, triton.next_power_of_2(chunks)),
        **regions.constants,
    )
    return tokens_T
