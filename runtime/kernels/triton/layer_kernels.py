"""The kernels of decoder layers bound to their tensors, and a step through them.

Shapes: T tokens, D hidden_size, N features of a result (of queries, keys and values together), H
query heads, E head_dim, K kinds of rotation, or features that attention returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.attention import Attend, AttentionForm
from ..ops.batch import LayerPlace, RaggedBatch
from ..ops.collectives import Collectives
from ..ops.experts import ExpertTensors
from ..ops.layer_plan import BoundLayer, BoundModel
from ..ops.norms import Norm
from .fusion import Activation, Attention, Fused, Mixture, NormLinear, ResidualLinear
from .kernel_calls import num_multiprocessors
from .linear import GpuLinear, GpuNorm, Pending
from .operations import Operations
from .prefill_attention import SPLIT, any_tiling, prefill_tiling
from .rotated_heads import HeadRotation
from .split_attention import choose_splits, new_partials

__all__ = [
    "Hidden",
    "LayerAttention",
    "LayerChain",
    "LayerKernel",
    "StepAttention",
    "norm_hidden",
]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of a layer with its tensors and its place in the cache."""

    attend: Attend
    form: AttentionForm
    place: LayerPlace
    norms: tuple[Tensor | None, Tensor | None, float, bool]
    """The first fields of `HeadRotation`."""
    rope: int
    """Its kind of rotation: the first coordinate of cosines and sines."""

    @classmethod
    def of(cls, fused: Attention, layer: BoundLayer, model: BoundModel) -> LayerAttention:
        """Bind the tensors of a layer."""
        attend, norm = fused.attend, fused.qk_norm
        traits = norm or model.plan.norm  # a missing norm has the traits of the others
        sinks = None if attend.sinks is None else layer.tensor(attend.sinks)
        weights = (None, None) if norm is None else (layer.tensor(norm.q), layer.tensor(norm.k))
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
            (*weights, traits.eps, traits.offset),
            fused.rotate.kind,
        )


