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

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.activation import Activate
from ..ops.attention import Attend, AttentionForm
from ..ops.batch import LayerPlace, RaggedBatch
from ..ops.experts import Experts, ExpertTensors
from ..ops.layer_plan import BoundLayer, BoundModel
from ..ops.linear import LinearTensors
from ..ops.norms import JoinNorms, Norm
from ..ops.stack import (
    AttentionBlock,
    Block,
    ExpertsBlock,
    GatedBlock,
    Stack,
    StackInputs,
    blocks_of,
)
from .begin import Beginning, EmbeddingTable, begin_decode
from .decode_attention import decode_attention
from .expert_routing import Routed, route
from .experts import experts
from .fusion import is_clamped
from .kernel_calls import num_multiprocessors
from .linear import GpuNorm, Pending
from .linear_kernels import gate_up, norm_linear, residual_linear
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
        plain, names = cls(), ("norm_linear", "residual_linear", "gate_up", "route", "experts")
        return cls(**{name: partial(getattr(plain, name), any_tokens=True) for name in names})


@dataclass(frozen=True, slots=True)
class _BoundBlock:
    """A block of a layer with its tensors."""

    block: Block
    norm: GpuNorm | None
    output_norm: GpuNorm | None
    first: LinearTensors | None = None
    """Queries, keys and values; or gate and up."""
    last: LinearTensors | None = None
    experts: ExpertTensors | None = None
    form: AttentionForm | None = None
    place: LayerPlace | None = None
    """Of attention: the layer's in the cache."""
    head_norms: tuple[Tensor | None, Tensor | None, float, bool] | None = None
    """Of attention: the first fields of `HeadRotation`."""

    @classmethod
    def of(cls, block: Block, layer: BoundLayer, model: BoundModel) -> _BoundBlock:
        """Return a block with the tensors of its layer."""

        def bound(norm: Norm | None) -> GpuNorm | None:
            if norm is None:
                return None
            return GpuNorm(layer.tensor(norm.weight), norm.eps, norm.offset)

        output_norm = bound(block.output_norm)
        if isinstance(block, ExpertsBlock):
            experts = layer.experts(block.experts)
            return cls(block, bound(block.norm), output_norm, experts=experts)
        if isinstance(block, GatedBlock):
            products = layer.linear(block.gate_up), layer.linear(block.down)
            return cls(block, bound(block.norm), output_norm, *products)
        assert isinstance(block, AttentionBlock), "not in `SUPPORTED`"
        assert not isinstance(block.input_norm, JoinNorms), "not in `SUPPORTED`"
        attend, qk_norm = block.attend, block.qk_norm
        sinks = None if attend.sinks is None else layer.tensor(attend.sinks)
        traits = qk_norm or model.plan.norm  # a missing norm has the traits of the others
        weights = qk_norm and (layer.tensor(qk_norm.q), layer.tensor(qk_norm.k))
        return cls(
            block,
            bound(block.input_norm),
            output_norm,
            layer.linear(block.qkv),
            layer.linear(block.output),
            form=attend.form(model.storage, sinks),
            place=layer.place,
            head_norms=(*(weights or (None, None)), traits.eps, traits.offset),
        )


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
            [_BoundBlock.of(block, layer, model) for block in blocks_of(layer.plan)]
            for layer in model.layers
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
                for block in layer:
                    chain.run(block)
            if index in outputs:
                outputs[index] = chain.normed(None, None)
        normed_TD = chain.normed(self._final_norm, self._norm)
        if not aux_layers:
            return normed_TD, None
        return normed_TD, torch.cat([outputs[layer] for layer in aux_layers], dim=-1)


