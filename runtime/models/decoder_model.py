"""What the steps of an engine need of a decoder, whoever implements it."""

from __future__ import annotations

from typing import Protocol

import torch

from ...cache.arena import Storage
from ..kernels import DecodeStep, Kernels, RaggedBatch, Stack
from .config import DecoderConfig
from .modules import ShardedVocabulary

__all__ = ["DecoderConfig", "DecoderModel"]


class DecoderModel(Protocol):
    """Token ids to hidden states to logits, reading and writing the arena.

    T tokens of a step, B sampled positions, D hidden_size.
    """

    @property
    def config(self) -> DecoderConfig:
        """The configuration of the model."""

    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    storage: Storage
    """How the arena stores keys and values."""
    stack: Stack | None
    """One operation of all layers."""
    decode_step: DecodeStep | None
    """Kernels of a whole decode step."""
    vocabulary: ShardedVocabulary | None
    """The part of the vocabulary of a rank of a tensor-parallel group; None: it has all tokens."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as stored."""

    def weight_bytes_read(self, rows: float) -> int:
        """Return the bytes of the parameters that a decode step of `rows` rows reads."""

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[T, D]` as the first layer takes them."""

    def decode(self, x_TD: torch.Tensor, arena: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """Return the final hidden states `[T, D]`; writes the tokens' keys and values."""

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return logits `[B, vocab_size]`."""

    def own_logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return the logits of `vocabulary`, `[B, its tokens]`; without one, those of `logits`."""
