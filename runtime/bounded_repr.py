"""Values for error messages, cut to a bounded length."""

from __future__ import annotations

import reprlib

_DEFAULT_LENGTH = 200
_MOST_BITS = 256


class _Repr(reprlib.Repr):
    """`reprlib` with limits, also for integers that Python refuses to print."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 12
        self.maxstring = self.maxother = _DEFAULT_LENGTH

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _MOST_BITS:
            return f"<integer of {x.bit_length()} bits>"
        return repr(x)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: self.maxstring])


_REPR = _Repr()


def bounded_repr(value: object, length: int = _DEFAULT_LENGTH) -> str:
    """Return `repr(value)`, cut to `length` characters. Never raises.

    Large containers, long strings and deep nesting are cut before they are formatted, so the time
    does not depend on the size of the value.
    """
    try:
        text = _REPR.repr(value)
    except Exception:  # any __repr__ may raise
        text = f"<{type(value).__name__}>"
    return bounded_text(text, length)


def bounded_text(text: object, length: int = _DEFAULT_LENGTH) -> str:
    """Return `str(text)`, cut to `length` characters."""
    shown = str(text)
    return shown if len(shown) <= length else shown[: length - 3] + "..."
