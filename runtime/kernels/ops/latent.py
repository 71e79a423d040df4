"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shapes: T tokens, H heads, E elements of a query or key that are rotated, R kv_lora_rank, C what the
cache holds of a token, F features, D size of a key or value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .norms import RMSNorm
from .operation import (
    Binding,
    LayerStep,
    NeededUnits,
    Operation,
    Run,
    ShardedLayer,
    per_token,
)
from .parameter import Parameter, cut_heads
from .rotation import rotate


class HeadProjection(nn.Module):
    """Matrices of each head from the latent to keys and values: `[H, keys + values, R]`.

    Attention works in the latent space: instead of projecting each latent to a key, the query is
    projected to the latent space (q . (W c) = (W^T q) . c). The output is a weighted sum of
    latents, which is projected to values. Their weight stays in the model's dtype where
    linear layers are quantised: it has no output channel that both products share.
    """

    def __init__(self, key_dim: int) -> None:
        super().__init__()
        self.key_dim = key_dim
        self.weight: nn.Parameter | None = None

    def queries_to_latent(self, q_THD: Tensor) -> Tensor:
        """Return `[T, H, R]`; D is the size of a key."""
        assert self.weight is not None
        return torch.bmm(q_THD.transpose(0, 1), self.weight[:, : self.key_dim]).transpose(0, 1)

    def latent_to_values(self, x_THR: Tensor) -> Tensor:
        """Return `[T, H, D]`; D is the size of a value."""
        assert self.weight is not None
        up_HRD = self.weight[:, self.key_dim :].transpose(1, 2)
        return torch.bmm(x_THR.transpose(0, 1), up_HRD).transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class LatentOperation(Operation):
    """An operation that uses `HeadProjection`: two operations of a layer share its parameter."""

    kv_up: Parameter
    """`[H, keys + values, rank]`."""
    keys: int
    """Elements of a head's key, which are not rotated."""

    @property
    def title(self) -> str:
        return "latent attention"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.kv_up,)

    def module(self, to: Binding) -> HeadProjection:
        """Return the module that holds the parameter."""
        found: HeadProjection = to.module(self.kv_up, lambda: HeadProjection(self.keys))
        return found

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        kv_up = cut_heads(self.kv_up, layer.rank.part(layer.heads), layer.heads)
        yield replace(self, kv_up=kv_up)


@dataclass(frozen=True, kw_only=True)
class LatentQueries(LatentOperation):
    """Of (queries, latent, shared key), the queries `[T, H, C]` and keys `[T, 1, C]` of attention.

    The last elements of each head's query and the key are rotated. The other elements of a query
    are projected to the latent space, and the latent is normalised.
    """

    norm: Parameter
    eps: float
    rope: int
    """Elements of a head's queries that are rotated."""
    interleaved: bool
    """Whether the elements of a rotated pair are neighbours."""
    kind: int
    """The first coordinate of cosines and sines."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.kv_up, self.norm

    def bind(self, to: Binding) -> Run:
        project = per_token(to.kernels, self.module(to).queries_to_latent)
        norm = per_token(to.kernels, to.module(self.norm, lambda: RMSNorm(self.eps)))
        heads, sizes = self.kv_up.shape[0], (self.keys, self.rope)
        interleaved, kind = self.interleaved, self.kind

        def run(value: tuple[Tensor, Tensor, Tensor], step: LayerStep) -> tuple[Tensor, Tensor]:
            q_TF, latent_TR, key_TE = value
            cos_TE, sin_TE = step.cos[kind], step.sin[kind]
            plain_THE, turned_THE = q_TF.unflatten(1, (heads, -1)).split(sizes, dim=-1)
            turned_THE = rotate(turned_THE, cos_TE, sin_TE, interleaved=interleaved)
            key_T1E = rotate(key_TE[:, None], cos_TE, sin_TE, interleaved=interleaved)
            q_THC = torch.cat((project(plain_THE), turned_THE), dim=-1)
            return q_THC, torch.cat((norm(latent_TR)[:, None], key_T1E), dim=-1)

        return run

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        first, *others = split
        return layer.rank.part(first), *map(range, others)


@dataclass(frozen=True, kw_only=True)
class LatentToValues(LatentOperation):
    """Project the output of attention, weighted sums of latents `[T, H * rank]`, to values."""

    def bind(self, to: Binding) -> Run:
        project = per_token(to.kernels, self.module(to).latent_to_values)
        heads = self.kv_up.shape[0]

        def run(attended_TF: Tensor, step: LayerStep) -> Tensor:
            return project(attended_TF.unflatten(1, (heads, -1))).flatten(1)

        return run
