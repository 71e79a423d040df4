"""Checks of the fields of configurations and the arguments of public methods. No torch.

Each error has the field or parameter in `field`, and names it, the value and what is allowed. It is
a `RequestError`, or a `ConfigError` for configurations.

The types of a configuration's fields say what is allowed, for example
`Annotated[int, Range(1, 64)] | None`. The checks (`check_fields`), the flags of commands, the
limits in the OpenAPI document and docs/configuration.md follow from them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Self, TypeVar

from .bounded_repr import bounded_repr
from .errors import ConfigError, RequestError

T = TypeVar("T")

MAX_PRIORITY = (1 << 63) - 1
MAX_COUNT = 1 << 40
"""Most tokens or rows that a question can be about."""


def check_integer(field: str, value: object, low: int, high: int, why: str = "") -> int:
    """Return an integer, also one of NumPy, from `low` to `high`; `why` explains the range."""
    if not isinstance(value, bool) and isinstance(value, Integral) and low <= int(value) <= high:
        return int(value)
    raise _refusal(field, value, f"an integer from {low} to {high}{why}")


def check_number(field: str, value: object, low: float, high: float) -> float:
    """Return a finite number from `low` to `high`."""
    if not isinstance(value, bool) and isinstance(value, Real):
        number: Any = value  # an integer may exceed a float
        if low <= number <= high:
            return float(number)
    raise _refusal(field, value, f"a number from {low:g} to {high:g}")


def check_type(field: str, value: T, kind: Any, allowed: str) -> T:
    """Return a value of a type, or of one of several; `allowed` describes it."""
    if isinstance(value, kind):
        return value
    raise _refusal(field, value, allowed)


def check_config(field: str, value: object, kind: type) -> None:
    """Raise `ConfigError` for what is neither a configuration of this type nor None."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(
            f"{field} must be {kind.__name__}(...) or None, not {bounded_repr(value, 100)}",
            field=field,
        )


