"""A smaller model with the vocabulary of the target. Shapes: B rows, T tokens, D hidden_size."""

from __future__ import annotations

import torch

from ..decoder import Decoder
from .drafter import Drafts, FollowedTokens, NewestTokens, StepOperator
from .most_likely import most_likely, most_likely_after

__all__ = ["DraftModel"]


class DraftModel:
    """Drafts with a decoder of its own, one pass per draft.

    The first pass of `propose` has two tokens per row. Of the tokens of a verify step it has
    computed all before, when it drafted them, but the last draft, which may be the previous token
    now. This holds if the drafts of a step are those that it proposed after the step before. It
    computes the tokens of prompts first.
    """

    taps: tuple[int, ...] = ()
    operator: StepOperator | None = None

    def __init__(self, decoder: Decoder, most_drafts: int) -> None:
        self.decoder = decoder
        self.most_drafts = most_drafts

    @property
    def weight_bytes(self) -> int:
        """Bytes of its parameters as stored."""
        return self.decoder.weight_bytes

    def close(self) -> None:
        """See `Drafter.close`."""
        self.decoder.close()

    def follow(self, tokens: FollowedTokens, arena: torch.Tensor) -> None:
        """Store keys and values of the tokens."""
        self.decoder(tokens.token_ids, arena, tokens.batch)

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """See `Drafter.propose`."""
        if tokens.of_prompts:
            self.follow(tokens, arena)
        both_B2 = torch.stack((newest.previous_ids, newest.token_ids), dim=1)
        hidden_TD = self.decoder(both_B2.flatten(), arena, newest.batch(-1, 2))
        ids_B, probability_B = self._most_likely(hidden_TD[1::2])
        ids, probabilities = [ids_B], [probability_B]
        for place in range(1, count):
            hidden_BD = self.decoder(ids_B, arena, newest.batch(place, 1))
            ids_B, probability_B = self._most_likely(hidden_BD)
            ids.append(ids_B)
            probabilities.append(probability_B)
        return Drafts(torch.stack(ids, dim=1), torch.stack(probabilities, dim=1))

    def _most_likely(self, hidden_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decoder = self.decoder
        if (
            decoder.logit_softcap
            or decoder.plan.logit_scale != 1.0
            or decoder.vocabulary is not None
        ):
            return most_likely(decoder, decoder.logits(hidden_BD))
        return most_likely_after(decoder, decoder.lm_head, hidden_BD)
