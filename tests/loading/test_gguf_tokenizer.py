"""Tokenizers of GGUF files, against those that their vocabularies are from."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from sentencepiece import SentencePieceProcessor
from stepgraph.runtime import CheckpointError
from stepgraph.runtime.loading.gguf_file import GGUFFile
from stepgraph.runtime.loading.gguf_tokenizer import gguf_tokenizer
from stepgraph.runtime.loading.text_stream import BYTE_OF_CHAR
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from tokenizers import Tokenizer

from ..rigs.tiny_models import CORPUS, byte_level_tokenizer
from .test_vocabulary import LLAMA, trained

TEXTS = (
    *CORPUS[:1],
    *("", " ", "a", "  two  spaces", "\t\n\n mixed\r\n", "12345 + 6.7e8", "it's DON'T we'LL"),
    *(
        "naïve café, e\u0301",
        "中文 and 日本語",
        "😀👩‍👩‍👧",
        "a\0b",
        "<s>x</s>",
        "<think> y</think>",
    ),
    *("aaaa aaa aa", "x" * 70, "stop here,\u2581then"),
)
BYTE_ALPHABET = {byte: char for char, byte in BYTE_OF_CHAR.items()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def written(path: Path, **metadata: Any) -> Path:
    """Write a file with this metadata of the tokenizer; `__` stands for `.`."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata.items():
        key = f"tokenizer.{name.replace('__', '.')}"
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def loaded(path: Path, **metadata: Any) -> TextTokenizer:
    found = gguf_tokenizer(GGUFFile(written(path, **metadata)), eos_token_ids=(1,))
    assert found is not None
    return found


def byte_level_metadata(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<think>"]
    kinds = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3), USER_DEFINED]
    found = {
        **{"ggml__model": "gpt2", "ggml__pre": "gpt-2", "ggml__tokens": tokens},
        **{"ggml__token_type": kinds, "ggml__bos_token_id": 0, "ggml__eos_token_id": 1},
        "ggml__merges": [" ".join(pair) for pair in model["merges"]],
    }
    return found | more


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokenizer = byte_level_tokenizer(320)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def test_byte_level(byte_level: Tokenizer, tmp_path: Path) -> None:
    found = loaded(tmp_path / "a.gguf", **byte_level_metadata(byte_level))
    for text in TEXTS:
        assert found.encode(text) == byte_level.encode(text).ids
        assert found.decode(found.encode(text), skip_special_tokens=False) == text
    assert found.special_ids == {0, 1}
    think = byte_level.token_to_id("<think>")
    assert found.added_tokens["<think>"] == think
    assert found.decode([0, think, 1]) == "<think>"
    for _ in range(2):
        stream = found.text_stream([])
        ids = found.encode(TEXTS[0])
        assert "".join(map(stream.push, ids)) == TEXTS[0]


@pytest.mark.parametrize(
    ("pre", "flags", "begin", "end"),
    [
        ("gpt-2", {}, [], []),
        ("llama-bpe", {}, [0], []),
        ("llama-bpe", {"bos": False}, [], []),
        ("gpt-2", {"bos": True, "eos": True}, [0], [1]),
        ("qwen2", {"eos": True}, [], [1]),
    ],
)
def test_tokens_that_begin_and_end_a_text(
    byte_level: Tokenizer,
    tmp_path: Path,
    pre: str,
    flags: dict[str, bool],
    begin: list[int],
    end: list[int],
) -> None:
    settings = {f"ggml__add_{name}_token": flag for name, flag in flags.items()}
    metadata = byte_level_metadata(byte_level, ggml__pre=pre, **settings)
    found = loaded(tmp_path / "a.gguf", **metadata)
    plain = found.encode("stop", special=False)
    assert found.encode("stop") == [*begin, *plain, *end]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 123 a.b", ["it", "'s", " 123", " a", ".", "b"]),
        ("smollm", "it's 12 a", ["it", "'s", " ", "1", "2", " a"]),
        ("llama-bpe", "IT'S 1234.\n\nx", ["IT", "'S", " ", "123", "4", ".\n\n", "x"]),
        ("qwen2", "(ab) 12", ["(ab", ")", " ", "1", "2"]),
        ("qwen2", "ae\u0301b", ["ae", "\u0301b"]),
        ("qwen35", "ae\u0301b", ["ae\u0301b"]),
        ("gpt-4o", "HelloWorld's a/\n", ["Hello", "World's", " a", "/\n"]),
        ("tekken", "HelloWORLD 12", ["Hello", "WORLD", " ", "1", "2"]),
        ("kimi-k2", "Aé汉字's 1234/\n", ["Aé", "汉字", "'s", " ", "123", "4", "/\n"]),
        ("deepseek-llm", "a 12,\n世界b", ["a", " ", "12", ",", "\n", "世界", "b"]),
        ("deepseek-v3", "a1234!x 世界", ["a", "123", "4", "!x", " ", "世界"]),
        ("default", "a+1234", ["a", "+", "123", "4"]),
    ],
)
def test_pre_tokenizer_splits_words(
    byte_level: Tokenizer, tmp_path: Path, pre: str, text: str, words: list[str]
) -> None:
    """Merges make the words, and then two words that follow each other, if they are one."""
    spelled = ["".join(BYTE_ALPHABET[byte] for byte in word.encode()) for word in words]
    assert "".join(words) == text
    chains = [(word[:end], word[end]) for word in spelled for end in range(1, len(word))]
    merges = [*dict.fromkeys([*chains, *pairwise(spelled)])]
    tokens = [*dict.fromkeys([*BYTE_ALPHABET.values(), *map("".join, merges)])]
    metadata = byte_level_metadata(byte_level, ggml__pre=pre, ggml__tokens=tokens)
    metadata |= {"ggml__token_type": [NORMAL] * len(tokens)}
    found = loaded(tmp_path / "a.gguf", **metadata | {"ggml__merges": [*map(" ".join, merges)]})
    ids = found.encode(text, special=False)
    assert [found.decode([token_id]) for token_id in ids] == words


