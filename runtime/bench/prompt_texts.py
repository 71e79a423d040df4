"""Texts that benchmarks of speculation continue: source code of this package."""

from __future__ import annotations

import inspect
from typing import Literal

from .. import request
from ..execution import inputs

__all__ = ["KINDS", "REPEATED", "TextKind", "prompt_text"]

TextKind = Literal["edit", "code", "free"]
KINDS: tuple[TextKind, ...] = ("edit", "code", "free")
REPEATED = 40
"""Characters of the beginning that an `edit` prompt has once more."""
_LENGTH, _STRIDE = 700, 300
_BEGINNINGS = (
    "def main(",
    "class Stack:\n    def __init__(",
    "import os\nimport ",
    "for name in ",
    "with open(path) as ",
    "try:\n    ",
    "    if self.",
    "    return ",
)


def prompt_text(kind: TextKind, index: int) -> str:
    """Return the text with a number, which begins again after some dozens of texts.

    `code` is an excerpt of source code, `edit` an excerpt twice and the beginning of it once more,
    and `free` the first few tokens of a line.
    """
    if kind == "free":
        return _BEGINNINGS[index % len(_BEGINNINGS)]
    source = inspect.getsource(inputs) + inspect.getsource(request)
    begin = index * _STRIDE % (len(source) - _LENGTH)
    text = source[begin : begin + _LENGTH]
    return text if kind == "code" else 2 * text + text[:REPEATED]
