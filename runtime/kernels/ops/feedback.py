"""Token feedback: a step writes its sampled tokens to the row state on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NON_FINITE", "Feedback"]

NON_FINITE = -1
"""Token that samplers return for logits with NaN or +inf, or with only -inf, before or after the
sampling parameters are applied. The device continues with token 0, which is a valid index; the host
ends the request."""


class Feedback(NamedTuple):
    """Row state that a step updates with its sampled tokens; B lanes, R rows of the state.

    A sampled token becomes the newest token of its row, one position after the last input.
    `NON_FINITE` is stored as token 0. The null row, the last row of the state, remains at position
    0.
    """

    rows: Tensor
    """int64 `[B]`: the row of each lane."""
    positions: Tensor
    """int64 `[B]`: position of each lane's last input."""
    token_ids: Tensor
    """int64 `[R]` of the state, written."""
    state_positions: Tensor
    """int64 `[R]` of the state, written."""

    def store(self, tokens: Tensor) -> None:
        """Store the sampled tokens, int64 `[B]`, as the newest of their rows, in plain PyTorch."""
        null_row = self.token_ids.shape[0] - 1
        positions = torch.where(self.rows == null_row, 0, self.positions + 1)
        self.token_ids.index_put_((self.rows,), tokens.clamp(min=0))
        self.state_positions.index_put_((self.rows,), positions)
