"""EAGLE-3 heads: see `eagle3_config.py`. Shape suffixes: T tokens, D hidden_size, F features, V
tokens of the head's vocabulary."""

from __future__ import annotations

import torch

from ....cache.arena import Storage
from ....cache.spec import LayerGroup
from ...kernels import Kernels, RaggedBatch
from ...kernels.cpu.drafted import HeadWeights, head_drafts
from ...kernels.ops.stack import DecoderStack
from ..decoder import Decoder
from ..each_token import each_token
from ..modules import Projection, RMSNorm
from .drafter import Drafts, SampledTokens, StepOperator
from .drafter_config import DrafterConfig
from .eagle3_config import Eagle3Parts
from .feature_head import FeatureHead
from .token_projection import TokenProjection

__all__ = ["Eagle3"]


class Eagle3(FeatureHead):
    """An EAGLE-3 head. `store` gives it its weights."""

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
        """See `load_drafter`; what the head has no weights for is that of `target`."""
        super().__init__(config, target, kernels, dtype, device, group, storage)
        parts = config.parts
        assert isinstance(parts, Eagle3Parts)
        self._weights: HeadWeights | None = None
        """Those of `operator`, at its first call."""
        self.fc = Projection(kernels, *parts.fuse.shape)
        self.input_norm: RMSNorm | None = None
        if parts.input_norm is not None:
            self.input_norm = RMSNorm(parts.input_norm.eps)
        if parts.embedding is not None:
            self.embed_tokens = Projection(kernels, *parts.embedding.shape)
            self._embedding = TokenProjection(self.embed_tokens)
        if parts.head is not None:
            self.lm_head = Projection(kernels, *parts.head.shape)
            self._head = TokenProjection(self.lm_head)

    @property
    def operator(self) -> StepOperator | None:
        """See `Drafter.operator`. The C++ stack has one, for rotations of fixed frequencies, and
        an embedding and an output projection that are not split over ranks."""
        if not isinstance(self.stack, DecoderStack) or self._frequencies_by_length is not None:
            return None
        if self._embedding.vocabulary is not None or self._head.vocabulary is not None:
            return None
        return self._propose_natively

    def _propose_natively(self, step: SampledTokens, arena: torch.Tensor, count: int) -> Drafts:
        if self._weights is None:
            self._weights = self._bound_weights()
        tokens = step.tokens
        assert tokens.features is not None
        drafts_BK, probabilities_BK = head_drafts(
            tokens.features,
            tokens.token_ids,
            tokens.next_ids,
            tokens.batch,
            step.rows,
            step.positions,
            step.first,
            step.stops,
            arena,
            count,
            self._weights,
        )
        return Drafts(drafts_BK, probabilities_BK)

    def _bound_weights(self) -> HeadWeights:
        """The weights, which `overwrite` leaves where they are."""
        embedding, head = self._embedding.projection, self._head.projection
        norm = self.input_norm
        assert isinstance(self.stack, DecoderStack)
        assert self.fc.weight is not None
        assert embedding.weight is not None
        assert head.weight is not None
        return HeadWeights(
            fuse=self.fc.weight,
            fuse_scales=self.fc.scales,
            input_norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            hidden_size=self.fc.out_features,
            embedding=embedding.weight,
            embedding_scales=embedding.scales,
            stack=self.stack.handle,
            frequencies=self.inverse_frequencies,
            amplitudes=self.amplitudes,
            head=head.weight,
            head_scales=head.scales,
            head_bias=head.bias,
            head_features=head.out_features,
            target_ids=self.target_ids,
        )

    def start(self, features_TF: torch.Tensor) -> torch.Tensor:
        """See `FeatureHead.start`."""
        hidden_TD: torch.Tensor = self.fc(features_TF)
        return hidden_TD

    def advance(
        self,
        hidden_TD: torch.Tensor,
        next_ids_T: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FeatureHead.advance`."""
        if self.input_norm is not None:
            hidden_TD = each_token(self.kernels, self.input_norm)(hidden_TD)
        embeddings_TD = self._embedding.rows(next_ids_T)
        normed_TD, output_TD = self.run_layers(hidden_TD, arena, batch, self._last, embeddings_TD)
        assert output_TD is not None, "the last layer is tapped"
        return normed_TD, output_TD
