"""The embedding and the output projection of a drafter: its own, or those of its target.

Shape suffixes: T tokens, B rows, D hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ..decoder import LayerStack
from ..modules import Projection
from ..sharded_vocabulary import ShardedVocabulary
from .most_likely import most_likely, most_likely_after

__all__ = ["TokenProjection"]


@dataclass(frozen=True)
class TokenProjection:
    """A linear layer with a row for each token. No module itself, so that a layer of the target is
    none of its drafter."""

    projection: Projection
    vocabulary: ShardedVocabulary | None = None
    """The part of a rank of a tensor-parallel group, all of which call the methods together; None:
    `projection` has all rows."""

    def rows(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens, `[T, D]`."""
        if self.vocabulary is None:
            return self.projection.rows(token_ids_T)
        return self.vocabulary.embed(token_ids_T, self.projection.rows)

    def most_likely(
        self, layers: LayerStack, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `most_likely_after` does, of the logits of all ranks."""
        if self.vocabulary is None:
            return most_likely_after(layers, self.projection, hidden_BD)
        logits_BW = self.projection(hidden_BD)
        return self.vocabulary.most_likely(logits_BW, partial(most_likely, layers))
