"""Restricts outputs by lists of tokens and words: `allowed_token_ids` and `bad_words`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from ..errors import StructuredOutputError
from ..kernels.ops.mask_words import MaskWords
from ..kernels.ops.token_masks import MASK_BITS
from ..request import OutputMatcher, Request

__all__ = ["ListMatcher", "TokenLists", "word_tokens"]

_ANCHOR = "\n"
"""Text without a space before a word, after which the word is not the first of its text."""


def word_tokens(word: str, encode: Callable[[str], list[int]]) -> set[tuple[int, ...]]:
    """Return the tokens of a word: at the beginning of a text and within, after a space and not.

    `encode` is that of the tokenizer, without special tokens.
    """
    anchor = encode(_ANCHOR)
    bare = word.lstrip() or word
    found = set()
    for text in (bare, " " + bare):
        found.add(tuple(encode(text)))
        within = encode(_ANCHOR + text)
        if within[: len(anchor)] == anchor:
            found.add(tuple(within[len(anchor) :]))
    return found - {()}


class TokenLists:
    """The tokens that an output can have, and the sequences that it cannot. Immutable."""

    def __init__(
        self, vocab_size: int, allowed: Sequence[int] | None, banned: Iterable[tuple[int, ...]]
    ) -> None:
        """Make the mask of the model's tokens.

        Args:
            vocab_size: of the model.
            allowed: tokens of the vocabulary; None: all.
            banned: sequences of tokens, whose last one cannot follow the others.
        """
        self._mask = np.full(-(-vocab_size // MASK_BITS), -1, dtype=np.int32)
        if allowed is not None:
            bits = np.zeros(len(self._mask) * MASK_BITS, dtype=np.uint8)
            bits[list(allowed)] = 1
            self._mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        self._last_bits = (
            np.array([(2 << (vocab_size - 1) % MASK_BITS) - 1], dtype=np.uint64)
            .astype(np.uint32)
            .view(np.int32)[0]
        )
        self._banned: dict[int, list[tuple[int, ...]]] = {}
        single = [tokens[0] for tokens in banned if len(tokens) == 1]
        MaskWords(self._mask).forbid(single)
        for tokens in banned:
            if len(tokens) > 1 and max(tokens) < vocab_size:
                self._banned.setdefault(tokens[-2], []).append(tokens)

    def restrict(self, mask: MaskWords, output_ids: Callable[[int], Sequence[int]]) -> None:
        """Clear the bits of the tokens that cannot follow.

        `output_ids` returns the last tokens of the output, at most as many as it is given.
        """
        mask.array &= self._mask
        (newest,) = output_ids(1) or (-1,)
        for tokens in self._banned.get(newest, ()):
            before = tokens[:-1]
            if tuple(output_ids(len(before))) == before:
                mask.forbid(tokens[-1:])

    def leaves_any(self, mask: MaskWords) -> bool:
        """Whether a token of the vocabulary is left in a mask."""
        mask.array[-1] &= self._last_bits
        return mask.any()


class ListMatcher:
    """`TokenLists`, and a grammar if there is one, as the matcher of one completion."""

    def __init__(self, lists: TokenLists, grammar: OutputMatcher | None) -> None:
        """Restrict what the grammar allows; None: any token."""
        self._lists = lists
        self._grammar = grammar
        self.overrun = 0.0
        """Seconds of its masks beyond the limit of their steps."""

    def fill(
        self, request: Request, masks: Sequence[MaskWords], drafts: Sequence[int] = ()
    ) -> tuple[StructuredOutputError | Literal["complete"] | None, int]:
        """See `OutputMatcher.fill`."""
        kept = len(drafts)
        if self._grammar is None:
            for mask in masks[: 1 + kept]:
                mask.allow_all()
        else:
            outcome, kept = self._grammar.fill(request, masks, drafts)
            if outcome is not None:
                return outcome, kept
        for number, mask in enumerate(masks[: 1 + kept]):
            self._lists.restrict(mask, partial(_last, request, drafts[:number]))
            num_output = request.num_output + number
            if num_output < request.params.min_tokens:  # the sampler forbids these too
                mask.forbid(request.stop_token_ids)
            if not self._lists.leaves_any(mask):
                if number:
                    return None, number - 1
                return self._error(request), 0
        return None, kept

    def drafts(self, request: Request, guess: Sequence[int]) -> tuple[Sequence[int], int]:
        """See `OutputMatcher.drafts`; what the lists forbid is rejected by the masks."""
        return (guess, 0) if self._grammar is None else self._grammar.drafts(request, guess)

    @staticmethod
    def _error(request: Request) -> StructuredOutputError:
        return StructuredOutputError(
            f"request {request.id}: after {request.num_output} output tokens nothing is left that"
            " allowed_token_ids, bad_words and its grammar all allow. Allow more tokens"
        )


def _last(request: Request, drafts: Sequence[int], count: int) -> Sequence[int]:
    """Return the last `count` tokens of an output and drafts that follow it, or all."""
    if count <= len(drafts):
        return drafts[-count:]
    total = request.num_output
    start = max(total - (count - len(drafts)), 0)
    return (*request.output_slice(start, total), *drafts)
