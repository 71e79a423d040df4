"""What a step needs of a drafter, whoever implements it.

After a step has sampled, a drafter first takes in what the step computed (`follow`), then proposes
the tokens that follow the newest one of each row (`propose`). It has keys and values of its own, in
an arena of its own, whose blocks have the ids of the target model's: the drafter needs no block
tables.

    tokens of a verify step       e  x  y  z         newest token and 3 drafts, at 4 5 6 7
    sampled after them            x  y  q  r         z is rejected
    follow                        (e x) (x y) (y q) (z r)       token and the one after it
    propose                       after q, which is at 7

What it stores for rejected tokens is overwritten later, as the keys and values of the target are.
Drafts are never more than guesses: whatever a drafter returns, outputs stay the same.

Shape suffixes: T tokens of a step, B rows, F features of the target model, K drafts, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ...kernels import RaggedBatch

__all__ = [
    "Drafter",
    "Drafts",
    "FollowedTokens",
    "NewestTokens",
    "SampledTokens",
    "StepOperator",
]


@dataclass(frozen=True, slots=True)
class FollowedTokens:
    """The tokens that a step has computed."""

    token_ids: torch.Tensor
    """int64 `[T]`."""
    next_ids: torch.Tensor
    """int64 `[T]`: the token after each of them, sampled by the step or known before."""
    features: torch.Tensor | None
    """`[T, F]`: hidden states of the target model, those of `Drafter.taps` side by side."""
    batch: RaggedBatch
    """Their positions and slots. Padding, and drafts beyond a row's own, go to the null block."""
    of_prompts: bool = False
    """Whether they are chunks of prompts. Otherwise they are the newest token, and the drafts that
    were proposed after it."""


@dataclass(frozen=True, slots=True)
class NewestTokens:
    """Where each row stands after a step."""

    token_ids: torch.Tensor
    """int64 `[B]`: the newest token, which no model has computed yet."""
    previous_ids: torch.Tensor
    """int64 `[B]`: the token before it."""
    index: torch.Tensor
    """int64 `[B]`: index of the previous token in the `FollowedTokens`."""
    batch: Callable[[int, int], RaggedBatch]
    """`batch(first, count)`: `count` tokens per row, from the one `first` after the newest (-1: the
    one before it). Tokens for which a row has no slot go to the null block."""


class Drafts(NamedTuple):
    """What a drafter proposes."""

    token_ids: torch.Tensor
    """int64 `[B, K]`, ids of the target's vocabulary."""
    probabilities: torch.Tensor
    """float32 `[B, K]`: of each of them by the drafter, if those before it are right."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What `FollowedTokens` and `NewestTokens` are made of. R: rows of the state."""

    tokens: FollowedTokens
    """Of which `next_ids` may have `NON_FINITE`, and any shape."""
    rows: torch.Tensor
    """int64 `[B]`: the rows that get drafts."""
    positions: torch.Tensor
    """int64 `[R]`: of the newest token of each row."""
    first: torch.Tensor
    """int64 `[B]`: index of each row's first token."""
    stops: torch.Tensor
    """int64 `[B]`: the first position of each row that has no slot."""


StepOperator: TypeAlias = Callable[[SampledTokens, torch.Tensor, int], Drafts]
"""`Drafter.propose` of sampled tokens, the arena and a number of drafts."""


class Drafter(Protocol):
    """Proposes tokens with a small model or a head on the target model's hidden states."""

    taps: tuple[int, ...]
    """Layers of the target whose outputs (before the final norm) are its features, ascending; the
    number of the target's layers stands for the final hidden state, after the norm. () for a
    drafter that reads token ids only."""
    most_drafts: int
    """Drafts that one call of `propose` can return at most."""

    @property
    def operator(self) -> StepOperator | None:
        """One operator of a CPU that finds the newest tokens and proposes; None: there is none."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own parameters as stored; those it shares with the target not counted."""

    def close(self) -> None:
        """Release what it holds outside of PyTorch. Steps must not follow."""

    def follow(self, tokens: FollowedTokens, arena: torch.Tensor) -> None:
        """Store keys and values of tokens of any step, prefill included."""

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """As `follow`, and return `count` drafts of each row."""
