"""The operations that the steps of a GPU consist of: Triton kernels and products of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .activation import activate_rows
from .any_rows import linear_of_any_rows
from .begin import Beginning, begin_decode
from .combine_output import combine_output
from .decode_attention import decode_attention
from .expert_routing import Routed, route
from .experts import experts, experts_of_any_tokens
from .gate_up import gate_up
from .greedy import pick_greedy
from .head import head
from .matmul import library_linear
from .norm import norm_rows
from .norm_linear import norm_linear
from .prefill_attention import prefill_attention
from .prefill_tiles import prefill_tiles
from .rank_operations import pick_of_ranks, sum_rows
from .residual_linear import residual_linear
from .store import rotate_and_store

__all__ = ["Operations"]


@dataclass(frozen=True, slots=True)
class Operations:
    """One function an operation; tests and tools replace some of them."""

    begin_decode: Callable[..., Beginning] = begin_decode
    norm_linear: Callable[..., None] = norm_linear
    decode_attention: Callable[..., None] = decode_attention
    residual_linear: Callable[..., None] = residual_linear
    combine_output: Callable[..., None] = combine_output
    gate_up: Callable[..., None] = gate_up
    norm_rows: Callable[..., None] = norm_rows
    sum_rows: Callable[..., None] = sum_rows
    """Over the ranks of a group."""
    activate_rows: Callable[..., None] = activate_rows
    linear: Callable[..., None] = library_linear
    """Of any number of rows."""
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
        return cls(
            linear=linear_of_any_rows,
            route=partial(route, any_tokens=True),
            experts=experts_of_any_tokens,
        )