def sentencepiece_metadata(model: SentencePieceProcessor, spaced: bool) -> dict[str, Any]:
    ids = range(model.get_piece_size())
    kinds = [BYTE if model.is_byte(i) else CONTROL if model.is_control(i) else NORMAL for i in ids]
    kinds[model.piece_to_id("<think>")] = USER_DEFINED
    return {
        **{"ggml__model": "llama", "ggml__add_space_prefix": spaced},
        "ggml__tokens": [model.id_to_piece(i) for i in ids],
        "ggml__scores": [model.get_score(i) for i in ids],
        "ggml__token_type": [UNKNOWN, *kinds[1:]],
        **{f"ggml__{n}_token_id": i for i, n in enumerate(("unknown", "bos", "eos"))},
    }


@pytest.mark.parametrize("spaced", [False, True])
def test_sentencepiece_merges_by_score(tmp_path: Path, spaced: bool) -> None:
    model = trained(**LLAMA, add_dummy_prefix=spaced, user_defined_symbols=["<think>"])
    found = loaded(tmp_path / "a.gguf", **sentencepiece_metadata(model, spaced))
    for text in TEXTS:
        ids, expected = found.encode(text), [1]
        for part in re.split("(<unk>|<s>|</s>|<think>)", text):
            is_special = re.fullmatch("<.*>", part) is not None
            expected += [model.piece_to_id(part)] if is_special else model.encode(part)
        assert ids == expected
        stream = found.text_stream(ids[:1])
        streamed = "".join(map(stream.push, ids[1:]))
        assert streamed == found.decode(ids)
        if not text.startswith("<") and "\u2581" not in text:
            assert streamed == text
    assert found.special_ids == {0, 1, 2, 3}


def test_chat_templates(byte_level: Tokenizer, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    metadata = byte_level_metadata(byte_level, chat_template=template)
    metadata |= {"chat_template__tool_use": "tools", "chat_templates": ["tool_use"]}
    found = loaded(tmp_path / "a.gguf", **metadata)
    assert found.chat_templates == {"default": template, "tool_use": "tools"}
    messages = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(messages, tokenize=False) == "<s>user: hi"


def test_file_without_tokens(tmp_path: Path) -> None:
    assert gguf_tokenizer(GGUFFile(written(tmp_path / "a.gguf"))) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ggml__model": "t5"}, "'t5'"),
        ({"ggml__pre": "unheard-of"}, "'unheard-of'"),
        ({"ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"ggml__token_type": [1]}, "tokenizer.ggml.token_type"),
        ({"ggml__merges": ["a b c"]}, "tokenizer"),
        ({"ggml__merges": ["nowhere to-be-found"]}, "tokenizer"),
        ({"ggml__bos_token_id": -1.5}, "tokenizer.ggml.bos_token_id"),
        ({"ggml__model": "llama"}, "tokenizer.ggml.scores"),
        ({"ggml__model": "llama", "ggml__scores": [0.0]}, "tokenizer.ggml.scores"),
        ({"chat_template": "x" * (1 << 21)}, "template"),
    ],
)
def test_metadata_that_makes_no_tokenizer(
    byte_level: Tokenizer, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    metadata = byte_level_metadata(byte_level) | changes
    if isinstance(metadata["ggml__bos_token_id"], float):
        metadata["ggml__bos_token_id"] = [1]
    path = written(tmp_path / "a.gguf", **metadata)
    with pytest.raises(CheckpointError) as caught:
        gguf_tokenizer(GGUFFile(path))
    assert str(path.parent) in str(caught.value)
    assert named in str(caught.value)
