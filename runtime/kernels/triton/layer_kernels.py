"""The kernels of decoder layers bound to their tensors, and decode steps of few rows of them.

Shapes: T tokens, D hidden_size, N features of a result, K features that attention returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.bound_model import BoundLayer, BoundModel, LinearTensors
from .combine_output import product_combines
from .fusion import Activation, Attention, Fused, GateUp, NormLinear, ResidualLinear
from .linear import GpuLinear, GpuNorm, Pending
from .operations import Operations
from .paired_layers import LayerPairs
from .step_attention import DecodeAttention, LayerAttention

__all__ = ["FewRows", "Hidden", "LayerKernel", "gpu_linear"]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states `[T, D]` on their way: `x`, and what a norm has to be taken of and added."""

    x: Tensor
    delta: Tensor | None = None
    norm: GpuNorm | None = None

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

    @classmethod
    def bind(
        cls, fused: Fused, layer: BoundLayer, model: BoundModel, after: LayerKernel | None
    ) -> LayerKernel:
        """Return the kernel with the tensors of a layer."""
        linear = norm = attention = None
        if isinstance(fused, Attention):
            attention = LayerAttention.of(fused, layer, model)
        elif not isinstance(fused, Activation):
            linear = gpu_linear(layer.linear(fused.linear))
            if fused.norm is not None:
                norm = GpuNorm(layer.tensor(fused.norm.weight), fused.norm.eps, fused.norm.offset)
        return cls(fused, linear, norm, attention, after)


def gpu_linear(linear: LinearTensors) -> GpuLinear:
    """A linear layer as the kernels take it."""
    return GpuLinear(*linear)


class FewRows:
    """A decode step of few rows, kernel by kernel; scopes are the names of `fusion.py`."""

    def __init__(
        self,
        operations: Operations,
        step: DecodeAttention,
        pairs: LayerPairs | None,
        barrier: Tensor,
        x_TD: Tensor,
    ) -> None:
        """`pairs` are those products that are one kernel, which needs the barrier."""
        self._operations, self._step, self._pairs = operations, step, pairs
        self._barrier = barrier
        self.hidden = Hidden(x_TD)
        """After the last kernel that ran."""
        self._value: Tensor | None = None
        """What the last kernel left for the next one; None: splits of attention."""
        self._done: LayerKernel | None = None
        """A product that its pair has computed."""

    def run(self, kernel: LayerKernel) -> None:
        """Run a kernel of the chain."""
        fused = kernel.fused
        if kernel is self._done:
            return
        if isinstance(fused, Attention):
            self._attend(kernel)
        elif isinstance(fused, ResidualLinear):
            self._add_product(kernel, fused)
        elif isinstance(fused, Activation):
            assert self._value is not None
            with operation(fused.name):
                self._value = fused.run(self._value)
        else:
            self._normed_product(kernel, fused)

    def _new(self, features: int) -> Tensor:
        x_TD = self.hidden.x
        return x_TD.new_empty(x_TD.shape[0], features)

    def _normed_product(self, kernel: LayerKernel, fused: NormLinear | GateUp) -> None:
        pending = self.hidden.pending()
        out_TN = self._new(fused.features)
        arguments = (self.hidden.x, kernel.norm, kernel.linear, out_TN)
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
        weight = None if output is None else output.weight
        if (
            output is not None
            and self._pairs is None
            and product_combines(step.partials.acc, output, qkv_TN.dtype)
        ):
            step.attend(kernel.attention, qkv_TN, None, weight)
            self._value = None
        else:
            self._value = step.attended(kernel.attention, qkv_TN, weight)

    def _add_product(self, kernel: LayerKernel, fused: ResidualLinear) -> None:
        x_TD, value, operations = self.hidden.x, self._value, self._operations
        out_TD = torch.empty_like(x_TD)
        after = kernel.after
        config = None
        if self._pairs is not None and after is not None:
            config = self._pairs.of(fused, after.fused)
        if config is not None:
            assert after is not None
            second = after.fused
            assert isinstance(second, NormLinear | GateUp)
            gated = isinstance(second, GateUp)
            self._value = self._new(second.features)
            with operation("output_gate_up" if gated else "down_qkv"):
                operations.fused_pair(
                    value,
                    kernel.linear,
                    x_TD,
                    out_TD,
                    after.norm,
                    after.linear,
                    self._value,
                    self._barrier,
                    config,
                    gated=gated,
                    **({"gelu": second.gelu} if isinstance(second, GateUp) else {}),
                )
            self.hidden, self._done = Hidden(out_TD), after
            return
        residual_TD = x_TD if kernel.norm is None else None
        with operation(fused.name):
            if value is None:
                operations.combine_output(*self._step.partials, kernel.linear, residual_TD, out_TD)
            else:
                operations.residual_linear(value, kernel.linear, residual_TD, out_TD)
        self.hidden = self.hidden.after(out_TD, kernel.norm)
