"""Rotary positions whose frequencies depend on the length of the sequence.

`longrope` has one factor of each pair's frequency within the context of the first training and
another one beyond it (Ding et al. 2024). `dynamic` scales the base with the length ("NTK-aware"
scaling): for a context of L positions, factor f and length l > L the base is multiplied by
(f * l / L - (f - 1)) ** (d / (d - 2)), with d rotated elements of a head.

Shape suffixes: T tokens, K kinds of rotation, E pairs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..rope_lengths import UNLIMITED, RopeLengths
from .config import ModelConfig, Rope
from .decoder_model import DecoderConfig
from .rope import inverse_frequencies, pair_exponents

__all__ = ["FrequenciesByLength", "rope_lengths"]


def rope_lengths(config: DecoderConfig) -> RopeLengths | None:
    """Return how the rotations of a model depend on the length; None if they do not."""
    if not isinstance(config, ModelConfig):
        return None
    kinds = list(dict.fromkeys(config.rope(layer).scaling for layer in range(config.num_layers)))
    first = {
        kind: tuple(s.original_max_position_embeddings for s in kinds if s.type == kind)
        for kind in ("longrope", "dynamic")
    }
    if not any(first.values()):
        return None
    recomputes = config.family.recomputes_long and first["longrope"]
    return RopeLengths(
        switches=first["longrope"],
        grows=first["dynamic"],
        recompute_above=min(first["longrope"]) if recomputes else UNLIMITED,
    )


class FrequenciesByLength(nn.Module):
    """The frequencies of each token's pairs."""

    def __init__(self, kinds: Sequence[Rope], head_dim: int, device: torch.device) -> None:
        super().__init__()
        self._kinds = nn.ModuleList(_Kind(rope, head_dim, device) for rope in kinds)

    def forward(self, lengths_T: Tensor) -> Tensor:
        """Return radians per position, float32 `[K, T, E]`.

        `lengths_T`, int64, are the lengths whose parameters rotate each token.
        """
        return torch.stack([kind(lengths_T) for kind in self._kinds])


class _Kind(nn.Module):
    """The frequencies of one rotation."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        super().__init__()
        scaling, dim = rope.scaling, rope.dim(head_dim)
        short_E = inverse_frequencies(rope, head_dim)
        self._type, self._theta, self._dim = scaling.type, rope.theta, dim
        self._factor, self._first = scaling.factor, scaling.original_max_position_embeddings
        self._short = nn.Buffer(short_E.to(device), persistent=False)
        long_E = short_E.clone()
        if scaling.type == "longrope":
            rotated = 1.0 / (torch.tensor(scaling.long_factor) * rope.theta ** pair_exponents(dim))
            long_E[: rotated.numel()] = rotated
        elif scaling.type == "dynamic":
            long_E.zero_()
            long_E[: (dim + 1) // 2] = pair_exponents(dim)
        self._long = nn.Buffer(long_E.to(device), persistent=False)
        """`longrope`: frequencies beyond the first context; `dynamic`: exponents of the base."""

    def forward(self, lengths_T: Tensor) -> Tensor:
        """Return `[T, E]`."""
        if self._type not in ("longrope", "dynamic"):
            return self._short.expand(lengths_T.shape[0], -1)
        beyond_T1 = (lengths_T > self._first)[:, None]
        if self._type == "longrope":
            return torch.where(beyond_T1, self._long, self._short)
        grown_T = self._factor * lengths_T.float() / self._first - (self._factor - 1)
        # Of lengths within the context, which are not used, the base could be negative.
        base_T = self._theta * grown_T.clamp(min=1.0) ** (self._dim / (self._dim - 2))
        long_TE = torch.where(self._short == 0.0, 0.0, base_T[:, None] ** -self._long)
        return torch.where(beyond_T1, long_TE, self._short)
