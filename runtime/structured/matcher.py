"""How far a request's output has come in its grammar, and which tokens may follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from ..bounded_repr import bounded_text
from ..errors import StructuredOutputError
from ..mask_words import MASK_BITS, MaskWords
from ..request import OutputMatcher, Request

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Restricts outputs by lists of tokens and words: `allowed_token_ids` and `bad_words`.

_ANCHOR = "\n"
"""Text without a space before a word, after which the word is not the first of its text."""


def word_tokens(word: str, encode: Callable[[str], list[int]]) -> set[tuple[int, ...]]:
    """Return the tokens of a word: at the beginning of a text and within, after a space and not.

    `encode` is the tokenizer's, without special tokens.
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

        `allowed` are tokens of the vocabulary, or None for all; `banned` are sequences of tokens,
        whose last one cannot follow the others.
        """
        self._mask = np.full(-(-vocab_size // MASK_BITS), -1, dtype=np.int32)
        if allowed is not None:
            bits = np.zeros(len(self._mask) * MASK_BITS, dtype=np.uint8)
            bits[list(allowed)] = 1
            self._mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        self._last_bits = _UP_TO_BIT[(vocab_size - 1) % MASK_BITS]
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
        return bool(mask.array.any())


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
                error = StructuredOutputError(
                    f"request {request.id}: after {request.num_output} output tokens nothing is"
                    " left that allowed_token_ids, bad_words and its grammar all allow. Allow more"
                    " tokens"
                )
                return error, 0
        return None, kept

    def drafts(self, request: Request, guess: Sequence[int]) -> tuple[Sequence[int], int]:
        """See `OutputMatcher.drafts`; what the lists forbid is rejected by the masks."""
        return (guess, 0) if self._grammar is None else self._grammar.drafts(request, guess)


def _last(request: Request, drafts: Sequence[int], count: int) -> Sequence[int]:
    """Return the last `count` tokens of an output and drafts that follow it, or all."""
    if count <= len(drafts):
        return drafts[-count:]
    total = request.num_output
    start = max(total - (count - len(drafts)), 0)
    return (*request.output_slice(start, total), *drafts)


MASK_SECONDS: Final = 0.05
"""Time of the masks of a row after which no mask of a draft begins."""


class TokenMatcher:
    """The grammar of one completion.

    It follows the output tokens of its request, not the row: a request that was preempted continues
    where it was.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        matcher_vocab_size: int,
    ) -> None:
        """Begin at the beginning of a grammar.

        `matcher` is not changed: a copy, of up to some megabytes, is made when the request runs.
        Its vocabulary is the model's, or larger.
        """
        self._first = matcher
        self._copy: LLMatcher | None = None
        self._wide: MaskWords | None = None
        """The mask of a matcher with tokens that the model lacks."""
        if matcher_vocab_size > vocab_size:
            words = -(-matcher_vocab_size // MASK_BITS)
            self._wide = MaskWords(np.zeros(words, dtype=np.int32))
        self._last_bits = _UP_TO_BIT[(vocab_size - 1) % MASK_BITS]
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        self._num_consumed = 0
        self.overrun = 0.0

    def drafts(self, request: Request, guess: Sequence[int]) -> tuple[Sequence[int], int]:
        """Return drafts after the output of the request, and how many of them are forced.

        They are the tokens that the grammar forces, or what it allows of a guess.
        """
        try:
            matcher = self._caught_up(request)
            if matcher.is_error():
                return (), 0
            if forced := self._forced_tokens(matcher, request):
                return forced, len(forced)
            ends = (i for i, token in enumerate(guess) if token in self._eos_token_ids)
            guess = guess[: next(ends, len(guess))]
            return guess[: matcher.validate_tokens(list(guess))] if guess else (), 0
        except (KeyboardInterrupt, SystemExit):  # of a signal handler of the application
            raise
        except BaseException:  # a panic of llguidance, which `fill` will meet again
            return (), 0

    def fill(
        self, request: Request, masks: Sequence[MaskWords], drafts: Sequence[int] = ()
    ) -> tuple[StructuredOutputError | Literal["complete"] | None, int]:
        """Write which tokens may follow the output of the request, and that output with drafts.

        Where the grammar forces the text, llguidance allows only the token that the tokenizer makes
        of it. It does so after each token, and so masks depend on the output so far alone:
        outputs are the same with drafts.

        Returns None and the number of drafts after which the output may continue. Or the error that
        ends the request, or `complete` if the grammar allows only end-of-sequence tokens and the
        request forbids them; `masks` are then any.
        """
        began = time.perf_counter()
        matcher = self._caught_up(request)
        outcome, kept = self._write(matcher, request, masks[0], request.num_output), 0
        if drafts and outcome is None:
            kept = self._write_drafts(matcher, request, masks[1:], drafts, began + MASK_SECONDS)
        return outcome, kept

    def _write_drafts(
        self,
        matcher: LLMatcher,
        request: Request,
        masks: Sequence[MaskWords],
        drafts: Sequence[int],
        deadline: float,
    ) -> int:
        """Write the masks after each draft; return after how many the output may continue.

        Stops at a deadline, by `time.perf_counter`: slow masks are not computed for drafts too.
        """
        kept = consumed = 0
        for token in drafts:
            if time.perf_counter() > deadline:
                break
            if token in self._eos_token_ids or not matcher.try_consume_tokens([token]):
                break
            consumed += 1
            number = request.num_output + consumed
            if self._write(matcher, request, masks[kept], number) is not None:
                break
            kept += 1
        if matcher.is_error():  # of which no matcher recovers; the drafts may be wrong
            self._copy = self._first.deep_copy()
            self._copy.consume_tokens(request.output_ids)
        elif consumed:
            matcher.rollback(consumed)
        return kept

    def _caught_up(self, request: Request) -> LLMatcher:
        """Return the grammar after the output of the request."""
        if self._copy is None:
            self._copy = self._first.deep_copy()
        if self._num_consumed < request.num_output:
            self._copy.consume_tokens(
                list(request.output_slice(self._num_consumed, request.num_output))
            )
            self._num_consumed = request.num_output
        return self._copy

    def _forced_tokens(self, matcher: LLMatcher, request: Request) -> Sequence[int]:
        """Return the forced tokens after the output of the request."""
        forced: list[int] = matcher.compute_ff_tokens()
        for index, token in enumerate(forced):
            too_early = request.num_output + index < request.params.min_tokens
            if (
                token >= self._vocab_size
                or token in self._eos_token_ids
                or (too_early and token in request.stop_token_ids)
            ):
                return forced[:index]
        return forced

    def _write(
        self, matcher: LLMatcher, request: Request, mask: MaskWords, num_output: int
    ) -> StructuredOutputError | Literal["complete"] | None:
        """Write which tokens may follow `num_output` tokens, which `matcher` has consumed."""
        params, written = request.params, mask if self._wide is None else self._wide
        matcher.unsafe_compute_mask_ptr(written.address, written.nbytes)
        if matcher.is_error():
            return self._error(request, matcher.get_error())
        if self._wide is not None:
            mask.array[:] = self._wide.array[: len(mask.array)]
            mask.array[-1] &= self._last_bits
        # In some vocabularies the end-of-sequence token is also a text.
        ends = matcher.is_accepting()
        forbidden = () if ends and not params.ignore_eos else self._eos_token_ids
        if num_output < params.min_tokens:  # the sampler forbids these too
            forbidden = (*forbidden, *request.stop_token_ids)
        if (not mask.forbid(forbidden) and self._wide is None) or mask.array.any():
            return None
        if ends:
            return "complete"
        lacks = " or is unknown to the model" if self._wide is not None else ""
        return self._error(request, f"every token that it allows ends the output, too early{lacks}")

    @staticmethod
    def _error(request: Request, reason: str) -> StructuredOutputError:
        shown = bounded_text(reason.removesuffix("<non-verbose/>").strip() or "unknown reason")
        return StructuredOutputError(
            f"request {request.id}: its grammar cannot be followed after {request.num_output}"
            f" output tokens: {shown}. Give a simpler grammar"
        )


_UP_TO_BIT = np.array([(2 << i) - 1 for i in range(MASK_BITS)], dtype=np.uint32).view(np.int32)
