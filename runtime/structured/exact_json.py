"""JSON whose numbers keep their digits: a schema with 9007199254740993 must not ask for ...992.

Numbers with a fraction or an exponent are `Decimal`, of which `str` is again a number in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, NoReturn, TypeGuard

from ..bounded_repr import bounded_text

__all__ = [
    "MAX_EXPONENT",
    "MAX_NUMBER_CHARS",
    "JsonFloat",
    "decode_at",
    "dumps",
    "is_number",
    "loads",
]

MAX_NUMBER_CHARS: Final = 512
"""Of a number as it is written. The longest numbers of code generators have 309 digits."""
MAX_EXPONENT: Final = 400
"""Of a number in scientific notation, of either sign; double precision ends at 308 and -324."""
_MAX_BITS: Final = 4 * MAX_NUMBER_CHARS


class JsonFloat(float):
    """A number of a request, for code that expects a float, with its text."""

    __slots__ = ("literal",)
    literal: str

    def __new__(cls, literal: str) -> JsonFloat:
        """Return the number that `literal` writes; out of range it is infinite."""
        number = super().__new__(cls, literal)
        number.literal = literal
        return number


def is_number(value: object) -> TypeGuard[int | Decimal]:
    """Whether a parsed value is a number of JSON, which a bool is not."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def loads(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is invalid, or a number is too long or too large.
    """
    return _DECODER.decode(text)


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON text that begins at `start`; return its value and its end.

    Raises:
        ValueError: as `loads`.
    """
    return _DECODER.raw_decode(text, start)


def dumps(value: object) -> str:
    """Return the text of mappings, sequences and plain values, with the digits of each number.

    Raises:
        ValueError: a number is NaN, infinite, too long or too large.
        TypeError: a value has no form in JSON.
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise ValueError(f"a number has more than {MAX_NUMBER_CHARS} digits")
        return _checked(int.__repr__(value))
    if isinstance(value, float | Decimal):
        return _number_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)}: {dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(dumps, value)) + "]"
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")


def _key(key: object) -> str:
    if isinstance(key, str):
        return dumps(key)
    if key is None or isinstance(key, bool | int | float):  # as the module json writes these
        return f'"{dumps(key)}"'
    raise TypeError(f"a key of type {type(key).__name__} has no form in JSON")


def _number_text(value: float | Decimal) -> str:
    if isinstance(value, JsonFloat):
        return str(_decimal(value.literal))
    number = value if isinstance(value, Decimal) else Decimal(float.__repr__(value))
    if not number.is_finite():
        raise ValueError(f"{number} is not a number in JSON")
    return str(_decimal(str(number)))


def _integer(literal: str) -> int:
    return int(_checked(literal))


def _decimal(literal: str) -> Decimal:
    _, _, exponent = _checked(literal).lower().partition("e")
    number = Decimal(literal) if len(exponent) < 8 else None
    if number is None or not -MAX_EXPONENT <= number.adjusted() <= MAX_EXPONENT:
        raise ValueError(
            f"the number {bounded_text(literal)} is out of range: allowed are exponents of"
            f" -{MAX_EXPONENT} to {MAX_EXPONENT}"
        )
    return number


def _checked(literal: str) -> str:
    if len(literal) > MAX_NUMBER_CHARS:
        raise ValueError(
            f"the number {literal[:20]}... has {len(literal)} characters; allowed are"
            f" {MAX_NUMBER_CHARS}"
        )
    return literal


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


_DECODER: Final = json.JSONDecoder(
    parse_int=_integer, parse_float=_decimal, parse_constant=_refuse_constant
)
