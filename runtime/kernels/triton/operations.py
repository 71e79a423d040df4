"""The operations that the steps of a GPU consist of: Triton kernels and products of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops.batch import NON_FINITE, Feedback
from ..ops.collectives import Collectives
from .begin import Beginning, begin_decode
from .decode_attention import decode_attention
from .expert_routing import Routed, route
from .experts import experts, experts_of_any_tokens
from .head import head, pick_greedy
from .linear_kernels import gate_up, norm_linear, residual_linear
from .matmul import library_linear, linear_of_any_rows
from .prefill_attention import prefill_attention, prefill_tiles
from .rowwise import activate_rows, norm_rows
from .store import rotate_and_store

__all__ = [
    "Operations",
    "pick_of_ranks",
]


def pick_of_ranks(
    collectives: Collectives,
    maxima_TC: Tensor,
    ids_TC: Tensor,
    first: int,
    feed: Feedback | None = None,
) -> Tensor:
    """As `head.pick_greedy`, over the chunks of all ranks.

    `first` is the first token of this rank's part of the vocabulary, from which its ids count.
    """
    best_T, chunks_T = maxima_TC.max(-1)
    ids_T = ids_TC.gather(1, chunks_T[:, None])[:, 0].to(torch.int64) + first
    best_T, ids_T = collectives.largest(best_T, ids_T)
    tokens_T = torch.where(best_T.isfinite(), ids_T, NON_FINITE)
    if feed is not None:
        feed.store(tokens_T)
    return tokens_T


@dataclass(frozen=True, slots=True)
class Operations:
    """One function an operation; tests and tools replace some of them."""

    begin_decode: Callable[..., Beginning] = begin_decode
    norm_linear: Callable[..., None] = norm_linear
    decode_attention: Callable[..., None] = decode_attention
    residual_linear: Callable[..., None] = residual_linear
    gate_up: Callable[..., None] = gate_up
    norm_rows: Callable[..., None] = norm_rows
    activate_rows: Callable[..., None] = activate_rows
    linear: Callable[..., None] = library_linear
    """Of any number of rows, outside of the layers of a stack."""
    route: Callable[..., Routed] = route
    experts: Callable[..., None] = experts
    rotate_and_store: Callable[..., Tensor] = rotate_and_store
    prefill_tiles: Callable[..., Tensor] = prefill_tiles
    prefill_attention: Callable[..., Tensor] = prefill_attention
    head: Callable[..., tuple[Tensor, Tensor, Tensor]] = head
    pick_greedy: Callable[..., Tensor] = pick_greedy
    pick_of_ranks: Callable[..., Tensor] = pick_of_ranks
    """Over the vocabulary of all ranks of a group."""

    @classmethod
    def batch_invariant(cls) -> Operations:
        """Those of `GpuStack` with `any_batch`: none of its sums depends on the rows of a step."""
        alone: dict[str, Any] = {"product": linear_of_any_rows}
        return cls(
            norm_linear=partial(norm_linear, **alone),
            residual_linear=partial(residual_linear, **alone),
            gate_up=partial(gate_up, **alone),
            linear=linear_of_any_rows,
            route=partial(route, any_tokens=True),
            experts=experts_of_any_tokens,
        )
