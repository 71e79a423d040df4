"""Finds tags in text that arrives in pieces."""

from __future__ import annotations

import re

__all__ = ["begins_with_tag", "find_tag", "skip_space"]

_SPACE = re.compile(r"[ \t\r\n]*")


def find_tag(text: str, start: int, tag: str) -> tuple[int, bool]:
    """Find a tag in `text` from `start`.

    Returns:
        Its index and True; or False and the index of the text's end that may begin the tag, which
        is the length of the text if no end of it may.
    """
    index = text.find(tag, start)
    if index >= 0:
        return index, True
    for begin in range(max(start, len(text) - len(tag) + 1), len(text)):
        if tag.startswith(text[begin:]):
            return begin, False
    return len(text), False


def begins_with_tag(text: str, start: int, tag: str) -> bool | None:
    """Return whether `text` from `start` begins with a tag; None if more text must tell."""
    if text.startswith(tag, start):
        return True
    return None if tag.startswith(text[start : start + len(tag)]) else False


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` that is no JSON white space."""
    found = _SPACE.match(text, start)
    assert found is not None, "the pattern matches nothing too"
    return found.end()
