"""Builds tokenizers from vocabularies: tokens with kinds and scores, and patterns of words.

The metadata of a GGUF file has a vocabulary. Checkpoints without `tokenizer.json` have one in a
file: `tekken.json` (Mistral), `tiktoken.model` (Kimi) or `tokenizer.model` (SentencePiece).
"""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from ..bounded_repr import bounded_repr
from .checkpoint_files import read_bytes, read_json_object
from .text_stream import BYTE_OF_CHAR

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of tokens, as SentencePiece and GGUF number them."""
VOCABULARY_FILES = ("tekken.json", "tiktoken.model", "tokenizer.model")
"""Files that `read_vocabulary` reads, by precedence."""
_MOST_BYTES, _MOST_JSON_BYTES = 16 << 20, 64 << 20
_MOST_RESERVED = 1 << 14
"""Special tokens without a name of their own; each slows down the start."""
_MOST_CHARS = 1024
"""Characters of a token that is made by merges, which are found by comparing all its parts."""
_CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
_UNIGRAM, _BPE = 1, 2
"""Values of SentencePiece's `ModelType`."""
_FIXED = {1: 8, 5: 4}
"""Bytes of the wire types with a fixed size."""

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
ANY_CASE = f"(?i:{CONTRACTIONS})"
SPACES = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def word_pattern(
    digits: str,
    *,
    cased: bool = False,
    contractions: str = "",
    han: bool = False,
    letters: str = r"\p{L}",
) -> str:
    """Return the pattern of tiktoken's vocabularies since cl100k: words, digits, punctuation.

    Args:
        digits: pattern of numbers.
        cased: whether words end before a capital letter that follows lower case.
        contractions: pattern of English contractions, which follow `cased` words.
        han: whether runs of Chinese characters are words of their own, with `cased`.
        letters: what words consist of without `cased`, and punctuation does not.
    """
    begin, marks = r"[^\r\n\p{L}\p{N}]?", r"[\r\n]*"
    words = rf"{contractions}|{begin}[{letters}]+" if contractions else rf"{begin}[{letters}]+"
    if cased:
        end, more = f"{contractions}?" if contractions else "", r"&&[^\p{Han}]" if han else ""
        upper, lower = f"[{_UPPER}{more}]", f"[{_LOWER}{more}]"
        words = rf"{begin}{upper}*{lower}+{end}|{begin}{upper}+{lower}*{end}"
        if han:
            words = rf"\p{{Han}}+|{words}"
        else:
            marks = r"[\r\n/]*"
    return rf"{words}|{digits}| ?[^\s{letters}\p{{N}}]+{marks}|\s*[\r\n]+|{SPACES}"


KIMI = word_pattern(r"\p{N}{1,3}", cased=True, contractions=ANY_CASE, han=True)
_PATTERNS = {"TikTokenTokenizer": KIMI}
"""The pattern of `tiktoken.model` by `tokenizer_class`: checkpoints have it only as code."""


