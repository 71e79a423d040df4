"""A mixture of experts on a GPU: from normed hidden states to their sum with the residual.

Shapes: T tokens, K experts of a token, N = T * K pairs, D hidden_size, F features of an expert.

The arithmetic follows `ops/experts.py`. All shapes are static and nothing waits for the device,
so a step with experts can be captured. Results are the same in every run: the experts of a token
are summed in float32 and in their order, without atomic operations.

Few tokens run by pair, with the kernels of this file. Such a step is bound by reading the weights
of the chosen experts, so sums are made on the float32 cores, as `linear_kernels.py` does. Which
weights they are is known after the choice alone: nothing is loaded before the wait. The first
kernel computes gate, up and activation of a pair; a program of the second one adds up the experts
of its token. Programs of all pairs that compute the same features run at the same time: pairs with
the same expert find its weights in the L2 cache. More tokens run by block (`expert_blocks.py`).

Default sizes follow from a model of the device, not from measurements. At a bandwidth b and a
latency l, b * l bytes of weights must be on their way: 36 KiB on each of the 132 multiprocessors of
an H200 (4.8 TB/s, about 1 µs under load). So there are at least three programs for each
multiprocessor, and their stages together hold that many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..ops.experts import Experts, ExpertTensors, reference_products
from ..ops.experts_operator import define_experts
from ..ops.linear import LinearTensors
from ..weights.stored import FP8_BLOCK
from .expert_blocks import block_tiles, experts_by_block
from .expert_routing import Routed, route
from .fusion import runs_by_pair
from .kernel_calls import (
    call_kernel,
    let_dependents_start,
    num_multiprocessors,
    wait_for_inputs,
)
from .linear import EXPERT_PRODUCTS, FEW_ROWS, LinearConfig, code_bits
from .quantised import as_numbers, decoded_tile, kernel_weight, load_levels
from .rowwise import Gating, activate, scaled
from .tuning import Product, lookup

_IN_FLIGHT = 40 << 10
"""Bytes of weights that are on their way to a multiprocessor."""
_RESIDENT = 5
"""Programs of 128 threads and at most 96 registers on a multiprocessor, with room for others."""
_LEAST_PROGRAMS = 3
"""For each multiprocessor."""
_TILE_BYTES = 8 << 10
"""Of a program for pairs, at a time."""
_WIDEST, _TALLEST = 256, 32
"""Input features and rows of a weight of such a tile at most."""
_STAGES, _CODE_STAGES = (3, 8), 5
"""At least and at most; of 4-bit codes, of which some spill with more."""
_ANY_PAIRS = 32
"""Pairs of a block that do not depend on the step: few have to be padded, and many share the reads
of a weight."""


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
        any_tokens: one compiled kernel for any number of tokens: each expert of a token is one
            chain of products, whatever the place of the pair in its block.
    """
    if any_tokens:
        configs = (block_tiles(_ANY_PAIRS, 1, x_TD.dtype),) * 2
    elif configs is None:
        configs = expert_tiles(ExpertSizes.of(op, x_TD.shape[0], x_TD.dtype, tensors.gate_up))
    if configs[0].kind == "blocks":
        rows = _ANY_PAIRS if any_tokens else None
        experts_by_block(
            op, x_TD, tensors, routed, residual_TD, out_TD, configs, scale=scale, rows=rows
        )
        return
    (tokens, hidden), features, per_token = x_TD.shape, op.activate.features, op.per_token
    inner_TKF = x_TD.new_empty(tokens, per_token, features)
    gate_up, form = kernel_weight(tensors.gate_up)
    config, block_f = configs[0], configs[0].block_n // 2
    shape = {"PER_TOKEN": per_token, "TOTAL": op.total, "SCALED_INPUTS": op.scaled_inputs}
    call_kernel(
        gate_up_kernel, (tokens * per_token, triton.cdiv(features, block_f)),
        x_TD, gate_up, tensors.gate_up.scales, tensors.gate_up.bias, routed.experts,
        routed.weights, inner_TKF, features,
        num_warps=config.num_warps, K=hidden, BLOCK_N=block_f, BLOCK_K=config.block_k,
        STAGES=config.stages, **shape, GATING=Gating.of(op.activate), FORM=form,
    )  # fmt: skip
    down, form = kernel_weight(tensors.down)
    config = configs[1]
    call_kernel(
        down_kernel, (tokens, triton.cdiv(hidden, config.block_n)),
        inner_TKF, down, tensors.down.scales, tensors.down.bias, routed.experts, routed.weights,
        residual_TD, out_TD, hidden,
        num_warps=config.num_warps, K=features, PLACES=triton.next_power_of_2(per_token),
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.stages, SCALE=scale,
        **shape, FORM=form,
    )  # fmt: skip


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
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    live_T: Tensor | None = None,
    router_TD: Tensor | None = None,
) -> Tensor:
    """As `ops.experts.reference_experts`, with the kernels of this package."""
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    routed = route(op, x_TD if router_TD is None else router_TD.contiguous(), tensors, live_T)
    if tensors.expert_scales is not None:  # of shared experts and of padding 1
        scales_E = F.pad(tensors.expert_scales, (0, op.total + 1 - op.routed), value=1.0)
        routed = routed._replace(weights=routed.weights * scales_E[routed.experts])
    experts(op, x_TD, tensors, routed, None, out_TD)
    return out_TD


