"""Device tensors of steps with token masks; `kernels/ops/token_masks.py` applies the masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.ops.token_masks import MASK_BITS
from ..models.decoder_model import DecoderConfig
from ..models.plan import plan_of
from ..resolved_config import ResolvedConfig
from .step_sizes import MOST_VERIFIED_TOKENS

__all__ = ["MaskSizes", "MaskState"]


@dataclass(frozen=True, slots=True)
class MaskSizes:
    """The sizes of a `MaskState`."""

    rows: int
    """The null row included."""
    tokens_per_row: int
    """Masks of a row: one for each token that a verify step samples, 1 without speculation."""
    lanes: int
    """Most tokens that a step with two parts samples; 0 where steps have one part."""
    vocab_size: int
    own_vocab_size: int
    """Logits of a token, before those of all ranks are gathered."""
    dtype: torch.dtype
    """Of logits."""

    @classmethod
    def of(cls, config: ResolvedConfig, model: DecoderConfig) -> MaskSizes | None:
        """Return the sizes of an engine, or of one rank; None without structured output."""
        if not config.structured_output:
            return None
        lanes = 0
        if config.is_async_device:
            verified = MOST_VERIFIED_TOKENS if config.tokens_per_row else 0
            lanes = max(config.max_num_seqs, config.max_prefill_rows, verified)
        shard = plan_of(model).shard
        return cls(
            config.max_num_seqs + 1,
            max(config.tokens_per_row, default=1),
            lanes,
            model.vocab_size,
            model.vocab_size if shard is None else len(shard.vocab),
            config.dtype,
        )

    @property
    def mask_bytes(self) -> int:
        """Bytes of all masks."""
        return 4 * self.rows * self.tokens_per_row * -(-self.vocab_size // MASK_BITS)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return self.mask_bytes + self.lanes * (self.own_vocab_size * self.dtype.itemsize + 8)


@dataclass(frozen=True, slots=True)
class MaskState:
    """Masks of all rows, and what the forward part of a step leaves for its sampling part.

    R rows, N masks of a row, V tokens of the vocabulary, W of these on the rank, L lanes: see
    `MaskSizes`.
    """

    bits: torch.Tensor
    """int32 `[N * R, ceil(V / 32)]`: bit i % 32 of word i // 32 is set if token i may be sampled.
    Mask `n * R + row` is that of the token after the newest one of a row and `n` drafts. All bits
    of rows without a grammar are set, those of the null row included."""
    logits: torch.Tensor
    """`[L, W]` in the model's dtype: logits of the lanes."""
    positions: torch.Tensor
    """int64 `[L]`: the positions after which the lanes sample."""

    @classmethod
    def allocate(cls, sizes: MaskSizes, device: torch.device) -> MaskState:
        """Allocate the state of rows without a grammar."""
        words = -(-sizes.vocab_size // MASK_BITS)
        masks = sizes.rows * sizes.tokens_per_row
        return cls(
            torch.full((masks, words), -1, dtype=torch.int32, device=device),
            torch.zeros(sizes.lanes, sizes.own_vocab_size, dtype=sizes.dtype, device=device),
            torch.zeros(sizes.lanes, dtype=torch.int64, device=device),
        )

    def store(self, logits_BV: torch.Tensor, positions_B: torch.Tensor) -> None:
        """Keep logits and positions for the sampling part."""
        lanes = logits_BV.shape[0]
        self.logits[:lanes].copy_(logits_BV)
        self.positions[:lanes].copy_(positions_B)
