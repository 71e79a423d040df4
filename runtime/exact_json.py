"""JSON whose numbers keep their digits: a schema with 9007199254740993 must not ask for ...992.

Numbers with a fraction or an exponent are `Decimal`, of which `str` is again a number in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final, NoReturn, TypeGuard

from .bounded_repr import bounded_text

__all__ = [
    "JsonFloat",
    "LARGEST_EXACT",
    "MAX_EXPONENT",
    "MAX_NUMBER_CHARS",
    "NumberRange",
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


# Ranges of numbers, exact in decimal.

LARGEST_EXACT: Final = 2**53

"""Up to here double precision has every integer."""

_EXACT: Final = Context(prec=2 * (MAX_NUMBER_CHARS + MAX_EXPONENT))


@dataclass(frozen=True)
class NumberRange:
    """The numbers that the bounds of a schema allow; None means unbounded.

    Attributes:
        low: the least number.
        high: the largest number.
        above_low: whether `low` itself is excluded.
        below_high: whether `high` itself is excluded.
    """

    low: Decimal | None = None
    high: Decimal | None = None
    above_low: bool = False
    below_high: bool = False

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> NumberRange:
        """Return the range of a schema, also if its exclusive bounds are bools as in draft 4."""
        low, above = _bound(schema, "minimum", "exclusiveMinimum", 1)
        high, below = _bound(schema, "maximum", "exclusiveMaximum", -1)
        return cls(low, high, above, below)

    def __and__(self, other: NumberRange) -> NumberRange:
        """Return the numbers of both."""
        lows = [(r.low, r.above_low) for r in (self, other) if r.low is not None]
        highs = [(r.high, not r.below_high) for r in (self, other) if r.high is not None]
        low, above = max(lows, default=(None, False))
        high, reached = min(highs, default=(None, True))
        return NumberRange(low, high, above, not reached)

    def __contains__(self, number: int | Decimal) -> bool:
        below = self.low is not None and (
            number < self.low or (self.above_low and number == self.low)
        )
        above = self.high is not None and (
            number > self.high or (self.below_high and number == self.high)
        )
        return not below and not above

    def integers(self) -> NumberRange:
        """Return the range from the least to the largest integer of this one."""
        low = high = None
        if self.low is not None:
            low = self.low.to_integral_value(ROUND_CEILING, _EXACT)
            low = _EXACT.add(low, self.above_low and low == self.low)
        if self.high is not None:
            high = self.high.to_integral_value(ROUND_FLOOR, _EXACT)
            high = _EXACT.subtract(high, self.below_high and high == self.high)
        return NumberRange(low, high)

    def is_empty(self) -> bool:
        """Whether it has no number."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (
            self.low == self.high and (self.above_low or self.below_high)
        )

    def has_multiple(self, factor: Decimal) -> bool:
        """Whether a multiple of `factor`, which is above 0, is in the range."""
        if self.low is None or self.high is None:
            return True
        scaled = NumberRange(
            _quotient(self.low, factor, ROUND_CEILING),
            _quotient(self.high, factor, ROUND_FLOOR),
        )
        if scaled.is_empty():
            return False
        assert scaled.low is not None
        assert scaled.high is not None
        least, most = int(scaled.low), int(scaled.high)
        least += _EXACT.multiply(Decimal(least), factor) not in self
        most -= _EXACT.multiply(Decimal(most), factor) not in self
        return least <= most


def _bound(
    schema: Mapping[str, Any], inclusive: str, exclusive: str, sign: int
) -> tuple[Decimal | None, bool]:
    """Return the tighter bound, and whether it is exclusive. `sign` is 1 for lower bounds."""
    bound, limit = schema.get(inclusive), schema.get(exclusive)
    found = Decimal(bound) if is_number(bound) else None
    if isinstance(limit, bool):
        return found, limit and found is not None
    if is_number(limit) and (found is None or sign * (Decimal(limit) - found) >= 0):
        return Decimal(limit), True
    return found, False


def _quotient(number: Decimal, factor: Decimal, rounding: str) -> Decimal:
    n, d = number.as_integer_ratio()
    a, b = factor.as_integer_ratio()
    quotient, rest = divmod(n * b, d * a)
    return Decimal(quotient + (rounding == ROUND_CEILING and rest != 0))
