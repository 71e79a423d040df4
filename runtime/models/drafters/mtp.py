"""Modules for multi-token prediction: see `mtp_config.py`. Shape suffixes: T tokens, D hidden_size.

A module was trained to predict the token after the next one. For further drafts it takes its own
output in place of the target's hidden state, normed as that is.
"""

from __future__ import annotations

import torch

from ....cache.arena import Storage
from ....cache.spec import LayerGroup
from ...kernels import Kernels, RaggedBatch
from ..decoder import Decoder
from ..each_token import each_token
from ..modules import Projection, RMSNorm
from .drafter_config import DrafterConfig
from .feature_head import FeatureHead
from .mtp_config import MtpParts

__all__ = ["MultiTokenPrediction"]


class MultiTokenPrediction(FeatureHead):
    """A layer of the target's kind, on its last hidden states and the next tokens."""

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
        super().__init__(config, target, kernels, dtype, device, group, storage)
        parts = config.parts
        assert isinstance(parts, MtpParts)
        self.enorm = RMSNorm(parts.embedding_norm.eps)
        self.hnorm = RMSNorm(parts.hidden_norm.eps)
        self.eh_proj = Projection(kernels, *parts.fuse.weight.shape)
        self._layout = parts.layout

    def start(self, features_TF: torch.Tensor) -> torch.Tensor:
        """See `FeatureHead.start`."""
        return features_TF

    def advance(
        self,
        hidden_TD: torch.Tensor,
        next_ids_T: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FeatureHead.advance`."""
        embeddings_TD = each_token(self.kernels, self.enorm)(self._embedding.rows(next_ids_T))
        hidden_TD = each_token(self.kernels, self.hnorm)(hidden_TD)
        pair = (embeddings_TD, hidden_TD)
        x_TD = self.eh_proj(torch.cat(pair[::-1] if self._layout.hidden_first else pair, dim=-1))
        if self._layout.normed:
            normed_TD, _ = self.run_layers(x_TD, arena, batch)
            return normed_TD, normed_TD
        normed_TD, output_TD = self.run_layers(x_TD, arena, batch, self._last)
        assert output_TD is not None, "the last layer is tapped"
        return normed_TD, output_TD
