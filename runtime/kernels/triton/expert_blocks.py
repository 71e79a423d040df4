"""Experts of many tokens: pairs of a token and an expert sorted by expert, and products of blocks.

Shapes: T tokens, K experts of a token, N = T * K pairs (pair n is expert n % K of token n // K),
E experts, M pairs of a block, B blocks, D hidden_size, F features of an expert.

A block has pairs of one expert, whose weights its programs read once for all of them. How many
pairs an expert has is known on the device alone, so there are as many blocks as any choice needs:
programs of blocks without pairs end. With blocks of 2:

    experts of pairs 0 to 5   2 0 2 2 0 2
    pairs of blocks           1 4 | 0 2 | 3 5 | . .        . is padding
    experts of blocks         0     2     2     no expert

The pairs of an expert are in ascending order, and each result is written to the place of its pair,
so results do not depend on the order in which programs run. They are summed by token at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.activation import Activate
from ..ops.experts import Experts, ExpertTensors
from ..ops.linear import LinearTensors
from ..weights.stored import FP8_BLOCK
from .expert_routing import Routed
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import LinearConfig
from .quantised import as_operand, decoded_tile, kernel_weight, load_levels
from .rowwise import Gating, activate, scaled

_MOST_ROWS = 128
"""Pairs of a block at most."""
_SCAN = 1024
"""Most pairs that are looked at together while they are sorted."""
_LEAST_SCAN = 128
"""As many as a program has threads: Triton has counted elements twice that two threads hold."""
_SUMMED = 512
"""Features that a program sums over the experts of a token."""


class PairBlocks(NamedTuple):
    """Pairs sorted by expert."""

    pairs: Tensor
    """int32 `[B * M]`: pairs of each block, N where there is none; anything in blocks of no
    expert."""
    experts: Tensor
    """int32 `[B]`: the expert of each block, E for blocks without pairs, which come last."""


def num_blocks(pairs: int, total: int, rows: int) -> int:
    """Blocks that are enough for any choice: all but one block of an expert are full."""
    return min(pairs, (pairs + total * (rows - 1)) // rows)


def block_rows(pairs: int, total: int) -> int:
    """Pairs of a block: about as many as an expert has, but no fewer than tensor cores take."""
    rows: int = triton.next_power_of_2(-(-pairs // total))
    return max(16, min(_MOST_ROWS, rows))


def block_tiles(pairs: int, total: int, dtype: torch.dtype) -> LinearConfig:
    """Return the default sizes of a product of blocks."""
    rows = block_rows(pairs, total)
    wide = dtype == torch.float32  # multiplied by the ordinary units
    height = 64 if rows == 16 or wide else 128
    block_k = 32 if wide else (FP8_BLOCK if rows == 16 else 64)
    stages = 2 if wide else 4 if rows == 16 else 3
    return LinearConfig(height, block_k, 8 if height == 128 else 4, "blocks", stages=stages)


def sort_pairs(experts_TK: Tensor, total: int, rows: int) -> PairBlocks:
    """Sort the pairs of contiguous int32 experts (`total` for padding) into blocks of `rows`.

    Padding is left out.
    """
    pairs, device = experts_TK.numel(), experts_TK.device
    blocks = num_blocks(pairs, total, rows)
    sorted_pairs = torch.empty(blocks * rows, dtype=torch.int32, device=device)
    experts = torch.empty(blocks, dtype=torch.int32, device=device)
    call_kernel(
        pairs_of_experts, (total,), experts_TK, sorted_pairs, experts, pairs, blocks,
        TOTAL=total, BINS=triton.next_power_of_2(total), ROWS=rows,
        BLOCK=max(_LEAST_SCAN, min(_SCAN, triton.next_power_of_2(pairs))),
    )  # fmt: skip
    return PairBlocks(sorted_pairs, experts)


def experts_by_block(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    routed: Routed,
    residual_TD: Tensor | None,
    out_TD: Tensor,
    configs: tuple[LinearConfig, LinearConfig],
    *,
    scale: float,
    rows: int | None = None,
) -> None:
    """See `experts.experts`; blocks have `rows` rows, None: as many as `block_rows` chooses."""
    pairs, (tokens, hidden) = routed.experts.numel(), out_TD.shape
    blocks = sort_pairs(routed.experts, op.total, rows or block_rows(pairs, op.total))
    inner_NF = x_TD.new_empty(pairs, op.activate.features)
    products_ND = x_TD.new_empty(pairs, hidden, dtype=torch.float32)
    before, after = (routed.weights, None) if op.scaled_inputs else (None, routed.weights)
    gate_up, down = tensors.gate_up, tensors.down
    shape, act = (op.per_token, op.total), op.activate
    _product(gate_up, x_TD, inner_NF, before, None, blocks, configs[0], *shape, act=act)
    _product(down, inner_NF, products_ND, None, after, blocks, configs[1], *shape)
    call_kernel(
        sum_of_experts, (tokens, triton.cdiv(hidden, _SUMMED)),
        products_ND, routed.experts, residual_TD, out_TD, hidden,
        PER_TOKEN=op.per_token, TOTAL=op.total, BLOCK=_SUMMED, SCALE=scale,
    )  # fmt: skip


def product_of_rows_by_expert(
    x_NK: Tensor, weight: Tensor, experts_N: Tensor, *, transposed: bool
) -> Tensor:
    """Return each row of `x` times the weight of its expert.

    Args:
        x_NK: contiguous.
        weight: `[E, rows, K]`, or `[E, K, rows]` if `transposed`; contiguous, in the dtype of `x`.
        experts_N: int32; E for rows whose result is undefined.
        transposed: see `weight`.
    """
    total, rows = weight.shape[0], weight.shape[2 if transposed else 1]
    pairs = x_NK.shape[0]
    out_NR = x_NK.new_empty(pairs, rows)
    blocks = sort_pairs(experts_N, total, block_rows(pairs, total))
    config = block_tiles(pairs, total, x_NK.dtype)
    linear = LinearTensors(weight.flatten(0, 1))
    _product(linear, x_NK, out_NR, None, None, blocks, config, 1, total, transposed=transposed)
    return out_NR


def _product(
    linear: LinearTensors,
    x: Tensor,
    out_NF: Tensor,
    input_weights: Tensor | None,
    output_weights: Tensor | None,
    blocks: PairBlocks,
    config: LinearConfig,
    per_token: int,
    total: int,
    *,
    act: Activate | None = None,
    transposed: bool = False,
) -> None:
    """Call the product of blocks; with an activation x are tokens, else pairs."""
    weight, form = kernel_weight(linear)
    pairs, n = out_NF.shape
    block_n = config.block_n // (1 if act is None else 2)
    call_kernel(
        product_of_blocks, (blocks.experts.shape[0], triton.cdiv(n, block_n)),
        x, weight, linear.scales, linear.bias, *blocks, input_weights, output_weights, out_NF,
        pairs, n,
        num_warps=config.num_warps, K=x.shape[-1],
        ROWS=blocks.pairs.shape[0] // blocks.experts.shape[0], BLOCK_N=block_n,
        BLOCK_K=config.block_k, STAGES=config.stages, PER_TOKEN=per_token, TOTAL=total,
        TRANSPOSED=transposed, GATING=Gating.of(act), FORM=form,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N", "BLOCKS"])
def pairs_of_experts(  # type: ignore[no-untyped-def]
    experts_ptr, sorted_ptr, block_experts_ptr, N, BLOCKS,
    TOTAL: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program e: the blocks of expert e. All programs count the pairs of all experts."""
    let_dependents_start(PDL)
    mine = tl.program_id(0)
    wait_for_inputs(PDL)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        expert = tl.load(experts_ptr + n, mask=n < N, other=TOTAL)
        counts += tl.histogram(expert, BINS, mask=expert < TOTAL)
    each = tl.arange(0, BINS)
    blocks = tl.cdiv(counts, ROWS)
    first = tl.sum(tl.where(each < mine, blocks, 0), axis=0)
    own = tl.sum(tl.where(each == mine, blocks, 0), axis=0)

    found = 0
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        here = tl.load(experts_ptr + n, mask=n < N, other=TOTAL) == mine
        rank = found + tl.cumsum(here.to(tl.int32), axis=0) - 1
        tl.store(sorted_ptr + first * ROWS + rank, n, mask=here)
        found += tl.sum(here.to(tl.int32), axis=0)
    lane = tl.arange(0, ROWS)
    for block in range(first, first + own):
        tl.store(block_experts_ptr + block, mine)
        place = block * ROWS + lane
        empty = place >= first * ROWS + found
        tl.store(sorted_ptr + place, tl.zeros_like(place) + N, mask=empty)
    if mine == TOTAL - 1:  # the last blocks belong to no expert
        for block in range(first + own, BLOCKS):
            tl.store(block_experts_ptr + block, TOTAL)


