"""Where a step writes its sampled tokens on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Feedback"]


class Feedback(NamedTuple):
    """Rows whose newest tokens a step samples; B lanes, R rows of the state.

    Sampled tokens become the newest of their rows, one position after the last input.
    The null row, the last one of the state, stays at position 0.
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
        """Make the sampled tokens, int64 `[B]`, the newest of their rows, in plain torch."""
        null_row = self.token_ids.shape[0] - 1
        positions = torch.where(self.rows == null_row, 0, self.positions + 1)
        self.token_ids.index_put_((self.rows,), tokens)
        self.state_positions.index_put_((self.rows,), positions)
