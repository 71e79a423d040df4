"""Attention of the layers of one step: of decode steps and of prefill steps.

Shapes: T tokens, N features of queries, keys and values, H query heads, E head_dim, K kinds of
rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....profiling.attribution import operation
from ..ops.attention import AttentionForm, AttentionInputs
from ..ops.layer_plan import Attend, BoundLayer, BoundModel
from .fusion import Attention
from .launch import num_multiprocessors
from .operations import Operations
from .prefill_tiles import PrefillTiling, prefill_tiling
from .split_attention import new_partials
from .splits import choose_splits

__all__ = ["DecodeAttention", "LayerAttention", "PrefillAttention"]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of a layer with its tensors and its place in the cache."""

    attend: Attend
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    eps: float
    offset_norms: bool
    rope: int
    """Its kind of rotation: the first coordinate of cosines and sines."""
    group: int
    position: int
    storage: str

    @classmethod
    def of(cls, fused: Attention, layer: BoundLayer, model: BoundModel) -> LayerAttention:
        """Bind the tensors of a layer."""
        norm = fused.qk_norm
        traits = norm or model.plan.norm  # one that is not there has those of the others
        return cls(
            fused.attend,
            None if norm is None else layer.tensor(norm.q),
            None if norm is None else layer.tensor(norm.k),
            None if fused.attend.sinks is None else layer.tensor(fused.attend.sinks),
            traits.eps,
            traits.offset,
            fused.rotate.kind,
            layer.group,
            layer.position,
            model.storage,
        )

    def form(self, block_size: int) -> AttentionForm:
        """The constants of the kernels."""
        attend = self.attend
        return AttentionForm(
            block_size,
            attend.scale,
            attend.window,
            attend.softcap,
            self.storage,
            attend.value_dim,
            self.sinks,
        )


class _StepAttention:
    """Inputs that all layers of one step share."""

    def __init__(
        self,
        operations: Operations,
        like: LayerAttention,
        x_TD: Tensor,
        arena: Tensor,
        inputs: AttentionInputs,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
    ) -> None:
        """`like` is the attention of any layer: all have the same heads."""
        self.operations = operations
        self.like = like
        self.x = x_TD
        self.arena = arena
        self.inputs = inputs
        self.cos, self.sin = cos_KTE, sin_KTE


class DecodeAttention(_StepAttention):
    """A decode step, one token a row: writes to the cache and attends in one operation.

    All layers share one workspace for splits.
    """

    def __init__(self, counters: Tensor, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = counters
        tokens, attend, device = self.x.shape[0], self.like.attend, self.x.device
        most = self.inputs.read_blocks * self.inputs.block_size
        splits = choose_splits(tokens, attend.kv_heads, most, num_multiprocessors(device))
        self.partials = new_partials(tokens, attend.heads, splits, attend.value_dim, device)

    def attend(
        self,
        layer: LayerAttention,
        qkv_TN: Tensor,
        attended_TK: Tensor | None,
        next_weight: Tensor | None,
    ) -> None:
        """Write keys and values, and attend: into `attended_TK`, or None leaves the partials."""
        inputs = self.inputs
        with operation("decode_attention"):
            self.operations.decode_attention(
                qkv_TN,
                self.arena,
                layer.position,
                layer.q_norm,
                layer.k_norm,
                layer.eps,
                layer.offset_norms,
                self.cos[layer.rope],
                self.sin[layer.rope],
                inputs.slots[layer.group],
                inputs.block_tables[layer.group],
                inputs.token_rows,
                inputs.positions,
                layer.form(inputs.block_size),
                self.partials,
                read_blocks=inputs.read_blocks,
                attended_TN=attended_TK,
                counters=self._counters,
                next_weight=next_weight,
            )

    def attended(
        self, layer: LayerAttention, qkv_TN: Tensor, next_weight: Tensor | None = None
    ) -> Tensor:
        """Attention of the layer, `[T, H * E]`."""
        attended_TK = self.x.new_empty(self.x.shape[0], layer.attend.features)
        self.attend(layer, qkv_TN, attended_TK, next_weight)
        return attended_TK


class PrefillAttention(_StepAttention):
    """A prefill step: keys and values are written first, then tiles of each chunk attend."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        attend, tokens, rows = self.like.attend, self.x.shape[0], self.inputs.rows.shape[0]
        self.tiling: PrefillTiling = prefill_tiling(
            tokens,
            attend.heads,
            attend.kv_heads,
            attend.head_dim,
            self.x.dtype,
            self.like.storage,
            self.x.device,
        )
        most = self.tiling.tokens(attend.heads // attend.kv_heads)
        self.tiles = self.operations.prefill_tiles(self.inputs.token_rows, rows, most)

    def attended(self, layer: LayerAttention, qkv_TN: Tensor) -> Tensor:
        """Write keys and values, and attend: `[T, H * E]`."""
        inputs = self.inputs
        form = layer.form(inputs.block_size)
        with operation("rotate_and_store"):
            q_THE = self.operations.rotate_and_store(
                qkv_TN,
                self.arena,
                layer.position,
                layer.q_norm,
                layer.k_norm,
                layer.eps,
                layer.offset_norms,
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
