"""All layers of a decoder on a GPU: five operations a layer.

    1 norm_linear        norm, then queries, keys and values
    2 decode_attention   norms of queries and keys, rotation, write to the cache, attention
    3 residual_linear    output projection, residual
    4 gate_up            norm, then gate and up, activation
    5 residual_linear    down projection, residual

Up to four tokens each operation is one kernel. For more, a kernel norms the inputs of a product
first, and the product is the library's (`linear_kernels.py`). Which kernels a layer is follows from
its plan (`fusion.py`). The arithmetic follows `ops/operation.py`, with results rounded to the
model's dtype at the same places.

In a tensor-parallel group the ranks add what 3 and 5 leave before the residual is added. Families
that norm the outputs of attention and the MLP leave the residual addition to the next kernel that
norms. Prefill steps write keys and values first and then attend in tiles.

Shapes: T tokens, D hidden_size, N features of queries, keys and values together, H query heads, E
head_dim (of cosines and sines half of it), K kinds of rotation, or features that attention returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.attention import Attend, AttentionForm
from ..ops.batch import LayerPlace, RaggedBatch
from ..ops.experts import Experts, ExpertTensors
from ..ops.layer_plan import BoundLayer, BoundModel
from ..ops.linear import LinearTensors
from ..ops.norms import Norm
from ..ops.stack import Stack, StackInputs
from .begin import Beginning, EmbeddingTable, begin_decode
from .decode_attention import decode_attention
from .expert_routing import Routed, route
from .experts import experts
from .fusion import Activation, Attention, Fused, Mixture, NormLinear, ResidualLinear, fuse
from .kernel_calls import num_multiprocessors
from .linear import GpuNorm, Pending
from .linear_kernels import gate_up, linear_of_any_rows, norm_linear, residual_linear
from .prefill_attention import SPLIT, any_tiling, prefill_attention, prefill_tiles, prefill_tiling
from .rowwise import activate_rows, norm_rows
from .split_attention import choose_splits, new_counters, new_partials
from .store import HeadRotation, rotate_and_store


@dataclass(frozen=True, slots=True)
class Operations:
    """One function an operation of a step; tests and tools replace some of them."""

    begin_decode: Callable[..., Beginning] = begin_decode
    norm_linear: Callable[..., None] = norm_linear
    decode_attention: Callable[..., None] = decode_attention
    residual_linear: Callable[..., None] = residual_linear
    gate_up: Callable[..., None] = gate_up
    norm_rows: Callable[..., None] = norm_rows
    activate_rows: Callable[..., None] = activate_rows
    route: Callable[..., Routed] = route
    experts: Callable[..., None] = experts
    rotate_and_store: Callable[..., Tensor] = rotate_and_store
    prefill_tiles: Callable[..., Tensor] = prefill_tiles
    prefill_attention: Callable[..., Tensor] = prefill_attention

    @classmethod
    def batch_invariant(cls) -> Operations:
        """Return the kernels whose sums do not depend on the rows of a step."""
        alone: dict[str, Any] = {"product": linear_of_any_rows}
        return cls(
            norm_linear=partial(norm_linear, **alone),
            residual_linear=partial(residual_linear, **alone),
            gate_up=partial(gate_up, **alone),
            route=partial(route, any_tokens=True),
            experts=partial(experts, any_tokens=True),
        )


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel of a layer with its tensors."""

    fused: Fused
    linear: LinearTensors | None = None
    """Of attention: the product that follows."""
    norm: GpuNorm | None = None
    experts: ExpertTensors | None = None
    output_norm: GpuNorm | None = None
    """Of a mixture of experts."""
    form: AttentionForm | None = None
    place: LayerPlace | None = None
    """Of attention: the layer's in the cache."""
    head_norms: tuple[Tensor | None, Tensor | None, float, bool] | None = None
    """Of attention: the first fields of `HeadRotation`."""

    @classmethod
    def bind(
        cls, fused: Fused, following: Fused | None, layer: BoundLayer, model: BoundModel
    ) -> _Kernel:
        """Return the kernel with the tensors of a layer; `following` is its next one."""

        def bound(norm: Norm | None) -> GpuNorm | None:
            if norm is None:
                return None
            return GpuNorm(layer.tensor(norm.weight), norm.eps, norm.offset)

        match fused:
            case Attention(qk_norm, _, attend):
                assert isinstance(following, ResidualLinear)
                sinks = None if attend.sinks is None else layer.tensor(attend.sinks)
                form = attend.form(model.storage, sinks)
                traits = qk_norm or model.plan.norm  # a missing norm has the traits of the others
                weights = qk_norm and (layer.tensor(qk_norm.q), layer.tensor(qk_norm.k))
                norms = (*(weights or (None, None)), traits.eps, traits.offset)
                linear, place = layer.linear(following.linear), layer.place
                return cls(fused, linear, form=form, place=place, head_norms=norms)
            case Activation():
                return cls(fused)
            case Mixture(norm, op, output_norm):
                return cls(fused, None, bound(norm), layer.experts(op), bound(output_norm))
        return cls(fused, layer.linear(fused.linear), bound(fused.norm))


