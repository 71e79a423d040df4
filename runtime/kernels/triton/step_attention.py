"""Attention of the layers of one step: of decode steps and of prefill steps.

Shapes: T tokens, N features of queries, keys and values, H query heads, E head_dim, K kinds of
rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ....profiling.attribution import operation
from ..ops.attention import AttentionForm
from ..ops.batch import LayerPlace, RaggedBatch
from ..ops.bound_model import BoundLayer, BoundModel
from ..ops.layer_operations import Attend
from .fusion import Attention
from .kernel_calls import num_multiprocessors
from .operations import Operations
from .prefill_tiles import SPLIT, PrefillTiling, any_tiling, prefill_tiling
from .rotated_heads import HeadRotation
from .split_attention import new_partials
from .splits import choose_splits

__all__ = ["AnyAttention", "DecodeAttention", "LayerAttention", "PrefillAttention"]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of a layer with its tensors and its place in the cache."""

    attend: Attend
    form: AttentionForm
    place: LayerPlace
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    offset_norms: bool
    rope: int
    """Its kind of rotation: the first coordinate of cosines and sines."""

    @classmethod
    def of(cls, fused: Attention, layer: BoundLayer, model: BoundModel) -> LayerAttention:
        """Bind the tensors of a layer."""
        attend, norm = fused.attend, fused.qk_norm
        traits = norm or model.plan.norm  # one that is not there has those of the others
        sinks = None if attend.sinks is None else layer.tensor(attend.sinks)
        return cls(
            attend,
            AttentionForm(
                attend.scale,
                attend.window,
                attend.softcap,
                model.storage,
                attend.value_dim,
                attend.chunk,
                sinks,
            ),
            layer.place,
            None if norm is None else layer.tensor(norm.q),
            None if norm is None else layer.tensor(norm.k),
            traits.eps,
            traits.offset,
            fused.rotate.kind,
        )


class _StepAttention:
    """Inputs that all layers of one step share."""

    def __init__(
        self,
        operations: Operations,
        like: LayerAttention,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
    ) -> None:
        """`like` is the attention of any layer: all have the same heads."""
        self.operations = operations
        self.like = like
        self.x = x_TD
        self.arena = arena
        self.batch = batch
        self.cos, self.sin = cos_KTE, sin_KTE

    def rotation(self, layer: LayerAttention) -> HeadRotation:
        """Norm and rotation of a layer's heads in this step."""
        return HeadRotation(
            layer.q_norm,
            layer.k_norm,
            layer.eps,
            layer.offset_norms,
            self.cos[layer.rope],
            self.sin[layer.rope],
            layer.attend.temperature,
        )


class DecodeAttention(_StepAttention):
    """A decode step, one token a row: writes to the cache and attends in one operation.

    All layers share one workspace for splits.
    """

    def __init__(self, counters: Tensor, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = counters
        tokens, attend, device = self.x.shape[0], self.like.attend, self.x.device
        most = self.batch.read_blocks * self.batch.block_size
        splits = choose_splits(tokens, attend.kv_heads, most, num_multiprocessors(device))
        self.partials = new_partials(tokens, attend.heads, splits, attend.value_dim, device)

    def attend(
        self,
        layer: LayerAttention,
        qkv_TN: Tensor,
        attended_TK: Tensor | None,
        next_weights: Sequence[Tensor],
    ) -> None:
        """Write keys and values, and attend: into `attended_TK`, or None leaves the partials."""
        with operation("decode_attention"):
            self.operations.decode_attention(
                qkv_TN,
                self.arena,
                layer.place,
                self.rotation(layer),
                self.batch,
                layer.form,
                self.partials,
                attended_TN=attended_TK,
                counters=self._counters,
                next_weights=next_weights,
            )

    def attended(
        self, layer: LayerAttention, qkv_TN: Tensor, next_weights: Sequence[Tensor] = ()
    ) -> Tensor:
        """Attention of the layer, `[T, H * E]`."""
        attended_TK = self.x.new_empty(self.x.shape[0], layer.attend.features)
        self.attend(layer, qkv_TN, attended_TK, next_weights)
        return attended_TK


class PrefillAttention(_StepAttention):
    """A prefill step: keys and values are written first, then tiles of each chunk attend."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        attend, rows = self.like.attend, self.batch.rows.shape[0]
        self.tiling = self._tiling()
        most = self.tiling.tokens(attend.heads // attend.kv_heads)
        self.tiles = self.operations.prefill_tiles(self.batch.token_rows, rows, most)

    def _tiling(self) -> PrefillTiling:
        attend = self.like.attend
        return prefill_tiling(
            self.x.shape[0],
            attend.heads,
            attend.kv_heads,
            attend.head_dim,
            self.x.dtype,
            self.like.form.storage,
            self.x.device,
        )

    def attended(self, layer: LayerAttention, qkv_TN: Tensor) -> Tensor:
        """Write keys and values, and attend: `[T, H * E]`."""
        place, form = layer.place, layer.form
        with operation("rotate_and_store"):
            q_THE = self.operations.rotate_and_store(
                qkv_TN, self.arena, place, self.rotation(layer), self.batch, form
            )
        with operation("prefill_attention"):
            out_THE: Tensor = self.operations.prefill_attention(
                q_THE, self.arena, place, self.batch, form, self.tiles, self.tiling
            )
        return out_THE.flatten(1)


class AnyAttention(PrefillAttention):
    """A step of any kind: the same compiled kernels whatever its rows and tokens.

    Triton also compiles other kernels for tensors that do not begin at a multiple of 16 bytes. So
    the parts of tensors do, for each group and kind of rotation, whatever the number of tokens.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batch = replace(self.batch, slots=_aligned(self.batch.slots))
        self.cos, self.sin = _aligned(self.cos), _aligned(self.sin)

    def _tiling(self) -> PrefillTiling:
        attend = self.like.attend
        storage, device = self.like.form.storage, self.x.device
        tiling = any_tiling(attend.head_dim, self.x.dtype, storage, device)
        # Sums of the parts before take as many registers as those of the part: without these
        # sizes they spill.
        rows = min(tiling.block_m, 32) if attend.head_dim > 128 else tiling.block_m
        warps = 8 if attend.head_dim > 64 else tiling.num_warps
        return tiling._replace(block_m=rows, num_warps=warps, split=SPLIT)


def _aligned(parts_PT: Tensor) -> Tensor:
    """Return a tensor `[P, T, ...]` whose parts begin at multiples of 16 bytes."""
    parts, tokens = parts_PT.shape[:2]
    if parts == 1 or tokens % 4 == 0:
        return parts_PT
    padded = parts_PT.new_empty(parts, tokens + -tokens % 4, *parts_PT.shape[2:])
    return padded[:, :tokens].copy_(parts_PT)
