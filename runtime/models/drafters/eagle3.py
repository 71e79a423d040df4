"""EAGLE-3 heads: one pass of a layer per draft. See `eagle3_config.py`.

The entry of a token at position p is made of its features and of the embedding of the next token.
Its keys and values lie in the slot of p.

    tokens          a   b   c   d        d is the newest one
    entries         a+b b+c c+d          at the positions of a, b, c
    first draft     e, from the entry c+d
    second draft    f, from the entry of d: the output of c+d, and e

Shape suffixes: T tokens, B rows, D hidden_size, F features, V tokens of the head's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....cache.arena import Storage
from ....cache.spec import LayerGroup
from ...kernels import Kernels, RaggedBatch
from ...kernels.ops.parameter import Parameter
from ..decoder import Decoder
from ..each_token import each_token
from ..layer_stack import LayerStack
from ..modules import Projection, RMSNorm
from ..plan import rope_kinds
from .drafter import Drafts, FollowedTokens, NewestTokens
from .drafter_config import DrafterConfig
from .eagle3_config import Eagle3Parts
from .most_likely import most_likely
from .reach import within_window

__all__ = ["Eagle3"]


class Eagle3(LayerStack):
    """An EAGLE-3 head. `store` gives it its weights."""

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
        """See `load_drafter`; what the head has no weights for is that of `target`."""
        plan = within_window(config.plan, group.spec.window_tokens)
        ropes = rope_kinds(config.model)
        super().__init__(plan, ropes, kernels, dtype, device, [group], storage)
        parts = config.parts
        assert isinstance(parts, Eagle3Parts)
        self.taps, self.most_drafts = config.taps, config.most_drafts
        self._config = config
        self._last = (len(plan.layers) - 1,)
        self.fc = Projection(kernels, *parts.fuse.shape)
        self.input_norm: RMSNorm | None = None
        if parts.input_norm is not None:
            self.input_norm = RMSNorm(parts.input_norm.eps)
        # In tuples, so that modules of the target are none of this one.
        self._embedding, self._head = (target.embed_tokens,), (target.lm_head,)
        if parts.embedding is not None:
            self.embed_tokens = Projection(kernels, *parts.embedding.shape)
            self._embedding = (self.embed_tokens,)
        if parts.head is not None:
            self.lm_head = Projection(kernels, *parts.head.shape)
            self._head = (self.lm_head,)
        self.target_ids: torch.Tensor | None = None
        """int64 `[V]`: tokens of the target; None: the same vocabulary."""

    def layout(self) -> Iterator[Parameter]:
        """Yield the parameters that `store` expects."""
        return iter(self._config.parameters)

    def map_to_target(self, target_ids_V: torch.Tensor) -> None:
        """Set the tokens of the target that those of the head are."""
        self.target_ids = target_ids_V.to(self.device)

    def follow(self, tokens: FollowedTokens, arena: torch.Tensor) -> None:
        """See `Drafter.follow`."""
        self._follow(tokens, arena)

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """See `Drafter.propose`."""
        normed_TD, output_TD = self._follow(tokens, arena)
        normed_BD, output_BD = normed_TD[newest.index], output_TD[newest.index]
        ids: list[torch.Tensor] = []
        probabilities: list[torch.Tensor] = []
        for place in range(count):
            if place > 0:
                batch = newest.batch(place - 1, 1)
                normed_BD, output_BD = self._pass(output_BD, ids[-1], arena, batch)
            ids_B, probability_B = most_likely(self._head[0](normed_BD))
            ids.append(ids_B if self.target_ids is None else self.target_ids[ids_B])
            probabilities.append(probability_B)
        return Drafts(torch.stack(ids, dim=1), torch.stack(probabilities, dim=1))

    def _follow(
        self, tokens: FollowedTokens, arena: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert tokens.features is not None
        return self._pass(self.fc(tokens.features), tokens.next_ids, arena, tokens.batch)

    def _pass(
        self,
        hidden_TD: torch.Tensor,
        next_ids_T: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the layers, normed and not normed, `[T, D]` each."""
        if self.input_norm is not None:
            hidden_TD = each_token(self.kernels, self.input_norm)(hidden_TD)
        embeddings_TD = self._embedding[0].rows(next_ids_T)
        normed_TD, output_TD = self.run_layers(hidden_TD, arena, batch, self._last, embeddings_TD)
        assert output_TD is not None, "the last layer is tapped"
        return normed_TD, output_TD
