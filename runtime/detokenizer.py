"""The text of one request's output: grows token by token, ends at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

__all__ = ["IncrementalDetokenizer"]

_MAX_PARTS = 256
"""Pieces of a text that are joined at a time."""


class _StopPattern:
    """A stop string, matched incrementally (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        assert text, "an empty stop string would match before the first token"
        self.text = text
        self.matched = 0
        """The length of the longest suffix of the text that is a prefix of the stop string."""
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
        while self.matched and self.text[self.matched] != char:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.text[self.matched] == char
        return self.matched == len(self.text)

    def ignore(self) -> None:
        """Continue after a match that does not count."""
        self.matched = self._borders[-1]


class IncrementalDetokenizer:
    """The text of one request's output, token by token, up to a stop string.

    The first stop string whose *end* appears counts, and the longest of those that end together, so
    the result does not depend on the boundaries of tokens. The text ends before it. Stop strings
    are matched in the output only, not in the prompt, and are ignored if they end within the text
    of the first `min_tokens` tokens, as in vLLM.

    The text is `decode(prompt + output)` after the prompt, without the bytes of an
    incomplete character at the end; see `text_stream`.
    """

    def __init__(
        self,
        next_text: Callable[[int], str],
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """Begin the output after a prompt.

        Args:
            next_text: `push` of the stream that continues the prompt, see
                `TextTokenizer.text_stream`.
            stop: strings that end it.
            min_tokens: tokens whose text no stop string ends.
            include_stop: whether the text keeps the stop string or the text of the stop token.
        """
        self._next_text = next_text
        self._patterns = [_StopPattern(text) for text in stop]
        self._tokens_to_ignore = min_tokens
        self.include_stop = include_stop
        self._parts: list[tuple[int, str]] = []  # each with the number of its first character
        self.num_chars = 0
        """Characters of `text`, which only grows."""
        self._held = ""
        """Decoded text that may be the start of a stop string."""
        self.stopped: str | None = None
        """The stop string that was found, None before."""
        self._finished = False

    @property
    def text(self) -> str:
        """All text returned so far. It is joined on each access, so do not read it per token.

        Another thread may read it while this one pushes.
        """
        return "".join([part for _, part in self._parts])

    def text_between(self, start: int, stop: int) -> str:
        """Return characters `start` to `stop` - 1 of `text`, in a time that depends on the parts
        after `start` only.

        Another thread may push meanwhile.
        """
        if start >= stop:
            return ""
        found = ""
        parts = self._parts  # `_emit` may replace the list, and only appends to it
        for number in range(len(parts) - 1, -1, -1):
            begin, part = parts[number]
            if begin < stop:
                found = part[max(start - begin, 0) : stop - begin] + found
            if begin <= start:
                break
        return found

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is final.

        An incomplete character, and text that may be the start of a stop string, are held back.
        After a stop string was found tokens are ignored.
        """
        assert not self._finished, "push after finish"
        text = ""
        for token_id in token_ids:
            if self.stopped is not None:
                break
            text += self._advance(self._next_text(token_id))
        return self._emit(text)

    def finish(self) -> str:
        """End the output and return the text held back, without an incomplete character."""
        self._finished = True
        held, self._held = self._held, ""
        return self._emit(held)

    def _advance(self, new: str) -> str:
        """Match the text of a token with the stop strings; return the text that is final."""
        if not self._patterns:
            return new
        ignored = self._tokens_to_ignore > 0
        self._tokens_to_ignore -= ignored
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            found = [pattern for pattern in self._patterns if pattern.advance(char)]
            if found and not ignored:
                self.stopped = max((pattern.text for pattern in found), key=len)
                self._held = ""
                return text[: end if self.include_stop else end - len(self.stopped)]
            for pattern in found:
                pattern.ignore()
        keep = max((pattern.matched for pattern in self._patterns), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append((self.num_chars, text))
            self.num_chars += len(text)
            if len(self._parts) == _MAX_PARTS:
                self._parts = [(0, self.text)]
        return text
