"""The operations that the steps of a GPU consist of: Triton kernels and products of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from .begin import Beginning, begin_decode
from .decode_attention import decode_attention
from .expert_routing import Routed, route
from .experts import experts
from .linear_kernels import gate_up, norm_linear, residual_linear
from .matmul import linear_of_any_rows
from .prefill_attention import prefill_attention, prefill_tiles
from .rowwise import activate_rows, norm_rows
from .store import rotate_and_store

__all__ = ["Operations"]


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
    route: Callable[..., Routed] = route
    experts: Callable[..., None] = experts
    rotate_and_store: Callable[..., Tensor] = rotate_and_store
    prefill_tiles: Callable[..., Tensor] = prefill_tiles
    prefill_attention: Callable[..., Tensor] = prefill_attention

    @classmethod
    def batch_invariant(cls) -> Operations:
        """Return the kernels whose sums do not depend on the rows of a step."""
        alone: dict[str, Any] = {"product": linear_of_any_rows}
        return cls(
            norm_linear=partial(norm_linear, **alone),
            residual_linear=partial(residual_linear, **alone),
            gate_up=partial(gate_up, **alone),
            route=partial(route, any_tokens=True),
            experts=partial(experts, any_tokens=True),
        )
