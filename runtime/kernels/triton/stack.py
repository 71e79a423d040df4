"""All layers of a decoder on a GPU: five operations a layer.

    1 norm_linear        norm, then queries, keys and values
    2 decode_attention   norms of queries and keys, rotation, write to the cache, attention
    3 residual_linear    output projection, residual
    4 gate_up            norm, then gate and up, activation
    5 residual_linear    down projection, residual

Up to four tokens each operation is one kernel. For more, a kernel norms the inputs of a product
first, and the product is the library's (`linear_kernels.py`).

In a tensor-parallel group the ranks add what 3 and 5 leave before the residual is added.

The positions of few rows are split; the last program of attention combines the splits.

Families that norm the outputs of attention and the MLP leave the residual addition to the next
kernel that norms. Prefill steps write keys and values first and then attend in tiles.

Shapes: T tokens, D hidden_size, F intermediate_size, K kinds of rotation, E half of head_dim, G
layer groups, N features of queries, keys and values. Which kernels a layer is follows from its plan
(`fusion.py`); attention and activations with traits that no kernel knows are plain torch. The
arithmetic follows `ops/operation.py`, with results rounded to the model's dtype at the same
places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.batch import RaggedBatch
from ..ops.experts import Experts
from ..ops.layer_plan import BoundModel
from ..ops.stack import Stack
from .begin import Embedding, Rotations
from .fusion import fuse
from .layer_kernels import LayerChain, LayerKernel, StepAttention, norm_hidden
from .linear import GpuNorm
from .operations import Operations
from .split_attention import new_counters

__all__ = [
    "GpuDecodeStep",
    "GpuStack",
]


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
        self.operations, self._any_batch = operations, any_batch
        self._layers: list[list[LayerKernel]] = []
        after: LayerKernel | None = None
        for layer in reversed(model.layers):
            kernels: list[LayerKernel] = []
            for fused in reversed(fuse(layer.plan)):
                after = LayerKernel.bind(fused, layer, model, after)
                kernels.insert(0, after)
            self._layers.insert(0, kernels)
        self._collectives = model.collectives
        self._final_norm = model.plan.norm
        self._has_experts = any(isinstance(op, Experts) for op in model.plan.operations)
        self._norm = GpuNorm(model.norm, model.plan.norm.eps, model.plan.norm.offset)
        # Kept, as graphs are replayed with their addresses. Each launch leaves zeros for the next.
        self._counters = new_counters(model.norm.device)

    def close(self) -> None:
        """Let go of the weights."""
        self._layers.clear()

    def workspace_bytes(self) -> int:
        """None: what a step needs are tensors that it makes."""
        return 0

    @torch.no_grad()
    def run(
        self,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
        aux_layers: Sequence[int] = (),
        embeddings_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Stack.run`.

        There are no kernels of layers that need embeddings.
        """
        assert embeddings_TD is None, "a plan that `fusion_obstacle` refuses"
        outputs: dict[int, Tensor] = dict.fromkeys(aux_layers, x_TD)
        like = next(kernel.attention for kernel in self._layers[0] if kernel.attention is not None)
        step = StepAttention(
            *(self.operations, like, x_TD, arena, batch, cos_KTE, sin_KTE, self._counters),
            any_batch=self._any_batch,
        )
        live_T = batch.live_tokens if self._has_experts else None
        chain = LayerChain(self.operations, step, x_TD, live_T, self._collectives)
        for index, layer in enumerate(self._layers):
            with operation("layer", index):
                for kernel in layer:
                    chain.run(kernel)
            if index in outputs:
                outputs[index] = chain.settle()
        normed_TD, _ = norm_hidden(self.operations, chain.hidden, self._final_norm, self._norm)
        if not aux_layers:
            return normed_TD, None
        return normed_TD, torch.cat([outputs[layer] for layer in aux_layers], dim=-1)


class GpuDecodeStep:
    """See `DecodeStep`: one kernel, then the kernels of the layers."""

    def __init__(self, stack: Stack, model: BoundModel) -> None:
        """`stack` are the layers of the model."""
        assert isinstance(stack, GpuStack)
        self._stack = stack
        plan, embedding = model.plan, model.embedding
        self._collectives, self._shard = model.collectives, plan.shard
        self._embedding = Embedding(
            embedding.weight,
            embedding.scales,
            model.norm.dtype,
            model.embedding_factor,
            None if plan.shard is None else plan.shard.vocab,
        )
        self._rotations = Rotations(model.frequencies, model.amplitudes)

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
        with operation("begin"):
            start = self._stack.operations.begin_decode(
                rows_T,
                token_ids_R,
                positions_R,
                block_tables,
                block_size,
                self._embedding,
                self._rotations,
            )
        x_TD = start.x
        if self._collectives is not None and self._shard is not None:
            with operation("embedding_sum"):
                x_TD = self._collectives.all_reduce(x_TD)  # of zeros but for one rank: exact
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
        hidden_TD, _ = self._stack.run(x_TD, arena, batch, start.cos, start.sin)
        return hidden_TD, start.positions
