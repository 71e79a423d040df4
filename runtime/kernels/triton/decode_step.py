"""A whole decode step on a GPU, from the device's state to logits and back to the state."""

from __future__ import annotations

import torch
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.batch import RaggedBatch
from ..ops.bound_model import BoundModel
from ..ops.feedback import Feedback
from ..ops.stack import DecodeResult, Stack
from .begin import Embedding, Rotations
from .layer_kernels import gpu_linear
from .linear import GpuNorm
from .stack import GpuStack

__all__ = ["GpuDecodeStep"]


class GpuDecodeStep:
    """See `DecodeStep`; three kernels around those of the layers."""

    def __init__(self, stack: Stack, model: BoundModel) -> None:
        """`stack` are the layers of the model."""
        assert isinstance(stack, GpuStack)
        self.operations = stack.operations
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
        self._norm = GpuNorm(model.norm, plan.norm.eps, plan.norm.offset)
        self._head = gpu_linear(model.head)
        self._logit_softcap, self._logit_scale = plan.logit_softcap, plan.logit_scale

    @torch.no_grad()
    def run(
        self,
        rows_T: Tensor,
        token_ids_R: Tensor,
        positions_R: Tensor,
        block_tables: Tensor,
        arena: Tensor,
        read_blocks: int,
        block_size: int,
    ) -> DecodeResult:
        """See `DecodeStep.run`."""
        with operation("begin"):
            start = self.operations.begin_decode(
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
        hidden = self._stack.layers(x_TD, arena, batch, start.cos, start.sin, decodes=True)
        with operation("head"):
            logits, maxima, ids = self.operations.head(
                hidden.x,
                self._norm,
                self._head,
                self._logit_softcap,
                hidden.pending(),
                scale=self._logit_scale,
            )
        return DecodeResult(logits, start.positions, maxima, ids)

    @torch.no_grad()
    def pick(
        self, result: DecodeResult, rows_T: Tensor, token_ids_R: Tensor, positions_R: Tensor
    ) -> Tensor:
        """See `DecodeStep.pick`."""
        with operation("greedy"):
            feed = Feedback(rows_T, result.positions, token_ids_R, positions_R)
            if self._collectives is None or self._shard is None:
                return self.operations.pick_greedy(result.maxima, result.ids, feed)
            first = self._shard.vocab.start
            return self.operations.pick_of_ranks(
                self._collectives, result.maxima, result.ids, first, feed
            )
