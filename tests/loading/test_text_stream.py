"""Tokens to text one by one, against `decode` of the whole; where stop strings end it; offsets."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.detokenizer import IncrementalDetokenizer
from stepgraph.runtime.errors import CheckpointError, RequestError
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from stepgraph.runtime.request import TokenLogprobs
from stepgraph.runtime.service.http.token_text import ChoiceTokens, TokenTexts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

CORPUS = ["the cat sat on the mat. don't stop, it 's ok", "naïve café 漢字 tests testing"] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]


def train(model: Any, trainer: Any, pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bpe(pre_tokenizer: Any, **options: Any) -> Tokenizer:
    trainer = BpeTrainer(vocab_size=160, special_tokens=SPECIAL, show_progress=False, **options)
    return train(models.BPE(unk_token="<unk>"), trainer, pre_tokenizer)


def byte_level() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), initial_alphabet=alphabet)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_piece() -> Tokenizer:
    trainer = WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    model = models.WordPiece(unk_token="<unk>")
    tokenizer = train(model, trainer, pre_tokenizers.BertPreTokenizer())
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram() -> Tokenizer:
    trainer = UnigramTrainer(
        vocab_size=100, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer = train(models.Unigram(), trainer, pre_tokenizers.Metaspace())
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def sentencepiece(*decoder: Any) -> Tokenizer:
    """Metaspace with byte fallback."""
    model = json.loads(bpe(pre_tokenizers.Metaspace()).to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(list(decoder))
    return tokenizer


def words() -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*SPECIAL, "a", "bc", "."])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


FALLBACK, FUSE = decoders.ByteFallback(), decoders.Fuse()
SPACES = decoders.Replace("▁", " ")
KINDS = {
    "byte_level": byte_level,
    "word_piece": word_piece,
    "unigram": unigram,
    "no_decoder": words,
    "llama": lambda: sentencepiece(SPACES, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)),
    "strip_two": lambda: sentencepiece(SPACES, FALLBACK, FUSE, decoders.Strip(" ", 2, 0)),
    "gemma": lambda: sentencepiece(SPACES, FALLBACK, FUSE),
    "late_replace": lambda: sentencepiece(FALLBACK, FUSE, SPACES),
    "metaspace": lambda: sentencepiece(FALLBACK, decoders.Metaspace(), FUSE),
}


@cache
def make(kind: str) -> TextTokenizer:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(token) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool 漢>", special=False)])
    return TextTokenizer(tokenizer)


def finished(tokenizer: TextTokenizer, ids: list[int], skip: bool) -> str:
    """The decoded text without an unfinished character at its end."""
    pieces = tokenizer.pieces
    shown = [i for i in ids if pieces.is_visible(i, skip_special_tokens=skip)]
    # Python's decoder holds back the first two bytes of a surrogate too, which `decode` replaces.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(pieces.of, shown)))
    held, _ = decoder.getstate()
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    return text[: len(text) - len(held.decode(errors="replace"))]


def valid_bytes(tokenizer: TextTokenizer, ids: list[int]) -> bool:
    """Whether runs of byte tokens are UTF-8: `decode` judges each run as a whole."""
    runs = [b""]
    for token_id in ids:
        byte = tokenizer.pieces.byte_of(token_id)
        if byte is None:
            runs.append(b"")
        else:
            runs[-1] += bytes([byte])
    try:
        return all(run.decode() is not None for run in runs)
    except UnicodeDecodeError:
        return False


def cut(ids: list[int], borders: Sequence[int]) -> list[list[int]]:
    places = [0, *sorted(border % (len(ids) + 1) for border in borders), len(ids)]
    return [ids[a:b] for a, b in pairwise(places)]


BORDERS = st.lists(st.integers(0, 60), max_size=10) | st.just(range(60))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans(), borders=BORDERS)
@settings(max_examples=60, deadline=None)
def test_pushed_tokens_are_the_decoded_text(
    kind: str, data: st.DataObject, skip: bool, borders: Sequence[int]
) -> None:
    tokenizer = make(kind)
    token = st.integers(0, tokenizer.vocab_size + 2)  # also ids without a token
    texts = st.text(alphabet="the cat.▁ don't漢é<s>", max_size=8).map(tokenizer.encode)
    parts = st.lists(texts | st.lists(token, max_size=6), max_size=4)
    ids = parts.map(lambda drawn: list(itertools.chain(*drawn)))
    prompt, output = data.draw(ids), data.draw(ids)
    if not (valid_bytes(tokenizer, prompt) and valid_bytes(tokenizer, output)):
        return
    detokenizer = IncrementalDetokenizer(
        tokenizer.text_stream(prompt, skip_special_tokens=skip).push
    )
    before, ids, text = finished(tokenizer, prompt, skip), [*prompt], ""
    for tokens in cut(output, borders):
        text += detokenizer.push(tokens)
        ids += tokens
        if kind == "byte_level" or ids == prompt + output:  # others decode runs of bytes as a whole
            assert text == finished(tokenizer, ids, skip)[len(before) :] == detokenizer.text
    assert detokenizer.finish() == ""


@given(st.data(), st.sampled_from([1, 7, 255, 256, 257, 600]))
@settings(max_examples=30, deadline=None)
def test_any_part_of_the_text(data: st.DataObject, num_tokens: int) -> None:
    tokenizer = make("byte_level")
    ids = tokenizer.encode(CORPUS[1], special=False)
    detokenizer = IncrementalDetokenizer(tokenizer.text_stream([]).push)
    for number in range(num_tokens):
        detokenizer.push([ids[number % len(ids)]])
    places = st.integers(0, detokenizer.num_chars)
    start, stop = data.draw(places), data.draw(places)
    assert detokenizer.text_between(start, stop) == detokenizer.text[start:stop]


def test_character_begun_by_the_prompt() -> None:
    tokenizer = make("byte_level")
    ids = tokenizer.encode("\u20ad", special=False)
    assert len(ids) == 3
    detokenizer = IncrementalDetokenizer(tokenizer.text_stream(ids[:2]).push)
    assert detokenizer.push(ids[2:]) == "\u20ad"


def first_stop(text: str, stop: tuple[str, ...], ignored: int = 0) -> tuple[str, str | None]:
    """The text before the match that ends first, the longest of several; brute force.

    A match that ends within the first `ignored` characters does not count.
    """
    for end in range(ignored + 1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("abest op\n漢字😀👧\u200dé\ufffd", max_size=30).map(
        lambda t: make("byte_level").encode(t)
    )
    | st.lists(st.integers(0, 270), max_size=24),  # includes ids without a token
    st.lists(st.text("stop \n漢😀", min_size=1, max_size=5), max_size=4),
    st.sampled_from([0, 0, 1, 3, 8, 20]),
    BORDERS,
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_stop_strings_are_found_as_in_the_whole_text(
    ids: list[int],
    random_stops: list[str],
    min_tokens: int,
    borders: Sequence[int],
    data: st.DataObject,
) -> None:
    """Stop strings that end in the first `min_tokens` tokens are ignored."""
    tokenizer = make("byte_level")
    whole = finished(tokenizer, ids, skip=True)
    start = data.draw(st.integers(0, len(whole)))
    taken = (whole[start : start + 4], whole[start : start + 2])
    stop = tuple(string for string in (*random_stops, *taken) if string)
    ignored = len(finished(tokenizer, ids[:min_tokens], skip=True))
    expected, found = first_stop(whole, stop, ignored)
    push = tokenizer.text_stream(tokenizer.encode("stop")).push
    detokenizer = IncrementalDetokenizer(push, stop, min_tokens=min_tokens)
    emitted = ""
    for tokens in cut(ids, borders):
        emitted += detokenizer.push(tokens)
        assert expected.startswith(emitted), "text was shown that a stop string took back"
        assert detokenizer.num_chars == len(emitted)
    assert emitted + detokenizer.finish() == expected == detokenizer.text
    assert detokenizer.stopped == found
    assert detokenizer.finish() == "", "finish may be called again"


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    tokenizer = make("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer.text_stream([]).push, ("\n\nabab!", "aba?"))
    seen = [detokenizer.push(tokenizer.encode(c, special=False)) for c in "x\n\nababab"]
    assert seen == ["x", "", "", "", "", "", "", "\n\nab", "ab"]
    assert detokenizer.finish() == "ab"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([FUSE, decoders.Replace("ab", "x")]),
        decoders.Sequence([FUSE, decoders.Replace(Regex("a+"), "a")]),
        decoders.Sequence([SPACES, FUSE, decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("the", "The")]),
        decoders.CTC(),
        decoders.BPEDecoder(suffix="</w>"),
        decoders.Sequence([FALLBACK, decoders.WordPiece()]),
    ],
    ids=lambda decoder: str(decoder)[:60],
)
def test_decoders_that_take_text_back_are_refused(decoder: Any) -> None:
    tokenizer = sentencepiece(decoder)
    with pytest.raises(CheckpointError) as caught:
        TextTokenizer(tokenizer)
    assert len(str(caught.value)) < 1000


def test_what_decode_and_encode_refuse_is_a_request_error() -> None:
    tokenizer = TextTokenizer(Tokenizer(models.WordLevel({"a": 0}, unk_token="<none>")))
    refused: list[tuple[Any, Any]] = [(tokenizer.encode, t) for t in ("b", b"a", "a\ud800")]
    refused += [(make("byte_level").decode, ids) for ids in ([-1], [1 << 40], [1.5], ["a"])]
    for call, argument in refused:
        with pytest.raises(RequestError):
            call(argument)


# Texts and offsets of tokens in the log-probabilities of completions ------------------------------


WITH_OFFSETS = ("byte_level", "llama", "gemma", "unigram", "metaspace")


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


@pytest.mark.parametrize("kind", WITH_OFFSETS)
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


@pytest.mark.parametrize("kind", WITH_OFFSETS)
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
