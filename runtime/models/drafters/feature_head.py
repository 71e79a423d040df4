"""Heads that draft one token per pass from features of the target.

The entry of a token at position p is made of its features and of the embedding of the next token.
Its keys and values lie in the slot of p.

    tokens          a   b   c   d        d is the newest one
    entries         a+b b+c c+d          at the positions of a, b, c
    first draft     e, from the entry c+d
    second draft    f, from the entry of d: the output of c+d, and e

Shape suffixes: T tokens, B rows, D hidden_size, V tokens of the head's vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from ....cache.arena import Storage
from ....cache.spec import LayerGroup
from ...kernels import Kernels, RaggedBatch
from ...kernels.ops.parameter import Parameter
from ..decoder import Decoder, LayerStack
from ..plan import rope_kinds
from .drafter import Drafts, FollowedTokens, NewestTokens, StepOperator
from .drafter_config import DrafterConfig
from .reach import within_window
from .token_projection import TokenProjection

__all__ = ["FeatureHead"]


class FeatureHead(LayerStack, ABC):
    """Layers between features and tokens; subclasses define what a pass computes."""

    def __init__(
        self,
        config: DrafterConfig,
        target: Decoder,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        group: LayerGroup,
        storage: Storage,
    ) -> None:
        """See `load_drafter`."""
        plan = within_window(config.plan, group.spec.window_tokens)
        ropes = rope_kinds(config.model)
        super().__init__(plan, ropes, kernels, dtype, device, [group], storage)
        self.taps, self.most_drafts = config.taps, config.most_drafts
        self._config = config
        self._last = (len(plan.layers) - 1,)
        self._embedding = TokenProjection(target.embed_tokens, target.vocabulary)
        self._head = TokenProjection(target.lm_head, target.vocabulary)
        self.target_ids: torch.Tensor | None = None
        """int64 `[V]`: tokens of the target; None: the same vocabulary."""

    def layout(self) -> Iterator[Parameter]:
        """Yield the parameters that `store` expects."""
        return iter(self._config.parameters)

    def map_to_target(self, target_ids_V: torch.Tensor | None) -> None:
        """Set the tokens of the target that those of the head are; None: the same."""
        self.target_ids = None if target_ids_V is None else target_ids_V.to(self.device)

    @property
    def operator(self) -> StepOperator | None:
        """See `Drafter.operator`."""
        return None

    @abstractmethod
    def start(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[T, D]` that `advance` takes of features."""

    @abstractmethod
    def advance(
        self,
        hidden_TD: torch.Tensor,
        next_ids_T: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers; return their output, normed and not normed, `[T, D]` each."""

    def follow(self, tokens: FollowedTokens, arena: torch.Tensor) -> None:
        """See `Drafter.follow`."""
        self._follow(tokens, arena)

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """See `Drafter.propose`."""
        normed_TD, output_TD = self._follow(tokens, arena)
        normed_BD = normed_TD.index_select(0, newest.index)
        output_BD = output_TD.index_select(0, newest.index)
        ids: list[torch.Tensor] = []
        probabilities: list[torch.Tensor] = []
        for place in range(count):
            if place > 0:
                batch = newest.batch(place - 1, 1)
                normed_BD, output_BD = self.advance(output_BD, ids[-1], arena, batch)
            ids_B, probability_B = self._head.most_likely(self, normed_BD)
            ids.append(ids_B if self.target_ids is None else self.target_ids[ids_B])
            probabilities.append(probability_B)
        return Drafts(torch.stack(ids, dim=1), torch.stack(probabilities, dim=1))

    def _follow(
        self, tokens: FollowedTokens, arena: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert tokens.features is not None
        return self.advance(self.start(tokens.features), tokens.next_ids, arena, tokens.batch)
