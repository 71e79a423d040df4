"""How tokens choose experts: logits of the router, then the best experts of each token.

Shapes: T tokens, D hidden_size, R routed experts, K experts of a token (the chosen ones, then the
shared ones).

The logits are float32. Up to four tokens a program multiplies one token by a few rows of the
router, so that its rows are read by many processors; more tokens are multiplied on tensor cores.
The choice is a kernel of its own with a program for each token. The experts of padding have a
number that no expert has: programs that read it end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.experts import Experts, ExpertTensors, reference_choice
from ..ops.linear import LinearTensors
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import FEW_ROWS
from .linear_kernels import RowSizes, tiled_product

_ROUTER_ROWS = 2
"""Rows of the router that a program multiplies a token by: 256 experts are 128 programs."""


class Routed(NamedTuple):
    """The experts of each token."""

    logits: Tensor
    """float32 `[T, R]`."""
    weights: Tensor
    """float32 `[T, K]`: factors of the experts' outputs; 1 of shared ones, 0 of padding."""
    experts: Tensor
    """int32 `[T, K]`: expert ids; padding has the number of experts."""


def route(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    live_T: Tensor | None = None,
    *,
    any_tokens: bool = False,
) -> Routed:
    """Choose the experts of each token as `ops.experts.reference_route` does.

    Hidden states are normed and contiguous; `live_T` is false for padding. With `any_tokens` one
    compiled kernel serves any number of tokens: the logits of a token do not depend on it.
    """
    logits_TR = router_logits(x_TD, tensors.router, tensors.router_bias, any_tokens=any_tokens)
    return choose_experts(op, logits_TR, tensors.correction, live_T)


def router_logits(
    x_TD: Tensor, router_RD: Tensor, bias_R: Tensor | None, *, any_tokens: bool = False
) -> Tensor:
    """Return `x @ router.T + bias`, float32 `[T, R]`; `any_tokens` as for `route`."""
    tokens, hidden = x_TD.shape
    routed = router_RD.shape[0]
    logits_TR = x_TD.new_empty(tokens, routed, dtype=torch.float32)
    if tokens <= FEW_ROWS and not any_tokens:
        call_kernel(
            router_of_few_rows, (triton.cdiv(routed, _ROUTER_ROWS), tokens),
            x_TD, router_RD, bias_R, logits_TR, tokens, routed,
            D=hidden, BLOCK_R=_ROUTER_ROWS, BLOCK_D=min(1024, triton.next_power_of_2(hidden)),
        )  # fmt: skip
        return logits_TR
    wide = x_TD.dtype == torch.float32
    block_t = 16 if tokens <= 16 or wide or any_tokens else 32
    # Few programs: each has 24 KiB of the router on their way.
    sizes = RowSizes(block_t, 16, 64, 2) if wide else RowSizes(block_t, 16, 256, 4)
    tiled_product(x_TD, LinearTensors(router_RD, bias=bias_R), logits_TR, sizes)
    return logits_TR


def choose_experts(
    op: Experts, logits_TR: Tensor, correction_R: Tensor | None, live_T: Tensor | None = None
) -> Routed:
    """Choose the experts of each token from the logits; arguments as for `route`."""
    tokens, routed = logits_TR.shape
    routing, per_token = op.routing, op.per_token
    weights_TK = torch.empty(tokens, per_token, dtype=torch.float32, device=logits_TR.device)
    experts_TK = torch.empty(tokens, per_token, dtype=torch.int32, device=logits_TR.device)
    limited = routing.top_groups < routing.groups
    call_kernel(
        choice_of_experts, (tokens,),
        logits_TR, correction_R, None if live_T is None else live_T.view(torch.uint8), weights_TK,
        experts_TK, routing.scale,
        num_warps=1 if routed <= 256 else 4, R=routed, BLOCK_R=triton.next_power_of_2(routed),
        TOP_K=routing.top_k, SHARED=op.shared, BLOCK_K=triton.next_power_of_2(per_token),
        SCORES=routing.scores, BY_LOGITS=op.chooses_by_logits, NORMALISED=routing.normalised,
        GROUPS=routing.groups if limited else 1, TOP_GROUPS=routing.top_groups if limited else 1,
        TOP_2_SUM=routing.group_score == "top_2_sum",
    )  # fmt: skip
    return Routed(logits_TR, weights_TK, experts_TK)


def reference_routing(
    op: Experts, x_TD: Tensor, tensors: ExpertTensors, live_T: Tensor | None = None
) -> Routed:
    """What `route` does, in plain torch."""
    logits_TR = x_TD.float() @ tensors.router.float().T
    if tensors.router_bias is not None:
        logits_TR = logits_TR + tensors.router_bias.float()
    weights_TK, experts_TK = reference_choice(op, logits_TR, tensors.correction, live_T)
    return Routed(logits_TR, weights_TK, experts_TK.to(torch.int32))


