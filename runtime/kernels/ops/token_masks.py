"""Token masks: which tokens each row may sample, as bits; and their application to logits."""

import torch

__all__ = ["MASK_BITS", "mask_logits"]

MASK_BITS = 32
"""Tokens of a word of a mask: bit i % 32 of word i // 32 is set if token i may be sampled."""


def mask_logits(
    logits_BV: torch.Tensor, bits_RW: torch.Tensor, rows_B: torch.Tensor
) -> torch.Tensor:
    """Return the logits `[B, V]` with -inf for tokens that the mask of their row forbids.

    `bits_RW`: int32 `[R, ceil(V / 32)]`. NaN and +inf of forbidden tokens become NaN, so that
    samplers still detect them.
    """
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=bits_RW.device)
    bits_BV = ((bits_RW[rows_B][:, :, None] >> shifts) & 1).flatten(1)[:, : logits_BV.shape[1]]
    return torch.where(bits_BV == 0, logits_BV - torch.inf, logits_BV)
