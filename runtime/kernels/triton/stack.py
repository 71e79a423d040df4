"""All layers of a decoder on a GPU: five operations a layer for up to 32 rows of a decode step.

    1 norm_linear        norm, then queries, keys and values
    2 decode_attention   norms of queries and keys, rotation, write to the cache, attention
    3 residual_linear    output projection, residual
    4 gate_up            norm, then gate and up, activation
    5 residual_linear    down projection, residual

Up to four rows each operation is one kernel; where the tuner found it faster, a layer is three
kernels (`paired_layers.py`). For 5 to 32 rows a kernel norms the inputs of a product first, and the
product is the library's or `row_product.py` (`linear_launch.py`).

The positions of few rows are split. For up to four rows the third operation (`combine_output` then)
combines the splits where they are small; otherwise the last program of attention does.

Families that norm the outputs of attention and the MLP leave the residual addition to the next
kernel that norms. Steps of more rows and prefill steps are bound by arithmetic and not by reading
weights: they use the library's products with kernels of this package between them.

Shapes: T tokens, D hidden_size, F intermediate_size, K kinds of rotation, E half of head_dim, G
layer groups, N features of queries, keys and values. The arithmetic is that of the modules in
`models/decoder.py`, with results rounded to the model's dtype at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.batch import RaggedBatch
from ..ops.stack import StackLayer, StackLinear, StackShape
from .combine_output import product_combines
from .linear import ROW_CLASSES, GpuLinear, Norm, Pending
from .operations import Operations
from .paired_layers import PairedLayers
from .split_attention import new_counters
from .step_attention import DecodeAttention, PrefillAttention

__all__ = ["GpuStack", "Hidden", "gpu_linear"]

MOST_ROWS = ROW_CLASSES[-1]
"""Rows up to which a decode step runs in the kernels for few rows."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states `[T, D]` on their way: `x`, and what a norm has to be taken of and added."""

    x: Tensor
    delta: Tensor | None = None
    norm: Norm | None = None

    def pending(self) -> Pending | None:
        """What the next kernel that norms has to add first, with room for the sum."""
        if self.delta is None or self.norm is None:
            return None
        return Pending(self.delta, self.norm, torch.empty_like(self.x))


class _Products(NamedTuple):
    """The linear layers of a decoder layer."""

    qkv: GpuLinear
    output: GpuLinear
    gate_up: GpuLinear
    down: GpuLinear

    @classmethod
    def of(cls, layer: StackLayer) -> _Products:
        return cls(*map(gpu_linear, (layer.qkv, layer.output, layer.gate_up, layer.down)))


