"""Parts of a decoder layer that hold weights.

Shape suffixes: T tokens of a step, H query heads, D hidden_size or any width, R kv_lora_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import Kernels, packed_embedding
from ..kernels.ops.batch import NON_FINITE
from ..kernels.ops.collectives import Collectives
from ..kernels.ops.layer_plan import Shard
from ..kernels.weights import dequantise

__all__ = [
    "HeadProjection",
    "Projection",
    "RMSNorm",
    "ShardedVocabulary",
    "Vector",
    "per_token",
    "mean_square",
]


# Plain PyTorch operations whose results do not depend on the other tokens of a step.
#
# PyTorch's products, sums and vectorised functions take another order, or other code for the last
# elements, when the number of tokens changes. Called for one token at a time, on a copy that begins
# at the alignment of every allocation, an operation always gets the same shape and so runs the same
# code. Operations of one rounding for each element (sums, products, conversions) need no such care.


def per_token(kernels: Kernels, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of tensors `[T, ...]` that runs once for each token, in a batch-invariant
    engine; in others, return the function itself."""
    if not kernels.batch_invariant:
        return function

    def run(*tensors: Tensor) -> Tensor:
        return torch.cat(
            [
                function(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in token))
                for token in zip(*(tensor.split(1) for tensor in tensors), strict=True)
            ]
        )

    return run


# Embeddings, logits and most likely tokens of a vocabulary that is split over ranks.
#
# Shape suffixes: T tokens of a step, D hidden_size, B sampled positions, W tokens of the vocabulary
# that the rank holds, V all of them.


