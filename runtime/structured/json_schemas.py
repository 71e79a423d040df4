"""JSON schemas for llguidance. Those that it would get wrong, or never finish, are refused.

- A `format` that JSON Schema does not specify, and `"uniqueItems": false` for example, say nothing
  about which texts are valid, and `x-guidance` is an option of llguidance, not of JSON Schema: they
  are left out.
- Names of properties can be written with escapes, such as `"\\u0061"` for `"a"`. llguidance treats
  an escaped name as a different one. So where a schema also allows other properties, `\\u` escapes
  are forbidden, and with them control characters.
- Names of additional properties can be repeated, each of which llguidance counts.
- llguidance computes with double precision. Bounds are narrowed to numbers that it computes with
  exactly; a schema that needs others is refused.
- A pattern that only some named properties match leaves llguidance without a name to go on with. It
  becomes these properties.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..bounded_repr import bounded_repr, bounded_text
from ..exact_json import LARGEST_EXACT, NumberRange, dumps, is_number, loads

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["COMPACT", "PreparedSchema", "prepared_schema"]

COMPACT: Final[dict[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""White space between the parts of a JSON text: a space, or none, after `,` and `:`."""

MAX_FORCED_CHARS: Final = 4096
"""Of `const`, a value of `enum` or a name: each step tokenises what is left of a forced text."""
MAX_FACTOR, MAX_DECIMALS = 10_000, 18
"""Of `multipleOf`: its digits, to which the automaton counts, and how many of them are decimals."""
MAX_COMMON_FACTOR: Final = 100_000
"""Of all `multipleOf` of a schema: values may have to be multiples of several of them."""
MAX_COUNT: Final = 2**31 - 1
"""Of items, characters and properties. No output has more."""
MAX_PATTERNS: Final = 100
"""Of names of properties; each takes some milliseconds."""
_MAX_STEPS: Final = 1000
"""Bytes that are tried for a pattern, some milliseconds."""
_MAX_BRANCHES: Final = 64
MAX_BOUND_DIGITS: Final = 100
"""Of a bound of numbers."""

