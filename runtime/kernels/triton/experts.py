"""Experts of few tokens: each pair of a token and an expert by programs of its own.

Shapes: T tokens, K experts of a token, D hidden_size, F features of an expert.

A step of few tokens is bound by reading the weights of the experts that they choose, so sums are
made on the float32 cores, as `linear_kernels.py` does. Which weights they are is known after the
choice alone: nothing is loaded before the wait. The first kernel computes gate, up and activation
of a pair; a program of the second one adds up the experts of its token, in their order.

Programs of all pairs that compute the same features run at the same time: pairs with the same
expert find its weights in the L2 cache.

A mixture of experts on a GPU: from normed hidden states to their sum with the residual.

Shapes: T tokens, D hidden_size, K experts of a token.

The arithmetic follows `ops/experts.py`. All shapes are static and nothing waits for the device,
so a step with experts can be captured. Results are the same in every run: the experts of a token
are summed in float32 and in their order, without atomic operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.experts import Experts, ExpertTensors, reference_products
from ..ops.experts_operator import define_experts
from .expert_blocks import down_of_blocks, gate_up_of_blocks
from .expert_routing import Routed, route
from .expert_tiles import ANY_PAIRS, ExpertSizes, block_tiles, expert_tiles
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import GpuLinear, LinearConfig
from .linear_tiles import activate, as_numbers, scaled
from .quantised import kernel_weight
from .rowwise import activation_constants

__all__ = [
    "down_of_pairs",
    "experts",
    "experts_on_gpu",
    "gate_up_of_pairs",
    "reference_experts_of_choice",
    "triton_experts",
]


def gate_up_of_pairs(
    op: Experts, x_TD: Tensor, tensors: ExpertTensors, routed: Routed, config: LinearConfig
) -> Tensor:
    """Return gate and up of each token's experts, activated: `[T, K, F]`; of padding anything."""
    (tokens, hidden), features, per_token = x_TD.shape, op.activate.features, op.per_token
    inner_TKF = x_TD.new_empty(tokens, per_token, features)
    weight, storage = kernel_weight(GpuLinear(tensors.gate_up, tensors.gate_up_scales))
    block_f = config.block_n // 2
    call_kernel(
        gate_up_kernel,
        (tokens * per_token, triton.cdiv(features, block_f)),
        x_TD,
        weight,
        tensors.gate_up_scales,
        tensors.gate_up_bias,
        routed.experts,
        routed.weights,
        inner_TKF,
        features,
        num_warps=config.num_warps,
        K=hidden,
        PER_TOKEN=per_token,
        TOTAL=op.total,
        BLOCK_N=block_f,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        SCALED_INPUTS=op.scaled_inputs,
        **activation_constants(op.activate),
        **storage,
    )
    return inner_TKF


def down_of_pairs(
    op: Experts,
    inner_TKF: Tensor,
    tensors: ExpertTensors,
    routed: Routed,
    residual_TD: Tensor | None,
    out_TD: Tensor,
    scale: float,
    config: LinearConfig,
) -> None:
    """Write the weighted sum of the outputs of each token's experts; see `experts.experts`."""
    (tokens, per_token, features), hidden = inner_TKF.shape, out_TD.shape[1]
    weight, storage = kernel_weight(GpuLinear(tensors.down, tensors.down_scales))
    call_kernel(
        down_kernel,
        (tokens, triton.cdiv(hidden, config.block_n)),
        inner_TKF,
        weight,
        tensors.down_scales,
        tensors.down_bias,
        routed.experts,
        routed.weights,
        residual_TD,
        out_TD,
        hidden,
        num_warps=config.num_warps,
        K=features,
        PER_TOKEN=per_token,
        PLACES=triton.next_power_of_2(per_token),
        TOTAL=op.total,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        SCALED_INPUTS=op.scaled_inputs,
        SCALE=scale,
        **storage,
    )


