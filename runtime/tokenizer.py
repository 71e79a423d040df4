"""Text in and out: the checkpoint's tokenizer, and text that grows token by token.

Incremental detokenization works on bytes. Every token stands for a fixed byte string (its *piece*);
the pieces of a request run through an incremental UTF-8 decoder, so a character that is split over
tokens appears when its last byte does, bytes that can never become a character appear as U+FFFD at
once, and the cost of a token does not depend on how many came before it. (`tokenizers`' own
`DecodeStream` keeps every token of an unfinished run: a model that emits stray continuation bytes
makes each step slower than the last.)
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from .bounded_repr import bounded_text
from .checkpoint_files import has_file
from .errors import CheckpointError, RequestError

__all__ = ["IncrementalDetokenizer", "TextTokenizer", "load_tokenizer"]


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


_BYTE_OF_CHAR = _byte_of_char()
_BYTE_OF_FALLBACK_TOKEN = {f"<0x{byte:02X}>": byte for byte in range(0x100)}
_MAX_INCOMPLETE_BYTES = 3
_MAX_PARTS = 256  # of a text, before they are joined
"""The longest beginning of a UTF-8 character that is not yet a character."""


class TextTokenizer:
    """A checkpoint's tokenizer: text to token ids, token ids to text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A tokenizer.json may carry the truncation and padding of its training; a prompt is
        # served as it is or refused, never silently cut.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        decoder = tokenizer.decoder
        # What the decoder does is asked of it, because it may be nested in a sequence. U+20AC:
        self._byte_level = decoder is not None and decoder.decode(["âĤ¬"]) == "€"
        self._byte_fallback = (
            decoder is not None and decoder.decode(["<0xE2>", "<0x82>", "<0xAC>"]) == "€"
        )
        self._pieces: dict[int, bytes] = {}
        ordinary = [i for i in self.encode("a", special=False) if i not in self._special_ids]
        self._anchor = ordinary[-1:]
        self._anchor_length = len(self.decode(self._anchor))

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. A model's vocabulary may be padded beyond."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of `text`.

        With `special`, the checkpoint's post-processor adds its tokens (for example the one
        that begins a text). Raises `RequestError` for a `text` that is not valid Unicode.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except TypeError as error:  # a lone surrogate cannot be handed to the tokenizer
            raise RequestError(f"the prompt is not valid Unicode text: {text[:40]!a}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; special tokens and ids without a token are left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def piece(self, token_id: int, *, first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text, none for a special token.

        `first` says that no other token with a piece precedes it: decoders in the style of
        SentencePiece then drop the space that stands before the first word.
        """
        if first:
            return self._compute_piece(token_id, first=True)
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._compute_piece(token_id, first=False)
        return piece

    def has_piece(self, token_id: int) -> bool:
        """Return whether `decode` would pass the token to the decoder at all."""
        return (
            token_id not in self._special_ids and self._tokenizer.id_to_token(token_id) is not None
        )

    def _compute_piece(self, token_id: int, *, first: bool) -> bytes:
        if not self.has_piece(token_id):
            return b""
        token = str(self._tokenizer.id_to_token(token_id))
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, which is plain text
                return token.encode()
        if self._byte_fallback and token in _BYTE_OF_FALLBACK_TOKEN:
            return bytes((_BYTE_OF_FALLBACK_TOKEN[token],))
        if first:
            return self.decode([token_id]).encode()
        # Behind an ordinary token the decoder treats this one as the middle of a text.
        return self.decode([*self._anchor, token_id])[self._anchor_length :].encode()


def load_tokenizer(directory: Path) -> TextTokenizer | None:
    """Return the tokenizer of a checkpoint directory, `None` where it has no `tokenizer.json`.

    Without one, prompts must be token ids and outputs have no text. Raises `CheckpointError`
    for a file that is not a tokenizer.
    """
    path = directory / "tokenizer.json"
    if not has_file(path):
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare `Exception`
        raise CheckpointError(f"{path} is not a tokenizer: {bounded_text(error)}") from error
    return TextTokenizer(tokenizer)


class _StopPattern:
    """A stop string and how much of it the text ends with (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        assert text, "an empty stop string would match before the first token"
        self.text = text
        self.matched = 0
        """The length of the longest suffix of the text that begins the stop string."""
        self._borders = [0]
        """For each prefix, the length of its longest proper prefix that is also its suffix."""
        border = 0
        for char in text[1:]:
            while border and text[border] != char:
                border = self._borders[border - 1]
            border += text[border] == char
            self._borders.append(border)

    def advance(self, char: str) -> bool:
        """Take the next character; return whether it completes the stop string."""
        if self.matched == len(self.text):
            self.matched = self._borders[-1]
        while self.matched and self.text[self.matched] != char:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.text[self.matched] == char
        return self.matched == len(self.text)


class IncrementalDetokenizer:
    """The text of one request's output, token by token, up to a stop string.

    A stop string counts when its last character appears, so which one wins does not depend on
    where tokens end: the match that *ends* first, and the longest of those that end together.
    The text ends before it. Stop strings are looked for in the output only, not in the prompt.

    For a byte-level tokenizer the text equals `decode(prompt + output)` behind the prompt, less
    the bytes of an unfinished character at the end. With byte fallback that holds for valid
    UTF-8; a run with invalid bytes, which `decode` can only judge as a whole, shows what was
    valid in it.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._patterns = [_StopPattern(text) for text in stop]
        self._parts: list[str] = []
        self.num_chars = 0
        """Characters of `text`, which only grows."""
        self._held = ""
        """Decoded text that may be the beginning of a stop string."""
        self._stopped: str | None = None
        self._finished = False
        self._at_start = True
        context = b""
        for token_id in reversed(prompt_ids):
            if len(context) >= _MAX_INCOMPLETE_BYTES:
                break
            context = tokenizer.piece(token_id) + context
            self._at_start = self._at_start and not tokenizer.has_piece(token_id)
        # Only an unfinished character at the prompt's end has an effect on what follows.
        self._utf8.decode(context)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found, `None` as long as there is none."""
        return self._stopped

    @property
    def text(self) -> str:
        """All text returned so far. Joins it: to be asked for once in a while, not per token.

        Changes nothing: another thread may ask while this one pushes.
        """
        return "".join(self._parts)

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is now certain to be in the output.

        That is never half a character and never what may turn out to begin a stop string. After
        a stop string was found tokens are ignored.
        """
        assert not self._finished, "push after finish"
        if self._stopped is not None:
            return ""
        raw = b""
        for token_id in token_ids:
            raw += self._tokenizer.piece(token_id, first=self._at_start)
            self._at_start = self._at_start and not self._tokenizer.has_piece(token_id)
        return self._emit(self._advance(self._utf8.decode(raw)))

    def finish(self) -> str:
        """End the output and return the text held back; bytes of half a character are dropped."""
        self._finished = True
        held, self._held = self._held, ""
        return self._emit(held)

    def _advance(self, new: str) -> str:
        """Run `new` through the stop patterns and return what need not be held back."""
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            found = [pattern.text for pattern in self._patterns if pattern.advance(char)]
            if found:
                self._stopped = max(found, key=len)
                self._held = ""
                return text[: end - len(self._stopped)]
        keep = max((pattern.matched for pattern in self._patterns), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
            self.num_chars += len(text)
            if len(self._parts) == _MAX_PARTS:
                self._parts = ["".join(self._parts)]
        return text
