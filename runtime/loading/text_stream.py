"""Decodes tokens to text one at a time, as the tokenizer's decoder joins them.

A `TextStream` is the state of one text. Joined, what `push` returns is `decode` of the whole
sequence; it never has to be corrected. The decoder in `tokenizer.json` determines the kind:

- `PieceStream`: every token is fixed bytes (its *piece*), whatever precedes it. Byte-level BPE,
  SentencePiece styles with or without byte fallback, WordPiece. Pieces run through an incremental
  UTF-8 decoder: a character that is split over tokens appears with its last byte, invalid bytes
  appear as U+FFFD at once, and the cost of a token does not depend on its position. (`DecodeStream`
  of `tokenizers` keeps every token of an unfinished run, so that stray continuation bytes make each
  step slower than the last.)
- `PairStream`: a token's text depends on the token before it. Word-end suffixes (`</w>`, whose
  space appears with the next word) and CTC (which drops repetitions).

Other decoders may change earlier text, for example one that replaces a pattern across tokens.
`stream_kind` returns None for them.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from .token_pieces import Pieces, stages

__all__ = ["STREAMS", "StreamKind", "TextStream", "find_difference", "stream_kind"]

StreamKind = Literal["pieces", "pairs"]


_MAX_INCOMPLETE_BYTES = 3
"""Most bytes of an incomplete UTF-8 character."""
_MAX_START_TOKENS = 16
"""Visible tokens without text after which the text counts as started."""
_CHECKED_TEXTS, _CHECKED_TOKENS = 8, 16


class TextStream(Protocol):
    """The text of a growing sequence of tokens."""

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that it completes."""


def stream_kind(decoder: Mapping[str, Any] | None) -> StreamKind | None:
    """Return the kind of stream for a decoder; None if the decoder may change earlier text.

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


class PieceStream:
    """Joins pieces; see the module's docstring.

    With byte fallback the text equals `decode` for valid UTF-8. Of an invalid run of byte tokens,
    which `decode` replaces as a whole, the valid characters appear.
    """

    def __init__(
        self, pieces: Pieces, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._start: list[int] | None = None if pieces.byte_level else []
        """Visible tokens until the first text, None after it: decoders in the style of
        SentencePiece drop the space before the first word."""
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
        # Of the prompt, only an incomplete character at its end affects the output.
        self._utf8.reset()
        self._utf8.decode(context)

    def push(self, token_id: int) -> str:
        """Take the next token and return the characters that it completes."""
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
    """Return the texts of a stream and of `decode` for tokens where they differ, or None."""
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
