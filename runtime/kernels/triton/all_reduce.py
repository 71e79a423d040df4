"""Sums over the GPUs of a tensor-parallel group, in memory that all of them have mapped.

Three algorithms (`peer_exchange.py` has what they share):

- `one_shot`: every rank reads the parts of all ranks and adds them. One exchange; each rank reads
  `ranks` times the tensor. For small tensors.
- `two_shot`: every rank adds one segment of the tensor, and then reads the segments of the others.
  Two exchanges; each rank reads about twice the tensor.
- `multimem`: as `two_shot`, but the switch adds: a load from the multicast address returns the sum
  (`multimem.ld_reduce`, PTX ISA), a store goes to all ranks.

The first two add in float32 in the order of ranks and round once, so all ranks have the same bits,
and both algorithms do. With `multimem` the order is the switch's, with sums in float32, but each
segment is added by one rank for all, so that they have the same bits too.

`sum_rows` is `one_shot` with what follows in a decoder layer: residual, norms. A program has a row.

Shapes: T rows, D features.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import GpuNorm, reference_norm
from .linear_tiles import appended, normed, scaled
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

__all__ = ["Algorithm", "all_reduce", "fits_rows", "reference_sum_rows", "sum_rows"]

Algorithm = Literal["one_shot", "two_shot", "multimem"]

_TILE_BYTES = 4096
"""A tile: 16 bytes of each thread of a program."""
_WARPS = 8


@triton.jit
def _publish(x_ptr, slot, first, share, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy the share of this program into its slot; past the end of the tensor zeros."""
    lane = tl.arange(0, BLOCK)
    for start in range(0, share, BLOCK):
        at = first + start + lane
        tl.store(slot + start + lane, tl.load(x_ptr + at, mask=at < numel, other=0.0))


