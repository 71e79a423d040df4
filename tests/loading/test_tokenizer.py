"""Tokenizers of directories: what is loaded or refused, and the bound on the tokens of a text."""

from __future__ import annotations

import gc
import json
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.tokenizer import TextTokenizer, load_tokenizer
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ..rigs.tiny_models import byte_level_tokenizer
from .test_text_stream import KINDS, byte_level


def without_processor() -> Tokenizer:
    content = json.loads(byte_level().to_str()) | {"post_processor": None}
    return Tokenizer.from_str(json.dumps(content))


def test_what_is_loaded_neither_cuts_nor_pads(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    text = "def main(): 漢字😀 stop " * 4
    ids = tokenizer.encode(text)
    assert ids[0] == 1, "the post-processor's token"
    assert tokenizer.encode(text, special=False) == ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == backend.get_vocab_size()


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"model": 3}', b"\xff\xfe"])
def test_a_corrupt_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("processor", [None, processors.ByteLevel()])
def test_tokens_that_begin_and_end_a_text(
    tmp_path: Path, processor: Any, bos: bool, eos: bool
) -> None:
    backend = without_processor()
    if processor is not None:
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
def test_a_wrong_config(tmp_path: Path, config: Any, message: str) -> None:
    without_processor().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


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


def test_a_tokenizer_is_not_in_a_cycle() -> None:
    """The collector would not free it after `gc.freeze`."""
    tokenizer = TextTokenizer(byte_level_tokenizer(300))
    assert tokenizer.pieces.of(tokenizer.encode("a")[0]) == b"a"
    pieces = weakref.ref(tokenizer.pieces)
    gc.disable()
    try:
        del tokenizer
        assert pieces() is None
    finally:
        gc.enable()
