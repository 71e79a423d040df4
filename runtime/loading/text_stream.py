"""Tokens to text, one at a time: how a tokenizer's decoder joins its tokens.

A `TextStream` is the state of one text. Pushing tokens gives the text that `decode` of the whole
sequence has there, and never takes any of it back. Which stream does that follows from the decoder
in `tokenizer.json`:

- `PieceStream`: every token stands for fixed bytes (its *piece*), whatever precedes it. Byte-level
  BPE, SentencePiece styles with or without byte fallback, WordPiece. Pieces run through an
  incremental UTF-8 decoder: a character that is split over tokens appears when its last byte does,
  bytes that can never become a character appear as U+FFFD at once, and a token costs the same
  wherever it stands. (`DecodeStream` of `tokenizers` keeps every token of an unfinished run: a
  model that emits stray continuation bytes makes each step slower than the last.)
- `PairStream`: a token's text depends on the token before it. Word-end suffixes (`</w>`, whose
  space appears with the next word) and CTC (which drops repetitions).

Other decoders could change text that was already shown, for example one that replaces a pattern
across tokens. `stream_kind` refuses them.
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

from ..errors import RequestError

__all__ = [
    "STREAMS",
    "Pieces",
    "StreamKind",
    "TextStream",
    "component_state",
    "find_difference",
    "stages",
    "stream_kind",
    "tokenizer_errors",
]

StreamKind = Literal["pieces", "pairs"]


def _byte_of_char() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: the character that stands for a byte → that byte.

    Bytes that are printable in Latin-1 stand for themselves, the others for U+0100 onwards in
    their order (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = _byte_of_char()
BYTE_OF_FALLBACK_TOKEN = {f"<0x{byte:02X}>": byte for byte in range(0x100)}
_MAX_INCOMPLETE_BYTES = 3
"""The longest beginning of a UTF-8 character that is not yet a character."""
_MAX_START_TOKENS = 16
"""Visible tokens without text after which a text counts as begun."""
_MAX_SHOWN_CHARS = 200
_CHECKED_TEXTS, _CHECKED_TOKENS, _CHECKED_VOCABULARY = 8, 16, 24


class TextStream(Protocol):
    """The text of a growing sequence of tokens."""

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is certain now."""


