"""Norms.

Shapes: T tokens, D features, H query heads, G key/value heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..choice import Kernels
from .operation import (
    QKV,
    Binding,
    LayerStep,
    NeededUnits,
    Operation,
    Run,
    ShardedLayer,
    Vector,
    collectives_of,
    on_part,
    per_token,
)
from .parameter import Parameter, cut, cut_heads


class RMSNorm(nn.Module):
    """Root-mean-square norm, accumulated in float32 (Zhang & Sennrich 2019).

    With `offset` it is multiplied by one plus the weight, in float32, before it is rounded. A
    `centred` one is a layer norm without bias, which is multiplied by the weight in float32.
    """

    def __init__(self, eps: float, *, offset: bool = False, centred: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.centred = centred
        self.weight: nn.Parameter | None = None

    def forward(self, x_TD: Tensor, mean_square_T1: Tensor | None = None) -> Tensor:
        """Norm the last dimension; there may be others before it.

        `mean_square_T1` belongs to a longer vector of which each is a part; None: its own.
        """
        assert self.weight is not None
        x = x_TD.float()
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        if mean_square_T1 is None:
            mean_square_T1 = mean_square(x)[..., None]
        x = x * torch.rsqrt(mean_square_T1 + self.eps)
        if self.offset:
            return (x * (1.0 + self.weight.float())).to(x_TD.dtype)
        if self.centred:
            return (self.weight.float() * x).to(x_TD.dtype)
        return self.weight * x.to(x_TD.dtype)


def mean_square(x_TD: Tensor) -> Tensor:
    """Return the mean of the squares of the last dimension, float32 `[T]`."""
    return x_TD.float().pow(2).mean(-1)


@dataclass(frozen=True, kw_only=True)
class Norm(Operation):
    """Norm over the last dimension: of its root mean square, unless it is `centred`."""

    weight: Parameter
    eps: float
    offset: bool = False
    """Whether to multiply by one plus the weight, in float32, and round afterwards."""
    part: int | None = None
    """The part of the value that is normalised; None: the value is one tensor."""
    centred: bool = False
    """Whether the mean is subtracted first: a layer norm without bias (Ba et al. 2016), which is
    multiplied by the weight in float32 and rounded afterwards (Cohere 2)."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,)

    def module(self) -> RMSNorm:
        """Return the module that computes it, without its weight."""
        return RMSNorm(self.eps, offset=self.offset, centred=self.centred)

    def bind(self, to: Binding) -> Run:
        norm = to.module(self.weight, self.module)
        return on_part(per_token(to.kernels, norm), self.part)

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        return None if self.part == 0 else super().needed_units(split, layer)

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * 2 * hidden + (12 * hidden if eager else 0)


