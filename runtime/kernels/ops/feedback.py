"""Where a step writes its sampled tokens on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NON_FINITE", "Feedback"]

NON_FINITE = -1
"""What samplers return in the place of a token for logits that are not a distribution: NaN or +inf
among them, or nothing but -inf, in the model's logits or once the sampling parameters are applied.
The device goes on with token 0, which is a valid index; the host ends the request."""


class Feedback(NamedTuple):
    """Rows whose newest tokens a step samples; B lanes, R rows of the state.

    Sampled tokens become the newest of their rows, one position after the last input; in the place
    of `NON_FINITE` it is token 0.
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
        self.token_ids.index_put_((self.rows,), tokens.clamp(min=0))
        self.state_positions.index_put_((self.rows,), positions)