class StepAttention:
    """Attention of a step, with the inputs and the workspace that all its layers share.

    A decode step, one token a row, writes to the cache and attends in one operation. Other steps
    write keys and values first, then tiles of each chunk attend.
    """

    def __init__(
        self,
        operations: Operations,
        like: LayerAttention,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
        counters: Tensor,
        *,
        any_batch: bool,
    ) -> None:
        """Prepare the step.

        Args:
            operations: that run.
            like: the attention of any layer: all have the same heads.
            x_TD: the step's hidden states.
            arena: the cache.
            batch: the step's tokens.
            cos_KTE: of their positions.
            sin_KTE: likewise.
            counters: see `decode_attention`.
            any_batch: run the same compiled kernels whatever the rows and tokens are, as a prefill
                step. Triton also compiles other kernels for tensors that do not begin at a multiple
                of 16 bytes. So the parts of tensors do, for each group and kind of rotation.
        """
        self._operations, self._x, self._arena, self._counters = operations, x_TD, arena, counters
        self._batch, self._cos, self._sin = batch, cos_KTE, sin_KTE
        # In a decode step no token attends to the key of another one.
        self._decodes = batch.tokens_per_row == 1 and not any_batch
        if not self._decodes:
            with operation("prefill_tiles"):
                self._tile(like, any_batch)
            return
        attend, tokens, device = like.attend, x_TD.shape[0], x_TD.device
        most = batch.read_blocks * batch.block_size
        splits = choose_splits(tokens, attend.kv_heads, most, num_multiprocessors(device))
        self._partials = new_partials(tokens, attend.heads, splits, attend.value_dim, device)

    def _tile(self, like: LayerAttention, any_batch: bool) -> None:
        """Deal the tokens to tiles."""
        attend, x_TD = like.attend, self._x
        width, traits = attend.head_dim, (x_TD.dtype, like.form.storage)
        if any_batch:
            self._batch = replace(self._batch, slots=_aligned(self._batch.slots))
            self._cos, self._sin = _aligned(self._cos), _aligned(self._sin)
            tiling = any_tiling(width, *traits)
            # Sums of earlier parts take as many registers as sums of this part: without these
            # sizes they spill.
            rows = min(tiling.block_m, 32) if width > 128 else tiling.block_m
            warps = 8 if width > 64 else tiling.num_warps
            self._tiling = tiling._replace(block_m=rows, num_warps=warps, split=SPLIT)
        else:
            heads = (attend.heads, attend.kv_heads, width)
            self._tiling = prefill_tiling(x_TD.shape[0], *heads, *traits, x_TD.device)
        self._tiles = self._operations.prefill_tiles(
            self._batch.token_rows,
            self._batch.rows.shape[0],
            self._tiling.tokens(attend.heads // attend.kv_heads),
        )

    def attended(self, kernel: LayerKernel, qkv_TN: Tensor) -> Tensor:
        """Write keys and values, and attend: `[T, H * E]`."""
        layer = kernel.attention
        assert layer is not None
        angles = self._cos[layer.rope], self._sin[layer.rope]
        rotation = HeadRotation(*layer.norms, *angles, layer.attend.temperature)
        operations, batch, form = self._operations, self._batch, layer.form
        if self._decodes:
            after = kernel.after
            next_weight = None if after is None or after.linear is None else after.linear.weight
            attended_TK = self._x.new_empty(self._x.shape[0], layer.attend.features)
            with operation("decode_attention"):
                operations.decode_attention(
                    qkv_TN,
                    self._arena,
                    layer.place,
                    rotation,
                    batch,
                    form,
                    self._partials,
                    self._counters,
                    attended_TK,
                    next_weight=next_weight,
                )
            return attended_TK
        with operation("rotate_and_store"):
            q_THE = operations.rotate_and_store(
                qkv_TN, self._arena, layer.place, rotation, batch, form
            )
        with operation("prefill_attention"):
            out_THE: Tensor = operations.prefill_attention(
                q_THE, self._arena, layer.place, batch, form, self._tiles, self._tiling
            )
        return out_THE.flatten(1)


def _aligned(parts_PT: Tensor) -> Tensor:
    """Return a tensor `[P, T, ...]` whose parts begin at multiples of 16 bytes."""
    parts, tokens = parts_PT.shape[:2]
    if parts == 1 or tokens % 4 == 0:
        return parts_PT
    padded = parts_PT.new_empty(parts, tokens + -tokens % 4, *parts_PT.shape[2:])
    return padded[:, :tokens].copy_(parts_PT)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states `[T, D]` on their way: `x`, and what a norm has to be taken of and added."""

    x: Tensor
    delta: Tensor | None = None
    norm: GpuNorm | None = None

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
        linear = GpuLinear(*layer.linear(fused.linear))
        return cls(fused, linear, bound(fused.norm), None, after)


def norm_hidden(
    operations: Operations, hidden: Hidden, norm: Norm | None, bound: GpuNorm | None
) -> tuple[Tensor, Hidden]:
    """Return the hidden states normed (as they are without a norm), and nothing pending."""
    pending = hidden.pending()
    if bound is None and pending is None:
        return hidden.x, hidden
    normed_TD = torch.empty_like(hidden.x)
    with operation("residual" if norm is None else norm.name):
        operations.norm_rows(hidden.x, bound, normed_TD, pending)
    return normed_TD, Hidden(hidden.x if pending is None else pending.out)


class LayerChain:
    """A step through the layers, kernel by kernel; scopes are the names of `fusion.py`."""

    def __init__(
        self,
        operations: Operations,
        step: StepAttention,
        x_TD: Tensor,
        live_T: Tensor | None,
        collectives: Collectives | None,
    ) -> None:
        """Experts need `live_T`, false for padding."""
        self._operations, self._step, self._live = operations, step, live_T
        self._collectives = collectives
        self.hidden = Hidden(x_TD)
        """After the last kernel that ran."""
        self._value = x_TD
        """What the last kernel left for the next one."""

    def run(self, kernel: LayerKernel) -> None:
        """Run a kernel of the chain."""
        fused = kernel.fused
        if isinstance(fused, Attention):
            self._value = self._step.attended(kernel, self._value)
        elif isinstance(fused, ResidualLinear):
            self._add_product(kernel, fused)
        elif isinstance(fused, Mixture):
            self._mix(kernel, fused)
        elif isinstance(fused, Activation):
            self._activate(fused)
        else:
            self._normed_product(kernel, fused)

    def settle(self) -> Tensor:
        """Return the hidden states with nothing left to add."""
        if self.hidden.delta is not None:
            _, self.hidden = norm_hidden(self._operations, self.hidden, None, None)
        return self.hidden.x

    def _normed_product(self, kernel: LayerKernel, fused: NormLinear) -> None:
        x_TD, pending = self.hidden.x, self.hidden.pending()
        out_TN = x_TD.new_empty(x_TD.shape[0], fused.features)
        name = fused.name
        with operation(name):
            getattr(self._operations, name)(
                *(x_TD, kernel.linear, out_TN),
                norm=kernel.norm,
                pending=pending,
                activate=fused.activate,
            )
        self._value = out_TN
        if pending is not None:
            self.hidden = Hidden(pending.out)

    def _activate(self, fused: Activation) -> None:
        gate_up_TF = self._value
        self._value = gate_up_TF.new_empty(gate_up_TF.shape[0], fused.features)
        with operation(fused.name):
            self._operations.activate_rows(gate_up_TF, self._value, fused.activate)

    def _add_product(self, kernel: LayerKernel, fused: ResidualLinear) -> None:
        x_TD = self.hidden.x
        out_TD = torch.empty_like(x_TD)
        residual_TD = x_TD if kernel.norm is None and not fused.sums else None
        scale = 1.0 if fused.sums else fused.scale
        with operation(fused.name):
            self._operations.residual_linear(
                self._value, kernel.linear, out_TD, residual_TN=residual_TD, scale=scale
            )
        self._added(fused, out_TD, kernel.norm)

    def _mix(self, kernel: LayerKernel, fused: Mixture) -> None:
        """A mixture of experts; padding is not live."""
        operations, tensors = self._operations, kernel.experts
        assert tensors is not None
        normed_TD, self.hidden = norm_hidden(operations, self.hidden, fused.norm, kernel.norm)
        with operation("route"):
            routed = operations.route(fused.experts, normed_TD, tensors, self._live)
        out_TD = torch.empty_like(normed_TD)
        adds = kernel.output_norm is None and not fused.sums
        residual_TD, scale = self.hidden.x if adds else None, 1.0 if fused.sums else fused.scale
        with operation(fused.name):
            operations.experts(
                fused.experts, normed_TD, tensors, routed, residual_TD, out_TD, scale=scale
            )
        self._added(fused, out_TD, kernel.output_norm)

    def _added(self, fused: ResidualLinear | Mixture, out_TD: Tensor, norm: GpuNorm | None) -> None:
        """Go on with what a kernel left; `norm` is applied to its result.

        Without one and without a sum over ranks, the kernel has added the hidden states itself.
        """
        x_TD = self.hidden.x
        if not fused.sums:
            self.hidden = Hidden(out_TD) if norm is None else Hidden(x_TD, out_TD, norm)
            return
        assert self._collectives is not None, "a plan with sums over ranks belongs to a group"
        with operation("all_reduce"):
            sum_TD = self._collectives.all_reduce(out_TD)
            if norm is not None:
                self.hidden = Hidden(x_TD, sum_TD, norm)
            else:
                self.hidden = Hidden(
                    x_TD + (sum_TD if fused.scale == 1.0 else sum_TD * fused.scale)
                )
