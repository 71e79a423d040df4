"""The bytes that each token of a tokenizer adds to a text, and the parts of `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from ..errors import RequestError

__all__ = [
    "BYTE_OF_CHAR",
    "BYTE_OF_FALLBACK_TOKEN",
    "Pieces",
    "component_state",
    "stages",
    "tokenizer_errors",
]


def _byte_of_char() -> dict[str, int]:
    """Return the alphabet of byte-level BPE, from the character of a byte to the byte.

    Bytes that are printable in Latin-1 are their own characters, the others in order those from
    U+0100 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = _byte_of_char()
BYTE_OF_FALLBACK_TOKEN = {f"<0x{byte:02X}>": byte for byte in range(0x100)}

_MAX_SHOWN_CHARS = 200
_CHECKED_VOCABULARY = 24
"""Tokens of `Pieces.sample`, about."""


@contextmanager
def tokenizer_errors(action: str, field: str) -> Iterator[None]:
    """Raise a `RequestError` with this `field` for any error of the tokenizer.

    Panics of the library derive from `BaseException`, so `except Exception` would miss them.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        shown = f"{type(error).__name__}: {error}"
        raise RequestError(
            f"the tokenizer cannot {action}: {shown[:_MAX_SHOWN_CHARS]}", field=field
        ) from error


def component_state(component: Any) -> dict[str, Any] | None:
    """Return a component of a tokenizer as `tokenizer.json` has it."""
    return None if component is None else json.loads(component.__getstate__())


def stages(component: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """Yield the stages of a component of `tokenizer.json`, sequences (under `parts`) flattened."""
    if component is not None and component["type"] == "Sequence":
        for part in component[parts]:
            yield from stages(part, parts)
    elif component is not None:
        yield component


class Pieces:
    """The bytes that each token of a tokenizer adds to a text. Shared by all texts."""

    def __init__(self, tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        kinds = [part["type"] for part in stages(decoder, "decoders")]
        self.byte_level = "ByteLevel" in kinds
        # An earlier stage may change the names of byte tokens, so this runs the decoder.
        self._byte_fallback = "ByteFallback" in kinds and (
            tokenizer.decoder.decode(["<0xE2>", "<0x82>", "<0xAC>"]) == "€"
        )
        self.replaced = _replaced_after_bytes(decoder)
        """Replacements by later stages of characters that byte tokens formed."""
        self._pieces: dict[int, bytes] = {}
        self._exists: dict[int, bool] = {}  # of the token ids that were asked for
        self._anchor = self._find_anchor()
        self._anchor_length = len(self.decode(self._anchor, skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence; raise `RequestError` if the tokenizer fails."""
        with tokenizer_errors("decode the tokens", "token_ids"):
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return str(text)

    def is_visible(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether `decode` passes the token to the decoder."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        exists = self._exists.get(token_id)
        if exists is None:
            exists = self._exists[token_id] = self._tokenizer.id_to_token(token_id) is not None
        return exists

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token, special or not, in the middle of a text."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._compute(token_id)
        return piece

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte of a token of byte fallback; None for other tokens."""
        if not self._byte_fallback:
            return None
        return BYTE_OF_FALLBACK_TOKEN.get(str(self._tokenizer.id_to_token(token_id)))

    def sample(self) -> list[int]:
        """Return some ordinary tokens, spread over the vocabulary."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ids = range(0, size, max(1, size // _CHECKED_VOCABULARY))
        return [
            token_id
            for token_id in ids
            if self.is_visible(token_id, skip_special_tokens=True)
            and self.byte_of(token_id) is None
        ]

    def _compute(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, which is plain text
                return str(token).encode()
        byte = self.byte_of(token_id)
        if byte is not None:
            return bytes((byte,))
        # After an ordinary token the decoder treats this one as inside a text.
        text = self.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text[self._anchor_length :].encode()

    def _find_anchor(self) -> list[int]:
        """Return a token with text of its own, to decode other tokens after."""
        try:
            candidates = list(self._tokenizer.encode("a", add_special_tokens=False).ids)
        except Exception:  # a model without this letter and without an unknown token
            candidates = []
        for token_id in [*reversed(candidates), *self.sample()]:
            if token_id in self.special_ids:
                continue
            if self.decode([token_id], skip_special_tokens=False).strip():
                return [token_id]
        return []


def _replaced_after_bytes(decoder: Mapping[str, Any] | None) -> dict[int, str]:
    parts = list(stages(decoder, "decoders"))
    kinds = [part["type"] for part in parts]
    replaced: dict[int, str] = {}
    if "ByteFallback" in kinds:
        for part in parts[kinds.index("ByteFallback") :]:
            if part["type"] == "Replace":
                replaced[ord(part["pattern"]["String"])] = part["content"]
            elif part["type"] == "Metaspace":
                replaced[ord(part["replacement"])] = " "
    return replaced