@dataclass(frozen=True)
class ShardedVocabulary:
    """The rows of the embedding and of the head that one rank holds."""

    shard: Shard
    collectives: Collectives

    def embed(self, token_ids_T: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings `[T, D]`; `rows` looks up rows of the rank's part."""
        held = self.shard.vocab
        index_T = token_ids_T - held.start
        own_T = (index_T >= 0) & (index_T < len(held))
        x_TD = rows(index_T.clamp(0, len(held) - 1))
        # One rank adds the embedding to zeros, so the sum is exact.
        return self.collectives.all_reduce(x_TD.masked_fill(~own_T[:, None], 0.0))

    def gather(self, logits_BW: Tensor) -> Tensor:
        """Return the logits of all ranks, `[B, V]`."""
        return self.collectives.gather(logits_BW, self.shard.vocab_sizes)

    def greedy(self, logits_BW: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what `sample` returns for the logits of all ranks, int64 `[B]`.

        `sample` has the signature of `sample_greedy`.
        """
        # Of a rank without a finite largest logit only the value counts.
        own_B = sample(logits_BW).clamp(min=0) + self.shard.vocab.start
        values_B = logits_BW.amax(-1).float()  # NaN if one of them is
        values_B, ids_B = self.collectives.largest(values_B, own_B)
        return torch.where(values_B.isfinite(), ids_B, NON_FINITE)

    def most_likely(
        self, logits_BW: Tensor, own: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the most likely token, int64 `[B]`, and its probability, float32 `[B]`.

        `own` returns them for the tokens of the rank.
        """
        ids_B, probability_B = own(logits_BW)
        top_B = logits_BW.gather(1, ids_B[:, None])[:, 0].float()
        best_B, best_ids_B = self.collectives.largest(top_B, ids_B + self.shard.vocab.start)
        # The sum of exp(logit - best) over the tokens of the rank.
        sums_B1 = ((top_B - best_B).exp() / probability_B)[:, None]
        return best_ids_B, self.collectives.all_reduce(sums_B1)[:, 0].reciprocal()


class Projection(nn.Module):
    """A linear layer whose weight is stored in the format of the selected kernels.

    With several `matrices` it holds one per expert, stacked along the first dimension.
    """

    def __init__(
        self, kernels: Kernels, out_features: int, in_features: int, matrices: int = 1
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.out_features = out_features
        self.in_features = in_features
        self.matrices = matrices
        self.weight: nn.Parameter | None = None
        self.scales: nn.Parameter | None = None
        """Of weights that are stored in 8 bits: float32 `[out_features]`, or of fp8 a scale for
        every 128 input features, `[out_features, ceil(in_features / 128)]`."""
        self.bias: nn.Parameter | None = None
        self.dtype: torch.dtype | None = None
        """Of the weight as it was before it was quantised."""

    def as_stored(self, weight: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        """Return a weight `[out_features, in_features]`, quantised and packed as the kernels want.

        The result has the values of the attributes `weight` and, if it is quantised, `scales`. It
        is quantised on `device`, but packed by the processor.

        Raises ValueError for NaN or infinity in a weight to quantise, naming the row.
        """
        stored: dict[str, torch.Tensor] = {}
        if self.kernels.pack is None:
            weight = weight.to(device)
        if self.kernels.weights.dtype is not None:
            weight, scales = self.kernels.weights.quantise(weight)
            stored["scales"] = scales.to(device)
        stored["weight"] = self._packed(weight).to(device)
        return stored

    def _packed(self, weight: torch.Tensor) -> torch.Tensor:
        if self.kernels.pack is None:
            return weight
        if self.matrices == 1:
            return self.kernels.pack(weight)
        matrices = weight.chunk(self.matrices)
        first = self.kernels.pack(matrices[0])
        packed = first.new_empty(self.matrices, *first.shape)
        for place, matrix in zip(packed, matrices, strict=True):
            place.copy_(self.kernels.pack(matrix))
        return packed.flatten(0, 1)

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weight as stored, scales included."""
        return self.kernels.stored_bytes(self.out_features, self.in_features, dtype, self.matrices)

    def rows(self, index_T: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, `[T, in_features]`: the layer used as an embedding."""
        assert self.weight is not None
        assert self.dtype is not None
        if self.kernels.pack is None:
            rows = F.embedding(index_T, self.weight)
        else:
            rows = packed_embedding(index_T, self.weight, self.in_features)
        if self.scales is None:
            return rows
        return dequantise(rows, self.scales[index_T]).to(self.dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return self.kernels.linear(x_TD, self.weight, self.bias, self.out_features, self.scales)


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

    def queries_to_latent(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Return `[T, H, R]`; D is the size of a key."""
        assert self.weight is not None
        return torch.bmm(q_THD.transpose(0, 1), self.weight[:, : self.key_dim]).transpose(0, 1)

    def latent_to_values(self, x_THR: torch.Tensor) -> torch.Tensor:
        """Return `[T, H, D]`; D is the size of a value."""
        assert self.weight is not None
        up_HRD = self.weight[:, self.key_dim :].transpose(1, 2)
        return torch.bmm(x_THR.transpose(0, 1), up_HRD).transpose(0, 1)


class Vector(nn.Module):
    """Holds a parameter that is stored unchanged, and perhaps a bias."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype` is the parameter's; None: the model's."""
        super().__init__()
        self.dtype = dtype
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None


class RMSNorm(nn.Module):
    """Root-mean-square norm, accumulated in float32 (Zhang & Sennrich 2019).

    With `offset` it is multiplied by one plus the weight, in float32, before it is rounded.
    """

    def __init__(self, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight: nn.Parameter | None = None

    def forward(
        self, x_TD: torch.Tensor, mean_square_T1: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Norm the last dimension; there may be others before it.

        `mean_square_T1` belongs to a longer vector of which each is a part; None: its own.
        """
        assert self.weight is not None
        x = x_TD.float()
        if mean_square_T1 is None:
            mean_square_T1 = mean_square(x)[..., None]
        x = x * torch.rsqrt(mean_square_T1 + self.eps)
        if self.offset:
            return (x * (1.0 + self.weight.float())).to(x_TD.dtype)
        return self.weight * x.to(x_TD.dtype)


def mean_square(x_TD: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares of the last dimension, float32 `[T]`."""
    return x_TD.float().pow(2).mean(-1)
