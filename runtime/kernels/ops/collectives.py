"""The collective operations of a tensor-parallel group, as models and steps call them.

All ranks call the same operations in the same order with tensors of the same shapes. Every result
has the same bits on all ranks, so that ranks which sample from it choose the same tokens.

Shape suffixes: B rows, F features, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class CollectiveFailure(NamedTuple):
    """Why the operations of a rank gave up: what a rank did, or did not do."""

    rank: int
    reason: str
    ended_before: bool = False
    """Whether the group had already ended, so that this explains nothing."""

    def __str__(self) -> str:
        """The sentence."""
        return f"rank {self.rank} {self.reason}"


class Collectives(Protocol):
    """Operations of one rank with the others of its group."""

    rank: int
    ranks: int
    communicator: int
    """Handle of the group in the C++ operators (`cpu/collectives.py`); 0: they have none."""

    def all_reduce(self, x_BF: Tensor) -> Tensor:
        """Return the sum over ranks, added in float32 in the order of ranks and rounded once."""

    def gather(self, x_BF: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the columns of all ranks in their order, `[B, sum(sizes)]`.

        `sizes` has the number of columns of each rank.
        """

    def abort(self) -> None:
        """End operations under way that wait for another rank, from any thread."""

    def close(self) -> None:
        """Release the memory of the group. Idempotent."""


def largest_of_ranks(
    collectives: Collectives, values_B: Tensor, ids_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the largest value over ranks and its id; the lowest rank wins a tie.

    Values are float32 and NaN counts as the largest, ids are int64.
    """
    own_B2 = torch.stack((values_B.view(torch.int32).long(), ids_B), dim=1)
    ranks = collectives.ranks
    all_BR2 = collectives.gather(own_B2, [2] * ranks).unflatten(1, (ranks, 2))
    values_BR = all_BR2[..., 0].int().view(torch.float32)
    best_B1 = values_BR.argmax(dim=1, keepdim=True)
    return values_BR.gather(1, best_B1)[:, 0], all_BR2[..., 1].gather(1, best_B1)[:, 0]
