"""All layers of a decoder on a GPU: five operations a layer for up to 32 rows of a decode step.

    1 norm_linear        norm, then queries, keys and values
    2 decode_attention   norms of queries and keys, rotation, write to the cache, attention
    3 residual_linear    output projection, residual
    4 gate_up            norm, then gate and up, activation
    5 residual_linear    down projection, residual

Up to four rows each is one kernel, or three kernels are a layer where the tuner found that faster
(`paired_layers.py`). Above, a product takes its inputs normed by a kernel before it, and is the
library's or `row_product.py`'s (`linear_launch.py`).

The positions of few rows are split. For up to four rows the third kernel (`combine_output` then)
puts together what the splits found, where that is little; else attention's last program does.

Families that norm what attention and the MLP return leave the addition to the kernel that follows,
which norms anyway. Many rows and the chunks of a prefill step are bound by arithmetic instead of
reading weights: their products are the library's, with kernels of ours between them.

Shapes: T tokens, D hidden_size, F intermediate_size, K kinds of rotation, E half of head_dim, G
layer groups, N features of queries, keys and values. The arithmetic is that of the modules in
`models/decoder.py`, with results rounded to the model's dtype at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..attention import AttentionForm, AttentionInputs
from ..stack import StackLayer, StackLinear, StackShape
from .combine_output import product_combines
from .launch import num_multiprocessors
from .linear import ROW_CLASSES, GpuLinear, Norm, Pending
from .operations import Operations
from .paired_layers import PairedLayers
from .prefill_tiles import PrefillTiling, prefill_tiling
from .split_attention import new_counters, new_partials
from .splits import choose_splits

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
        inputs: AttentionInputs,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
    ) -> Tensor:
        """See `Stack.run`. Tokens of a row see each other: decode steps take `layers`."""
        hidden = self.layers(x_TD, arena, inputs, cos_KTE, sin_KTE, decodes=False)
        with operation("final_norm"):
            normed_TD, _ = self._normed(hidden, self._norm)
        return normed_TD

    def layers(
        self,
        x_TD: Tensor,
        arena: Tensor,
        inputs: AttentionInputs,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
        *,
        decodes: bool,
    ) -> Hidden:
        """Hidden states behind the last layer, not normed.

        A step that `decodes` has one token a row, and attends while it writes: no token of it sees
        another's key.
        """
        tokens = x_TD.shape[0]
        step: _Decoding | _Prefilling
        if decodes:
            step = _Decoding(
                self._counters,
                self.operations,
                self.shape,
                x_TD,
                arena,
                inputs,
                cos_KTE,
                sin_KTE,
            )
        else:
            with operation("prefill_tiles"):
                step = _Prefilling(
                    self.operations, self.shape, x_TD, arena, inputs, cos_KTE, sin_KTE
                )
        few = decodes and tokens <= MOST_ROWS
        if few and (pairs := self._paired.tuned(tokens, x_TD.dtype)) is not None:
            assert isinstance(step, _Decoding)
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
        step: _Decoding | _Prefilling,
    ) -> Hidden:
        """The five kernels; the names of their scopes are those of `profiling/kernel_costs.py`."""
        assert isinstance(step, _Decoding)
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
        step: _Decoding | _Prefilling,
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


class _Attending:
    """What the layers of one step share of their attention."""

    def __init__(
        self,
        operations: Operations,
        shape: StackShape,
        x_TD: Tensor,
        arena: Tensor,
        inputs: AttentionInputs,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
    ) -> None:
        self.operations = operations
        self.shape = shape
        self.x = x_TD
        self.arena = arena
        self.inputs = inputs
        self.cos, self.sin = cos_KTE, sin_KTE

    def form(self, layer: StackLayer) -> AttentionForm:
        shape = self.shape
        return AttentionForm(
            self.inputs.block_size,
            shape.scale,
            layer.window,
            shape.softcap,
            shape.storage,
            shape.head_dim,
        )


class _Decoding(_Attending):
    """A token a row: the kernel from projections to attention, one workspace for all layers."""

    def __init__(self, counters: Tensor, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = counters
        tokens, shape, device = self.x.shape[0], self.shape, self.x.device
        most = self.inputs.read_blocks * self.inputs.block_size
        splits = choose_splits(tokens, shape.num_kv_heads, most, num_multiprocessors(device))
        self.partials = new_partials(tokens, shape.num_heads, splits, shape.head_dim, device)

    def attend(
        self,
        layer: StackLayer,
        qkv_TN: Tensor,
        attended_TK: Tensor | None,
        next_weight: Tensor | None,
    ) -> None:
        """Write keys and values, and attend: into `attended_TK`, or None leaves the partials."""
        inputs, shape = self.inputs, self.shape
        with operation("decode_attention"):
            self.operations.decode_attention(
                qkv_TN,
                self.arena,
                layer.position,
                layer.q_norm,
                layer.k_norm,
                shape.eps,
                shape.offset_norms,
                self.cos[layer.rope],
                self.sin[layer.rope],
                inputs.slots[layer.group],
                inputs.block_tables[layer.group],
                inputs.token_rows,
                inputs.positions,
                self.form(layer),
                self.partials,
                read_blocks=inputs.read_blocks,
                attended_TN=attended_TK,
                counters=self._counters,
                next_weight=next_weight,
            )

    def attended(
        self, layer: StackLayer, qkv_TN: Tensor, next_weight: Tensor | None = None
    ) -> Tensor:
        """Attention of the layer, `[T, H * E]`."""
        shape = self.shape
        attended_TK = self.x.new_empty(self.x.shape[0], shape.num_heads * shape.head_dim)
        self.attend(layer, qkv_TN, attended_TK, next_weight)
        return attended_TK


class _Prefilling(_Attending):
    """Chunks of prompts: keys and values are written first, then tiles of each chunk attend."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shape, tokens, rows = self.shape, self.x.shape[0], self.inputs.rows.shape[0]
        self.tiling: PrefillTiling = prefill_tiling(
            tokens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self.x.dtype,
            shape.storage,
            self.x.device,
        )
        most = self.tiling.tokens(shape.num_heads // shape.num_kv_heads)
        self.tiles = self.operations.prefill_tiles(self.inputs.token_rows, rows, most)

    def attended(self, layer: StackLayer, qkv_TN: Tensor) -> Tensor:
        """Write keys and values, and attend: `[T, H * E]`."""
        inputs, shape, form = self.inputs, self.shape, self.form(layer)
        with operation("rotate_and_store"):
            q_THE = self.operations.rotate_and_store(
                qkv_TN,
                self.arena,
                layer.position,
                layer.q_norm,
                layer.k_norm,
                shape.eps,
                shape.offset_norms,
                self.cos[layer.rope],
                self.sin[layer.rope],
                inputs.slots[layer.group],
                form,
            )
        with operation("prefill_attention"):
            out_THE: Tensor = self.operations.prefill_attention(
                q_THE,
                self.arena,
                layer.position,
                inputs.block_tables[layer.group],
                inputs.token_rows,
                inputs.positions,
                self.tiles,
                form,
                self.tiling,
                rows_R=inputs.rows,
                read_blocks=inputs.read_blocks,
            )
        return out_THE.flatten(1)
