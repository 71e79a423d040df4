"""The texts and offsets of tokens in the log-probabilities of completions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.detokenizer import IncrementalDetokenizer
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from stepgraph.runtime.request import TokenLogprobs
from stepgraph.runtime.service.http.token_text import ChoiceTokens, TokenTexts

from .test_text_stream import make

KINDS = ("byte_level", "llama", "gemma", "unigram", "metaspace")


def entries(tokenizer: TextTokenizer, ids: list[int]) -> list[TokenLogprobs]:
    """Entries whose most probable tokens are others, and in every second one the sampled token."""
    found = []
    for place, token_id in enumerate(ids):
        others = [(token_id + n) % tokenizer.id_bound for n in range(1, 20)]
        top = {other: -1.0 - n for n, other in enumerate(others)}
        if place % 2:
            top[token_id] = -50.0
        found.append(TokenLogprobs(token_id, -50.0, top))
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_token_text_offsets_index_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = make(kind)
    ids = st.lists(st.integers(0, tokenizer.id_bound - 1), min_size=1, max_size=20)
    prompt, output = data.draw(ids), data.draw(ids)
    skip, cut = data.draw(st.booleans()), data.draw(st.integers(0, len(output)))
    text = IncrementalDetokenizer(tokenizer.text_stream(prompt, skip_special_tokens=skip).push)
    text.push(output)
    text.finish()
    tokens = ChoiceTokens(TokenTexts(tokenizer), prompt, skip_special_tokens=skip)
    all_entries = entries(tokenizer, output)
    first = tokens.take(output[:cut], all_entries[:cut], None)
    found = first.joined(tokens.take(output[cut:], all_entries[cut:], text.num_chars))
    tops = zip(found.tokens, found.token_logprobs, found.top_logprobs, all_entries, strict=True)
    for string, value, top, entry in tops:
        assert top is not None
        assert top[string] == value == entry.logprob
        assert len(top) == len({*entry.top, entry.token_id})
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[-1] <= text.num_chars
    for token_id, string, offset in zip(output, found.tokens, found.text_offset, strict=True):
        has_text = tokenizer.pieces.is_visible(token_id, skip_special_tokens=skip)
        if has_text and not string.startswith("bytes:"):
            assert text.text[offset:].startswith(string)


@pytest.mark.parametrize("kind", KINDS)
def test_token_text_of_an_echoed_prompt(kind: str) -> None:
    tokenizer = make(kind)
    special = tokenizer.encode("<s>", special=False)
    for text in ("abc de", "ab  cd", "<s>abc", "e"):
        for added in ([], [] if text.startswith("<s>") else special):
            ids = [*added, *tokenizer.encode(text, special=False)]
            tokens = ChoiceTokens(TokenTexts(tokenizer), ids, skip_special_tokens=True)
            found = tokens.prompt(ids, [None, *entries(tokenizer, ids[1:])], text)
            own = list(zip(found.tokens, found.text_offset, strict=True))[len(added) :]
            assert found.text_offset[: len(added)] == [0] * len(added)
            for string, offset in own:
                if string not in ("<unk>", " "):  # decoders drop the space of the first word
                    assert text[offset:].startswith(string)
            following = tokens.take([ids[-1]], entries(tokenizer, [ids[-1]]), None)
            assert following.text_offset[0] >= len(text)


def test_token_text_of_split_characters_is_unambiguous() -> None:
    tokenizer = make("llama")
    ids = tokenizer.encode("a🎉b", special=False)
    texts = [TokenTexts(tokenizer).text(token_id) for token_id in ids]
    assert texts[-5:-1] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8e", "bytes:\\x89"]
    tokens = ChoiceTokens(TokenTexts(tokenizer), ids[:1], skip_special_tokens=True)
    found = tokens.take(ids[1:], entries(tokenizer, ids[1:]), None)
    party = found.text_offset[-5]
    assert found.text_offset[-5:] == [party] * 4 + [party + 1]
    named = TokenTexts(tokenizer, as_ids=True)
    assert [named.text(token_id) for token_id in ids] == [f"token_id:{i}" for i in ids]


def test_token_text_after_a_stop_string_is_at_the_end() -> None:
    tokenizer = make("byte_level")
    ids = tokenizer.encode("abc de", special=False)
    tokens = ChoiceTokens(TokenTexts(tokenizer), [ids[0]], skip_special_tokens=True)
    assert max(tokens.take(ids, entries(tokenizer, ids), 2).text_offset) == 2