@triton.jit
def _scales_of(scale_ptr, rows, block, SCALE_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of rows, of one block of 128 input features or of all of them."""
    if SCALE_BLOCKS:
        scales = tl.load(scale_ptr + rows * SCALE_BLOCKS + block)
    else:
        scales = tl.load(scale_ptr + rows)
    return scales


@triton.jit
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr, N,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, TOTAL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr, SCALED_INPUTS: tl.constexpr, GELU: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (pair, i): `BLOCK_N` features of the activation of a token's expert."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    R: tl.constexpr = 2 * BLOCK_N
    let_dependents_start(PDL)
    pair = tl.program_id(0)
    # Of gate and up the rows of the same features, in turn.
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, R) // 2
    row = tl.minimum(n, N - 1) + tl.arange(0, R) % 2 * N
    wait_for_inputs(PDL)
    expert = tl.load(experts_ptr + pair)
    if expert >= TOTAL:
        return
    rows = expert.to(tl.int64) * (2 * N) + row
    x_row = x_ptr + (pair // PER_TOKEN).to(tl.int64) * K
    factor = 1.0
    if SCALED_INPUTS:
        factor = tl.load(weights_ptr + pair)
    sums = tl.zeros([R, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row + k, mask=k < K, other=0.0).to(tl.float32)
        if SCALED_INPUTS:
            x = (x * factor).to(dtype).to(tl.float32)
        w = tl.load(w_ptr + rows[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0)
        products = as_numbers(w, STORAGE, NATIVE_FP8) * x[None, :]
        if SCALE_BLOCKS:
            products *= _scales_of(scale_ptr, rows, start // 128, SCALE_BLOCKS)[:, None]
        sums += products
    out = tl.sum(sums, axis=1)
    if scale_ptr is not None and not SCALE_BLOCKS:
        out *= _scales_of(scale_ptr, rows, 0, SCALE_BLOCKS)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + rows).to(tl.float32)
    gate, up = tl.split(tl.reshape(out, [BLOCK_N, 2]))
    out = activate(gate, up, GELU, dtype, LIMIT, ALPHA, UP_OFFSET).to(dtype)
    stored_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + pair.to(tl.int64) * N + stored_n, out, mask=stored_n < N)


@triton.jit
def down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, residual_ptr, out_ptr, N,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, PLACES: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, STORAGE: tl.constexpr,
    NATIVE_FP8: tl.constexpr, SCALE_BLOCKS: tl.constexpr, SCALED_INPUTS: tl.constexpr,
    SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i): `BLOCK_N` output features of token t, summed over its experts.

    The loop is one over the steps of all experts, so that the next expert's weights are loaded
    while one is multiplied. It reads no expert from memory, which its loads would wait for.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    let_dependents_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    places = tl.arange(0, PLACES)
    wait_for_inputs(PDL)
    first = t * PER_TOKEN
    there = places < PER_TOKEN
    experts = tl.load(experts_ptr + first + places, mask=there, other=TOTAL)
    factors = tl.full([PLACES], 1.0, tl.float32)
    if not SCALED_INPUTS:
        factors = tl.load(weights_ptr + first + places, mask=there, other=0.0)
    # All experts of padding have this number: it has no steps.
    live = tl.min(experts, axis=0) < TOTAL
    steps = tl.where(live, PER_TOKEN * STEPS, 0)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        used = experts < TOTAL
        at = tl.where(used, experts, 0).to(tl.int64)[None, :] * N + row[:, None]
        biases = tl.load(bias_ptr + at, mask=used[None, :], other=0.0).to(tl.float32)
        bias = tl.sum(biases * factors[None, :], axis=1)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        place = step // STEPS
        start = step % STEPS * BLOCK_K
        k = start + tl.arange(0, BLOCK_K)
        rows = tl.sum(tl.where(places == place, experts, 0), axis=0).to(tl.int64) * N + row
        x = tl.load(x_ptr + (first + place) * K + k, mask=k < K, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + rows[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0)
        if not SCALED_INPUTS:
            x *= tl.sum(tl.where(places == place, factors, 0.0), axis=0)
        products = as_numbers(w, STORAGE, NATIVE_FP8) * x[None, :]
        if scale_ptr is not None:
            products *= _scales_of(scale_ptr, rows, start // 128, SCALE_BLOCKS)[:, None]
        sums += products
    out = scaled(tl.sum(sums, axis=1) + bias, SCALE, dtype).to(dtype)
    place = t * N + n
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place, mask=n < N, other=0.0).to(tl.float32)
        out = residual + out.to(tl.float32)
    tl.store(out_ptr + place, out.to(dtype), mask=n < N)


def experts(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    routed: Routed,
    residual_TD: Tensor | None,
    out_TD: Tensor,
    configs: tuple[LinearConfig, LinearConfig] | None = None,
    *,
    scale: float = 1.0,
    any_tokens: bool = False,
) -> None:
    """`out = residual + scale * (sum of the outputs of each token's experts)`.

    Sums are rounded before they are scaled and before they are added. Padding uses no expert: its
    sum is zero.

    Args:
        op: the mixture.
        x_TD: normed hidden states, contiguous, in the model's dtype.
        tensors: weights in the model's dtype, or 8-bit numbers with scales; contiguous.
        routed: the experts of each token.
        residual_TD: None: the result is the sum alone.
        out_TD: written; may be `residual_TD`.
        configs: sizes of both products, of one kind; None: from `expert_tiles`.
        scale: of the sum.
        any_tokens: one compiled kernel for any number of tokens. The bits of a token do not depend
            on the others: each of its experts is one chain of products, whatever the place of the
            pair in its block.
    """
    rows = None
    if any_tokens:
        rows, configs = ANY_PAIRS, (block_tiles(ANY_PAIRS, 1, x_TD.dtype),) * 2
    elif configs is None:
        weight = tensors.gate_up, tensors.gate_up_scales
        configs = expert_tiles(ExpertSizes.of(op, x_TD.shape[0], x_TD.dtype, *weight))
    first, second = configs
    ends = (residual_TD, out_TD, scale, second)
    if first.kind == "pairs":
        inner_TKF = gate_up_of_pairs(op, x_TD, tensors, routed, first)
        down_of_pairs(op, inner_TKF, tensors, routed, *ends)
    else:
        blocks, inner_NF = gate_up_of_blocks(op, x_TD, tensors, routed, first, rows)
        down_of_blocks(op, blocks, inner_NF, tensors, routed, *ends)


def reference_experts_of_choice(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    routed: Routed,
    residual_TD: Tensor | None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """What `experts` writes, in plain torch."""
    sum_TD = reference_products(op, x_TD, tensors, routed.weights, routed.experts.long())
    if scale != 1.0:
        sum_TD = sum_TD * scale
    return sum_TD if residual_TD is None else residual_TD + sum_TD


def triton_experts(
    op: Experts, x_TD: Tensor, tensors: ExpertTensors, live_T: Tensor | None = None
) -> Tensor:
    """As `ops.experts.reference_experts`, with the kernels of this package."""
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    experts(op, x_TD, tensors, route(op, x_TD, tensors, live_T), None, out_TD)
    return out_TD


experts_on_gpu = define_experts("triton_experts", triton_experts, "CUDA")
"""`triton_experts` as an operation that torch.compile does not look into."""
