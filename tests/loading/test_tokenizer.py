"""Text in and out: pieces of tokens, growing text, stop strings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.detokenizer import IncrementalDetokenizer
from stepgraph.runtime.errors import CheckpointError, RequestError
from stepgraph.runtime.loading.tokenizer import (
    TextTokenizer,
    load_tokenizer,
)
from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ..rigs.tiny_models import byte_level_tokenizer
from .test_text_stream import finished

CORPUS = ["def main(): return '漢字 かな' # 😀👩‍👩‍👧 naïve café", "stop STOP stopping here\n\n"] * 8


@cache
def byte_level_backend() -> Tokenizer:
    tokenizer = byte_level_tokenizer(340, CORPUS)
    tokenizer.add_tokens([AddedToken("<tool 😀>", special=False)])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@cache
def byte_level() -> TextTokenizer:
    return TextTokenizer(byte_level_backend())


BYTE_LEVEL_IDS = st.lists(st.integers(0, 345), max_size=24)  # includes ids without a token
TEXT_IDS = st.text("abest op\n漢字😀👧\u200dé\ufffd", max_size=30).map(
    lambda text: byte_level().encode(text)
)


def cut(ids: list[int], borders: Sequence[int]) -> list[list[int]]:
    places = [0, *sorted(border % (len(ids) + 1) for border in borders), len(ids)]
    return [ids[a:b] for a, b in pairwise(places)]


def settled(tokenizer: TextTokenizer, ids: list[int]) -> str:
    """The decoded text without an unfinished character at its end."""
    return finished(tokenizer, ids, skip=True)


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


class TestTextTokenizer:
    def test_loads_and_reads_back(self, tmp_path: Path) -> None:
        backend = Tokenizer.from_str(byte_level_backend().to_str())
        backend.enable_truncation(4)
        backend.enable_padding(length=64)
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        text = "def main(): 漢字😀 stop " * 4
        ids = tokenizer.encode(text)
        assert ids[0] == 0, "the post-processor's token"
        assert tokenizer.encode(text, special=False) == ids[1:]
        assert tokenizer.decode(ids) == text, "neither truncated nor padded"
        assert tokenizer.vocab_size == backend.get_vocab_size()

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        assert load_tokenizer(tmp_path) is None

    @pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"model": 3}', b"\xff\xfe"])
    def test_corrupt_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)

    def test_invalid_unicode_is_the_request_s_error(self) -> None:
        with pytest.raises(RequestError):
            byte_level().encode("a\ud800b")

    @pytest.mark.parametrize("eos", [True, False])
    @pytest.mark.parametrize("bos", [True, False])
    @pytest.mark.parametrize("processor", [None, processors.ByteLevel()])
    def test_tokens_that_begin_and_end_a_text(
        self, tmp_path: Path, processor: Any, bos: bool, eos: bool
    ) -> None:
        backend = Tokenizer.from_str(byte_level_backend().to_str())
        if processor is None:  # it cannot be set to nothing
            content = json.loads(backend.to_str()) | {"post_processor": None}
            backend = Tokenizer.from_str(json.dumps(content))
        else:
            backend.post_processor = processor
        backend.save(str(tmp_path / "tokenizer.json"))
        flags = {"add_bos_token": bos, "add_eos_token": eos}
        config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | flags
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        loaded = load_tokenizer(tmp_path)
        assert loaded is not None
        # transformers 5 ignores the file's flags where there is a tokenizer.json, not arguments.
        reference = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **flags
        )
        assert loaded.encode("main") == reference("main").input_ids
        assert loaded.encode("main", special=False) == backend.encode("main").ids

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"add_bos_token": 1, "bos_token": "<s>"}, "add_bos_token must be true or false"),
            ({"bos_token": 3}, "bos_token must be a string"),
            ({"add_bos_token": True, "bos_token": "<x>"}, "'<x>' to every text"),
            ({"chat_template": 3}, "chat_template must be a string"),
            ({"chat_template": [{"name": "a"}]}, "chat_template must be a string"),
            ({"chat_template": "a" * (1 << 21)}, "2097152 characters"),
            ([], "must hold a JSON object"),
        ],
    )
    def test_a_wrong_config(self, tmp_path: Path, config: Any, message: str) -> None:
        backend = json.loads(byte_level_backend().to_str()) | {"post_processor": None}
        (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(tmp_path)

    @given(BYTE_LEVEL_IDS)
    @settings(deadline=None)
    def test_pieces_are_what_decode_joins(self, ids: list[int]) -> None:
        pieces = byte_level().pieces
        shown = [i for i in ids if pieces.is_visible(i, skip_special_tokens=True)]
        raw = b"".join(map(pieces.of, shown))
        assert raw.decode(errors="replace") == byte_level().decode(ids)


class TestGrowingText:
    @given(
        BYTE_LEVEL_IDS,
        BYTE_LEVEL_IDS | TEXT_IDS,
        st.just(range(1, 30)) | st.lists(st.integers(0, 30), max_size=6),
    )
    @settings(deadline=None)
    def test_whole_characters_are_out_at_once(
        self, prompt: list[int], output: list[int], borders: Sequence[int]
    ) -> None:
        tokenizer = byte_level()
        detokenizer = IncrementalDetokenizer(tokenizer.text_stream(prompt).push)
        before, ids, text = settled(tokenizer, prompt), list(prompt), ""
        for tokens in cut(output, borders):
            text += detokenizer.push(tokens)
            ids += tokens
            assert text == settled(tokenizer, ids)[len(before) :] == detokenizer.text
        assert detokenizer.finish() == ""

    @given(st.data(), st.sampled_from([1, 7, 255, 256, 257, 600]))
    @settings(max_examples=30, deadline=None)
    def test_any_part_of_the_text(self, data: st.DataObject, num_tokens: int) -> None:
        tokenizer = byte_level()
        ids = tokenizer.encode(CORPUS[0], special=False)
        detokenizer = IncrementalDetokenizer(tokenizer.text_stream([]).push)
        for number in range(num_tokens):
            detokenizer.push([ids[number % len(ids)]])
        places = st.integers(0, detokenizer.num_chars)
        start, stop = data.draw(places), data.draw(places)
        assert detokenizer.text_between(start, stop) == detokenizer.text[start:stop]

    def test_character_begun_by_the_prompt(self) -> None:
        tokenizer = byte_level()
        ids = tokenizer.encode("\u20ad", special=False)
        assert len(ids) == 3
        detokenizer = IncrementalDetokenizer(tokenizer.text_stream(ids[:2]).push)
        assert detokenizer.push(ids[2:]) == "\u20ad"


class TestStop:
    @given(
        TEXT_IDS | BYTE_LEVEL_IDS,
        st.lists(st.text("stop \n漢😀", min_size=1, max_size=5), max_size=4),
        st.sampled_from([0, 0, 1, 3, 8, 20]),
        st.lists(st.integers(0, 60), max_size=10),
        st.data(),
    )
    @settings(max_examples=150, deadline=None)
    def test_equals_the_search_in_the_whole_text(
        self,
        ids: list[int],
        random_stops: list[str],
        min_tokens: int,
        borders: list[int],
        data: st.DataObject,
    ) -> None:
        """Stop strings that end in the first `min_tokens` tokens are ignored."""
        tokenizer = byte_level()
        whole = settled(tokenizer, ids)
        start = data.draw(st.integers(0, len(whole)))
        taken = (whole[start : start + 4], whole[start : start + 2])
        stop = tuple(string for string in (*random_stops, *taken) if string)
        expected, found = first_stop(whole, stop, len(settled(tokenizer, ids[:min_tokens])))
        prompt = tokenizer.encode("stop")
        detokenizer = IncrementalDetokenizer(
            tokenizer.text_stream(prompt).push, stop, min_tokens=min_tokens
        )
        emitted = ""
        for tokens in cut(ids, borders):
            emitted += detokenizer.push(tokens)
            assert expected.startswith(emitted), "text was shown that a stop string took back"
            assert detokenizer.num_chars == len(emitted)
        assert emitted + detokenizer.finish() == expected == detokenizer.text
        assert detokenizer.stopped == found
        assert detokenizer.finish() == "", "finish may be called again"

    def test_only_what_may_begin_a_stop_string_is_held(self) -> None:
        tokenizer = byte_level()
        detokenizer = IncrementalDetokenizer(tokenizer.text_stream([]).push, ("\n\nabab!", "aba?"))
        seen = [detokenizer.push(tokenizer.encode(c, special=False)) for c in "x\n\nababab"]
        assert seen == ["x", "", "", "", "", "", "", "\n\nab", "ab"]
        assert detokenizer.finish() == "ab"
