"""Tokenizers of checkpoints without tokenizer.json, against SentencePiece and merges by rank."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgraph.runtime import CheckpointError, RequestError
from stepgraph.runtime.loading.text_stream import BYTE_OF_CHAR
from stepgraph.runtime.loading.tokenizer import TextTokenizer, load_tokenizer
from transformers import LlamaTokenizer

from ..rigs.tiny_models import CORPUS, byte_level_tokenizer

TEXT = st.text(alphabet="the cat.sa'D\t\n ▁12345漢字かé́ßé😀\ufb01<0x41>", max_size=40)
TEXT = TEXT.filter(lambda text: "<s>" not in text)
"""Without the special token, which hypothesis draws as a constant of the modules that are loaded:
other ones, if other tests ran before."""
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
TEKKEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = [bytes([byte]) for byte in range(256)] + [
    bytes(BYTE_OF_CHAR[char] for char in "".join(pair))
    for pair in json.loads(byte_level_tokenizer(400).to_str())["model"]["merges"]
]
RANKS = {word: rank for rank, word in enumerate(dict.fromkeys([*WORDS, "漢字".encode()]))}


def loaded(directory: Path, files: Mapping[str, Any]) -> TextTokenizer:
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (directory / name).write_bytes(data)
    found = load_tokenizer(directory, eos_token_ids=(2,))
    assert found is not None
    return found


def merged(text: str, pattern: str) -> list[int]:
    """The ranks of a text: in each word, the pair of the best token is merged, as in tiktoken."""
    found = []
    for word in map(str.encode, regex.findall(pattern, text, regex.V1)):
        parts = [word] if word in RANKS else [bytes([byte]) for byte in word]
        while ranks := [rank for pair in pairwise(parts) if (rank := RANKS.get(b"".join(pair)))]:
            place = [RANKS.get(b"".join(pair)) for pair in pairwise(parts)].index(min(ranks))
            parts[place : place + 2] = [b"".join(parts[place : place + 2])]
        found += [RANKS[part] for part in parts]
    return found


def check_stream(tokenizer: TextTokenizer, ids: list[int]) -> None:
    stream = tokenizer.text_stream([])
    assert "".join(map(stream.push, ids)) == tokenizer.decode(ids)


def trained(**options: Any) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    fixed = {"hard_vocab_limit": False, "minloglevel": 2, "control_symbols": ["<sep>"]}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=written, **fixed, **options
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


LLAMA = {
    **{"model_type": "bpe", "byte_fallback": True, "vocab_size": 340},
    **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma": LLAMA | {"add_dummy_prefix": False},
    "bpe": {"model_type": "bpe", "vocab_size": 120},
    "unigram": {"model_type": "unigram", "vocab_size": 120},
    "unigram of bytes": LLAMA | {"model_type": "unigram"},
}


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece(tmp_path: Path, kind: str) -> None:
    reference = trained(**SENTENCEPIECE[kind], user_defined_symbols=["<think>"])
    found = loaded(tmp_path, {"tokenizer.model": reference.serialized_model_proto()})
    unknown, literal = reference.unk_id(), kind == "unigram of bytes"

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TEXT)
    def check(text: str) -> None:
        if literal:  # the library matches the names of bytes
            text = text.replace("<", "")
        ids = reference.encode(text)
        assert found.encode(text) == [1, *ids]
        if unknown not in ids:
            assert found.decode(ids) == reference.decode(ids)
        check_stream(found, ids)

    check()
    think = reference.piece_to_id("<think>")
    assert found.encode("<sep><think>")[1:] == [reference.piece_to_id("<sep>"), think]
    assert found.special_ids == {0, 1, 2, 3}
    assert "<think>" in found.decode([think])


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_with_added_tokens(tmp_path: Path, legacy: bool) -> None:
    """Text after an added token begins with a space in the legacy way only."""
    reference = trained(**LLAMA)
    size = reference.get_piece_size()
    added = {"2": {"content": "</end>", "special": True}, str(size + 1): {"content": "<call>"}}
    config = {
        **{"legacy": legacy, "added_tokens_decoder": added, "add_bos_token": False},
        **{"eos_token": "</end>", "chat_template": "{{ bos_token }}<call>{{ eos_token }}"},
    }
    files = {"tokenizer.model": reference.serialized_model_proto(), "tokenizer_config.json": config}
    found = loaded(tmp_path, files)
    inside = reference.encode("the cat")
    if not legacy:
        model = json.loads(found.definition)["model"]
        llama = LlamaTokenizer(model["vocab"], [tuple(pair) for pair in model["merges"]])
        inside = llama.encode("</s>the cat", add_special_tokens=False)[1:]
    assert found.encode("<call>the cat</end>") == [size + 1, *inside, 2]
    assert found.decode([size, size + 1, 2]) == "<call>"
    messages = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(messages) == [1, size + 1, 2]


def kimi_files(**changes: Any) -> dict[str, Any]:
    lines = (b"%s %d\n" % (b64encode(word), rank) for word, rank in RANKS.items())
    named = {0: ("[BOS]", True), 1: ("[EOS]", True), 4: ("<|im_end|>", True), 5: ("<call>", False)}
    config = {
        **{"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"},
        "added_tokens_decoder": {
            str(len(RANKS) + place): {"content": text, "special": special}
            for place, (text, special) in named.items()
        },
    }
    template = b"{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    return {
        **{"tiktoken.model": b"".join(lines), "tokenizer_config.json": config | changes},
        "chat_template.jinja": template,
    }


def tekken_file(**changes: Any) -> dict[str, Any]:
    named = ["<unk>", "<s>", "</s>", "[INST]"]
    sizes = {"default_vocab_size": len(RANKS) + 10, "default_num_special_tokens": 10}
    content = {
        "config": {"pattern": TEKKEN, "version": "v7"} | sizes,
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(word).decode(), "token_str": None}
            for word, rank in [*RANKS.items(), (b"beyond", len(RANKS))]
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(named)
        ],
    }
    return {"tekken.json": content | changes}


def test_tiktoken_of_kimi(tmp_path: Path) -> None:
    found, size = loaded(tmp_path, kimi_files()), len(RANKS)

    @settings(max_examples=200, deadline=None)
    @given(TEXT)
    def check(text: str) -> None:
        ids = found.encode(text)
        assert ids == merged(text, KIMI)
        assert found.decode(ids) == text
        check_stream(found, ids)

    check()
    assert found.encode("<|im_end|><call>[BOS]") == [size + 4, size + 5, size]
    assert found.decode([size + 4, size + 5, size + 2]) == "<call>"
    assert found.added_tokens[f"<|reserved_token_{size + 2}|>"] == size + 2
    messages = [{"role": "user", "content": "漢字"}]
    assert found.apply_chat_template(messages) == [*merged("漢字", KIMI), size + 4]


def test_tekken_of_mistral(tmp_path: Path) -> None:
    found = loaded(tmp_path, tekken_file())

    @settings(max_examples=100, deadline=None)
    @given(TEXT)
    def check(text: str) -> None:
        ids = found.encode(text)
        assert ids == [1, *(10 + rank for rank in merged(text, TEKKEN))]
        assert found.decode(ids) == text

    check()
    assert found.encode("[INST]<SPECIAL_9></s>", special=False) == [3, 9, 2]
    assert found.vocab_size == len(RANKS) + 10
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert loaded(tmp_path, {}).encode("[INST]") == [3]


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    backend = byte_level_tokenizer(300)
    files = kimi_files() | {"tokenizer.json": json.loads(backend.to_str())}
    assert loaded(tmp_path, files).encode("the cat") == backend.encode("the cat").ids


DAMAGED: dict[str, dict[str, Any]] = {
    "empty": {"tokenizer.model": b""},
    "not a protocol buffer": {"tokenizer.model": b"the cat sat"},
    "long integer": {"tokenizer.model": b"\xff" * 20},
    "words": {"tokenizer.model": b"\x0a\x03\x0a\x01a\x12\x02\x18\x03"},
    "no base64": {"tiktoken.model": b"? 0\n"},
    "no rank": {"tiktoken.model": b"YQ==\n"},
    "a rank is missing": {"tiktoken.model": b"YQ== 0\nYg== 2\n"},
    "no tokens": {"tiktoken.model": b""},
    "a token twice": {"tiktoken.model": b"YQ== 0\nYQ== 1\n"},
    "a long token": {"tiktoken.model": b64encode(bytes(10**6)) + b" 0\n"},
    "other class": kimi_files(tokenizer_class="OtherTokenizer"),
    "large id": kimi_files(added_tokens_decoder={str(10**5): {"content": "a"}}),
    "no content": kimi_files(added_tokens_decoder={"0": {}}),
    "no list": kimi_files(added_tokens_decoder=[]),
    "no special tokens": tekken_file(special_tokens=None),
    "no config": tekken_file(config={}),
    "many special tokens": tekken_file(
        config={"pattern": "a", "default_vocab_size": 9, "default_num_special_tokens": 10**5}
    ),
    "no pattern": tekken_file(
        config={"pattern": "(", "default_vocab_size": 9, "default_num_special_tokens": 5}
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_file(tmp_path: Path, kind: str) -> None:
    files = kimi_files() | DAMAGED[kind] if "tiktoken.model" in DAMAGED[kind] else DAMAGED[kind]
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, files)
    assert str(tmp_path / next(iter(DAMAGED[kind]))) in str(caught.value)


def test_damaged_normalisation(tmp_path: Path) -> None:
    """The library panics while it reads the table of characters."""
    pieces = b"\x0a\x09\x0a\x05<unk>\x18\x02\x0a\x03\x0a\x01a"
    table = b"\x1a\x0a\x12\x08\4\0\0\0\xff\xff\xff\xff"
    found = loaded(tmp_path, {"tokenizer.model": pieces + table})
    with pytest.raises(RequestError):
        found.encode("a")
