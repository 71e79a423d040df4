"""Masks of `allowed_token_ids` and `bad_words`, against a plain search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime import SamplingParams
from stepgraph.runtime.errors import StructuredOutputError
from stepgraph.runtime.mask_words import MaskWords
from stepgraph.runtime.structured.matcher import ListMatcher, TokenLists, word_tokens

from ..loading.test_text_stream import make
from ..rigs.scheduler_rig import make_request
from ..rigs.structured_rig import bits_of, masks_of

TOKENS = st.integers(0, 5)


def bits(mask: MaskWords, vocab_size: int) -> set[int]:
    return set(np.flatnonzero(bits_of(mask)[:vocab_size]).tolist())


@given(
    allowed=st.none() | st.sets(TOKENS, min_size=1),
    banned=st.sets(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=4),
    output=st.lists(TOKENS, max_size=4),
    drafts=st.lists(TOKENS, max_size=3),
    vocab_size=st.sampled_from((6, 32, 40)),
)
def test_list_matcher_forbids_only_the_last_token_of_a_word(
    allowed: set[int] | None,
    banned: set[tuple[int, ...]],
    output: list[int],
    drafts: list[int],
    vocab_size: int,
) -> None:
    lists = TokenLists(vocab_size, None if allowed is None else sorted(allowed), banned)
    masks = masks_of(1 + len(drafts), vocab_size)
    request = make_request([1, 2], output)
    outcome, kept = ListMatcher(lists, None).fill(request, masks, drafts)
    for number, mask in enumerate(masks[: kept + 1]):
        text = (*output, *drafts[:number])
        expected = {
            token
            for token in range(vocab_size)
            if (allowed is None or token in allowed)
            and not any((*text, token)[-len(word) :] == word for word in banned)
        }
        if not number and not expected:
            assert isinstance(outcome, StructuredOutputError)
            return
        assert bits(mask, vocab_size) == expected
    assert outcome is None


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_list_matcher_knows_both_spellings_of_a_word(kind: str) -> None:
    tokenizer = make(kind)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    texts = {
        tokenizer.decode([*encode("e"), *tokens]).removeprefix(tokenizer.decode(encode("e")))
        for tokens in word_tokens("bc", encode)
    }
    assert {"bc", " bc"} <= texts


def test_list_matcher_counts_min_tokens() -> None:
    lists = TokenLists(8, [3], ())
    request = make_request([1], params=SamplingParams(min_tokens=2), stop_token_ids=frozenset({3}))
    outcome, _ = ListMatcher(lists, None).fill(request, masks_of(1, 8))
    assert isinstance(outcome, StructuredOutputError)