_TYPES: Final = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LEAST: Final = ("minItems", "minLength", "minProperties")
_MOST: Final = ("maxItems", "maxLength", "maxProperties")
_SWITCHES: Final = ("exclusiveMinimum", "exclusiveMaximum")
"""Bounds that are bools in draft 4."""
_NOTHING: Final = NumberRange(Decimal(1), Decimal(0))
_UNIVERSAL: Final = frozenset(("", "^", "$", ".*", "^.*", ".*$", "^.*$", "^(.*)$", "[\\s\\S]*"))
"""Patterns that all names match."""
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
_COMBINING: Final = frozenset(
    (
        *("allOf", "patternProperties", "if", "then", "else", "not", "contains", "propertyNames"),
        *("dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords with which a value may have to follow several schemas."""
_REFERRING: Final = frozenset(("$ref", "anyOf", "oneOf"))
"""Keywords with which it may where the schema has other keywords too."""
_ANNOTATIONS: Final = frozenset(
    (
        *("title", "description", "default", "examples", "$comment", "$schema", "$id", "$anchor"),
        *("$defs", "definitions", "deprecated", "readOnly", "writeOnly"),
    )
)
"""Keywords that demand nothing of a value themselves."""
_EDGE: Final = Decimal("1e-6")
"""Between a range and an integer that it excludes, where llguidance would allow the integer."""
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


def prepared_schema(source: str, layout: Mapping[str, Any] = COMPACT) -> PreparedSchema:
    """Return a JSON schema for llguidance.

    Args:
        source: the schema.
        layout: options of llguidance: how the parts of a text are separated.

    Raises:
        ValueError: it is no JSON text, or outputs could be invalid or take too long.
    """
    schema = loads(source)
    walk = _Walk()
    walk.visit(schema)
    walk.check_numbers()
    walk.name_patterns()
    escapes = {"json_allowed_escapes": 'nrbtf\\"'} if walk.has_open_names else {}
    return PreparedSchema(dumps(schema) if walk.changed else source, {**layout, **escapes})


class _Walk:
    """Changes a schema and those in it, and checks them."""

    def __init__(self) -> None:
        self.changed = False
        self.has_open_names = False
        """Whether an object may have properties besides the named ones."""
        self._combines = False
        """Whether a value may have to follow several schemas."""
        self._factors: list[Fraction] = []
        self._names: set[str] = set()
        """Of properties."""
        self._patterned: list[dict[str, Any]] = []
        self._spans: list[NumberRange] = []

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
        self._names.update(named if isinstance(named, dict) else ())
        if isinstance(patterns, dict) and isinstance(named, dict | None):
            self._patterned.append(schema)
        ways = schema.keys() & _REFERRING
        others = schema.keys() - _ANNOTATIONS
        self._combines |= bool(schema.keys() & _COMBINING or (ways and len(others) > 1))
        self._bound_counts(schema)
        _check_count(schema, is_closed and not patterns)
        self._add_factor(schema.get("multipleOf"))
        self._bound_numbers(schema)
        _check_constants(schema)
        for keyword, value in schema.items():
            _check_texts(keyword, value)
            if keyword in _NAMED and isinstance(value, dict):
                value = list(value.values())
            if keyword not in _VALUES:
                self.visit(value)

    def check_numbers(self) -> None:
        """Refuse factors and bounds that llguidance would get wrong together."""
        scale = math.lcm(*(factor.denominator for factor in self._factors))
        common = math.lcm(*(int(factor * scale) for factor in self._factors))
        if common > MAX_COMMON_FACTOR:
            raise ValueError(
                "the least common multiple of all values of multipleOf has the digits"
                f" {bounded_repr(common)}; allowed are {MAX_COMMON_FACTOR}"
            )
        if self._combines:
            _check_together(self._spans, bool(self._factors))

    def name_patterns(self) -> None:
        """Replace patterns of property names that match only names of the schema."""
        count = sum(len(schema["patternProperties"]) for schema in self._patterned)
        if count > MAX_PATTERNS:
            raise ValueError(
                f"patternProperties has {count} patterns in all; allowed are {MAX_PATTERNS}"
            )
        for schema in self._patterned:
            patterns: dict[str, Any] = schema["patternProperties"]
            named: dict[str, Any] = schema.setdefault("properties", {})
            for pattern, inner in list(patterns.items()):
                if inner is False and pattern in _UNIVERSAL:
                    schema["additionalProperties"] = False
                    names: list[str] | None = list(named)
                else:
                    names = _matching_texts(pattern, len(self._names))
                if names is None:
                    continue
                self.changed = True
                del patterns[pattern]
                for name in names:
                    given = named.get(name, True)
                    combined = inner is not False and given is not True
                    named[name] = {"allOf": [given, inner]} if combined else inner
            for keyword in ("properties", "patternProperties"):
                if not schema[keyword]:
                    del schema[keyword]

    def _add_factor(self, factor: Any) -> None:
        if not is_number(factor) or not factor:  # 0 is refused by llguidance
            return
        number = Decimal(factor).normalize()
        _, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)
        too_many = len(digits) + max(exponent, 0) > len(str(MAX_FACTOR)) or exponent < -MAX_DECIMALS
        if too_many or int("".join(map(str, digits))) * 10 ** max(exponent, 0) > MAX_FACTOR:
            raise ValueError(
                f"multipleOf is {_shown(factor)}; written without its decimal point"
                f" it may be at most {MAX_FACTOR}, with at most {MAX_DECIMALS} decimals"
            )
        self._factors.append(Fraction(number))

    def _bound_counts(self, schema: dict[str, Any]) -> None:
        """Write counts as integers, and leave out those that no output reaches."""
        for keyword in _LEAST + _MOST:
            count = schema.get(keyword)
            if not is_number(count) or count != int(count):
                continue
            if count > MAX_COUNT and keyword in _LEAST:
                raise ValueError(f"{keyword} is {_shown(count)}; allowed are up to {MAX_COUNT}")
            self.changed |= not isinstance(count, int) or count > MAX_COUNT
            schema[keyword] = int(count)
            if count > MAX_COUNT:
                del schema[keyword]

    def _bound_numbers(self, schema: dict[str, Any]) -> None:
        """Write the bounds of numbers as llguidance reads them; note which it would get wrong."""
        factor = schema.get("multipleOf")
        given = [keyword for keyword in _BOUNDS if keyword in schema]
        numbers = [
            is_number(schema[k]) or (k in _SWITCHES and schema[k] in (True, False)) for k in given
        ]
        if not all(numbers):
            return  # no schema, or llguidance refuses it
        integer = _is_integer(schema)
        if integer and is_number(factor) and factor:  # integers are multiples of its numerator
            schema["multipleOf"] = factor = abs(Fraction(factor).numerator)
            self.changed = True
            if factor == 1:
                del schema["multipleOf"]
        span = NumberRange.of(schema)
        if integer:
            span = span.integers()
        has_multiple = True
        if is_number(factor) and factor:
            has_multiple = span.has_multiple(Decimal(factor).copy_abs())
        if span.is_empty() or not has_multiple:
            span = _NOTHING
        elif _types_of(schema) & {"number", "integer"}:
            span = _narrowed(schema, span)
        if given:
            _check_digits(schema)
            _check_together([span], bool(factor))
            self.changed |= _set_bounds(schema, span)
            self._spans.append(span)


def _is_integer(schema: dict[str, Any]) -> bool:
    """Whether all numbers that the type of a schema allows are integers."""
    types = _types_of(schema)
    return "integer" in types and "number" not in types


def _types_of(schema: Mapping[str, Any]) -> Set[str]:
    """Return the types that a schema names, or all of them."""
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list) and all(isinstance(name, str) for name in types):
        return set(types)
    return _TYPES


def _narrowed(schema: dict[str, Any], span: NumberRange) -> NumberRange:
    """Return the part of a range in which llguidance computes exactly."""
    bounds = [bound for bound in (span.low, span.high) if bound is not None]
    if all(bound == int(bound) and abs(bound) <= LARGEST_EXACT for bound in bounds):
        return span
    span &= NumberRange(Decimal(-LARGEST_EXACT), Decimal(LARGEST_EXACT))
    if _meet_badly([span]):
        low, high = span.low, span.high
        assert low is not None
        assert high is not None
        low = low + _EDGE if span.above_low and low == int(low) else low
        high = high - _EDGE if span.below_high and high == int(high) else high
        span &= NumberRange(low, high)
    if span.is_empty() or not (_is_plain(span.low) and _is_plain(span.high)):
        shown = " and ".join(f"{k} {_shown(schema[k])}" for k in _BOUNDS if k in schema)
        raise ValueError(
            f"{shown} needs numbers beyond 2^53, or with more digits than double precision"
        )
    return span


def _set_bounds(schema: dict[str, Any], span: NumberRange) -> bool:
    """Write a range into a schema; return whether that changes it."""
    before = {keyword: schema.pop(keyword) for keyword in _BOUNDS if keyword in schema}
    for bound, exclusive, keywords in (
        (span.low, span.above_low, ("minimum", "exclusiveMinimum")),
        (span.high, span.below_high, ("maximum", "exclusiveMaximum")),
    ):
        if bound is not None:
            schema[keywords[exclusive]] = int(bound) if bound == int(bound) else bound
    after = {keyword: schema[keyword] for keyword in _BOUNDS if keyword in schema}
    return dumps(before) != dumps(after)


def _check_together(spans: list[NumberRange], has_factor: bool) -> None:
    """Refuse bounds that llguidance would get wrong together, or with a `multipleOf`."""
    ends = [end for span in spans for end in (span.low, span.high)]
    if has_factor and any(end is not None and end != int(end) for end in ends):
        raise ValueError("multipleOf cannot be used with bounds that have a fraction")
    if _meet_badly(spans):
        raise ValueError(
            "a bound that excludes an integer cannot be used with one that has a fraction and the"
            " same integer part"
        )


def _meet_badly(spans: list[NumberRange]) -> bool:
    """Whether llguidance would allow an integer that some bounds exclude.

    It does so where a range leaves out an integer at one end, and has no other.
    """
    lows = [span.low for span in spans if span.low is not None]
    highs = [span.high for span in spans if span.high is not None]
    after = {span.low for span in spans if span.above_low and span.low is not None}
    before = {span.high for span in spans if span.below_high and span.high is not None}
    return any(high > 0 and high != int(high) and int(high) in after for high in highs) or any(
        low < 0 and low != int(low) and int(low) in before for low in lows
    )


def _check_digits(schema: dict[str, Any]) -> None:
    """Refuse bounds whose digits would take a large automaton to compare."""
    for keyword in _BOUNDS:
        bound = schema.get(keyword)
        if not is_number(bound):
            continue
        digits = f"{Decimal(bound):e}".partition("e")[0].rstrip("0")
        if len(digits) > MAX_BOUND_DIGITS:
            raise ValueError(
                f"{keyword} is {_shown(bound)}; allowed are {MAX_BOUND_DIGITS} digits"
                " and zeros at the end"
            )


def _shown(value: Any) -> str:
    return bounded_text(dumps(value), 60)


def _check_constants(schema: dict[str, Any]) -> None:
    """Refuse values with a number that llguidance would get wrong."""
    listed = schema.get("enum")
    for value in (*(listed if isinstance(listed, list) else ()), schema.get("const")):
        if not _is_plain(value):
            raise ValueError(
                f"the constant {_shown(value)} has a number beyond 2^53, or with more digits than"
                " double precision"
            )


def _is_plain(value: Any) -> bool:
    """Whether llguidance reads the numbers within a value as they are."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if not is_number(value):
        return True
    if not -LARGEST_EXACT <= value <= LARGEST_EXACT:
        return False
    if isinstance(value, int):
        return True
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    # So far llguidance rounds a text to double precision correctly.
    is_exact = int("".join(map(str, digits))) <= LARGEST_EXACT and abs(exponent) <= 22
    return is_exact and Decimal(repr(float(value))) == value


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
        texts = [dumps(value)] if keyword == "const" else list(value)
    elif keyword in ("enum", "required") and isinstance(value, list):
        texts = [dumps(item) for item in value]
    else:
        return
    longest = max(map(len, texts), default=0)
    if longest > MAX_FORCED_CHARS:
        raise ValueError(
            f"{keyword} has a text of {longest} characters; allowed are {MAX_FORCED_CHARS}"
        )


def _matching_texts(pattern: str, most: int) -> list[str] | None:
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
