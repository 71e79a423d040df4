"""The texts that a regular expression matches, if they are few."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["matching_texts"]

_MAX_STEPS: Final = 1000
"""Bytes that are tried for a pattern, some milliseconds."""
_MAX_BRANCHES: Final = 64


def matching_texts(pattern: str, most: int) -> list[str] | None:
    """Return the texts in which a pattern is found; None if they are more than `most`, or many.

    An invalid pattern has None.
    """
    from llguidance import LLMatcher  # an optional package

    schema = json.dumps({"type": "string", "pattern": pattern})
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_json_schema(schema), log_level=0)
    if matcher.is_error():
        return [] if "Regex is empty" in matcher.get_error() else None
    found: set[str] = set()
    steps, open_ = 0, [(matcher, b"")]
    while open_:
        matcher, begun = open_.pop()
        if matcher.is_accepting():
            try:
                found.add(json.loads(begun))
            except ValueError:
                return None
            if len(found) > most:
                return None
            continue
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(packed, bitorder="little")[:256])
        steps += len(allowed)
        if len(allowed) > _MAX_BRANCHES or steps > _MAX_STEPS:
            return None
        for byte in allowed.tolist():
            longer = matcher.deep_copy()
            longer.consume_token(byte)
            open_.append((longer, begun + bytes([byte])))
    return sorted(found)


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