@triton.jit(do_not_specialize=["T"])
def router_of_few_rows(  # type: ignore[no-untyped-def]
    x_ptr, router_ptr, bias_ptr, logits_ptr, T, R,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, t): the logits of `BLOCK_R` experts for token t."""
    let_dependents_start(PDL)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = router_ptr + tl.minimum(r, R - 1).to(tl.int64)[:, None] * D
    d = tl.arange(0, BLOCK_D)
    # The first tile, as weights may be loaded before the wait.
    w = tl.load(rows + d[None, :], mask=(d < D)[None, :], other=0.0)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + tl.minimum(r, R - 1)).to(tl.float32)
    wait_for_inputs(PDL)
    x_row = x_ptr + tl.program_id(1).to(tl.int64) * D
    x = tl.load(x_row + d, mask=d < D, other=0.0).to(tl.float32)
    sums = w.to(tl.float32) * x[None, :]
    for start in tl.static_range(BLOCK_D, D, BLOCK_D):
        at = start + d
        w = tl.load(rows + at[None, :], mask=(at < D)[None, :], other=0.0).to(tl.float32)
        sums += w * tl.load(x_row + at, mask=at < D, other=0.0).to(tl.float32)[None, :]
    logits = tl.sum(sums, axis=1) + bias
    tl.store(logits_ptr + tl.program_id(1) * R + r, logits, mask=r < R)


@triton.jit
def _within_groups(  # type: ignore[no-untyped-def]
    choice, r, R: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP_2_SUM: tl.constexpr,
):  # fmt: skip
    """What experts are chosen by, minus infinity outside of the best groups."""
    group = r // (R // GROUPS)
    score = tl.full(choice.shape, float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        mine = (r < R) & (group == g)
        of_group = tl.where(mine, choice, float("-inf"))
        best = tl.max(of_group, axis=0)
        if TOP_2_SUM:
            first = tl.min(tl.where(mine & (choice == best), r, R - 1), axis=0)
            best += tl.max(tl.where(r != first, of_group, float("-inf")), axis=0)
        score = tl.where(mine, best, score)
    left = r < R
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(left, score, float("-inf")), axis=0)
        chosen = tl.min(tl.where(left & (score == best), group, GROUPS - 1), axis=0)
        left = left & (group != chosen)
    return tl.where(left, float("-inf"), choice)


@triton.jit
def choice_of_experts(  # type: ignore[no-untyped-def]
    logits_ptr, correction_ptr, live_ptr, weights_ptr, experts_ptr, scale,
    R: tl.constexpr, BLOCK_R: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_K: tl.constexpr, SCORES: tl.constexpr, BY_LOGITS: tl.constexpr,
    NORMALISED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP_2_SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program chooses the experts of one token; of equal ones the first."""
    let_dependents_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    correction = 0.0
    if correction_ptr is not None:
        correction = tl.load(correction_ptr + r, mask=r < R, other=0.0)
    wait_for_inputs(PDL)
    logits = tl.load(logits_ptr + t * R + r, mask=r < R, other=float("-inf"))
    if SCORES == "softmax":
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    choice = (logits if BY_LOGITS else scores) + correction
    choice = tl.where(choice == choice, choice, float("inf"))  # NaN counts as the largest
    if TOP_GROUPS < GROUPS:
        choice = _within_groups(choice, r, R, GROUPS, TOP_GROUPS, TOP_2_SUM)

    k = tl.arange(0, BLOCK_K)
    experts = R + k - TOP_K  # of shared ones
    weights = tl.full([BLOCK_K], 1.0, tl.float32)
    left = r < R
    for place in range(TOP_K):
        best = tl.max(tl.where(left, choice, float("-inf")), axis=0)
        expert = tl.min(tl.where(left & (choice == best), r, R - 1), axis=0)
        weight = tl.sum(tl.where(r == expert, scores, 0.0), axis=0)
        experts = tl.where(k == place, expert, experts)
        weights = tl.where(k == place, weight, weights)
        left = left & (r != expert)
    routed = k < TOP_K
    if SCORES == "softmax_chosen":
        top = tl.max(tl.where(routed, weights, float("-inf")), axis=0)
        powers = tl.where(routed, tl.exp(weights - top), 0.0)
        weights = tl.where(routed, powers / tl.sum(powers, axis=0), weights)
    if NORMALISED:
        total = tl.sum(tl.where(routed, weights, 0.0), axis=0) + 1e-20
        weights = tl.where(routed, weights / total, weights)
    weights = tl.where(routed, weights * scale, weights)
    if live_ptr is not None:
        live = tl.load(live_ptr + t) != 0
        experts = tl.where(live, experts, R + SHARED)
        weights = tl.where(live, weights, 0.0)
    place = t * (TOP_K + SHARED) + k
    tl.store(experts_ptr + place, experts, mask=k < TOP_K + SHARED)
    tl.store(weights_ptr + place, weights, mask=k < TOP_K + SHARED)
