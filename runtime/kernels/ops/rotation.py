"""Rotary positions (Su et al. 2021). Shapes: T tokens, N heads, E elements that are rotated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .operation import QKV, Binding, LayerStep, NeededUnits, Operation, Run, ShardedLayer


def rotate(x_TNE: Tensor, cos_TE: Tensor, sin_TE: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate each vector of `x_TNE` `[tokens, heads, E]` by the angles of its token.

    `cos_TE` and `sin_TE` are float32 `[tokens, E / 2]`. The result has the dtype of `x_TNE`.

    Elements (i, i + E / 2) are a pair, or (2i, 2i + 1) if `interleaved`. The result has the first
    layout in both cases, which changes no dot product of two rotated vectors.
    """
    x = x_TNE.float()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    cos, sin = cos_TE[:, None], sin_TE[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_TNE.dtype)


@dataclass(frozen=True, kw_only=True)
class Rotate(Operation):
    """Rotary positions of the queries and keys: of the first two parts.

    Pairs of elements that a model does not rotate have frequency zero (see `HeadRows`).
    """

    kind: int
    """The first coordinate of cosines and sines."""
    pairs: int = 0
    """Pairs of a head where other layers have larger heads; 0: all heads have one size."""
    queries_only: bool = False
    """Whether the value has queries only: keys are read from another layer."""

    def bind(self, to: Binding) -> Run:
        at = (self.kind, slice(None), slice(self.pairs)) if self.pairs else self.kind

        def run(qkv: QKV, step: LayerStep) -> QKV:
            q_THE, k_TGE, v_TGE = qkv
            cos_TE, sin_TE = step.cos[at], step.sin[at]
            return rotate(q_THE, cos_TE, sin_TE), rotate(k_TGE, cos_TE, sin_TE), v_TGE.contiguous()

        def run_queries(value: tuple[Tensor], step: LayerStep) -> tuple[Tensor]:
            return (rotate(value[0], step.cos[at], step.sin[at]),)

        return run_queries if self.queries_only else run

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        return layer.rank_heads[: len(split)]