def score_merges(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a normal token, by falling score of that token.

    Raises `ValueError` for a normal token of more than 1024 characters.
    """
    vocabulary = frozenset(tokens)
    normal = [i for i, kind in enumerate(kinds) if kind == NORMAL]
    if long := [i for i in normal if len(tokens[i]) > _MOST_CHARS]:
        raise ValueError(f"token {long[0]} has more than {_MOST_CHARS} characters")
    return [
        (left, right)
        for token in (tokens[i] for i in sorted(normal, key=lambda i: -scores[i]))
        for end in range(len(token) - 1, 0, -1)
        if (left := token[:end]) in vocabulary and (right := token[end:]) in vocabulary
    ]


def byte_level_tokenizer(
    tokens: Sequence[str],
    kinds: Sequence[int],
    merges: Sequence[tuple[str, str]] | None,
    patterns: Iterable[str],
    *,
    whole_words: bool,
) -> Tokenizer:
    """Return a byte-level BPE.

    Texts are split at one pattern after the other, and with `whole_words` a word that is a token is
    not split further. Without `merges`, the pair whose token has the lowest id is merged first.
    """
    if merges is None:
        merges = score_merges(tokens, kinds, range(0, -len(tokens), -1))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special_tokens(tokenizer, tokens, kinds)


def sentencepiece_tokenizer(
    tokens: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
    unknown: int | None,
    *,
    spaced: bool,
    once: bool = False,
    bpe: bool = True,
    byte_fallback: bool = True,
    before: Sequence[normalizers.Normalizer] = (),
) -> Tokenizer:
    """Return a tokenizer of SentencePiece, which writes spaces as `▁`.

    Args:
        tokens: by id.
        kinds: of the tokens.
        scores: of the tokens; a BPE merges the pair whose token has the best one.
        unknown: id of the unknown token.
        spaced: whether a space is put before a text.
        once: whether none is put before the text after a special token.
        bpe: whether it is a BPE, and not a unigram model.
        byte_fallback: whether unknown characters become tokens of bytes.
        before: normalizers that come first.
    """
    model: models.Model
    if bpe:
        model = models.BPE(
            {token: i for i, token in enumerate(tokens)},
            score_merges(tokens, kinds, scores),
            unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    else:
        model = models.Unigram(list(zip(tokens, scores, strict=True)), unknown, byte_fallback)
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if spaced and not once else []
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([*before, *prefix, replace])
    if spaced and once:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _with_special_tokens(tokenizer, tokens, kinds)


def _with_special_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> Tokenizer:
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=True)
        if UNKNOWN <= kind <= USER_DEFINED
    ]
    tokenizer.add_tokens(added)
    return tokenizer


# Files of checkpoints without `tokenizer.json`.


def read_vocabulary(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of one of `VOCABULARY_FILES`.

    `settings` are the contents of `tokenizer_config.json`. Raises `CheckpointError` for a file that
    cannot be read, `ValueError` for one that is not supported, and other errors for a damaged one.
    """
    if path.name == "tokenizer.model":
        return _sentencepiece(read_bytes(path, _MOST_BYTES), settings)
    tokens: list[str] = []
    if path.name == "tekken.json":
        tokens, words, pattern = _tekken(read_json_object(path, _MOST_JSON_BYTES))
    else:
        words, pattern = _tiktoken(read_bytes(path, _MOST_BYTES), settings)
    if not words or len(set(words)) < len(words):
        raise ValueError("it has no tokens, or one of them twice")
    kinds = [CONTROL] * len(tokens) + [NORMAL] * len(words)
    tokens += (word.decode("latin-1").translate(_CHAR_OF_BYTE) for word in words)
    _place_added(settings, tokens, kinds)
    return byte_level_tokenizer(tokens, kinds, None, [pattern], whole_words=True)


def _place_added(settings: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> None:
    """Give `added_tokens_decoder` its ids, with reserved tokens between them."""
    bound = len(tokens) + _MOST_RESERVED
    for key, entry in settings.get("added_tokens_decoder", {}).items():
        token_id, token = int(key), entry.get("content")
        if token_id not in range(bound) or not isinstance(token, str):
            raise ValueError(
                f"tokenizer_config.json: added_tokens_decoder[{bounded_repr(key, 40)}] must have"
                f" an id below {bound}, as the file has {bound - _MOST_RESERVED} tokens, and a"
                " content. Is the file complete?"
            )
        tokens += (f"<|reserved_token_{i}|>" for i in range(len(tokens), token_id + 1))
        kinds += [CONTROL] * (len(tokens) - len(kinds))
        tokens[token_id] = token
        kinds[token_id] = CONTROL if entry.get("special") is True else USER_DEFINED


def _tekken(content: Mapping[str, Any]) -> tuple[list[str], list[bytes], str]:
    """Return special tokens, which have the first ids, other tokens, and the pattern of words."""
    config, listed = content["config"], content.get("special_tokens")
    if listed is None:
        raise ValueError("it lists no special_tokens: tokenizers before v7 are not supported")
    names = {entry["rank"]: entry["token_str"] for entry in listed}
    count = config.get("default_num_special_tokens", len(names))
    if count not in range(_MOST_RESERVED + 1):
        raise ValueError(f"default_num_special_tokens must be 0 to {_MOST_RESERVED}, not {count}")
    entries = content["vocab"][: max(0, config["default_vocab_size"] - count)]
    words = [b64decode(entry["token_bytes"], validate=True) for entry in entries]
    return [names.get(i, f"<SPECIAL_{i}>") for i in range(count)], words, config["pattern"]


def _tiktoken(content: bytes, settings: Mapping[str, Any]) -> tuple[list[bytes], str]:
    """Return the tokens of lines with a token in base64 and its id, and the pattern of words."""
    name = settings.get("tokenizer_class")
    if name not in _PATTERNS:
        raise ValueError(
            f"tokenizer_config.json has the tokenizer_class {bounded_repr(name, 60)}; supported:"
            f" {', '.join(_PATTERNS)}. Remove the file to serve requests of token ids"
        )
    lines = (line.split() for line in content.splitlines() if line)
    ranked = sorted((int(rank), b64decode(word, validate=True)) for word, rank in lines)
    if [rank for rank, _ in ranked] != list(range(len(ranked))):
        raise ValueError("its ranks are not 0, 1, 2 and so on")
    return [word for _, word in ranked], _PATTERNS[name]


def _sentencepiece(content: bytes, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a `ModelProto`, whose fields are read by number."""
    parts: dict[int, list[dict[int, Any]]] = {1: [], 2: [{}], 3: [{}]}
    for number, value in _fields(content):
        if number in parts:
            parts[number].append(dict(_fields(value)))
    pieces, trainer, normalizer = parts[1], parts[2][-1], parts[3][-1]
    tokens = [piece[1].decode() for piece in pieces]
    kinds = [piece.get(3, NORMAL) for piece in pieces]
    _place_added(settings, tokens, kinds)
    scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    algorithm, as_suffix = trainer.get(3, _UNIGRAM), trainer.get(24)
    if algorithm not in (_UNIGRAM, _BPE) or as_suffix:
        raise ValueError("it is neither a unigram model nor a BPE, or has spaces after words")
    before: list[normalizers.Normalizer] = []
    if charsmap := normalizer.get(2):
        before.append(normalizers.Precompiled(charsmap))
    if normalizer.get(4, True):  # remove_extra_whitespaces
        before.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        before.append(normalizers.Replace(Regex(" {2,}"), " "))
    return sentencepiece_tokenizer(
        tokens,
        kinds,
        scores + [0.0] * (len(tokens) - len(scores)),
        unknown=trainer.get(40, 0),
        spaced=bool(normalizer.get(3, True)),  # add_dummy_prefix
        once=settings.get("legacy") is False,
        bpe=algorithm == _BPE,
        byte_fallback=bool(trainer.get(35)),
        before=before,
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Iterate over the fields of a protocol buffer: numbers, and values as integers or bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        if key & 7 == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        size = _FIXED.get(key & 7)
        if size is None:
            size, place = _varint(message, place)
        if place + size > len(message):
            raise ValueError("it is cut off, or not a SentencePiece model")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return an integer of at most 64 bits, and the place after it."""
    value = 0
    for shift in range(0, 64, 7):
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("it has an integer of more than 64 bits")
