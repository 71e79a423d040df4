"""Device tensors of steps with token masks; `kernels/ops/token_masks.py` applies the masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.ops.token_masks import MASK_BITS

__all__ = ["MaskState"]


@dataclass(frozen=True, slots=True)
class MaskState:
    """Masks of all rows, and what the forward part of a step leaves for its sampling part.

    R = max_num_seqs + 1 rows, V tokens of the vocabulary.
    """

    bits: torch.Tensor
    """int32 `[R, ceil(V / 32)]`: bit i % 32 of word i // 32 is set if token i may be sampled. All
    bits of rows without a grammar are set, those of the null row included."""
    logits: torch.Tensor
    """`[max_num_seqs, V]` in the model's dtype: logits of the lanes."""
    positions: torch.Tensor
    """int64 `[max_num_seqs]`: the positions after which the lanes sample."""

    @classmethod
    def allocate(
        cls, max_num_seqs: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> MaskState:
        """Allocate the state of `max_num_seqs` rows and the null row, all without a grammar."""
        words = -(-vocab_size // MASK_BITS)
        return cls(
            torch.full((max_num_seqs + 1, words), -1, dtype=torch.int32, device=device),
            torch.zeros(max_num_seqs, vocab_size, dtype=dtype, device=device),
            torch.zeros(max_num_seqs, dtype=torch.int64, device=device),
        )

    @staticmethod
    def mask_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Bytes of `bits`."""
        return 4 * (max_num_seqs + 1) * -(-vocab_size // MASK_BITS)

    @staticmethod
    def bytes_for(max_num_seqs: int, vocab_size: int, dtype: torch.dtype) -> int:
        """Bytes that `allocate` will allocate."""
        masks = MaskState.mask_bytes(max_num_seqs, vocab_size)
        return masks + max_num_seqs * (vocab_size * dtype.itemsize + 8)

    def store(self, logits_BV: torch.Tensor, positions_B: torch.Tensor) -> None:
        """Keep logits and positions for the sampling part."""
        lanes = logits_BV.shape[0]
        self.logits[:lanes].copy_(logits_BV)
        self.positions[:lanes].copy_(positions_B)
