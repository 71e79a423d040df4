"""Operations of a step over the ranks of a tensor-parallel group: kernels and plain versions.

Collectives over peer memory compute them in one kernel each, for the rows of most decode steps.
Otherwise collectives are called for the sum or the largest value, with other kernels around them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..ops.collectives import Collectives
from ..ops.feedback import NON_FINITE, Feedback
from .all_reduce import reference_sum_rows
from .linear import GpuNorm, Pending
from .norm import norm_rows

__all__ = [
    "FusedCollectives",
    "pick_of_ranks",
    "plain_pick_of_ranks",
    "plain_sum_rows",
    "sum_rows",
]


@runtime_checkable
class FusedCollectives(Collectives, Protocol):
    """Collectives with kernels that do more than the exchange."""

    def sums_rows(self, x_TD: Tensor) -> bool:
        """Whether `sum_rows` is the fastest for rows of this shape."""

    def sum_rows(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        post: GpuNorm | None,
        norm: GpuNorm | None,
        sum_TD: Tensor,
        out_TD: Tensor | None,
        *,
        scale: float = 1.0,
    ) -> None:
        """See `all_reduce.sum_rows`."""

    def picks_rows(self, rows: int) -> bool:
        """Whether `pick_greedy` takes so many rows."""

    def pick_greedy(
        self, maxima_TC: Tensor, ids_TC: Tensor, first: int, feed: Feedback | None = None
    ) -> Tensor:
        """See `peer_gather.pick_of_ranks`."""


def sum_rows(
    collectives: Collectives,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    post: GpuNorm | None,
    norm: GpuNorm | None,
    sum_TD: Tensor,
    out_TD: Tensor | None,
    *,
    scale: float = 1.0,
) -> None:
    """`sum = residual + scale * post(sum over ranks of x)` and `out = norm(sum)`.

    As `all_reduce.sum_rows`, of any number of rows.
    """
    arguments = (x_TD, residual_TD, post, norm, sum_TD, out_TD)
    if isinstance(collectives, FusedCollectives) and collectives.sums_rows(x_TD):
        collectives.sum_rows(*arguments, scale=scale)
        return
    if residual_TD is None or (post is not None and scale != 1.0):
        plain_sum_rows(collectives, *arguments, scale=scale)
        return
    total_TD = collectives.all_reduce(x_TD)
    if post is not None:
        normed_TD = torch.empty_like(sum_TD) if out_TD is None else out_TD
        norm_rows(residual_TD, norm, normed_TD, Pending(total_TD, post, sum_TD))
        return
    torch.add(residual_TD, total_TD if scale == 1.0 else total_TD * scale, out=sum_TD)
    if out_TD is not None:
        norm_rows(sum_TD, norm, out_TD)


def plain_sum_rows(
    collectives: Collectives,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    post: GpuNorm | None,
    norm: GpuNorm | None,
    sum_TD: Tensor,
    out_TD: Tensor | None,
    *,
    scale: float = 1.0,
) -> None:
    """What `sum_rows` does, in plain torch around the sum."""
    total_TD = collectives.all_reduce(x_TD)
    reference_sum_rows(total_TD, residual_TD, post, norm, sum_TD, out_TD, scale=scale)


def pick_of_ranks(
    collectives: Collectives,
    maxima_TC: Tensor,
    ids_TC: Tensor,
    first: int,
    feed: Feedback | None = None,
) -> Tensor:
    """As `greedy.pick_greedy`, over the chunks of all ranks.

    `first` is the first token of this rank's part of the vocabulary, from which its ids count.
    """
    if isinstance(collectives, FusedCollectives) and collectives.picks_rows(len(maxima_TC)):
        return collectives.pick_greedy(maxima_TC, ids_TC, first, feed)
    return plain_pick_of_ranks(collectives, maxima_TC, ids_TC, first, feed)


def plain_pick_of_ranks(
    collectives: Collectives,
    maxima_TC: Tensor,
    ids_TC: Tensor,
    first: int,
    feed: Feedback | None = None,
) -> Tensor:
    """What `pick_of_ranks` does, in plain torch around the largest value."""
    best_T, chunks_T = maxima_TC.max(-1)
    ids_T = ids_TC.gather(1, chunks_T[:, None])[:, 0].to(torch.int64) + first
    best_T, ids_T = collectives.largest(best_T, ids_T)
    tokens_T = torch.where(best_T.isfinite(), ids_T, NON_FINITE)
    if feed is not None:
        feed.store(tokens_T)
    return tokens_T
