"""The kernels of this package as one choice of `select_kernels`.

Triton is imported when a model is made, not before: a plan of memory needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..choice import Kernels
from ..ops.attention import paged_attention
from ..ops.convolution import causal_conv
from ..ops.experts_operator import opaque_experts
from ..ops.layer_plan import BoundModel
from ..ops.linear import LinearTensors, reference_linear
from ..ops.recurrence import recurrence
from ..ops.stack import DecodeStep, Stack
from ..weights import WeightStorage
from .fusion import fusion_obstacle
from .packed_codes import parts_bytes, store_parts

if TYPE_CHECKING:
    from .stack import Operations


def _linear_of_codes(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    scales: Tensor,
    batch_invariant: bool,
) -> Tensor:
    from .stack import Operations

    operations = Operations.batch_invariant() if batch_invariant else Operations()
    out_TN = x_TK.new_empty(x_TK.shape[0], out_features)
    linear = LinearTensors(weight_NK, scales, bias_N)
    operations.norm_linear(x_TK.contiguous(), linear, out_TN)
    return out_TN


torch.library.define(
    "stepgraph::linear_of_codes",
    "(Tensor x, Tensor weight, Tensor? bias, int out_features, Tensor scales, bool invariant)"
    " -> Tensor",
)
torch.library.impl("stepgraph::linear_of_codes", "CUDA", _linear_of_codes)
torch.library.register_fake(
    "stepgraph::linear_of_codes",
    lambda x_TK, weight, bias, out_features, *_: x_TK.new_empty(x_TK.shape[0], out_features),
)


def gpu_kernels(
    weights: WeightStorage,
    operations: Operations | None = None,
    *,
    batch_invariant: bool = False,
) -> Kernels:
    """What runs on a CUDA device with Triton.

    Latent attention has no stack: its layers are compiled around the attention of this package.

    Args:
        weights: how weights of linear layers are stored.
        operations: what steps launch; None: the kernels of this package.
        batch_invariant: whether results of a token must not depend on the others of its step. If
            so, no decode step is fused, because its kernels differ from prefill kernels.
    """

    def chosen() -> Operations:
        from .stack import Operations

        return operations or (Operations.batch_invariant() if batch_invariant else Operations())

    def make_stack(model: BoundModel) -> Stack:
        from .stack import GpuStack

        return GpuStack(model, chosen(), any_batch=batch_invariant)

    def make_decode_step(stack: Stack, model: BoundModel) -> DecodeStep:
        from .stack import GpuDecodeStep

        return GpuDecodeStep(stack, model)

    def linear(
        x_TK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        out_features: int,
        scales_N: Tensor | None = None,
    ) -> Tensor:
        """As `reference_linear`, by `Operations.norm_linear` of codes and where torch does not
        compile it."""
        if torch.compiler.is_compiling():
            if scales_N is None or weights.dtype is not None:
                return reference_linear(x_TK, weight_NK, bias_N, out_features, scales_N)
            arguments = (x_TK, weight_NK, bias_N, out_features, scales_N, batch_invariant)
            found: Tensor = torch.ops.stepgraph.linear_of_codes.default(*arguments)
            return found
        out_TN = x_TK.new_empty(x_TK.shape[0], out_features)
        tensors = LinearTensors(weight_NK, scales_N, bias_N)
        chosen().norm_linear(x_TK.contiguous(), tensors, out_TN)
        return out_TN

    if torch.cuda.is_available():
        from .causal_conv import causal_conv_on_gpu as convolution
        from .decode_attention import paged_attention_on_gpu as attention
        from .experts import experts_on_gpu as experts
        from .recurrence import delta_rule_on_gpu, recurrence_on_gpu

        state_recurrence = recurrence_on_gpu(batch_invariant=batch_invariant)
        delta_rule = None if batch_invariant else delta_rule_on_gpu
    else:  # nothing calls the kernels, and Triton may be missing
        attention, experts = paged_attention, opaque_experts
        convolution, state_recurrence, delta_rule = causal_conv, recurrence, None
    return Kernels(
        name="triton",
        attention=attention,
        linear=linear,
        experts=experts,
        ungated_experts=opaque_experts,
        bounded_by_length=True,
        masks=0,
        recurrence=state_recurrence,
        delta_rule=delta_rule,
        causal_conv=convolution,
        weights=weights,
        sampler="triton",
        make_stack=make_stack,
        stack_obstacle=fusion_obstacle,
        make_decode_step=None if batch_invariant else make_decode_step,
        batch_invariant=batch_invariant,
        store_parts=store_parts,
        parts_bytes=parts_bytes,
    )
