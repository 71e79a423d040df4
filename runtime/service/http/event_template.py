"""`EventTemplate`: encodes the events of a stream that differ in their text only."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from .exchange import encode, event

__all__ = ["EventTemplate"]


class EventTemplate:
    """The bytes of an event before and after its text, encoded once for all texts."""

    def __init__(self, make_chunk: Callable[[str], msgspec.Struct]) -> None:
        """Encode a chunk; `make_chunk` returns the one of a text, which it contains once."""
        mark = secrets.token_hex(16)  # no other field contains it
        self._before, self._after = event(make_chunk(mark)).split(encode(mark))

    def event(self, text: str) -> bytes:
        """Return the event of a text."""
        return self._before + encode(text) + self._after
