"""The bound on a text's tokens: at most what the tokenizer makes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from tokenizers import AddedToken, Tokenizer, normalizers

from .test_text_stream import KINDS, byte_level

MARKS = "\u0301\u0338\u0327\u3099\u11a8\u1161\uff9e\u09be"  # may join what precedes them
TEXT = st.text(alphabet="the cat. \t\n▁<s>漢字かはe\u212b\ufb01\u1100가각ක😀\U0003fffd" + MARKS)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """Tokens in the text that are longer than any of the vocabulary, and one that eats spaces."""
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("the cat the cat the cat")])
    tokenizer.add_tokens([AddedToken("漢字漢字漢字漢字", normalized=True)])
    return tokenizer


def with_normalizer(tokenizer: Tokenizer, *stages: Any) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence(list(stages))
    return with_added(tokenizer)


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("cat", lstrip=True, rstrip=True)])
    return tokenizer


TOKENIZERS = {
    **KINDS,
    **{
        form: lambda form=form: with_normalizer(byte_level(), getattr(normalizers, form)())
        for form in ("NFC", "NFD", "NFKC", "NFKD")
    },
    "added": lambda: with_added(byte_level()),
    "stripping": stripping,
    "strip": lambda: with_normalizer(byte_level(), normalizers.Strip()),
}


@cache
def make(kind: str) -> tuple[Tokenizer, TextTokenizer]:
    tokenizer = TOKENIZERS[kind]()
    return tokenizer, TextTokenizer(tokenizer)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXT, times=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_a_text_has_no_fewer_tokens(kind: str, text: str, times: int) -> None:
    tokenizer, bound = make(kind)
    text *= times
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", ["byte_level", "NFC"])
def test_a_long_text_is_judged(kind: str) -> None:
    assert make(kind)[1].least_tokens("the cat sat on the mat\n" * 50_000) >= 8192


def test_what_may_lose_text_has_no_bound() -> None:
    for kind in ("word_piece", "llama", "strip", "stripping"):
        assert make(kind)[1].least_tokens("the cat " * 1000) == 0
