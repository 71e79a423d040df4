"""Attention of the layers of one step: of decode steps and of prefill steps.

Shapes: T tokens, N features of queries, keys and values, H query heads, E head_dim, K kinds of
rotation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....profiling.attribution import operation
from ..ops.attention import AttentionForm
from ..ops.batch import LayerPlace, RaggedBatch
from ..ops.stack import StackLayer, StackShape
from .launch import num_multiprocessors
from .operations import Operations
from .prefill_tiles import PrefillTiling, prefill_tiling
from .rotated_heads import HeadRotation
from .split_attention import new_partials
from .splits import choose_splits

__all__ = ["DecodeAttention", "PrefillAttention"]


class _StepAttention:
    """Inputs that all layers of one step share."""

    def __init__(
        self,
        operations: Operations,
        shape: StackShape,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
    ) -> None:
        self.operations = operations
        self.shape = shape
        self.x = x_TD
        self.arena = arena
        self.batch = batch
        self.cos, self.sin = cos_KTE, sin_KTE

    def form(self, layer: StackLayer) -> AttentionForm:
        shape = self.shape
        return AttentionForm(
            shape.scale,
            layer.window,
            shape.softcap,
            shape.storage,
            shape.head_dim,
        )

    def rotation(self, layer: StackLayer) -> HeadRotation:
        shape = self.shape
        return HeadRotation(
            layer.q_norm,
            layer.k_norm,
            shape.eps,
            shape.offset_norms,
            self.cos[layer.rope],
            self.sin[layer.rope],
        )


class DecodeAttention(_StepAttention):
    """A decode step, one token a row: writes to the cache and attends in one operation.

    All layers share one workspace for splits.
    """

    def __init__(self, counters: Tensor, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = counters
        tokens, shape, device = self.x.shape[0], self.shape, self.x.device
        most = self.batch.read_blocks * self.batch.block_size
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
        with operation("decode_attention"):
            self.operations.decode_attention(
                qkv_TN,
                self.arena,
                LayerPlace(layer.group, layer.position),
                self.rotation(layer),
                self.batch,
                self.form(layer),
                self.partials,
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


class PrefillAttention(_StepAttention):
    """A prefill step: keys and values are written first, then tiles of each chunk attend."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shape, tokens, rows = self.shape, self.x.shape[0], self.batch.rows.shape[0]
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
        self.tiles = self.operations.prefill_tiles(self.batch.token_rows, rows, most)

    def attended(self, layer: StackLayer, qkv_TN: Tensor) -> Tensor:
        """Write keys and values, and attend: `[T, H * E]`."""
        place, form = LayerPlace(layer.group, layer.position), self.form(layer)
        with operation("rotate_and_store"):
            q_THE = self.operations.rotate_and_store(
                qkv_TN, self.arena, place, self.rotation(layer), self.batch, form
            )
        with operation("prefill_attention"):
            out_THE: Tensor = self.operations.prefill_attention(
                q_THE, self.arena, place, self.batch, form, self.tiles, self.tiling
            )
        return out_THE.flatten(1)