@contextmanager
def tokenizer_errors(action: str) -> Iterator[None]:
    """Raise a `RequestError` for whatever the tokenizer raises.

    A panic of the library derives from `BaseException`, so that nothing catches it by accident.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        shown = f"{type(error).__name__}: {error}"
        raise RequestError(f"the tokenizer cannot {action}: {shown[:_MAX_SHOWN_CHARS]}") from error


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


def stream_kind(decoder: Mapping[str, Any] | None) -> StreamKind | None:
    """Return which stream shows what a decoder does, None if text could be taken back.

    Args:
        decoder: as in `tokenizer.json`; None joins tokens with spaces.
    """
    parts = list(stages(decoder, "decoders"))
    kinds = [part["type"] for part in parts]
    unfused = [kind for kind in kinds if kind != "Fuse"]
    if unfused in (["BPEDecoder"], ["CTC"]):
        return "pairs"
    if kinds[:1] == ["ByteLevel"] and len(unfused) == 1:
        return "pieces"
    fused = False  # whether the stage acts on the whole text, where a pattern can span tokens
    for place, part in enumerate(parts):
        kind, from_bytes = part["type"], "ByteFallback" in kinds[:place]
        if kind == "Fuse":
            fused = True
        elif kind == "Replace":
            one_char = len(part["pattern"].get("String", "")) == 1
            if (fused or from_bytes) and not one_char:
                return None
        elif kind == "Strip":
            if part["stop"] > 0 if fused else from_bytes:
                return None
        elif kind == "WordPiece":
            if fused or "ByteFallback" in kinds:
                return None
        elif fused or kind not in ("Metaspace", "ByteFallback"):
            return None
    return "pieces"


class Pieces:
    """What each token of a tokenizer adds to a text, as bytes. Shared by all texts."""

    def __init__(self, tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        kinds = [part["type"] for part in stages(decoder, "decoders")]
        self.byte_level = "ByteLevel" in kinds
        # A stage before it may change the names of byte tokens, so the decoder itself is asked.
        self._byte_fallback = "ByteFallback" in kinds and (
            tokenizer.decoder.decode(["<0xE2>", "<0x82>", "<0xAC>"]) == "€"
        )
        self.replaced = _replaced_after_bytes(decoder)
        """What later stages make of the characters that byte tokens formed."""
        self._pieces: dict[int, bytes] = {}
        self._anchor = self._find_anchor()
        self._anchor_length = len(self.decode(self._anchor, skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence; raise `RequestError` where the tokenizer fails."""
        with tokenizer_errors("decode the tokens"):
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return str(text)

    def is_visible(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether `decode` passes the token to the decoder at all."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._tokenizer.id_to_token(token_id) is not None

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token, special or not, in the middle of a text."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._compute(token_id)
        return piece

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte that a token of byte fallback stands for."""
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
        # After an ordinary token the decoder treats this one as the middle of a text.
        text = self.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text[self._anchor_length :].encode()

    def _find_anchor(self) -> list[int]:
        """Return a token with a text of its own, after which others are in the middle of a text."""
        try:
            candidates = list(self._tokenizer.encode("a", add_special_tokens=False).ids)
        except Exception:  # a model without this letter and without an unknown token
            candidates = []
        for token_id in [*reversed(candidates), *self.sample()]:
            if token_id in self._special_ids:
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


class PieceStream:
    """Joins pieces; see the module's docstring.

    With byte fallback the text equals `decode` for valid UTF-8; a run of byte tokens that is not,
    which `decode` judges as a whole, shows what was valid in it.
    """

    def __init__(
        self, pieces: Pieces, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._start: list[int] | None = None if pieces.byte_level else []
        """Visible tokens, as long as they have no text: decoders in the style of SentencePiece
        drop the space before the first word. None once the text has begun."""
        for token_id in prompt_ids:
            if self._start is None:
                break
            self.push(token_id)
        context = b""
        for token_id in reversed(prompt_ids):
            if len(context) >= _MAX_INCOMPLETE_BYTES:
                break
            if pieces.is_visible(token_id, skip_special_tokens=self._skip):
                context = pieces.of(token_id) + context
        # Only an unfinished character at the prompt's end has an effect on what follows.
        self._utf8.reset()
        self._utf8.decode(context)

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is certain now: whole characters."""
        pieces = self._pieces
        if not pieces.is_visible(token_id, skip_special_tokens=self._skip):
            return ""
        if self._start is not None:
            byte = pieces.byte_of(token_id)
            if byte is None or byte < 0x80:
                self._start.append(token_id)
                text = pieces.decode(self._start, skip_special_tokens=self._skip)
                if text or len(self._start) > _MAX_START_TOKENS:
                    self._start = None
                return text
            self._start = None
        text = self._utf8.decode(pieces.of(token_id))
        return text.translate(pieces.replaced) if pieces.replaced else text


class PairStream:
    """Decodes each token with the one before it; see the module's docstring."""

    def __init__(
        self, pieces: Pieces, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._last: list[int] = []
        self._last_length = 0
        for token_id in reversed(prompt_ids):
            if pieces.is_visible(token_id, skip_special_tokens=skip_special_tokens):
                self.push(token_id)
                break

    def push(self, token_id: int) -> str:
        """Take the next token and return its text."""
        pieces, skip = self._pieces, self._skip
        if not pieces.is_visible(token_id, skip_special_tokens=skip):
            return ""
        pair = pieces.decode([*self._last, token_id], skip_special_tokens=skip)
        text = pair[self._last_length :]
        self._last = [token_id]
        self._last_length = len(pieces.decode(self._last, skip_special_tokens=skip))
        return text


STREAMS: dict[StreamKind, type[PieceStream] | type[PairStream]] = {
    "pieces": PieceStream,
    "pairs": PairStream,
}


def find_difference(kind: StreamKind, pieces: Pieces) -> tuple[str, str] | None:
    """Return what a stream and `decode` make of some random texts where they differ, or None."""
    choices = pieces.sample()
    generator = random.Random(0)
    for _ in range(_CHECKED_TEXTS if choices else 0):
        token_ids = generator.choices(choices, k=_CHECKED_TOKENS)  # with repetitions
        stream = STREAMS[kind](pieces, (), skip_special_tokens=True)
        text = "".join(map(stream.push, token_ids))
        whole = pieces.decode(token_ids, skip_special_tokens=True)
        if text != whole and text != whole.removesuffix("\ufffd"):  # an unfinished character
            return text, whole
    return None
