"""Reads the JSON object of one tool call: its name, then its arguments as they arrive."""

from __future__ import annotations

import json
from collections.abc import Callable

from .json_scanner import JsonScanner
from .tag_search import skip_space
from .text_states import State, TextStates

__all__ = ["MAX_HELD_CHARS", "CallReader"]

MAX_HELD_CHARS = 1 << 16
"""Characters of an object that are kept until its name and the begin of its arguments are known."""

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


class CallReader(TextStates):
    """Reads an object such as `{"name": "f", "arguments": {"x": 1}}`.

    `arguments` may be called `parameters`, come before `name`, and be null. The object is a call
    once its name is known and the first character within its arguments is valid.
    """

    def __init__(self, *, is_bare: bool, accepts: Callable[[str], bool]) -> None:
        """Begin before the object.

        Args:
            is_bare: whether no tag marks the object as a call. Then it must have arguments, and no
                keys that a call does not have.
            accepts: whether there is a function of this name.
        """
        super().__init__(self._before_object)
        self.begun = False
        """Whether the object is a call; it has `failed` if it is none, or invalid JSON."""
        self.name = ""
        self._is_bare = is_bare
        self._accepts = accepts
        self._scanner = JsonScanner()
        self._held: list[str] = []
        self._num_held = 0
        self._parts: list[str] = []
        """Text of the present key or value."""
        self._key = ""
        self._keys: set[str] = set()
        self._arguments: str | None = None
        """The whole arguments, if they come before the name."""
        self._news: list[str] = []

    def feed(self, text: str, start: int) -> int:
        """Read `text` from `start`; call it again for the rest, unless `done` or `failed`.

        Returns the index of the first character that was not read.
        """
        if self.begun:
            return self._advance(text, start)
        room = MAX_HELD_CHARS - self._num_held
        read = self._advance(text[start : start + room], 0)
        if not self.begun:
            self._held.append(text[start : start + read])
            self._num_held += read
            self.failed |= read == room
        return start + read

    def held(self) -> str:
        """Return the text that was read, of an object that has not begun a call."""
        return "".join(self._held)

    def take_arguments(self) -> str:
        """Return the text of the arguments since the last call of this method."""
        news = "".join(self._news)
        self._news.clear()
        return news

    def _begin_call(self, arguments: str) -> None:
        self.begun = True
        self._held.clear()
        self._news.append(arguments)

    def _begin_value(self, read: State, at: int) -> int:
        self._scanner, self._parts, self._read = JsonScanner(), [], read
        return at

    def _scan(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self.failed = self._scanner.failed
        return end

    def _before_object(self, text: str, at: int) -> int:
        return self._expect("{", text, at, then=self._before_key)

    def _before_key(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._fail(at)
        return self._begin_value(self._in_key, at)

    def _in_key(self, text: str, at: int) -> int:
        end = self._scan(text, at)
        if self.begun:
            self._key = ""  # of no interest any more, and unbounded
        else:
            self._parts.append(text[at:end])
            if self._scanner.done:
                key = json.loads("".join(self._parts))
                if key in self._keys or (self._is_bare and key not in _KEYS):
                    return self._fail(end)
                self._keys.update(_ARGUMENTS if key in _ARGUMENTS else (key,))
                self._key = key
        if self._scanner.done:
            self._read = self._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        return self._expect(":", text, at, then=self._before_value)

    def _before_value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if self._key == "name":
            return self._begin_value(self._in_name, at) if text[at] == '"' else self._fail(at)
        if self._key in _ARGUMENTS:
            valid = text[at] in "{n"
            return self._begin_value(self._in_arguments, at) if valid else self._fail(at)
        return self._begin_value(self._in_other, at)

    def _in_name(self, text: str, at: int) -> int:
        end = self._scan(text, at)
        self._parts.append(text[at:end])
        if self._scanner.done:
            self.name = json.loads("".join(self._parts))
            if not self.name or not _is_encodable(self.name) or not self._accepts(self.name):
                return self._fail(end)
            if self._arguments is not None:
                self._begin_call(self._arguments)
            self._read = self._after_value
        return end

    def _in_arguments(self, text: str, at: int) -> int:
        end = self._scan(text, at)
        (self._news if self.begun else self._parts).append(text[at:end])
        if not self.begun and self.name and self._scanner.entered:
            self._begin_call("".join(self._parts))
        if self._scanner.done:
            if not self.begun:
                arguments = "".join(self._parts)
                self._arguments = "{}" if arguments == "null" else arguments
                if self.name:
                    self._begin_call(self._arguments)
            self._read = self._after_value
        return end

    def _in_other(self, text: str, at: int) -> int:
        end = self._scan(text, at)
        if self._scanner.done:
            self._read = self._after_value
        return end

    def _after_value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._read = self._before_key
            return at + 1
        if text[at] != "}":
            return self._fail(at)
        if not self.begun:
            if self._is_bare or not self.name:
                return self._fail(at)
            self._begin_call("{}")
        self.done = True
        return at + 1


def _is_encodable(name: str) -> bool:
    """Whether a string has no half of a surrogate pair, as JSON's escapes may write it."""
    return not any("\ud800" <= char <= "\udfff" for char in name)
