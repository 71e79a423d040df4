"""A lower bound of the tokens of a text, to refuse far too long ones without tokenising them.

Every part of a text that the tokenizer keeps is covered by tokens of its vocabulary. A token of
length n that holds a character c is no longer than L(c), the longest token with c in it; so if each
character of a text counts 1 / L(c), a token counts at most 1, and the sum over the text is at most
its number of tokens. The bound is sound for any text, and close where long tokens (runs of spaces,
say) hold few kinds of characters. What a tokenizer may drop or merge without limit counts zero:
characters without a token, whitespace around added tokens that strip it, and characters that a
Unicode normalization may change.

Tokenizers with other normalizers or pre-tokenizers than the ones below, or whose model maps whole
words to an unknown token (WordPiece, WordLevel), have no bound: their texts are tokenised whole.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, cast

import numpy as np
from tokenizers import Tokenizer, models

from .text_stream import BYTE_OF_CHAR, BYTE_OF_FALLBACK_TOKEN, component_state, stages

__all__ = ["TokenBound"]

UnicodeForm = Literal["NFC", "NFD", "NFKC", "NFKD"]

_CODE_POINTS = 0x20000
"""Code points with a count; those above count zero."""
_CHUNK = 1 << 18
"""Characters processed at a time."""
_SAFETY = 0.999
"""Allows for rounding of the sum, which is in 32 bits."""
_KEEPING_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Metaspace", "Split", "Punctuation", "Digits", "UnicodeScripts"}
)


class TokenBound:
    """A lower bound of the tokens that a tokenizer makes of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the vocabulary, in a fraction of the time that loading the tokenizer takes."""
        self._counts: np.ndarray | None = None
        """What a character adds to the bound, float32 `[_CODE_POINTS]`; None without a bound."""
        self._form: UnicodeForm | None = None
        replaced = self._replaced(tokenizer)
        model = tokenizer.model
        if replaced is None or not isinstance(model, models.BPE | models.Unigram):
            return
        if isinstance(model, models.BPE) and (
            model.continuing_subword_prefix or model.end_of_word_suffix
        ):
            return
        kinds = _kinds(tokenizer.pre_tokenizer, "pretokenizers")
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        contents = [
            form
            for content in added
            for form in (content, _normalized(content, replaced, self._form))
        ]
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        if "ByteLevel" in kinds:
            counts = _byte_level_counts(vocabulary, contents)
        else:
            fallback = (
                isinstance(model, models.BPE)
                and bool(model.byte_fallback)
                and vocabulary.keys() >= BYTE_OF_FALLBACK_TOKEN.keys()
            )
            counts = _character_counts(vocabulary, contents, fallback=fallback)
        counts[-1] = 0.0  # stands for all code points above
        for char, content in replaced.items():
            # An added token may match before the replacement: the smaller of the two.
            after = sum(float(counts[ord(c)]) if ord(c) < _CODE_POINTS else 0.0 for c in content)
            within = [1 / len(token) for token in added if char in token]
            counts[ord(char)] = min([after, *within])
        if any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values()):
            counts[[code for code in range(_CODE_POINTS) if chr(code).isspace()]] = 0.0
        self._counts = counts

    def least(self, text: str, enough: int) -> int:
        """Return a lower bound of the tokens of `text`; counting ends at `enough`."""
        total = 0.0
        if self._counts is None or len(text.encode("utf-8", "surrogatepass")) < enough:
            return 0
        for start in range(0, len(text), _CHUNK):
            chunk = text[start : start + _CHUNK].encode("utf-32-le", "surrogatepass")
            codes = np.minimum(np.frombuffer(chunk, np.uint32), _CODE_POINTS - 1)
            counts = self._counts[codes]
            if self._form is not None:
                counts = counts[_unaffected(codes, self._form)]
            total += float(counts.sum()) * _SAFETY
            if total >= enough:
                break
        return int(total)

    def _replaced(self, tokenizer: Tokenizer) -> dict[str, str] | None:
        """Return the replacements of characters before the model; None if text may be dropped."""
        replaced: dict[str, str] = {}
        for part in stages(component_state(tokenizer.normalizer), "normalizers"):
            kind = part["type"]
            if kind == "Replace" and len(part["pattern"].get("String", "")) == 1:
                pattern = part["pattern"]["String"]
                replaced = {c: r.replace(pattern, part["content"]) for c, r in replaced.items()}
                replaced.setdefault(pattern, part["content"])
            elif kind in ("NFC", "NFD", "NFKC", "NFKD") and self._form is None:
                self._form = kind
            elif kind != "Prepend":
                return None
        for part in stages(component_state(tokenizer.pre_tokenizer), "pretokenizers"):
            kind = part["type"]
            if kind not in _KEEPING_PRE_TOKENIZERS or part.get("behavior") == "Removed":
                return None
            if kind == "Metaspace":
                replaced.setdefault(" ", part["replacement"])
        if self._form is not None:
            changed, follows = _unicode_tables(self._form)
            content = [ord(c) for c in "".join(replaced.values())]
            if any(c >= _CODE_POINTS or changed[c] or follows[c] for c in content):
                return None
        if any(ord(char) >= _CODE_POINTS for char in replaced):
            return None
        return replaced


def _kinds(component: Any, parts: str) -> set[str]:
    return {part["type"] for part in stages(component_state(component), parts)}


def _normalized(text: str, replaced: Mapping[str, str], form: UnicodeForm | None) -> str:
    text = "".join(replaced.get(char, char) for char in text)
    return text if form is None else unicodedata.normalize(form, text)


def _longest(tokens: list[str] | list[bytes]) -> dict[Any, int]:
    """Return the length of the longest token that each unit (character or byte) occurs in."""
    longest: dict[Any, int] = {}
    for token in sorted(tokens, key=len, reverse=True):
        for unit in token:
            if unit not in longest:
                longest[unit] = len(token)
    return longest


def _character_counts(
    vocabulary: Mapping[str, int], contents: list[str], *, fallback: bool
) -> np.ndarray:
    """Return the counts for a model over characters; with `fallback` every byte has a token."""
    counts = np.full(_CODE_POINTS, 1.0 if fallback else 0.0, dtype=np.float32)
    for char, length in _longest([*vocabulary, *contents]).items():
        if ord(char) < _CODE_POINTS and (fallback or char in vocabulary):
            counts[ord(char)] = 1 / length
    return counts


def _byte_level_counts(vocabulary: Mapping[str, int], contents: list[str]) -> np.ndarray:
    """Return the counts for a model over bytes: those of a character's UTF-8 bytes together."""
    tokens = [
        bytes([BYTE_OF_CHAR[char] for char in token])
        for token in vocabulary
        if all(char in BYTE_OF_CHAR for char in token)
    ]
    longest = _longest([*tokens, *(content.encode() for content in contents)])
    known = {token[0] for token in tokens if len(token) == 1}
    of_byte = np.zeros(256, dtype=np.float32)
    for byte in known:
        of_byte[byte] = 1 / longest[byte]
    code = np.arange(_CODE_POINTS, dtype=np.int64)
    tail = of_byte[0x80 | code & 0x3F]
    middle = of_byte[0x80 | code >> 6 & 0x3F]
    counts = of_byte[0xE0 | code >> 12 & 0xF] + middle + tail
    counts[:0x800] = (of_byte[0xC0 | code >> 6 & 0x1F] + tail)[:0x800]
    counts[:0x80] = of_byte[:0x80]
    high = of_byte[0xF0 | code >> 18] + of_byte[0x80 | code >> 12 & 0x3F] + middle + tail
    counts[0x10000:] = high[0x10000:]
    return cast(np.ndarray, counts.astype(np.float32))