class GpuStack:
    """The layers of one model and its final norm, as kernels in one stream."""

    def __init__(
        self,
        shape: StackShape,
        layers: Sequence[StackLayer],
        norm: Tensor,
        operations: Operations,
    ) -> None:
        self.shape = shape
        self.operations = operations
        self._layers = [(layer, _Products.of(layer)) for layer in layers]
        self._norm = norm.detach()
        # Kept, as graphs are replayed with their address and each launch leaves zeros for the next.
        self._counters = new_counters(norm.device)
        self._paired = PairedLayers(operations, shape, self._layers, norm.device)

    def close(self) -> None:
        """Let go of the weights."""
        self._layers.clear()

    def workspace_bytes(self, tokens: int) -> int:
        """None: what a step needs are tensors that it makes."""
        return 0

    def norm(self, weight: Tensor) -> Norm:
        """A norm of this model."""
        return Norm(weight.detach(), self.shape.eps, self.shape.offset_norms)

    @torch.no_grad()
    def run(
        self,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
    ) -> Tensor:
        """See `Stack.run`; for prefill steps. Decode steps call `layers`."""
        hidden = self.layers(x_TD, arena, batch, cos_KTE, sin_KTE, decodes=False)
        with operation("final_norm"):
            normed_TD, _ = self._normed(hidden, self._norm)
        return normed_TD

    def layers(
        self,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
        *,
        decodes: bool,
    ) -> Hidden:
        """Return the hidden states after the last layer, not normed.

        A step that `decodes` has one token a row: no token attends to the key of another one.
        """
        tokens = x_TD.shape[0]
        step: DecodeAttention | PrefillAttention
        if decodes:
            step = DecodeAttention(
                self._counters,
                self.operations,
                self.shape,
                x_TD,
                arena,
                batch,
                cos_KTE,
                sin_KTE,
            )
        else:
            with operation("prefill_tiles"):
                step = PrefillAttention(
                    self.operations, self.shape, x_TD, arena, batch, cos_KTE, sin_KTE
                )
        few = decodes and tokens <= MOST_ROWS
        if few and (pairs := self._paired.tuned(tokens, x_TD.dtype)) is not None:
            assert isinstance(step, DecodeAttention)
            return Hidden(self._paired.run(x_TD, step, pairs))
        hidden = Hidden(x_TD)
        run = self._few if few else self._many
        for index, (layer, products) in enumerate(self._layers):
            with operation("layer", index):
                hidden = run(layer, products, hidden, step)
        return hidden

    def _few(
        self,
        layer: StackLayer,
        products: _Products,
        hidden: Hidden,
        step: DecodeAttention | PrefillAttention,
    ) -> Hidden:
        """The five operations; scopes are named as in `profiling/kernel_costs.py`."""
        assert isinstance(step, DecodeAttention)
        operations, shape, new = self.operations, self.shape, hidden.x.new_empty
        tokens = hidden.x.shape[0]
        qkv, output, mlp, down = products

        pending = hidden.pending()
        qkv_TN = new(tokens, qkv.weight.shape[0])
        with operation("norm_linear"):
            operations.norm_linear(hidden.x, self.norm(layer.input_norm), qkv, qkv_TN, pending)
        x_TD = hidden.x if pending is None else pending.out
        out_TD = torch.empty_like(x_TD)
        residual_TD = x_TD if layer.attention_output_norm is None else None
        if product_combines(step.partials.acc, output, x_TD.dtype):
            step.attend(layer, qkv_TN, None, output.weight)
            with operation("combine_output"):
                operations.combine_output(*step.partials, output, residual_TD, out_TD)
        else:
            attended_TK = step.attended(layer, qkv_TN, output.weight)
            with operation("combine_output"):
                operations.residual_linear(attended_TK, output, residual_TD, out_TD)
        hidden = self._added(x_TD, out_TD, layer.attention_output_norm)

        pending = hidden.pending()
        inner_TF = new(tokens, shape.intermediate_size)
        norm = self.norm(layer.mlp_norm)
        with operation("gate_up"):
            operations.gate_up(hidden.x, norm, mlp, inner_TF, gelu=shape.gelu, pending=pending)
        x_TD = hidden.x if pending is None else pending.out
        out_TD = torch.empty_like(x_TD)
        residual_TD = x_TD if layer.mlp_output_norm is None else None
        with operation("down"):
            operations.residual_linear(inner_TF, down, residual_TD, out_TD)
        return self._added(x_TD, out_TD, layer.mlp_output_norm)

    def _added(self, x_TD: Tensor, out_TD: Tensor, norm: Tensor | None) -> Hidden:
        """After a product that added x itself, unless a norm comes first."""
        return Hidden(out_TD) if norm is None else Hidden(x_TD, out_TD, self.norm(norm))

    def _many(
        self,
        layer: StackLayer,
        products: _Products,
        hidden: Hidden,
        step: DecodeAttention | PrefillAttention,
    ) -> Hidden:
        """Products of the library, with kernels between them; scopes as in `models/decoder.py`."""
        with operation("input_norm"):
            normed_TD, x_TD = self._normed(hidden, layer.input_norm)
        with operation("qkv_linear"):
            qkv_TN = self._product(normed_TD, products.qkv)
        attended_TK = step.attended(layer, qkv_TN)
        with operation("output_linear"):
            out_TD = self._product(attended_TK, products.output)
        hidden = self._to_add(x_TD, out_TD, layer.attention_output_norm)
        with operation("mlp_norm"):
            normed_TD, x_TD = self._normed(hidden, layer.mlp_norm)
        with operation("gate_up_linear"):
            gate_up_TF = self._product(normed_TD, products.gate_up)
        inner_TF = x_TD.new_empty(x_TD.shape[0], self.shape.intermediate_size)
        with operation("activate"):
            self.operations.activate_rows(gate_up_TF, inner_TF, gelu=self.shape.gelu)
        with operation("down_linear"):
            out_TD = self._product(inner_TF, products.down)
        return self._to_add(x_TD, out_TD, layer.mlp_output_norm)

    def _product(self, x_TK: Tensor, linear: GpuLinear) -> Tensor:
        """A product of the library, `[T, N]`."""
        out_TN = x_TK.new_empty(x_TK.shape[0], linear.weight.shape[0])
        self.operations.linear(x_TK, linear, out_TN)
        return out_TN

    def _to_add(self, x_TD: Tensor, out_TD: Tensor, norm: Tensor | None) -> Hidden:
        """After a product that added nothing."""
        if norm is not None:
            return Hidden(x_TD, out_TD, self.norm(norm))
        with operation("residual"):
            return Hidden(x_TD + out_TD)

    def _normed(self, hidden: Hidden, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states normed with a weight, and as they are."""
        pending = hidden.pending()
        normed_TD = torch.empty_like(hidden.x)
        self.operations.norm_rows(hidden.x, self.norm(weight), normed_TD, pending)
        return normed_TD, hidden.x if pending is None else pending.out


def gpu_linear(linear: StackLinear) -> GpuLinear:
    """A linear layer as the kernels take it."""
    scales, bias = (None if part is None else part.detach() for part in linear[1:])
    return GpuLinear(linear.weight.detach(), scales, bias)
