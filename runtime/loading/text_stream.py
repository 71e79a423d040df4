"""Decodes tokens to text one at a time, as the tokenizer's decoder joins them.

A `TextStream` is the state of one text. Joined, what `push` returns is `decode` of the whole
sequence; it never has to be corrected. Every token is fixed bytes (its *piece*), whatever precedes
it: byte-level BPE, SentencePiece styles with or without byte fallback, WordPiece. Pieces run
through an incremental UTF-8 decoder: a character that is split over tokens appears with its last
byte, invalid bytes appear as U+FFFD at once, and the cost of a token does not depend on its
position. (`DecodeStream` of `tokenizers` keeps every token of an unfinished run, so that stray
continuation bytes make each step slower than the last.)

Other decoders may change earlier text, for example one that replaces a pattern across tokens, or
give a token another text after others (`BPEDecoder`, `CTC`). `is_streamable` is False for them.
"""

from __future__ import annotations

import codecs
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from tokenizers import Tokenizer

from ..errors import RequestError

# The bytes that each token of a tokenizer adds to a text, and the parts of `tokenizer.json`.


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


def stages(component: Any, parts: str) -> list[dict[str, Any]]:
    """Return the stages of a component of a tokenizer as `tokenizer.json` has them.

    Sequences, whose stages are under `parts`, are flattened.
    """

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        if state["type"] != "Sequence":
            return [state]
        return [stage for part in state[parts] for stage in flat(part)]

    return [] if component is None else flat(json.loads(component.__getstate__()))


class Pieces:
    """The bytes that each token of a tokenizer adds to a text. Shared by all texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        decoder = stages(tokenizer.decoder, "decoders")
        kinds = [part["type"] for part in decoder]
        self.byte_level = "ByteLevel" in kinds
        # An earlier stage may change the names of byte tokens, so this runs the decoder.
        self._byte_fallback = "ByteFallback" in kinds and (
            tokenizer.decoder.decode(["<0xE2>", "<0x82>", "<0xAC>"]) == "€"
        )
        self.replaced: dict[int, str] = {}
        """Replacements by later stages of characters that byte tokens formed."""
        for part in decoder[kinds.index("ByteFallback") :] if "ByteFallback" in kinds else ():
            if part["type"] == "Replace":
                self.replaced[ord(part["pattern"]["String"])] = part["content"]
            elif part["type"] == "Metaspace":
                self.replaced[ord(part["replacement"])] = " "
        # By a weak reference: a cycle, which `gc.freeze` may keep, would outlive its engine.
        self.of = cache(partial(Pieces._compute, weakref.proxy(self)))
        """Returns the bytes of a token, special or not, in the middle of a text."""
        self._token = cache(tokenizer.id_to_token)
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
        return self._token(token_id) is not None

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte of a token of byte fallback; None for other tokens."""
        if not self._byte_fallback:
            return None
        return BYTE_OF_FALLBACK_TOKEN.get(str(self._token(token_id)))

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
        token = self._token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes(map(BYTE_OF_CHAR.__getitem__, token))
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
            with tokenizer_errors("encode a letter", "text"):
                candidates = list(self._tokenizer.encode("a", add_special_tokens=False).ids)
        except RequestError:  # without this letter and an unknown token, or damaged as texts show
            candidates = []
        for token_id in [*reversed(candidates), *self.sample()]:
            if token_id in self.special_ids:
                continue
            if self.decode([token_id], skip_special_tokens=False).strip():
                return [token_id]
        return []


_MAX_INCOMPLETE_BYTES = 3
"""Most bytes of an incomplete UTF-8 character."""
_MAX_START_TOKENS = 16
"""Visible tokens without text after which the text counts as started."""


def is_streamable(decoder: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a decoder of these stages gives each token its text whatever precedes it.

    Without stages, tokens are joined with spaces.
    """
    kinds = [part["type"] for part in decoder]
    if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
        return True
    fused = False  # whether the stage acts on the whole text, where a pattern can span tokens
    for place, part in enumerate(decoder):
        kind, from_bytes = part["type"], "ByteFallback" in kinds[:place]
        if kind == "Fuse":
            fused = True
        elif kind == "Replace":
            one_char = len(part["pattern"].get("String", "")) == 1
            if (fused or from_bytes) and not one_char:
                return False
        elif kind == "Strip":
            if part["stop"] > 0 if fused else from_bytes:
                return False
        elif kind == "WordPiece":
            if fused or "ByteFallback" in kinds:
                return False
        elif fused or kind not in ("Metaspace", "ByteFallback"):
            return False
    return True


class TextStream:
    """The text of a growing sequence of tokens; see the module's docstring.

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