class _Chain:
    """A step through the layers, block by block; scopes are the names of `fusion.py`.

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

    def run(self, bound: _BoundBlock) -> None:
        """Run a block, and add its result to the hidden states."""
        block = bound.block
        if isinstance(block, AttentionBlock):
            out_TD = self._product("output", bound, self._attended(bound, block))
        elif isinstance(block, GatedBlock):
            out_TD = self._product("down", bound, self._activated(bound, block))
        else:
            assert isinstance(block, ExpertsBlock), "not in `SUPPORTED`"
            out_TD = self._mixed(bound, block)
        norm, scale = bound.output_norm, block.residual.scale
        if block.sum is not None:
            collectives = self._stack.collectives
            assert collectives is not None, "a plan with sums over ranks belongs to a group"
            with operation("all_reduce"):
                out_TD = collectives.all_reduce(out_TD)
                if norm is None:
                    self._x = self._x + (out_TD if scale == 1.0 else out_TD * scale)
        elif norm is None:  # the kernel has added the hidden states itself
            self._x = out_TD
        if norm is not None:
            self._delta = (out_TD, norm)

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

    def _residual(self, bound: _BoundBlock) -> tuple[Tensor | None, float]:
        """What the last kernel of a block adds to its result, and the scale of the result.

        Results that are summed over ranks or normed are scaled and added later.
        """
        if bound.block.sum is not None:
            return None, 1.0
        return None if bound.output_norm is not None else self._x, bound.block.residual.scale

    def _attended(self, bound: _BoundBlock, block: AttentionBlock) -> Tensor:
        """Write keys and values, and attend: `[T, H * E]`."""
        qkv_TN = self._normed_product(bound, block.qkv.out_features, None)
        assert bound.head_norms is not None
        assert bound.last is not None
        attend, kind, operations = block.attend, block.rotate.kind, self._operations
        angles = self._cos[kind], self._sin[kind]
        rotation = HeadRotation(*bound.head_norms, *angles, attend.temperature)
        where, batch, form = (self._arena, bound.place), self._batch, bound.form
        if self._decodes:
            attended_TK = self._x.new_empty(self._x.shape[0], attend.features)
            with operation("decode_attention"):
                operations.decode_attention(
                    *(qkv_TN, *where, rotation, batch, form, self._partials),
                    *(self._stack.counters, attended_TK),
                    next_weight=bound.last.weight,
                )
            return attended_TK
        with operation("rotate_and_store"):
            q_THE = operations.rotate_and_store(qkv_TN, *where, rotation, batch, form)
        with operation("prefill_attention"):
            out_THE: Tensor = operations.prefill_attention(
                q_THE, *where, batch, form, self._tiles, self._tiling
            )
        return out_THE.flatten(1)

    def _activated(self, bound: _BoundBlock, block: GatedBlock) -> Tensor:
        """Gate and up, activated: `[T, F]`."""
        activate = block.activate
        if not is_clamped(activate):
            return self._normed_product(bound, activate.features, activate)
        gate_up_TF = self._normed_product(bound, block.gate_up.out_features, None)
        out_TF = gate_up_TF.new_empty(gate_up_TF.shape[0], activate.features)
        with operation("activate"):
            self._operations.activate_rows(gate_up_TF, out_TF, activate)
        return out_TF

    def _normed_product(
        self, bound: _BoundBlock, features: int, activate: Activate | None
    ) -> Tensor:
        x_TD, pending = self._x, self._pending()
        out_TN = x_TD.new_empty(x_TD.shape[0], features)
        name = "norm_linear" if activate is None else "gate_up"
        with operation(name):
            getattr(self._operations, name)(
                x_TD, bound.first, out_TN, norm=bound.norm, pending=pending, activate=activate
            )
        self._add(pending)
        return out_TN

    def _product(self, name: str, bound: _BoundBlock, value_TK: Tensor) -> Tensor:
        out_TD = torch.empty_like(self._x)
        residual_TD, scale = self._residual(bound)
        with operation(name):
            self._operations.residual_linear(
                value_TK, bound.last, out_TD, residual_TN=residual_TD, scale=scale
            )
        return out_TD

    def _mixed(self, bound: _BoundBlock, block: ExpertsBlock) -> Tensor:
        """A mixture of experts; padding is not live."""
        operations, op, tensors = self._operations, block.experts, bound.experts
        normed_TD = self.normed(block.norm, bound.norm)
        with operation("route"):
            routed = operations.route(op, normed_TD, tensors, self._live)
        out_TD = torch.empty_like(normed_TD)
        residual_TD, scale = self._residual(bound)
        with operation("experts"):
            operations.experts(op, normed_TD, tensors, routed, residual_TD, out_TD, scale=scale)
        return out_TD


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
