"""Token masks: which tokens each lane may sample, as bits; and their application to logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...mask_words import MASK_BITS


class LaneMasks(NamedTuple):
    """The masks of the lanes of a step. B lanes, N masks, V tokens of the vocabulary."""

    bits: torch.Tensor
    """int32 `[N, ceil(V / 32)]`, with a dense last dimension."""
    rows: torch.Tensor
    """int64 `[B]`: the mask of each lane."""


def mask_logits(logits_BV: torch.Tensor, masks: LaneMasks) -> torch.Tensor:
    """Return the logits `[B, V]` with -inf for tokens that the mask of their lane forbids.

    NaN and +inf of forbidden tokens become NaN, so that samplers still detect them.
    """
    bits_NW, rows_B = masks
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=bits_NW.device)
    bits_BV = ((bits_NW[rows_B][:, :, None] >> shifts) & 1).flatten(1)[:, : logits_BV.shape[1]]
    return torch.where(bits_BV == 0, logits_BV - torch.inf, logits_BV)
