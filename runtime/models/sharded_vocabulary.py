"""Embeddings, logits and most likely tokens of a vocabulary that is split over ranks.

Shape suffixes: T tokens of a step, D hidden_size, B sampled positions, W tokens of the vocabulary
that the rank holds, V all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.ops.batch import NON_FINITE
from ..kernels.ops.collectives import Collectives
from ..kernels.ops.layer_plan import Shard

__all__ = ["ShardedVocabulary"]


@dataclass(frozen=True)
class ShardedVocabulary:
    """The rows of the embedding and of the head that one rank holds."""

    shard: Shard
    collectives: Collectives

    def embed(self, token_ids_T: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings `[T, D]`; `rows` returns those of rows of the rank's part."""
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
