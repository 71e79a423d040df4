"""The text of one request's output: grows token by token, ends at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_MAX_PARTS = 256
"""Pieces of a text that are joined at a time."""


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
        """Begin the output after a prompt, whose text `next_text` continues token by token.

        `stop` strings end it, but not within the text of the first `min_tokens` tokens.
        `include_stop` keeps the stop string, or the text of the stop token.
        """
        self._next_text = next_text
        self._stop = tuple(stop)
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
        if not self._stop:
            return new
        text, held = self._held + new, len(self._held)
        self._held = ""
        if self._tokens_to_ignore > 0:
            self._tokens_to_ignore -= 1
        else:
            ends = []
            for stop in self._stop:
                begin = text.find(stop, max(held + 1 - len(stop), 0))
                if begin >= 0:
                    ends.append((begin + len(stop), begin, stop))
            if ends:
                end, begin, self.stopped = min(ends)
                return text[: end if self.include_stop else begin]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append((self.num_chars, text))
            self.num_chars += len(text)
            if len(self._parts) == _MAX_PARTS:
                self._parts = [(0, self.text)]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
