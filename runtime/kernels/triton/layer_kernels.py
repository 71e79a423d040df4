"""The kernels of decoder layers bound to their tensors, and decode steps of few rows of them.

Shapes: T tokens, D hidden_size, N features of a result, K features that attention returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.bound_model import BoundLayer, BoundModel, LinearTensors
from ..ops.collectives import Collectives
from ..ops.experts import ExpertTensors
from ..ops.layer_operations import Norm
from .activation import Clamp
from .combine_output import product_combines
from .fusion import Activation, Attention, Fused, GateUp, Mixture, NormLinear, ResidualLinear
from .linear import GpuLinear, GpuNorm, Pending
from .operations import Operations
from .step_attention import DecodeAttention, LayerAttention

__all__ = [
    "FewRows",
    "Hidden",
    "LayerKernel",
    "add_over_ranks",
    "gpu_linear",
    "norm_hidden",
    "run_activation",
    "run_mixture",
]


WEIGHTS_AHEAD = 1
"""Weights of the products after attention, at most two, that it brings to the L2 cache: with two
also that of gate and up. A benchmark on a GPU decides between them."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states `[T, D]` on their way: `x`, and what a norm has to be taken of and added."""

    x: Tensor
    delta: Tensor | None = None
    norm: GpuNorm | None = None
    normed: Tensor | None = None
    """x, normed as the next kernel would do it first; None: not yet."""

    def after(self, out_TD: Tensor, norm: GpuNorm | None) -> Hidden:
        """After a product that added x itself, unless a norm comes first."""
        return Hidden(out_TD) if norm is None else Hidden(self.x, out_TD, norm)

    def pending(self) -> Pending | None:
        """What the next kernel that norms has to add first, with room for the sum."""
        if self.delta is None or self.norm is None:
            return None
        return Pending(self.delta, self.norm, torch.empty_like(self.x))


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """A kernel of a layer with its tensors."""

    fused: Fused
    linear: GpuLinear | None
    norm: GpuNorm | None
    attention: LayerAttention | None
    after: LayerKernel | None
    """The next one, which may be of the next layer."""
    experts: ExpertTensors | None = None
    output_norm: GpuNorm | None = None
    """Of a mixture of experts."""

    @classmethod
    def bind(
        cls, fused: Fused, layer: BoundLayer, model: BoundModel, after: LayerKernel | None
    ) -> LayerKernel:
        """Return the kernel with the tensors of a layer."""

        def bound(norm: Norm | None) -> GpuNorm | None:
            if norm is None:
                return None
            return GpuNorm(layer.tensor(norm.weight), norm.eps, norm.offset)

        match fused:
            case Attention():
                return cls(fused, None, None, LayerAttention.of(fused, layer, model), after)
            case Activation():
                return cls(fused, None, None, None, after)
            case Mixture():
                tensors, output_norm = layer.experts(fused.experts), bound(fused.output_norm)
                return cls(fused, None, bound(fused.norm), None, after, tensors, output_norm)
        linear = gpu_linear(layer.linear(fused.linear))
        return cls(fused, linear, bound(fused.norm), None, after)


def gpu_linear(linear: LinearTensors) -> GpuLinear:
    """A linear layer as the kernels take it."""
    return GpuLinear(*linear)


def _weights_ahead(kernel: LayerKernel | None) -> list[Tensor]:
    """The weights of this kernel and of those after it, up to the first without one."""
    weights: list[Tensor] = []
    while kernel is not None and kernel.linear is not None and len(weights) < WEIGHTS_AHEAD:
        weights.append(kernel.linear.weight)
        kernel = kernel.after
    return weights


def add_over_ranks(
    operations: Operations,
    collectives: Collectives | None,
    kernel: LayerKernel,
    hidden: Hidden,
    part_TD: Tensor,
) -> Hidden:
    """Return the hidden states plus the sum over ranks of what a kernel left, its norm included.

    They are normed for the next kernel at the same time.
    """
    fused, after = kernel.fused, kernel.after
    assert collectives is not None, "a plan with sums over ranks belongs to a group"
    assert isinstance(fused, ResidualLinear | Mixture)
    post = kernel.norm if isinstance(fused, ResidualLinear) else kernel.output_norm
    norms = after is not None and isinstance(after.fused, NormLinear | GateUp | Mixture)
    norm = after.norm if after is not None and norms else None
    sum_TD = torch.empty_like(part_TD)
    normed_TD = None if norm is None else torch.empty_like(part_TD)
    with operation("all_reduce"):
        operations.sum_rows(
            collectives, part_TD, hidden.x, post, norm, sum_TD, normed_TD, scale=fused.scale
        )
    return Hidden(sum_TD, normed=normed_TD)


def run_mixture(
    operations: Operations,
    collectives: Collectives | None,
    kernel: LayerKernel,
    hidden: Hidden,
    live_T: Tensor | None,
) -> Hidden:
    """Return the hidden states after a mixture of experts; padding is not `live_T`."""
    fused, tensors = kernel.fused, kernel.experts
    assert isinstance(fused, Mixture)
    assert tensors is not None
    normed_TD, hidden = norm_hidden(operations, hidden, fused.norm, kernel.norm)
    with operation("route"):
        routed = operations.route(fused.experts, normed_TD, tensors, live_T)
    out_TD = torch.empty_like(hidden.x)
    adds = kernel.output_norm is None and not fused.sums
    residual_TD, scale = hidden.x if adds else None, 1.0 if fused.sums else fused.scale
    with operation(fused.name):
        operations.experts(
            fused.experts, normed_TD, tensors, routed, residual_TD, out_TD, scale=scale
        )
    if fused.sums:
        return add_over_ranks(operations, collectives, kernel, hidden, out_TD)
    return hidden.after(out_TD, kernel.output_norm)