@triton.jit
def _sum_of_ranks(bases_ptr, at, where, dtype: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements `where` of the slots of all ranks, added in float32 in the order of ranks."""
    first = tl.load(part_of(tl.load(bases_ptr), at, dtype) + where, cache_modifier=".cg")
    others = ()
    for peer in tl.static_range(1, RANKS):
        slot = part_of(tl.load(bases_ptr + peer), at, dtype)
        others = appended(others, tl.load(slot + where, cache_modifier=".cg"))
    total = first.to(tl.float32)
    for other in tl.static_range(RANKS - 1):
        total += others[other].to(tl.float32)
    return total


@triton.jit
def one_shot_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, bases_ptr, epochs_ptr, control_ptr, rank, numel, share,
    RANKS: tl.constexpr, FLAGS: tl.constexpr, SLOT: tl.constexpr, DEVICE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program sums `share` elements."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * share
    own = tl.load(bases_ptr + rank)
    let_dependents_start(PDL)
    wait_for_inputs(PDL)
    epoch = begin_exchange(epochs_ptr)
    at = slot_at(epoch, FLAGS, SLOT)
    _publish(x_ptr, part_of(own, at, dtype), first, share, numel, BLOCK)
    signal_peers(bases_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    wait_for_peers(bases_ptr, control_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    lane = tl.arange(0, BLOCK)
    for start in range(0, share, BLOCK):
        total = _sum_of_ranks(bases_ptr, at, start + lane, dtype, RANKS)
        place = first + start + lane
        tl.store(out_ptr + place, total.to(dtype), mask=place < numel)
    end_exchange(epochs_ptr, epoch)


@triton.jit
def _switch_sum(address, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replace 16 bytes at each multicast address by the sum over ranks, on all ranks."""
    load: tl.constexpr = "multimem.ld_reduce.relaxed.sys.global.add" + KIND
    tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d; "
        + load
        + """ {a, b, c, d}, [$1];
        multimem.st.relaxed.sys.global.v4.f32 [$1], {a, b, c, d};
        mov.u32 $0, 0; }""",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _order_aliases(DEVICE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Order accesses by the multicast address and by the rank's own of the same memory."""
    if DEVICE:
        tl.inline_asm_elementwise(
            "fence.proxy.alias; mov.u32 $0, 0;",
            "=r,r",
            [tl.arange(0, 32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def two_shot_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, bases_ptr, epochs_ptr, control_ptr, rank, numel, share, multicast,
    RANKS: tl.constexpr, FLAGS: tl.constexpr, SLOT: tl.constexpr, DEVICE: tl.constexpr,
    BLOCK: tl.constexpr, MULTIMEM: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program sums `share` elements: each rank one of `RANKS` segments of them.

    The sum of a segment replaces the rank's own part of it, which no other rank reads before.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * share
    own = tl.load(bases_ptr + rank)
    let_dependents_start(PDL)
    wait_for_inputs(PDL)
    epoch = begin_exchange(epochs_ptr)
    at = slot_at(epoch, FLAGS, SLOT)
    slot = part_of(own, at, dtype)
    _publish(x_ptr, slot, first, share, numel, BLOCK)
    if MULTIMEM:
        _order_aliases(DEVICE)
    signal_peers(bases_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    wait_for_peers(bases_ptr, control_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    segment = share // RANKS
    lane = tl.arange(0, BLOCK)
    if MULTIMEM:
        SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
        vector = tl.arange(0, BLOCK * SIZE // 16) * 16
        _order_aliases(DEVICE)
        for start in range(rank * segment, (rank + 1) * segment, BLOCK):
            _switch_sum(multicast + at + start * SIZE + vector, KIND)
        _order_aliases(DEVICE)
    else:
        for start in range(rank * segment, (rank + 1) * segment, BLOCK):
            total = _sum_of_ranks(bases_ptr, at, start + lane, dtype, RANKS)
            tl.store(slot + start + lane, total.to(dtype))
    signal_peers(bases_ptr, epoch, rank, 1, RANKS, FLAGS, DEVICE)
    wait_for_peers(bases_ptr, control_ptr, epoch, rank, 1, RANKS, FLAGS, DEVICE)
    if MULTIMEM:
        _order_aliases(DEVICE)
    for peer in tl.static_range(RANKS):
        source = slot if MULTIMEM else part_of(tl.load(bases_ptr + peer), at, dtype)
        for start in range(peer * segment, (peer + 1) * segment, BLOCK):
            total = tl.load(source + start + lane, cache_modifier=".cg")
            place = first + start + lane
            tl.store(out_ptr + place, total, mask=place < numel)
    end_exchange(epochs_ptr, epoch)


@triton.jit
def sum_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, post_ptr, norm_ptr, sum_ptr, out_ptr, bases_ptr, epochs_ptr, control_ptr,
    rank, post_eps, eps,
    K: tl.constexpr, SCALE: tl.constexpr, POST_OFFSET: tl.constexpr, OFFSET: tl.constexpr,
    RANKS: tl.constexpr, FLAGS: tl.constexpr, SLOT: tl.constexpr, DEVICE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has a row: its sum over ranks, a norm of that, the residual, the next norm."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK)
    inside = k < K
    post = tl.zeros([BLOCK], tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    if post_ptr is not None:
        post = tl.load(post_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(bases_ptr + rank)
    let_dependents_start(PDL)
    wait_for_inputs(PDL)
    epoch = begin_exchange(epochs_ptr)
    at = slot_at(epoch, FLAGS, SLOT)
    row = tl.program_id(0).to(tl.int64) * K
    part = tl.load(x_ptr + row + k, mask=inside, other=0.0)
    tl.store(part_of(own, at, dtype) + k, part)
    signal_peers(bases_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    residual = tl.zeros([BLOCK], tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row + k, mask=inside, other=0.0).to(tl.float32)
    wait_for_peers(bases_ptr, control_ptr, epoch, rank, 0, RANKS, FLAGS, DEVICE)
    x = _sum_of_ranks(bases_ptr, at, k, dtype, RANKS).to(dtype).to(tl.float32)
    if post_ptr is not None:
        reciprocal = tl.rsqrt(tl.sum(x * x) / K + post_eps)
        x = normed(x, reciprocal, post, dtype, POST_OFFSET)
    x = scaled(x, SCALE, dtype)
    if residual_ptr is not None:
        x = (residual + x).to(dtype).to(tl.float32)
    tl.store(sum_ptr + row + k, x.to(dtype), mask=inside)
    if norm_ptr is not None:
        reciprocal = tl.rsqrt(tl.sum(x * x) / K + eps)
        x = normed(x, reciprocal, weight, dtype, OFFSET)
        tl.store(out_ptr + row + k, x.to(dtype), mask=inside)
    end_exchange(epochs_ptr, epoch)


_KINDS = {
    torch.bfloat16: ".acc::f32.v4.bf16x2",
    torch.float16: ".acc::f32.v4.f16x2",
    torch.float32: ".v4.f32",
}
"""The type of 16 bytes of a dtype, for `multimem.ld_reduce`."""


def all_reduce(regions: PeerRegions, x: Tensor, algorithm: Algorithm) -> Tensor:
    """Return the sum of a tensor over ranks, contiguous, of any shape.

    Tensors larger than the regions are summed in several launches.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    flat, flat_out = x.view(-1), out.view(-1)
    size, numel = x.element_size(), x.numel()
    segments = 1 if algorithm == "one_shot" else regions.ranks
    block = _TILE_BYTES // size
    unit = block * segments
    slot = regions.slot_bytes // size // unit * unit
    assert slot, "a slot holds a tile of each rank"
    for start in range(0, numel, PROGRAMS * slot):
        stop = min(numel, start + PROGRAMS * slot)
        share = triton.cdiv(triton.cdiv(stop - start, unit), PROGRAMS) * unit
        grid = (triton.cdiv(stop - start, share),)
        tensors = (flat[start:stop], flat_out[start:stop], *regions.arguments, stop - start, share)
        if algorithm == "one_shot":
            call_kernel(
                one_shot_kernel, grid, *tensors, num_warps=_WARPS, BLOCK=block, **regions.constants
            )
            continue
        call_kernel(
            two_shot_kernel,
            grid,
            *tensors,
            regions.multicast,
            num_warps=_WARPS,
            BLOCK=block,
            MULTIMEM=algorithm == "multimem",
            KIND=_KINDS[x.dtype],
            **regions.constants,
        )
    return out


def fits_rows(regions: PeerRegions, x_TD: Tensor) -> bool:
    """Whether `sum_rows` takes these rows: one for each program, in its slot."""
    rows, features = x_TD.shape
    row_bytes: int = triton.next_power_of_2(features) * x_TD.element_size()
    return rows <= PROGRAMS and row_bytes <= regions.slot_bytes


def sum_rows(
    regions: PeerRegions,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    post: GpuNorm | None,
    norm: GpuNorm | None,
    sum_TD: Tensor,
    out_TD: Tensor | None,
    *,
    scale: float = 1.0,
) -> None:
    """`sum = residual + scale * post(sum over ranks of x)` and `out = norm(sum)`; one kernel.

    Results are rounded at each of these steps. All contiguous, of rows that `fits_rows`.

    Args:
        regions: of the group.
        x_TD: this rank's part.
        residual_TD: None: nothing is added.
        post: None: the sum is not normed.
        norm: None: there is no `out_TD`.
        sum_TD: written.
        out_TD: written.
        scale: of the sum, after its norm.
    """
    rows, k = x_TD.shape
    block = triton.next_power_of_2(k)
    call_kernel(
        sum_rows_kernel,
        (rows,),
        x_TD,
        residual_TD,
        None if post is None else post.weight,
        None if norm is None else norm.weight,
        sum_TD,
        out_TD,
        *regions.arguments,
        0.0 if post is None else post.eps,
        0.0 if norm is None else norm.eps,
        num_warps=max(4, min(16, block // 1024)),
        K=k,
        SCALE=scale,
        POST_OFFSET=post is not None and post.offset,
        OFFSET=norm is not None and norm.offset,
        BLOCK=block,
        **regions.constants,
    )


def reference_sum_rows(
    total_TD: Tensor,
    residual_TD: Tensor | None,
    post: GpuNorm | None,
    norm: GpuNorm | None,
    sum_TD: Tensor,
    out_TD: Tensor | None,
    *,
    scale: float = 1.0,
) -> None:
    """What `sum_rows` does with the sum over ranks `total_TD`, in plain torch."""
    x_TD = reference_norm(total_TD, post) * scale
    sum_TD.copy_(x_TD if residual_TD is None else residual_TD + x_TD)
    if out_TD is not None:
        out_TD.copy_(reference_norm(sum_TD, norm))