experts_on_gpu = define_experts("triton_experts", triton_experts, "CUDA")
"""`triton_experts` as an operation that torch.compile does not look into."""


# Sizes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """What the sizes of a mixture's products depend on."""

    op: Experts
    tokens: int
    dtype: torch.dtype
    """Of activations."""
    weight_dtype: torch.dtype
    scale_blocks: bool
    """Whether tiles are not wider than the 128 input features that share a scale."""
    device: torch.device

    @classmethod
    def of(cls, op: Experts, tokens: int, dtype: torch.dtype, linear: LinearTensors) -> ExpertSizes:
        """Return the sizes of a mixture; `linear` is one of its products."""
        bits, scales = code_bits(linear.weight.dtype), linear.scales
        blocks = bits >= 8 and scales is not None and scales.dim() > 1
        return cls(op, tokens, dtype, linear.weight.dtype, blocks, linear.weight.device)

    @property
    def default_kind(self) -> str:
        """`pairs` or `blocks`, see `fusion.runs_by_pair`."""
        rows, hidden = self.product(EXPERT_PRODUCTS[0])
        expert_bytes = 3 * rows // 2 * hidden * code_bits(self.weight_dtype) / 8
        return "pairs" if runs_by_pair(self.op, self.tokens, expert_bytes) else "blocks"

    def product(self, kernel: str) -> tuple[int, int]:
        """Return the rows of an expert's weight, and its input features."""
        hidden, features = self.op.router.shape[1], self.op.activate.features
        return (2 * features, hidden) if kernel == EXPERT_PRODUCTS[0] else (hidden, features)

    def key(self, kernel: str) -> Product:
        """Return the product under which sizes are tuned."""
        dtypes, op = (self.dtype, self.weight_dtype, self.device), self.op
        shape = (self.tokens, *self.product(kernel), *dtypes, op.total, op.per_token)
        return Product(kernel, *shape)


def expert_tiles(sizes: ExpertSizes) -> tuple[LinearConfig, LinearConfig]:
    """Return the sizes of both products, as tuned or by default; they are of one kind."""
    gate_up, down = EXPERT_PRODUCTS
    first = lookup(sizes.key(gate_up), lambda: candidate_tiles(gate_up, sizes))
    if first is None:
        first = default_tiles(gate_up, sizes)
    kind = first.kind
    second = lookup(sizes.key(down), lambda: candidate_tiles(down, sizes, kind))
    if second is None or second.kind != kind:
        second = default_tiles(down, sizes, kind)
    return first, second