@dataclass(frozen=True, kw_only=True)
class GatedNorm(Operation):
    """Norm of each group of features of the first part of the value, times an activation of the
    second part, the gate: `[T, D]`. Both may have their features in several dimensions."""

    weight: Parameter
    """Of a group, or of all groups: `[D]`."""
    eps: float
    features: int
    """D."""
    group: int
    """Elements that are normed together."""
    gate: Literal["silu", "sigmoid"] = "silu"
    gate_first: bool = False
    """Whether the gate multiplies the input of the norm, not its output (Mamba-2)."""
    in_float32: bool = False
    """Whether the weight multiplies in float32, before the product is rounded (Kimi Linear)."""

    @property
    def title(self) -> str:
        return "gated norms"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,)

    def bind(self, to: Binding) -> Run:
        held = to.module(self.weight, Vector)
        shape, eps = (self.features // self.group, self.group), self.eps
        activation = F.silu if self.gate == "silu" else torch.sigmoid
        gate_first, in_float32 = self.gate_first, self.in_float32

        def norm(x: Tensor, gate: Tensor) -> Tensor:
            x_TNE, dtype = x.reshape(-1, *shape).float(), x.dtype
            gate_TNE = activation(gate.reshape(-1, *shape).float())
            if gate_first:
                x_TNE = x_TNE * gate_TNE
            x_TNE = x_TNE * torch.rsqrt(mean_square(x_TNE)[..., None] + eps)
            weight_NE: Tensor = held.weight.view(-1, shape[1])
            x_TNE = weight_NE.float() * x_TNE if in_float32 else weight_NE * x_TNE.to(dtype)
            if not gate_first:
                x_TNE = x_TNE * gate_TNE
            return x_TNE.to(dtype).flatten(1)

        norm = per_token(to.kernels, norm)
        return lambda parts, step: norm(*parts)

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        own, weight = layer.rank.part(self.features), self.weight
        if weight.shape[0] == self.features > self.group:
            weight = cut(weight, [own])
        yield replace(self, weight=weight, features=len(own))

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * (hidden + 3 * self.features) + 4 * (4 if eager else 1) * self.features


@dataclass(frozen=True, kw_only=True)
class HeadNorm(Norm):
    """`Norm` of each head of one part of queries, keys and values."""

    @property
    def title(self) -> str:
        return "norms of values or of queries alone"

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        return layer.rank_heads[: len(split)]


@dataclass(frozen=True, kw_only=True)
class JoinNorms(Operation):
    """Norm of the step's embeddings, followed by the norm of the hidden states, `[T, 2 D]`.

    The first operation of a layer (EAGLE-3, arXiv 2503.01840).
    """

    embeddings: Parameter
    hidden: Parameter | None
    """None: the hidden states are not normed."""
    eps: float
    offset: bool = False
    """As in `Norm`."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.embeddings,) if self.hidden is None else (self.embeddings, self.hidden)

    def bind(self, to: Binding) -> Run:
        def norm(weight: Parameter) -> Callable[[Tensor], Tensor]:
            return per_token(
                to.kernels, to.module(weight, lambda: RMSNorm(self.eps, offset=self.offset))
            )

        of_embeddings = norm(self.embeddings)
        of_hidden = None if self.hidden is None else norm(self.hidden)

        def run(x_TD: Tensor, step: LayerStep) -> Tensor:
            assert step.embeddings is not None
            normed_TD = x_TD if of_hidden is None else of_hidden(x_TD)
            return torch.cat((of_embeddings(step.embeddings), normed_TD), dim=-1)

        return run


@dataclass(frozen=True, kw_only=True)
class QKNorm(Operation):
    """`Norm` of each head of the queries and of the keys: of the first two parts."""

    q: Parameter
    k: Parameter
    eps: float
    offset: bool = False
    all_heads: bool = False
    """Whether the elements of all heads of a token are normalised together; the weights then have
    as many elements as the queries and the keys (OLMo 2)."""
    ranks: int = 1
    """Ranks that hold parts of these elements. They add their sums of squares; where several hold
    the same keys, all hold as many of each."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.q, self.k)

    def bind(self, to: Binding) -> Run:
        q_norm = to.module(self.q, lambda: RMSNorm(self.eps, offset=self.offset))
        k_norm = to.module(self.k, lambda: RMSNorm(self.eps, offset=self.offset))
        if self.ranks > 1 and self.all_heads:
            return self._of_ranks(q_norm, k_norm, to.kernels)
        q_norm, k_norm = per_token(to.kernels, q_norm), per_token(to.kernels, k_norm)
        if not self.all_heads:
            return lambda qkv, step: (q_norm(qkv[0]), k_norm(qkv[1]), qkv[2])

        def run(qkv: QKV, step: LayerStep) -> QKV:
            q_THE, k_TGE, v_TGE = qkv
            q_THE = q_norm(q_THE.flatten(1)).view(q_THE.shape)
            return q_THE, k_norm(k_TGE.flatten(1)).view(k_TGE.shape), v_TGE

        return run

    def _of_ranks(self, q_norm: RMSNorm, k_norm: RMSNorm, kernels: Kernels) -> Run:
        """The norm over the heads of all ranks, from the sum of their means of squares."""
        collectives, mean = collectives_of(kernels), per_token(kernels, mean_square)

        def run(qkv: QKV, step: LayerStep) -> QKV:
            q_THE, k_TGE, v_TGE = qkv
            q_TF, k_TF = q_THE.flatten(1), k_TGE.flatten(1)
            squares_T2 = torch.stack((mean(q_TF), mean(k_TF)), dim=-1)
            q_T1, k_T1 = (collectives.all_reduce(squares_T2) / self.ranks).split(1, dim=-1)
            q_TF, k_TF = q_norm(q_TF, q_T1), k_norm(k_TF, k_T1)
            return q_TF.view(q_THE.shape), k_TF.view(k_TGE.shape), v_TGE

        return run

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        if not self.all_heads:
            yield self
            return
        yield replace(
            self,
            q=cut_heads(self.q, layer.rank.part(layer.heads), layer.heads),
            k=cut_heads(self.k, layer.rank.kv_heads(layer.kv_heads), layer.kv_heads),
            ranks=layer.rank.ranks,
        )

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        return layer.rank_heads