def _refusal(field: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{field} must be {allowed}, not {bounded_repr(value, 100)}", field=field)


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number, or of the length of a text, a sequence or a mapping."""

    low: float
    high: float
    above: bool = False
    """Whether `low` itself is left out."""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def text(self, number: Callable[[float], str] = str) -> str:
        """Return the range in words: `1 to 64`, or `above 0 and up to 1`."""
        low, high = number(self.low), number(self.high)
        return f"above {low} and up to {high}" if self.above else f"{low} to {high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a field may have, read from its type."""

    kind: type
    """`int`, `float`, `bool` or `str`; `tuple`, `Sequence` or `Mapping`."""
    optional: bool
    """Whether None is allowed."""
    range: Range | None = None
    choices: tuple[str, ...] = ()
    key: Allowed | None = None
    """The keys of a mapping."""
    entry: Allowed | None = None
    """The entries of a sequence, or the values of a mapping."""

    @classmethod
    def of(cls, hint: Any, *, range: Range | None = None, optional: bool = False) -> Self | None:
        """Return what a type allows; None for a type that the code of its class checks."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            return cls.of(arguments[0], range=arguments[1], optional=optional)
        if origin in (typing.Union, types.UnionType):
            others = [argument for argument in arguments if argument is not types.NoneType]
            return cls.of(others[0], optional=True) if len(others) == 1 else None
        if origin is Literal:
            return cls(kind=str, optional=optional, choices=arguments)
        if origin is None:
            known = hint in (int, float, bool, str)
            return cls(kind=hint, optional=optional, range=range) if known else None
        return cls(
            kind=origin,
            optional=optional,
            range=range,
            key=cls.of(arguments[0]) if origin is Mapping else None,
            entry=cls.of(arguments[1 if origin is Mapping else 0]),
        )

    def __str__(self) -> str:
        length = "" if self.range is None else self.range.text()
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        if self.kind is bool:
            return "True, False or None" if self.optional else "True or False"
        if self.kind is str:
            return f"a string of {length} characters" if length else "a string"
        if self.kind in (int, float):
            name = "an integer" if self.kind is int else "a number"
            number = self.range and self.range.text("{:.12g}".format if self.kind is float else str)
            return f"{name} {'' if self.range.above else 'from '}{number}" if self.range else name
        return f"a {self.kind.__name__.lower()}{f' of {length} entries' if length else ''}"

    @property
    def limits(self) -> str:
        """The range for readers, such as `0 to 2^20`; empty without one."""
        each = "" if self.entry is None else self.entry.limits
        if self.range is None:
            return each
        unit = "" if self.kind in (int, float) else " entries" if self.entry else " characters"
        return f"{self.range.text(_power)}{unit}{each and ', each '}{each}"

    def check(
        self, field: str, value: Any, error: type[RequestError | ConfigError], what: str = ""
    ) -> Any:
        """Return a value; integers given for real numbers as floats, sequences as tuples.

        Raises `error`, which names the field, or `what` the value is.
        """
        if value is None and self.optional:
            return None
        what = what or field
        kind = (int, float) if self.kind is float else self.kind
        valid = isinstance(value, kind) and isinstance(value, bool) == (self.kind is bool)
        if valid and self.kind is Sequence:
            valid = not isinstance(value, str | bytes | bytearray)
        if valid and self.choices:
            valid = value in self.choices
        size = None if not valid or self.kind in (int, float, bool) else len(value)
        if valid and self.range is not None:
            valid = (value if size is None else size) in self.range  # NaN is not
        if not valid:
            shown = f"one of {size}" if size and self.entry else bounded_repr(value, 100)
            raise error(f"{what} must be {self}, not {shown}", field=field)
        if self.key is not None and self.entry is not None:
            for key, entry in value.items():
                self.key.check(field, key, error, f"a key of {what}")
                self.entry.check(field, entry, error, f"{what}[{bounded_repr(key)}]")
        elif self.entry is not None:
            if not self.entry._has_all(value):
                for entry in value:
                    self.entry.check(field, entry, error, f"each of {what}")
            return tuple(value)
        return float(value) if self.kind is float else value

    def _has_all(self, values: Sequence[Any]) -> bool:
        """Whether all values are integers of the range: hundreds of thousands are quick to see."""
        if self.kind is not int or self.range is None or {*map(type, values)} - {int}:
            return False
        return not values or (min(values) in self.range and max(values) in self.range)


def _power(number: float) -> str:
    """Return a number in words, a large one as a power."""
    for base, least in ((2, 1 << 16), (10, 10**6)):
        for offset, end in ((0, ""), (1, " - 1")):
            power = round(math.log(max(number + offset, least), base))
            if base**power == number + offset:
                return f"{base}^{power}{end}"
    return f"{number:g}" if isinstance(number, float) else str(number)


@functools.cache
def allowed_values(kind: type) -> dict[str, Allowed]:
    """Return what each field of a dataclass may have, except for fields that its code checks."""
    hints = typing.get_type_hints(kind, include_extras=True)
    allowed = {field.name: Allowed.of(hints[field.name]) for field in dataclasses.fields(kind)}
    return {name: found for name, found in allowed.items() if found is not None}


def check_fields(config: Any, error: type[RequestError | ConfigError], within: str = "") -> None:
    """Check the fields of a dataclass that is being constructed by their types, and store them as
    `Allowed.check` returns them. Raises `error`, which names `within`, the field that the object is
    the value of, first.
    """
    for name, allowed in allowed_values(config.__class__).items():
        value = getattr(config, name)
        checked = allowed.check(within or name, value, error, f"{within} {name}".lstrip())
        if checked is not value:
            object.__setattr__(config, name, checked)


def from_mapping(
    kind: type[T], given: Mapping[Any, Any], error: type[RequestError | ConfigError], field: str
) -> T:
    """Return a dataclass with the fields of a mapping; `field` names the mapping in errors."""
    names = [known.name for known in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            raise error(
                f"{field} has no field {bounded_repr(name)}: use {', '.join(names)}", field=field
            )
    return kind(**given)


def described_fields(configured: type) -> dict[str, str]:
    """Return the description of each field from the Attributes section of a class's docstring.

    Raises `ValueError` unless it lists each field once, in the order of the class.
    """
    _, _, rest = inspect.getdoc(configured).partition("\nAttributes:\n")  # type: ignore[union-attr]
    section = textwrap.dedent(re.split(r"^(?=\S)", rest, maxsplit=1, flags=re.MULTILINE)[0])
    entries = re.findall(r"^(\w+): (.*(?:\n[ \n].*)*)", section, flags=re.MULTILINE)
    names = [field.name for field in dataclasses.fields(configured)]
    described = [name for name, _ in entries]
    if described != names:
        wrong = sorted({*names} ^ {*described}) or ["the order"]
        raise ValueError(
            f"the section Attributes of {configured.__name__}'s docstring and its fields differ in"
            f" {', '.join(wrong)}: describe each field there, in the order of the class"
        )
    return {name: " ".join(text.split()) for name, text in entries}