def default_tiles(kernel: str, sizes: ExpertSizes, kind: str | None = None) -> LinearConfig:
    """Return the sizes of a product that was not tuned; `kind` None: the default one."""
    tokens, pairs = sizes.tokens, sizes.tokens * sizes.op.per_token
    if (kind or sizes.default_kind) == "blocks":
        return block_tiles(pairs, sizes.op.total, sizes.dtype)
    rows, k = sizes.product(kernel)
    bits, processors = code_bits(sizes.weight_dtype), num_multiprocessors(sizes.device)
    width = min(FP8_BLOCK if sizes.scale_blocks else _WIDEST, max(16, triton.next_power_of_2(k)))
    halves, columns = (2, pairs) if kernel == EXPERT_PRODUCTS[0] else (1, tokens)
    # Codes take the registers of bfloat16.
    height = min(_TALLEST, 8 * _TILE_BYTES // (width * (bits if bits >= 8 else 16)))
    while height > 2 * halves and columns * -(-rows // height) < _LEAST_PROGRAMS * processors:
        height //= 2
    programs = columns * -(-rows // height)
    resident = max(1, min(_RESIDENT, programs // processors))
    ahead = -(-8 * _IN_FLIGHT // (resident * height * width * bits))
    stages = max(_STAGES[0], min(_STAGES[1] if bits >= 8 else _CODE_STAGES, 1 + ahead))
    return LinearConfig(height, width, 4, "pairs", stages=stages)


def candidate_tiles(kernel: str, sizes: ExpertSizes, kind: str | None = None) -> list[LinearConfig]:
    """Return the sizes to time, the default first; with `kind` only sizes of one kind."""
    kinds = [kind] if kind else ["pairs", "blocks"]
    if sizes.tokens > FEW_ROWS:
        kinds = ["blocks"]
    configs = [default_tiles(kernel, sizes, kind)]
    for one in kinds:
        configs += _around(default_tiles(kernel, sizes, one), sizes.scale_blocks)
    return list(dict.fromkeys(configs))


def _around(default: LinearConfig, scale_blocks: bool) -> Iterator[LinearConfig]:
    yield default
    least, widest = 16 if default.kind == "blocks" else 2, FP8_BLOCK if scale_blocks else 1 << 30
    for block_n in (default.block_n // 2, default.block_n, 2 * default.block_n):
        for block_k in (default.block_k // 2, default.block_k, 2 * default.block_k):
            if block_n >= least and 16 <= block_k <= widest:
                yield replace(default, block_n=block_n, block_k=block_k)
    for stages in (default.stages - 1, default.stages + 1, default.stages + 2):
        if 2 <= stages <= _STAGES[1]:
            yield replace(default, stages=stages)
    yield replace(default, num_warps=8 if default.num_warps == 4 else 4)


# By pair -----------------------------------------------------------------------------------------


@triton.jit
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr, N,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, TOTAL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SCALED_INPUTS: tl.constexpr,
    GATING: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (pair, i): `BLOCK_N` features of the activation of a token's expert."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    R: tl.constexpr = 2 * BLOCK_N
    let_dependents_start(PDL)
    levels = load_levels(w_ptr, K, FORM)
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
        if FORM.is_grouped:
            w = decoded_tile(w_ptr, scale_ptr, levels, rows, start, K, BLOCK_K, FORM)
        else:
            w = tl.load(w_ptr + rows[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0)
            w = as_numbers(w, FORM)
        products = w * x[None, :]
        if FORM.groups and not FORM.is_grouped:
            products *= tl.load(scale_ptr + rows * FORM.groups + start // 128)[:, None]
        sums += products
    out = tl.sum(sums, axis=1)
    if scale_ptr is not None and not FORM.groups:
        out *= tl.load(scale_ptr + rows)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + rows).to(tl.float32)
    gate, up = tl.split(tl.reshape(out, [BLOCK_N, 2]))
    out = activate(gate, up, GATING, dtype).to(dtype)
    stored_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + pair.to(tl.int64) * N + stored_n, out, mask=stored_n < N)


@triton.jit
def down_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, experts_ptr, weights_ptr, residual_ptr, out_ptr, N,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, PLACES: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SCALED_INPUTS: tl.constexpr, SCALE: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, i): `BLOCK_N` output features of token t, summed over its experts.

    The loop is one over the steps of all experts, so that the next expert's weights are loaded
    while one is multiplied. It reads no expert from memory, which its loads would wait for.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    let_dependents_start(PDL)
    levels = load_levels(w_ptr, K, FORM)
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
        if FORM.is_grouped:
            w = decoded_tile(w_ptr, scale_ptr, levels, rows, start, K, BLOCK_K, FORM)
        else:
            w = tl.load(w_ptr + rows[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0)
            w = as_numbers(w, FORM)
        if not SCALED_INPUTS:
            x *= tl.sum(tl.where(places == place, factors, 0.0), axis=0)
        products = w * x[None, :]
        if FORM.groups and not FORM.is_grouped:
            products *= tl.load(scale_ptr + rows * FORM.groups + start // 128)[:, None]
        elif scale_ptr is not None and not FORM.groups:
            products *= tl.load(scale_ptr + rows)[:, None]
        sums += products
    out = scaled(tl.sum(sums, axis=1) + bias, SCALE, dtype).to(dtype)
    place = t * N + n
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place, mask=n < N, other=0.0).to(tl.float32)
        out = residual + out.to(tl.float32)
    tl.store(out_ptr + place, out.to(dtype), mask=n < N)
