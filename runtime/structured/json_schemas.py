"""JSON schemas for llguidance. Those that it would get wrong, or never finish, are refused.

- A `format` that JSON Schema does not specify, and `"uniqueItems": false` for example, say nothing
  about which texts are valid, and `x-guidance` is an option of llguidance, not of JSON Schema: they
  are left out.
- Names of properties can be written with escapes, such as `"\\u0061"` for `"a"`. llguidance treats
  an escaped name as a different one. So where a schema also allows other properties, `\\u` escapes
  are forbidden, and with them control characters.
- Names of additional properties can be repeated, each of which llguidance counts.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple

from ..bounded_repr import bounded_repr

__all__ = ["PreparedSchema", "prepared_schema"]

MAX_FORCED_CHARS: Final = 4096
"""Of `const`, a value of `enum` or a name: each step tokenises what is left of a forced text."""
MAX_FACTOR, MAX_DECIMALS = 10_000, 18
"""Of `multipleOf`: its digits, to which the automaton counts, and how many of them are decimals."""
MAX_COMMON_FACTOR: Final = 100_000
"""Of all `multipleOf` of a schema: values may have to be multiples of several of them."""

_SPECIFIED: Final = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""Formats of JSON Schema 2020-12, Validation, section 7.3."""
_VALUES: Final = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords whose values are no schemas."""
_NAMED: Final = frozenset(
    (
        *("properties", "patternProperties", "dependentSchemas", "dependencies"),
        *("definitions", "$defs"),
    )
)
"""Keywords whose values are schemas by name."""
_OPTIONS: Final = "x-guidance"
_DEMANDS_NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
"""Keywords that llguidance lacks, and their values that every text follows."""


class PreparedSchema(NamedTuple):
    """A schema to be compiled."""

    text: str
    options: dict[str, Any]
    """Of llguidance."""


def prepared_schema(source: str) -> PreparedSchema:
    """Return a JSON schema for llguidance.

    Raises:
        ValueError: it is no JSON text, or outputs could be invalid or take too long.
    """
    schema = json.loads(source)
    walk = _Walk()
    walk.visit(schema)
    walk.check_factors()
    text = json.dumps(schema, ensure_ascii=False) if walk.changed else source
    return PreparedSchema(text, {"json_allowed_escapes": 'nrbtf\\"'} if walk.has_open_names else {})


class _Walk:
    """Changes a schema and those in it, and checks them."""

    def __init__(self) -> None:
        self.changed = False
        self.has_open_names = False
        """Whether an object may have properties besides the named ones."""
        self._factors: list[Fraction] = []

    def visit(self, schema: Any) -> None:
        """Visit a schema, or a list of these. Raises `ValueError`."""
        if isinstance(schema, list):
            for item in schema:
                self.visit(item)
        if not isinstance(schema, dict):
            return
        for keyword in [k for k, value in schema.items() if _is_ignored(k, value)]:
            del schema[keyword]
            self.changed = True
        is_closed = schema.get("additionalProperties") is False
        named, patterns = schema.get("properties"), schema.get("patternProperties")
        self.has_open_names |= bool(patterns) or (bool(named) and not is_closed)
        _check_count(schema, is_closed and not patterns)
        self._add_factor(schema.get("multipleOf"))
        for keyword, value in schema.items():
            _check_texts(keyword, value)
            if keyword in _NAMED and isinstance(value, dict):
                value = list(value.values())
            if keyword not in _VALUES:
                self.visit(value)

    def check_factors(self) -> None:
        """Raise `ValueError` if the least common multiple of all `multipleOf` is too large."""
        scale = math.lcm(*(factor.denominator for factor in self._factors))
        common = math.lcm(*(int(factor * scale) for factor in self._factors))
        if common > MAX_COMMON_FACTOR:
            raise ValueError(
                "the least common multiple of all values of multipleOf has the digits"
                f" {bounded_repr(common)}; allowed are {MAX_COMMON_FACTOR}"
            )

    def _add_factor(self, factor: Any) -> None:
        if not isinstance(factor, int | float) or isinstance(factor, bool):
            return
        number = Decimal(str(factor)).normalize()
        _, digits, exponent = number.as_tuple()
        if (
            not isinstance(exponent, int) or not number
        ):  # NaN, infinite or 0, which llguidance refuses
            return
        too_many = len(digits) + max(exponent, 0) > len(str(MAX_FACTOR)) or exponent < -MAX_DECIMALS
        if too_many or int("".join(map(str, digits))) * 10 ** max(exponent, 0) > MAX_FACTOR:
            raise ValueError(
                f"multipleOf is {bounded_repr(factor)}; written without its decimal point it may be"
                f" at most {MAX_FACTOR}, with at most {MAX_DECIMALS} decimals"
            )
        self._factors.append(Fraction(number))


def _is_ignored(keyword: str, value: Any) -> bool:
    """Return whether a keyword says nothing about which texts are valid."""
    if keyword == "format":
        return isinstance(value, str) and value not in _SPECIFIED
    return keyword == _OPTIONS or value in _DEMANDS_NOTHING.get(keyword, ())


def _check_count(schema: dict[str, Any], is_closed: bool) -> None:
    """Refuse a number of properties that llguidance counts wrongly."""
    least, required = schema.get("minProperties"), schema.get("required")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, known) and not is_closed:
        raise ValueError(
            f"minProperties is {least}, which repeated names of other properties could reach: list"
            " the names under required, or forbid others with additionalProperties: false"
        )


def _check_texts(keyword: str, value: Any) -> None:
    """Refuse a keyword with texts that are too long to be forced."""
    if keyword == "const" or keyword in _NAMED:
        texts = [json.dumps(value)] if keyword == "const" else list(value)
    elif keyword in ("enum", "required") and isinstance(value, list):
        texts = [json.dumps(item) for item in value]
    else:
        return
    longest = max(map(len, texts), default=0)
    if longest > MAX_FORCED_CHARS:
        raise ValueError(
            f"{keyword} has a text of {longest} characters; allowed are {MAX_FORCED_CHARS}"
        )