@cache
def _unicode_tables(form: UnicodeForm) -> tuple[np.ndarray, np.ndarray]:
    """Return which code points a normalization changes, and which may change the one before.

    Unassigned code points count as changed: libraries know different versions of Unicode.
    """
    changed = np.zeros(_CODE_POINTS, dtype=bool)
    follows = np.zeros(_CODE_POINTS, dtype=bool)
    follows[0x1161:0x1176] = follows[0x11A8:0x11C3] = True  # vowels and tails of Hangul
    changed[0xAC00:0xD7A4] = form.endswith("D")
    full: Literal["NFD", "NFKD"] = "NFKD" if "K" in form else "NFD"
    decomposed = {}
    for code in range(_CODE_POINTS):
        char = chr(code)
        changed[code] |= unicodedata.category(char) == "Cn"
        follows[code] |= unicodedata.combining(char) > 0
        if parts := unicodedata.decomposition(char):
            changed[code] |= unicodedata.normalize(form, char) != char
            decomposed[code] = ord(unicodedata.normalize(full, char)[0])
            if not parts.startswith("<"):
                follows[[int(p, 16) for p in parts.split()[1:] if int(p, 16) < _CODE_POINTS]] = True
    for code, first in decomposed.items():
        follows[code] |= first < _CODE_POINTS and bool(follows[first])
    return changed, follows


def _unaffected(codes: np.ndarray, form: UnicodeForm) -> np.ndarray:
    """Return which characters of a text a normalization never changes."""
    changed, follows = _unicode_tables(form)
    following = follows[codes]
    unaffected = ~(changed[codes] | following)
    unaffected[:-1] &= ~following[1:]
    unaffected[-1] = False  # the next chunk may begin with what changes it
    return cast(np.ndarray, unaffected)
