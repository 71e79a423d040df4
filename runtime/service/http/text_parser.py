"""A parser of text that arrives in pieces, as a coroutine that yields where it needs more of it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from .responses import ToolCall

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_FEW_SPACES: Final = r"[ \t\r\n]{0,32}"
_WORD: Final = r"""[^\s<>"'=:(){}\[\],]{1,256}"""
_FIELDS: Final = {
    "{name}": f"(?P<name>{_WORD})",
    "{string}": r'(?P<name>(?s:[^"\\]|\\.|\\\Z){1,256})',  # a name in JSON
    "{key}": r'(?P<key>[^<>"\n]{1,256})',
    "{word}": _WORD,
    "{type}": f"(?P<type>{_WORD})",
    "{id}": _WORD,
    "{any}": r"[^\n]{0,128}?",
    "{list}": r"[\[,]?",
    "{line}": r"\n?",
}
"""What a field of a `pattern` stands for."""
_FIELD: Final = re.compile(r"(\{[a-z]+\}|\s+)")
_GROUP: Final = re.compile(r"\(\?P<\w+>")


@dataclass(slots=True)
class Gained:
    """What a text adds to an answer, in parts: joining each at once would copy a text as often."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    """By index, without their arguments."""
    arguments: dict[int, list[str]] = field(default_factory=dict)
    """By the index of the call, as the model wrote them: they may be invalid or cut off."""


class TextParser(ABC):
    """Reads the text of one completion, in pieces of any size.

    Joined over all calls, the result does not depend on where the text was split. No text raises.
    """

    def __init__(self) -> None:
        """Begin before the text."""
        self._text, self._at = "", 0  # read up to `_at`
        self._last = False  # whether no more text follows
        self._gained = Gained()
        self._reading = self._parse()

    def push(self, text: str, *, last: bool) -> Gained:
        """Return what is certain after the next text; with the `last` one, all of it."""
        self._text, self._at, self._last = self._text[self._at :] + text, 0, last
        self._gained = Gained()
        next(self._reading, None)
        return self._gained

    @abstractmethod
    def _parse(self) -> Generator[None]:
        """Read all text; yield for more, until it is the `_last`."""

    def _add_content(self, text: str) -> None:
        self._gained.content.append(text)

    def _add_reasoning(self, text: str) -> None:
        self._gained.reasoning.append(text)

    def _skip_space(self) -> Generator[None]:
        """Drop white space."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None, "the pattern matches nothing too"
            self._at = found.end()
            if self._at < len(self._text) or self._last:
                return
            yield

    def _skip(self, tag: str) -> Generator[None, None, bool]:
        """Drop a tag, and white space before it; return whether the text continued with it."""
        found = yield from self._match(pattern(tag))
        self._at = self._at if found is None else found.end()
        return found is not None

    def _take_until(
        self, tags: Sequence[str], add: Callable[[str], None]
    ) -> Generator[None, None, str]:
        """Pass the text before a tag to `add`, and drop the tag; return it, empty without one."""
        while True:
            text, found = self._text, _any_of(*tags).search(self._text, self._at)
            index, tag = (len(text), "") if found is None else (found.start(), found[0])
            end = index
            if not self._last:  # an earlier tag may have begun
                for each in tags:
                    most = min(len(each) - 1, len(text) - self._at)
                    sizes = (n for n in range(most, 0, -1) if text.endswith(each[:n]))
                    end = min(end, len(text) - next(sizes, 0))
            if end > self._at:
                add(text[self._at : end])
            self._at = end
            if tag and end == index:
                self._at += len(tag)
                return tag
            if self._last:
                return ""
            yield

    def _match(self, *patterns: Pattern) -> Generator[None, None, re.Match[str] | None]:
        """Return the match of the first pattern that the text continues with."""
        for whole, cut in patterns:
            while True:
                found = whole.match(self._text, self._at)
                if self._last or (found is not None and found.end() < len(self._text)):
                    break
                if cut.fullmatch(self._text, self._at) is None:
                    break
                yield
            if found is not None:
                return found
        return None


@cache
def _any_of(*tags: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


Pattern = tuple[re.Pattern[str], re.Pattern[str]]
"""For a text, and for one that ends anywhere within it."""


@cache
def pattern(text: str, *following: str) -> Pattern:
    """Return the pattern of a text with fields, before one of the `following` texts.

    White space in it is optional and may be of another kind, also before it.
    """
    whole, cut = _sources(text)
    if following:
        sources = [_sources(each) for each in following]
        ahead = [_GROUP.sub("(?:", "|".join(kind)) for kind in zip(*sources, strict=True)]
        whole, cut = f"{whole}{_FEW_SPACES}(?={ahead[0]})", f"{cut}{_FEW_SPACES}(?:{ahead[1]})"
    return re.compile(_FEW_SPACES + whole), re.compile(_FEW_SPACES + cut)


def _sources(text: str) -> tuple[str, str]:
    """Return the regular expressions of a text, and of one that is cut off anywhere."""
    whole = cut = ""
    for part in _FIELD.split(text):
        if part.isspace():
            whole, cut = whole + _FEW_SPACES, cut + _FEW_SPACES
        elif part in _FIELDS:
            whole, cut = whole + _FIELDS[part], cut + rf"(?:{_FIELDS[part]}|\Z)"
        else:
            whole += re.escape(part)
            cut += "".join(rf"(?:{re.escape(char)}|\Z)" for char in part)
    return whole, cut
