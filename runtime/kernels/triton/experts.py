"""A mixture of experts on a GPU: from normed hidden states to their sum with the residual.

Shapes: T tokens, D hidden_size, K experts of a token.

The arithmetic is that of `ops/experts.py`. All shapes are static and nothing waits for the device,
so a step with experts can be captured. Results are the same in every run: the experts of a token
are summed in float32 and in their order, without atomic operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.expert_operations import Experts
from ..ops.experts import ExpertTensors, reference_products
from ..ops.experts_operator import define_experts
from .expert_blocks import down_of_blocks, gate_up_of_blocks
from .expert_pairs import down_of_pairs, gate_up_of_pairs
from .expert_routing import Routed, route
from .expert_tiles import ANY_PAIRS, ExpertSizes, any_tiles, expert_tiles
from .linear import LinearConfig

__all__ = [
    "experts",
    "experts_of_any_tokens",
    "experts_on_gpu",
    "reference_experts_of_choice",
    "triton_experts",
]


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
        configs: sizes of both products, of one kind; None: those of `expert_tiles`.
        scale: of the sum.
    """
    if configs is None:
        weight = tensors.gate_up, tensors.gate_up_scales
        configs = expert_tiles(ExpertSizes.of(op, x_TD.shape[0], x_TD.dtype, *weight))
    first, second = configs
    ends = (residual_TD, out_TD, scale, second)
    if first.kind == "pairs":
        inner_TKF = gate_up_of_pairs(op, x_TD, tensors, routed, first)
        down_of_pairs(op, inner_TKF, tensors, routed, *ends)
    else:
        blocks, inner_NF = gate_up_of_blocks(op, x_TD, tensors, routed, first)
        down_of_blocks(op, blocks, inner_NF, tensors, routed, *ends)


def experts_of_any_tokens(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    routed: Routed,
    residual_TD: Tensor | None,
    out_TD: Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """As `experts`, with one compiled kernel for any number of tokens.

    The bits of a token do not depend on the other tokens: each of its experts is one chain of
    products, whatever the place of the pair in its block.
    """
    config = any_tiles(x_TD.dtype)
    blocks, inner_NF = gate_up_of_blocks(op, x_TD, tensors, routed, config, ANY_PAIRS)
    ends = (residual_TD, out_TD, scale, config)
    down_of_blocks(op, blocks, inner_NF, tensors, routed, *ends)


def reference_experts_of_choice(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    routed: Routed,
    residual_TD: Tensor | None,
    out_TD: Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """What `experts` does, in plain torch."""
    sum_TD = reference_products(op, x_TD, tensors, routed.weights, routed.experts.long())
    if scale != 1.0:
        sum_TD = sum_TD * scale
    out_TD.copy_(sum_TD if residual_TD is None else residual_TD + sum_TD)


def triton_experts(
    op: Experts, x_TD: Tensor, tensors: ExpertTensors, live_T: Tensor | None = None
) -> Tensor:
    """As `ops.experts.reference_experts`, with the kernels of this package."""
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    experts(op, x_TD, tensors, route(op, x_TD, tensors, live_T), None, out_TD)
    return out_TD


experts_on_gpu = define_experts("triton_experts", triton_experts)
"""`triton_experts` as an operation that torch.compile does not look into."""
