"""Ranges of numbers, exact in decimal, and the terminals in Lark of the numbers within them.

llguidance computes with double precision: it would round bounds beyond 2^53, and overflow its stack
where they leave 64 bits. Numbers are compared digit by digit instead. With I the integral digits of
a bound, a text is at least the bound if it has more integral digits, or as many and a larger digit
after a common prefix: for 42, `[1-9][0-9]{2,}|[5-9][0-9]|4[3-9]|42`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final

from .exact_json import MAX_EXPONENT, MAX_NUMBER_CHARS, is_number

__all__ = ["LARGEST_EXACT", "NumberRange"]

LARGEST_EXACT: Final = 2**53
"""Up to here double precision has every integer."""
_EXACT: Final = Context(prec=2 * (MAX_NUMBER_CHARS + MAX_EXPONENT))
_RUNS: Final = re.compile("0+|[1-9]")
_FRACTION: Final = r"(\.[0-9]+)?"


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

    def terminal(self, integer: bool, decimals: int | None = None) -> str:
        """Return a terminal in Lark for the numbers of the range, written without exponents.

        Args:
            integer: whether they are written as integers.
            decimals: how many digits after the decimal point may be other than 0; None for any.

        Raises:
            ValueError: the range is empty.
        """
        span = self.integers() if integer else self
        zero = Decimal(0)
        positive = span & NumberRange(low=zero)
        negative = span & NumberRange(high=zero, below_high=integer)  # -0.0 is a number of 0
        if span.low is not None and span.low >= zero:
            negative = NumberRange(zero, zero, True)
        signed = []
        if not positive.is_empty():
            signed.append(positive._magnitudes(integer, decimals))
        if not negative.is_empty():
            mirrored = NumberRange(
                _negated(negative.high),
                _negated(negative.low),
                negative.below_high,
                negative.above_low,
            )
            signed.append(f'"-" {mirrored._magnitudes(integer, decimals)}')
        if not signed:
            raise ValueError("the bounds allow no number")
        return " | ".join(signed)

    def _magnitudes(self, integer: bool, decimals: int | None) -> str:
        """Return a terminal for the numbers of a range from 0 on, without signs."""
        assert self.low is not None
        parts = [_at_least(self.low, integer, self.above_low)]
        if self.high is not None:
            parts.append(_at_most(self.high, integer, self.below_high))
        if decimals is not None and not integer:
            digits = f"[0-9]{{1,{decimals}}}0*" if decimals else "0+"
            parts.append(rf"[0-9]+(\.{digits})?")
        return "(" + " & ".join(f"/{part}/" for part in parts) + ")"


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


def _negated(number: Decimal | None) -> Decimal | None:
    return None if number is None else number.copy_negate()


def _quotient(number: Decimal, factor: Decimal, rounding: str) -> Decimal:
    n, d = number.as_integer_ratio()
    a, b = factor.as_integer_ratio()
    quotient, rest = divmod(n * b, d * a)
    return Decimal(quotient + (rounding == ROUND_CEILING and rest != 0))


def _digits(number: Decimal) -> tuple[str, str]:
    """Return the digits before and after the decimal point of a number from 0 on."""
    whole, _, fraction = f"{number.copy_abs():f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _at_least(number: Decimal, integer: bool, exclusive: bool) -> str:
    """Return a regular expression for the texts of numbers from a number on, which is positive."""
    whole, fraction = _digits(number)
    point, end = ("", "") if integer else (_short(whole) + r"\.", _FRACTION)
    parts = [f"[1-9][0-9]{{{len(whole)},}}{end}"]
    reached = not fraction and not exclusive
    leading = (whole.rstrip("0") if reached else whole) or "0"
    for place, digit in enumerate(leading):
        if digit != "9":
            rest = _any_digits(len(whole) - place - 1)
            parts.append(f"{_short(whole[:place])}[{int(digit) + 1}-9]{rest}{end}")
    if reached:  # whatever follows in place of zeros
        parts.append(_short(leading) + _any_digits(len(whole) - len(leading)) + end)
    if integer:
        return "|".join(parts)
    for run in _RUNS.finditer(fraction):
        before, digit = point + _short(fraction[: run.start()]), run[0][0]
        if digit == "0":
            parts.append(f"{before}0{{0,{len(run[0]) - 1}}}[1-9][0-9]*")
        elif digit != "9":
            parts.append(f"{before}[{int(digit) + 1}-9][0-9]*")
    if exclusive:
        parts.append(f"{point}{_short(fraction)}[0-9]*[1-9][0-9]*")
    elif fraction:
        parts.append(f"{point}{_short(fraction)}[0-9]*")
    return "|".join(parts)


def _at_most(number: Decimal, integer: bool, exclusive: bool) -> str:
    """Return a regular expression for the texts of numbers up to a number, which is positive."""
    whole, fraction = _digits(number)
    point, end = ("", "") if integer else (_short(whole) + r"\.", _FRACTION)
    parts = []
    if len(whole) > 1:
        parts.append(f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){end}")
    leading = whole.rstrip("9") or whole[0] if integer else whole
    for place, digit in enumerate(leading):
        least = 1 if place == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            rest = _any_digits(len(whole) - place - 1)
            parts.append(f"{_short(whole[:place])}[{least}-{int(digit) - 1}]{rest}{end}")
    if integer:  # whatever follows in place of nines
        return "|".join((*parts, _short(leading) + _any_digits(len(whole) - len(leading))))
    if not fraction:
        return "|".join(parts if exclusive else [*parts, rf"{_short(whole)}(\.0+)?"])
    parts.append(_short(whole))
    for run in _RUNS.finditer(fraction):
        before, digit = point + _short(fraction[: run.start()]), run[0][0]
        if digit != "0":
            parts.append(f"{before}[0-{int(digit) - 1}][0-9]*")
        if run.end() < len(fraction):  # fewer digits are less, as the last one is not 0
            parts.append(f"{before}{digit}{{1,{len(run[0])}}}")
    if not exclusive:
        parts.append(f"{point}{_short(fraction)}0*")
    return "|".join(parts)


def _any_digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _short(digits: str) -> str:
    """Return digits as a regular expression, in which repeated ones take little place."""
    return re.sub(r"(.)\1{4,}", lambda run: f"{run[1]}{{{len(run[0])}}}", digits)