def norm_hidden(
    operations: Operations, hidden: Hidden, norm: Norm | None, bound: GpuNorm | None
) -> tuple[Tensor, Hidden]:
    """Return the hidden states normed (as they are without a norm), and nothing pending."""
    if hidden.normed is not None:
        return hidden.normed, Hidden(hidden.x)
    pending = hidden.pending()
    if bound is None and pending is None:
        return hidden.x, hidden
    normed_TD = torch.empty_like(hidden.x)
    with operation("residual" if norm is None else norm.name):
        operations.norm_rows(hidden.x, bound, normed_TD, pending)
    return normed_TD, Hidden(hidden.x if pending is None else pending.out)


def run_activation(
    operations: Operations, fused: GateUp | Activation, gate_up_TF: Tensor | None
) -> Tensor:
    """Return the activation of gate and up, `[T, F]`, computed by a kernel of its own."""
    assert gate_up_TF is not None
    out_TF = gate_up_TF.new_empty(gate_up_TF.shape[0], fused.features)
    activate, clamp = fused.activate, Clamp.of(fused.activate)
    with operation(activate.name):
        operations.activate_rows(
            gate_up_TF, out_TF, gelu=activate.function == "gelu_tanh", clamp=clamp
        )
    return out_TF


class FewRows:
    """A decode step of few rows, kernel by kernel; scopes are the names of `fusion.py`."""

    def __init__(
        self,
        operations: Operations,
        step: DecodeAttention,
        x_TD: Tensor,
        live_T: Tensor | None,
        collectives: Collectives | None = None,
    ) -> None:
        """Experts need `live_T`, false for padding."""
        self._operations, self._step, self._live = operations, step, live_T
        self._collectives = collectives
        self.hidden = Hidden(x_TD)
        """After the last kernel that ran."""
        self._value: Tensor | None = None
        """What the last kernel left for the next one; None: splits of attention."""

    def run(self, kernel: LayerKernel) -> None:
        """Run a kernel of the chain."""
        fused = kernel.fused
        if isinstance(fused, Attention):
            self._attend(kernel)
        elif isinstance(fused, ResidualLinear):
            self._add_product(kernel, fused)
        elif isinstance(fused, Mixture):
            self.hidden = run_mixture(
                self._operations, self._collectives, kernel, self.hidden, self._live
            )
        elif isinstance(fused, Activation):
            self._value = run_activation(self._operations, fused, self._value)
        else:
            self._normed_product(kernel, fused)

    def _new(self, features: int) -> Tensor:
        x_TD = self.hidden.x
        return x_TD.new_empty(x_TD.shape[0], features)

    def _normed_product(self, kernel: LayerKernel, fused: NormLinear | GateUp) -> None:
        pending = self.hidden.pending()
        out_TN = self._new(fused.features)
        x_TD, norm = self.hidden.x, kernel.norm
        if self.hidden.normed is not None:
            x_TD, norm = self.hidden.normed, None
            self.hidden = Hidden(self.hidden.x)
        arguments = (x_TD, norm, kernel.linear, out_TN)
        with operation(fused.name):
            if isinstance(fused, GateUp):
                self._operations.gate_up(*arguments, gelu=fused.gelu, pending=pending)
            else:
                self._operations.norm_linear(*arguments, pending)
        self._value = out_TN
        if pending is not None:
            self.hidden = Hidden(pending.out)

    def _attend(self, kernel: LayerKernel) -> None:
        """Attention, which leaves its splits to the next product where that is better."""
        qkv_TN, step = self._value, self._step
        assert kernel.attention is not None
        assert qkv_TN is not None
        after = kernel.after
        adds = after is not None and isinstance(after.fused, ResidualLinear)
        output = after.linear if after is not None and adds else None
        weights = _weights_ahead(after) if adds else []
        if output is not None and product_combines(step.partials.acc, output, qkv_TN.dtype):
            step.attend(kernel.attention, qkv_TN, None, weights)
            self._value = None
        else:
            self._value = step.attended(kernel.attention, qkv_TN, weights)

    def _add_product(self, kernel: LayerKernel, fused: ResidualLinear) -> None:
        x_TD, value, operations = self.hidden.x, self._value, self._operations
        out_TD = torch.empty_like(x_TD)
        residual_TD = x_TD if kernel.norm is None and not fused.sums else None
        outputs, scale = (kernel.linear, residual_TD, out_TD), 1.0 if fused.sums else fused.scale
        with operation(fused.name):
            if value is None:
                operations.combine_output(*self._step.partials, *outputs, scale=scale)
            else:
                operations.residual_linear(value, *outputs, scale=scale)
        if fused.sums:
            self.hidden = add_over_ranks(operations, self._collectives, kernel, self.hidden, out_TD)
            return
        self.hidden = self.hidden.after(out_TD, kernel.norm)
