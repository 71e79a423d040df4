"""Finds the end of a JSON value in text that arrives in pieces (RFC 8259)."""

from __future__ import annotations

import re
import string

from .tag_search import skip_space
from .text_states import State, TextStates

__all__ = ["MAX_DEPTH", "JsonScanner"]

MAX_DEPTH = 128
"""Nested arrays and objects; deeper ones count as invalid."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERALS = {"t": "true", "f": "false", "n": "null"}

_POSITIVE = dict.fromkeys(string.digits, "integer") | {"0": "zero"}
_NUMBERS: dict[str, dict[str, str]] = {
    "begin": _POSITIVE | {"-": "minus"},
    "minus": _POSITIVE,
    "zero": {".": "point", "e": "e", "E": "e"},
    "integer": dict.fromkeys(string.digits, "integer") | {".": "point", "e": "e", "E": "e"},
    "point": dict.fromkeys(string.digits, "fraction"),
    "fraction": dict.fromkeys(string.digits, "fraction") | {"e": "e", "E": "e"},
    "e": dict.fromkeys(string.digits, "exponent") | {"+": "sign", "-": "sign"},
    "sign": dict.fromkeys(string.digits, "exponent"),
    "exponent": dict.fromkeys(string.digits, "exponent"),
}
"""Part of a number → next character → part."""
_COMPLETE = {"zero", "integer", "fraction", "exponent"}


class JsonScanner(TextStates):
    """Reads one JSON value. Time is linear in the text; memory is one character a nested level."""

    def __init__(self) -> None:
        """Begin before the value."""
        super().__init__(self._value)
        self.entered = False
        """Whether more than the opening bracket of an object has been read."""
        self._closers: list[str] = []
        self._is_key = False
        self._number_part = ""
        self._num_hex = 0
        self._literal_rest = ""

    def feed(self, text: str, start: int) -> int:
        """Read `text` from `start` up to the end of the value or the first invalid character.

        Returns the index of the first character that was not read. A number ends before the
        character that follows it.
        """
        return self._advance(text, start)

    def _end_value(self) -> None:
        if self._closers:
            self._read = self._after_value
        else:
            self.done = True

    def _close(self, at: int) -> int:
        self._closers.pop()
        self._end_value()
        return at + 1

    def _open(self, closer: str, first: State, at: int) -> int:
        if len(self._closers) == MAX_DEPTH:
            return self._fail(at)
        self._closers.append(closer)
        self._read = first
        return at + 1

    def _value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        char = text[at : at + 1]
        if char == "{":
            return self._open("}", self._first_key, at)
        if char == "[":
            return self._open("]", self._first_item, at)
        if char == '"':
            self._is_key, self._read = False, self._string
            return at + 1
        if char in _NUMBERS["begin"]:
            self._number_part, self._read = "begin", self._number
        elif char in _LITERALS:
            self._literal_rest, self._read = _LITERALS[char], self._literal
        elif char:
            return self._fail(at)
        return at

    def _first_item(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if text[at : at + 1] == "]":
            return self._close(at)
        if at < len(text):
            self._read = self._value
        return at

    def _first_key(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if text[at : at + 1] == "}":
            self.entered = True
            return self._close(at)
        return self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        char = text[at : at + 1]
        if char == '"':
            self.entered = True
            self._is_key, self._read = True, self._string
            return at + 1
        return self._fail(at) if char else at

    def _colon(self, text: str, at: int) -> int:
        return self._expect(":", text, at, then=self._value)

    def _after_value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        char, closer = text[at : at + 1], self._closers[-1]
        if char == ",":
            self._read = self._key if closer == "}" else self._value
            return at + 1
        if char == closer:
            return self._close(at)
        return self._fail(at) if char else at

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None, "the pattern matches nothing too"
        at = found.end()
        char = text[at : at + 1]
        if char == '"':
            if self._is_key:
                self._read = self._colon
            else:
                self._end_value()
            return at + 1
        if char == "\\":
            self._read = self._escape
            return at + 1
        return self._fail(at) if char else at

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._num_hex, self._read = 4, self._hex
        elif text[at] in '"\\/bfnrt':
            self._read = self._string
        else:
            return self._fail(at)
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in string.hexdigits:
            return self._fail(at)
        self._num_hex -= 1
        if not self._num_hex:
            self._read = self._string
        return at + 1

    def _number(self, text: str, at: int) -> int:
        part = _NUMBERS[self._number_part].get(text[at])
        if part is not None:
            self._number_part = part
            return at + 1
        if self._number_part not in _COMPLETE:
            return self._fail(at)
        self._end_value()
        return at

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._literal_rest[0]:
            return self._fail(at)
        self._literal_rest = self._literal_rest[1:]
        if not self._literal_rest:
            self._end_value()
        return at + 1