@triton.jit(do_not_specialize=["PAIRS"])
def product_of_blocks(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, pairs_ptr, block_experts_ptr, input_weights_ptr,
    output_weights_ptr, out_ptr, PAIRS, N,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, TOTAL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, TRANSPOSED: tl.constexpr,
    GATING: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, i): `BLOCK_N` output features of the pairs of a block.

    The weight is the left operand: tensor cores take 64 of its rows at a time, and as few as 8 rows
    of the input. A product with `GATING` has tokens as inputs and an activation as its result, the
    other one has pairs. A weight is `[N, K]`, or `[K, N]` if `TRANSPOSED`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    GATED: tl.constexpr = GATING is not None
    HALVES: tl.constexpr = 2 if GATED else 1
    R: tl.constexpr = BLOCK_N * HALVES
    let_dependents_start(PDL)
    levels = load_levels(w_ptr, K, FORM)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, R) // HALVES
    row = tl.minimum(n, N - 1) + tl.arange(0, R) % HALVES * N
    wait_for_inputs(PDL)
    expert = tl.load(block_experts_ptr + tl.program_id(0))
    if expert >= TOTAL:
        return
    rows = expert.to(tl.int64) * (N * HALVES) + row
    pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    there = pair < PAIRS
    # Padding reads the inputs of the first pair; its result is not stored.
    read = tl.where(there, pair, 0)
    x_rows = x_ptr + (read // PER_TOKEN if GATED else read).to(tl.int64)[None, :] * K
    if TRANSPOSED:  # neighbouring features are neighbours in memory, which a minimum would hide
        w_rows = w_ptr + (expert.to(tl.int64) * N * K + n)[:, None]
    else:
        w_rows = w_ptr + rows[:, None] * K
    if input_weights_ptr is not None:
        factors = tl.load(input_weights_ptr + read)[None, :]
    sums = tl.zeros([R, ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + k[:, None], mask=(k < K)[:, None], other=0.0)
        if input_weights_ptr is not None:
            x = (x.to(tl.float32) * factors).to(dtype)
        if FORM.is_grouped:
            w = decoded_tile(w_ptr, scale_ptr, levels, rows, start, K, BLOCK_K, FORM).to(dtype)
        else:
            columns = k.to(tl.int64) * N if TRANSPOSED else k
            mask = (k < K)[None, :]
            if TRANSPOSED:
                mask &= (n < N)[:, None]
            w = tl.load(w_rows + columns[None, :], mask=mask, other=0)
            w = as_operand(w, FORM, dtype)
        if FORM.groups and not FORM.is_grouped:
            scales = tl.load(scale_ptr + rows * FORM.groups + start // 128)
            sums += tl.dot(w, x, input_precision="ieee") * scales[:, None]
        else:
            sums = tl.dot(w, x, sums, input_precision="ieee")
    if scale_ptr is not None and not FORM.groups:
        sums *= tl.load(scale_ptr + rows)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    stored_n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [BLOCK_N, 2, ROWS]), [0, 2, 1]))
        out = activate(gate, up, GATING, dtype).to(dtype)
    else:
        out = sums
        if output_weights_ptr is not None:
            out *= tl.load(output_weights_ptr + read)[None, :]
    place = out_ptr + pair.to(tl.int64)[None, :] * N + stored_n
    tl.store(place, out, mask=(stored_n < N) & there[None, :])


@triton.jit
def sum_of_experts(  # type: ignore[no-untyped-def]
    products_ptr, experts_ptr, residual_ptr, out_ptr, N, PER_TOKEN: tl.constexpr,
    TOTAL: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i): `BLOCK` features of the sum over the experts of token t, in their order."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    let_dependents_start(PDL)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    live = tl.load(experts_ptr + t * PER_TOKEN) < TOTAL  # nothing was computed for padding
    out = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(PER_TOKEN):
        at = (t * PER_TOKEN + place) * N + n
        out += tl.load(products_ptr + at, mask=(n < N) & live, other=0.0)
    out = scaled(out, SCALE, dtype).to(dtype)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + t * N + n, mask=n < N, other=0.0).to(tl.float32)
        out = residual + out.to(tl.float32)
    tl.store(out_ptr + t * N + n, out.to(dtype), mask=n < N)