class GpuStack:
    """The layers of one model and its final norm, as kernels in one stream."""

    def __init__(
        self, model: BoundModel, operations: Operations, *, any_batch: bool = False
    ) -> None:
        """The plan is one that `fusion_obstacle` has nothing against.

        With `any_batch` all steps run as prefill steps do, in kernels that do not depend on the
        step: results of a token do not depend on the others. It takes the operations of
        `Operations.batch_invariant`.
        """
        self.operations, self.any_batch = operations, any_batch
        self.collectives, self.storage = model.collectives, model.storage
        self.attend = model.plan.attend  # all layers have the same heads
        self._layers = [
            [_Kernel.bind(*pair, layer, model) for pair in zip_longest(kernels, kernels[1:])]
            for layer in model.layers
            for kernels in (fuse(layer.plan),)
        ]
        self._final_norm = model.plan.norm
        self._norm = GpuNorm(model.norm, model.plan.norm.eps, model.plan.norm.offset)
        self.has_experts = any(isinstance(op, Experts) for op in model.plan.operations)
        # Kept, as graphs are replayed with their addresses. Each launch leaves zeros for the next.
        self.counters = new_counters(model.norm.device)

    def close(self) -> None:
        """Let go of the weights."""
        self._layers.clear()

    def workspace_bytes(self) -> int:
        """None: what a step needs are tensors that it makes."""
        return 0

    @torch.no_grad()
    def run(
        self, x_TD: Tensor, inputs: StackInputs, aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """See `Stack.run`. No kernel supports layers that read the embeddings."""
        assert inputs[-1] is None, "a plan that `fusion_obstacle` refuses"
        outputs: dict[int, Tensor] = dict.fromkeys(aux_layers, x_TD)
        chain = _Chain(self, x_TD, inputs)
        for index, layer in enumerate(self._layers):
            with operation("layer", index):
                for kernel in layer:
                    chain.run(kernel)
            if index in outputs:
                outputs[index] = chain.normed(None, None)
        normed_TD = chain.normed(self._final_norm, self._norm)
        if not aux_layers:
            return normed_TD, None
        return normed_TD, torch.cat([outputs[layer] for layer in aux_layers], dim=-1)


class _Chain:
    """A step through the layers, kernel by kernel; scopes are the names of `fusion.py`.

    A decode step, one token a row, writes to the cache and attends in one operation. Other steps
    write keys and values first, then tiles of each chunk attend. All layers share the inputs and
    the workspace of attention.
    """

    def __init__(self, stack: GpuStack, x_TD: Tensor, inputs: StackInputs) -> None:
        """Begin at the hidden states `x_TD`."""
        self._operations, self._stack = stack.operations, stack
        self._cos, self._sin, (self._arena,), batch, _ = inputs
        self._batch = batch
        self._live = batch.live_tokens if stack.has_experts else None
        self._x = x_TD
        self._delta: tuple[Tensor, GpuNorm] | None = None
        """What a norm has to be taken of and added to `_x`, by the next kernel that norms."""
        self._value = x_TD
        """What the last kernel left for the next one."""
        # In a decode step no token attends to the key of another one.
        self._decodes = batch.tokens_per_row == 1 and not stack.any_batch
        if not self._decodes:
            with operation("prefill_tiles"):
                self._tile(stack.attend)
            return
        like = stack.attend
        tokens, device, most = x_TD.shape[0], x_TD.device, batch.read_blocks * batch.block_size
        splits = choose_splits(tokens, like.kv_heads, most, num_multiprocessors(device))
        self._partials = new_partials(tokens, like.heads, splits, like.value_dim, device)

    def _tile(self, like: Attend) -> None:
        """Deal the tokens to tiles.

        With `any_batch` the same compiled kernels run whatever the rows and tokens are. Triton
        compiles other kernels for tensors that do not begin at a multiple of 16 bytes, so the parts
        of tensors do, for each group and kind of rotation.
        """
        x_TD, width, traits = self._x, like.head_dim, (self._x.dtype, self._stack.storage)
        if self._stack.any_batch:
            self._batch = replace(self._batch, slots=_aligned(self._batch.slots))
            self._cos, self._sin = _aligned(self._cos), _aligned(self._sin)
            tiling = any_tiling(width, *traits)
            # Sums of earlier parts take as many registers as sums of this part: without these
            # sizes they spill.
            rows = min(tiling.block_m, 32) if width > 128 else tiling.block_m
            warps = 8 if width > 64 else tiling.num_warps
            self._tiling = tiling._replace(block_m=rows, num_warps=warps, split=SPLIT)
        else:
            heads = (like.heads, like.kv_heads, width)
            self._tiling = prefill_tiling(x_TD.shape[0], *heads, *traits, x_TD.device)
        tokens_of_tile = self._tiling.tokens(like.heads // like.kv_heads)
        self._tiles = self._operations.prefill_tiles(
            self._batch.token_rows, self._batch.rows.shape[0], tokens_of_tile
        )

    def run(self, kernel: _Kernel) -> None:
        """Run a kernel of the chain."""
        fused = kernel.fused
        if isinstance(fused, Attention):
            self._value = self._attended(kernel, fused, self._value)
        elif isinstance(fused, ResidualLinear):
            self._add_product(kernel, fused)
        elif isinstance(fused, Mixture):
            self._mix(kernel, fused)
        elif isinstance(fused, Activation):
            out_TF = self._value.new_empty(self._value.shape[0], fused.activate.features)
            with operation(fused.name):
                self._operations.activate_rows(self._value, out_TF, fused.activate)
            self._value = out_TF
        else:
            self._normed_product(kernel, fused)

    def normed(self, norm: Norm | None, bound: GpuNorm | None) -> Tensor:
        """Return the hidden states normed (as they are without a norm), with nothing pending."""
        pending = self._pending()
        if bound is None and pending is None:
            return self._x
        normed_TD = torch.empty_like(self._x)
        with operation("residual" if norm is None else norm.name):
            self._operations.norm_rows(self._x, bound, normed_TD, pending)
        self._add(pending)
        return normed_TD

    def _pending(self) -> Pending | None:
        """What the next kernel that norms has to add first, with room for the sum."""
        return None if self._delta is None else Pending(*self._delta, torch.empty_like(self._x))

    def _add(self, pending: Pending | None) -> None:
        """Go on with the sum that a kernel has kept."""
        if pending is not None:
            self._x, self._delta = pending.out, None

    def _attended(self, kernel: _Kernel, fused: Attention, qkv_TN: Tensor) -> Tensor:
        """Write keys and values, and attend: `[T, H * E]`."""
        assert kernel.head_norms is not None
        assert kernel.linear is not None
        attend, kind, operations = fused.attend, fused.rotate.kind, self._operations
        angles = self._cos[kind], self._sin[kind]
        rotation = HeadRotation(*kernel.head_norms, *angles, attend.temperature)
        where, batch, form = (self._arena, kernel.place), self._batch, kernel.form
        if self._decodes:
            attended_TK = self._x.new_empty(self._x.shape[0], attend.features)
            with operation("decode_attention"):
                operations.decode_attention(
                    *(qkv_TN, *where, rotation, batch, form, self._partials),
                    *(self._stack.counters, attended_TK),
                    next_weight=kernel.linear.weight,
                )
            return attended_TK
        with operation("rotate_and_store"):
            q_THE = operations.rotate_and_store(qkv_TN, *where, rotation, batch, form)
        with operation("prefill_attention"):
            out_THE: Tensor = operations.prefill_attention(
                q_THE, *where, batch, form, self._tiles, self._tiling
            )
        return out_THE.flatten(1)

    def _normed_product(self, kernel: _Kernel, fused: NormLinear) -> None:
        x_TD, pending = self._x, self._pending()
        self._value = x_TD.new_empty(x_TD.shape[0], fused.features)
        with operation(fused.name):
            getattr(self._operations, fused.name)(
                *(x_TD, kernel.linear, self._value),
                norm=kernel.norm,
                pending=pending,
                activate=fused.activate,
            )
        self._add(pending)

    def _add_product(self, kernel: _Kernel, fused: ResidualLinear) -> None:
        out_TD = torch.empty_like(self._x)
        residual_TD = self._x if kernel.norm is None and not fused.sums else None
        scale = 1.0 if fused.sums else fused.scale
        with operation(fused.name):
            self._operations.residual_linear(
                self._value, kernel.linear, out_TD, residual_TN=residual_TD, scale=scale
            )
        self._added(fused, out_TD, kernel.norm)

    def _mix(self, kernel: _Kernel, fused: Mixture) -> None:
        """A mixture of experts; padding is not live."""
        operations, tensors = self._operations, kernel.experts
        assert tensors is not None
        normed_TD = self.normed(fused.norm, kernel.norm)
        with operation("route"):
            routed = operations.route(fused.experts, normed_TD, tensors, self._live)
        out_TD = torch.empty_like(normed_TD)
        adds = kernel.output_norm is None and not fused.sums
        residual_TD, scale = self._x if adds else None, 1.0 if fused.sums else fused.scale
        with operation(fused.name):
            operations.experts(
                fused.experts, normed_TD, tensors, routed, residual_TD, out_TD, scale=scale
            )
        self._added(fused, out_TD, kernel.output_norm)

    def _added(self, fused: ResidualLinear | Mixture, out_TD: Tensor, norm: GpuNorm | None) -> None:
        """Go on with what a kernel left; `norm` is applied to its result.

        Without one and without a sum over ranks, the kernel has added the hidden states itself.
        """
        if not fused.sums:
            self._x, self._delta = (out_TD, None) if norm is None else (self._x, (out_TD, norm))
            return
        collectives = self._stack.collectives
        assert collectives is not None, "a plan with sums over ranks belongs to a group"
        with operation("all_reduce"):
            sum_TD = collectives.all_reduce(out_TD)
            if norm is not None:
                self._delta = (sum_TD, norm)
            else:
                self._x = self._x + (sum_TD if fused.scale == 1.0 else sum_TD * fused.scale)


def _aligned(parts_PT: Tensor) -> Tensor:
    """Return a tensor `[P, T, ...]` whose parts begin at multiples of 16 bytes."""
    parts, tokens = parts_PT.shape[:2]
    if parts == 1 or tokens % 4 == 0:
        return parts_PT
    padded = parts_PT.new_empty(parts, tokens + -tokens % 4, *parts_PT.shape[2:])
    return padded[:, :tokens].copy_(parts_PT)


class GpuDecodeStep:
    """See `DecodeStep`: one kernel, then the kernels of the layers."""

    def __init__(self, stack: Stack, model: BoundModel) -> None:
        """`stack` are the layers of the model."""
        assert isinstance(stack, GpuStack)
        self._stack, self._shard = stack, model.plan.shard
        self._embedding = EmbeddingTable(
            model.embedding.weight,
            model.embedding.scales,
            model.norm.dtype,
            model.embedding_factor,
            None if self._shard is None else self._shard.vocab,
        )
        self._rotations = (model.frequencies, model.amplitudes)

    @torch.no_grad()
    def __call__(
        self,
        rows_T: Tensor,
        token_ids_R: Tensor,
        positions_R: Tensor,
        block_tables: Tensor,
        arena: Tensor,
        read_blocks: int,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        """See `DecodeStep`."""
        stack, state = self._stack, (rows_T, token_ids_R, positions_R)
        with operation("begin"):
            start = stack.operations.begin_decode(
                *state, block_tables, block_size, self._embedding, self._rotations
            )
        x_TD = start.x
        if stack.collectives is not None and self._shard is not None:
            with operation("embedding_sum"):
                x_TD = stack.collectives.all_reduce(x_TD)  # of zeros but for one rank: exact
        batch = RaggedBatch(
            positions=start.positions,
            slots=start.slots,
            token_rows=rows_T,
            rows=rows_T,
            block_tables=block_tables,
            read_blocks=read_blocks,
            block_size=block_size,
            tokens_per_row=1,
        )
        hidden_TD, _ = stack.run(x_TD, (start.cos, start.sin, (arena,), batch, None))
        return hidden_TD, start.positions
