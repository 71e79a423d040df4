"""The experts of a transformers model as two grouped products with static shapes.

transformers' own implementations either read sizes on the host, gather the weights of every token,
or exist for bfloat16 only.

Shapes: T tokens, P pairs of a token and one of its experts, E experts, K input and N output
features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import have_triton

__all__ = ["EXPERTS_IMPLEMENTATION", "register_experts"]

EXPERTS_IMPLEMENTATION = "stepgraph"

torch.library.define(
    "stepgraph::grouped_mm", "(Tensor x, Tensor weight, Tensor ends, bool transposed) -> Tensor"
)


@torch.library.impl("stepgraph::grouped_mm", "CPU")
def _grouped_mm_cpu(x_PK: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    """Rows up to `ends[e]` by the weight of expert e, `[N, K]`, or `[K, N]` if `transposed`."""
    out_PN = x_PK.new_empty(x_PK.shape[0], weight.shape[2 if transposed else 1])
    begin = 0
    for expert, end in enumerate(ends_E.tolist()):
        if begin < end:
            matrix_KN = weight[expert] if transposed else weight[expert].T
            torch.mm(x_PK[begin:end], matrix_KN, out=out_PN[begin:end])
        begin = end
    return out_PN


@torch.library.impl("stepgraph::grouped_mm", "CUDA")
def _grouped_mm_cuda(x_PK: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    """As on a CPU, without waiting for the device.

    Not `torch._grouped_mm`: it needs rows of whole 16 bytes, and copies `ends` to the host where
    the device has no kernel for it.
    """
    pair_P = torch.arange(x_PK.shape[0], device=x_PK.device)
    expert_P = torch.searchsorted(ends_E, pair_P, right=True)
    if have_triton():
        from ...kernels.triton.expert_blocks import product_of_rows_by_expert

        rows = (x_PK.contiguous(), weight.contiguous(), expert_P.to(torch.int32))
        return product_of_rows_by_expert(*rows, transposed=transposed)
    # Each row gathers its own weight.
    weight_EKN = weight if transposed else weight.transpose(1, 2)
    return torch.bmm(x_PK[:, None], weight_EKN[expert_P])[:, 0]


def _fake_grouped_mm(x_PK: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    return x_PK.new_empty(x_PK.shape[0], weight.shape[2 if transposed else 1])


torch.library.register_fake("stepgraph::grouped_mm", _fake_grouped_mm)


def _experts_forward(
    module: Any, hidden_TK: Tensor, chosen_TX: Tensor, weights_TX: Tensor
) -> Tensor:
    """The experts function that is registered with transformers; X experts per token."""
    per_token = chosen_TX.shape[-1]
    expert_P, order_P = torch.sort(chosen_TX.reshape(-1))
    experts = torch.arange(module.num_experts, device=hidden_TK.device)
    ends_E = torch.searchsorted(expert_P, experts, right=True)

    def product(x_PK: Tensor, name: str) -> Tensor:
        out_PN: Tensor = torch.ops.stepgraph.grouped_mm.default(
            x_PK, getattr(module, name), ends_E, module.is_transposed
        )
        return out_PN + getattr(module, f"{name}_bias")[expert_P] if module.has_bias else out_PN

    x_PK = hidden_TK[order_P // per_token]
    if module.has_gate:
        inner = module._apply_gate(product(x_PK, "gate_up_proj"))
    else:
        inner = module.act_fn(product(x_PK, "up_proj"))
    out_PK = product(inner, "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such field
        out_PK = module.post_expert_norm(out_PK)
    weighted_PK = out_PK * weights_TX.reshape(-1)[order_P, None]
    own_order = torch.empty_like(weighted_PK).index_copy(0, order_P, weighted_PK)
    summed: Tensor = own_order.view(-1, per_token, hidden_TK.shape[-1]).sum(1)
    return summed.to(hidden_TK.dtype)


def register_experts() -> None:
    """Register the experts function with transformers. Idempotent."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, _experts_forward)
