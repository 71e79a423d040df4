"""Block-parallel drafters: all drafts in one pass. See `block_config.py`.

    tokens          a   b   c   d        d is the newest one
    context         a   b   c            keys and values of the features of each
    block                       d  ?  ?  tokens that attend to the context and to the whole block
    drafts                         e  f  predicted at the masked positions

Keys and values of the block lie in the slots of its positions, until the next steps overwrite them.

Shape suffixes: T tokens, B rows, D hidden_size, F features, L layers, G key/value heads, E
head_dim, N tokens of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from ....cache.arena import Storage
from ....cache.spec import LayerGroup
from ...kernels import Kernels, RaggedBatch
from ...kernels.cpu.drafted import PackedWeight, drafter_context
from ...kernels.ops.kv_storage import write_blocks
from ...kernels.ops.parameter import Parameter
from ..decoder import Decoder, LayerStack
from ..modules import Projection, RMSNorm, Vector, mean_square
from ..plan import rope_kinds
from ..rope import rotate
from .block_config import BlockParts
from .drafter import Drafts, FollowedTokens, NewestTokens, StepOperator
from .drafter_config import DrafterConfig
from .reach import within_window
from .token_projection import TokenProjection

__all__ = ["BlockDrafter"]


class BlockDrafter(LayerStack):
    """A block-parallel drafter. `store` gives it its weights."""

    operator: StepOperator | None = None

    def __init__(
        self,
        config: DrafterConfig,
        target: Decoder,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        group: LayerGroup,
        storage: Storage,
    ) -> None:
        """See `load_drafter`; embedding and output projection are those of `target`."""
        plan = within_window(config.plan, group.spec.window_tokens)
        ropes = rope_kinds(config.model)
        assert len(ropes) == 1, "layers of one kind"
        super().__init__(plan, ropes, kernels, dtype, device, [group], storage)
        parts = config.parts
        assert isinstance(parts, BlockParts)
        self.taps, self.most_drafts = config.taps, config.most_drafts
        self._config, self._parts = config, parts
        self.fc = Projection(kernels, *parts.fuse.weight.shape)
        self.hidden_norm = RMSNorm(parts.hidden_norm.eps)
        self.context = Projection(kernels, *parts.context.weight.shape)
        self.key_norms = Vector()
        self._embedding = TokenProjection(target.embed_tokens, target.vocabulary)
        self._head = TokenProjection(target.lm_head, target.vocabulary)

    def layout(self) -> Iterator[Parameter]:
        """Yield the parameters that `store` expects."""
        return iter(self._config.parameters)

    def follow(self, tokens: FollowedTokens, arena: torch.Tensor) -> None:
        """See `Drafter.follow`."""
        assert tokens.features is not None
        if self.runs_natively_on_cpu and self.kernels.pack is not None:
            return self._follow_natively(tokens.features, tokens.batch, arena)
        context_TD = self.hidden_norm(self.fc(tokens.features))
        attend, batch = self.plan.layers[0].attend, tokens.batch
        shape = (len(context_TD), len(self.layers), 2, attend.kv_heads, attend.head_dim)
        k_TLGE, v_TLGE = self.context(context_TD).view(shape).unbind(2)
        cos_KTE, sin_KTE = self._rotations(batch)
        turned = rotate(self._normed(k_TLGE).flatten(1, 2), cos_KTE[0], sin_KTE[0])
        self._write(arena, batch, turned.view(k_TLGE.shape), v_TLGE)

    def _follow_natively(
        self, features_TF: torch.Tensor, batch: RaggedBatch, arena: torch.Tensor
    ) -> None:
        """As `follow`, as one operator of the CPU."""
        cos_KTE, sin_KTE = self._rotations(batch)
        fuse, context, norm = self.fc, self.context, self.hidden_norm.weight
        assert fuse.weight is not None
        assert context.weight is not None
        assert norm is not None
        assert self.key_norms.weight is not None
        drafter_context(
            features_TF,
            PackedWeight(fuse.weight, fuse.scales),
            norm,
            PackedWeight(context.weight, context.scales),
            self.key_norms.weight,
            self._parts.eps,
            cos_KTE[0],
            sin_KTE[0],
            batch.slots[self._places[0].group],
            arena,
            self._places,
            batch.block_size,
            self.storage,
        )

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """See `Drafter.propose`."""
        self.follow(tokens, arena)
        rows, size = len(newest.token_ids), 1 + count
        ids_BN = F.pad(newest.token_ids[:, None], (0, count), value=self._parts.mask_id)
        batch = newest.batch(0, size)
        x_TD = self._embedding.rows(ids_BN.flatten())
        attended = None if self._parts.causal else _to_the_end(batch, size)
        normed_TD, _ = self.run_layers(x_TD, arena, batch, attended=attended)
        masked_TD = normed_TD.unflatten(0, (rows, size))[:, 1:].flatten(0, 1)
        ids_T, probabilities_T = self._head.most_likely(self, masked_TD)
        return Drafts(ids_T.view(rows, count), probabilities_T.view(rows, count))

    def _normed(self, k_TLGE: torch.Tensor) -> torch.Tensor:
        """The keys, normed with the weight of their layer."""
        assert self.key_norms.weight is not None
        reciprocal = torch.rsqrt(mean_square(k_TLGE)[..., None] + self._parts.eps)
        return self.key_norms.weight[:, None] * (k_TLGE.float() * reciprocal).to(k_TLGE.dtype)

    def _write(
        self,
        arena: torch.Tensor,
        batch: RaggedBatch,
        k_TLGE: torch.Tensor,
        v_TLGE: torch.Tensor,
    ) -> None:
        """Store keys and values of all layers."""
        place = self._places[0]
        slots_T, size = batch.slots[place.group], batch.block_size
        if self.storage == "model":
            kv_TLSGE = torch.stack((k_TLGE, v_TLGE), dim=2)
            arena[:, :, slots_T // size, :, slots_T % size] = kv_TLSGE
            return
        for layer, own in enumerate(self._places):
            for side, x_TLGE in enumerate((k_TLGE, v_TLGE)):
                x_TGE = x_TLGE[:, layer]
                write_blocks(arena[own.position, side], slots_T, x_TGE, size, self.storage)


def _to_the_end(batch: RaggedBatch, size: int) -> RaggedBatch:
    """The batch whose tokens attend up to the last token of their row."""
    last_B1 = batch.positions.view(-1, size)[:, -1:]
    return dataclasses.replace(batch, positions=last_B1.repeat(1, size).flatten())
