"""Grammars of all kinds as texts that llguidance compiles.

llguidance computes all forced text at once. A rule that refers to itself after a literal forces
text without an end, so nothing is forced in grammars of users, nor in schemas with references. This
does not change which texts they allow. Other JSON schemas force little at once, as a space may
follow each `:` and `,`, and `chat_grammars.py` bounds what tool calls force.

JSON schemas that llguidance would get wrong, or never finish, are changed or refused:

- Descriptions, a `format` that JSON Schema does not specify, and `"uniqueItems": false` for example
  say nothing about which texts are valid, and `x-guidance` is an option of llguidance, not of JSON
  Schema: they are left out.
- Names of properties can be written with escapes, such as `"\\u0061"` for `"a"`. llguidance treats
  an escaped name as a different one. So where a schema also allows other properties, `\\u` escapes
  are forbidden, and with them control characters.
- Names of additional properties can be repeated, each of which llguidance counts.
- llguidance computes with double precision, and ends the process for some larger integers. Bounds
  are narrowed to numbers that it computes with exactly; a schema that needs others is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, TypeGuard

from ..bounded_repr import bounded_repr, bounded_text

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
LARGEST_EXACT: Final = 2**53
"""Up to here double precision has every integer."""
MAX_EBNF_BYTES: Final = 1 << 14
"""Of a grammar with `::=`, whose conversion takes time quadratic in its size."""

_EDGE: Final = 1e-6
"""Between a range and an integer that it excludes, where llguidance would allow the integer."""
_SIDES: Final = (
    (1, ("minimum", "exclusiveMinimum")),
    (-1, ("maximum", "exclusiveMaximum")),
)
_LEAST: Final = ("minItems", "minLength", "minProperties")
_MOST: Final = ("maxItems", "maxLength", "maxProperties")
_OPTIONS: Final = "x-guidance"
_SPECIFIED: Final = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""Formats of JSON Schema 2020-12, Validation, section 7.3."""
_VALUES: Final = frozenset(("const", "enum", "example"))
"""Keywords whose values are no schemas."""
_DEFINITIONS: Final = frozenset(("definitions", "$defs"))
_DEPENDENT: Final = frozenset(("dependentSchemas", "dependencies"))
_NAMED: Final = _DEFINITIONS | _DEPENDENT | {"properties", "patternProperties"}
"""Keywords whose values are schemas by name."""
_COMBINING: Final = _DEPENDENT | {
    *("allOf", "patternProperties", "if", "then", "else", "not", "contains", "propertyNames"),
    *("$dynamicRef", "$recursiveRef"),
}
"""Keywords with which a value may have to follow several schemas."""
_REFERRING: Final = frozenset(("$ref", "anyOf", "oneOf"))
"""Keywords with which it may where the schema has other keywords too."""
_IGNORED: Final = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly")
) | {"writeOnly", _OPTIONS}
"""Keywords that say nothing about which texts are valid."""
_NAMING: Final = _DEFINITIONS | {"$schema", "$id", "$anchor"}
"""Keywords that demand nothing of a value themselves."""
_DEMANDS_NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
"""Keywords that llguidance lacks, and their values that every text follows."""

_UNFORCED: Final = '\n%llguidance {"no_forcing": true}'
"""At the end of a grammar, where it takes the place of an option before it."""
_IS_LARK: Final = re.compile(r"^[ \t]*(?:%llguidance\b|[?!]?start\b[^:\n]*:(?!:=))", re.MULTILINE)
_TOKEN: Final = re.compile(
    r"%(?P<keyword>json|llguidance|regex)\b\s*"
    r'|"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(?P<token><[^<>\s]+>)',
    re.DOTALL,
)
"""Keywords in a grammar that JSON follows, names of tokens, and what may contain a text that looks
like either: a string, a comment, a regular expression."""
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_REASONED: Final = r"""start: reasoning space @content
reasoning[lazy]: /(?s:.*)TAG/
space: /[ \t\r\n]{0,8}/"""
_DECODER: Final = json.JSONDecoder()


def grammar_text(kind: str, source: str, token_ids: Mapping[str, int] | None = None) -> str:
    """Return a grammar of a kind of `StructuredOutput` for llguidance, or raise `ValueError`.

    `token_ids` are the ids of added tokens, which grammars in Lark may name, as `<think>`.
    """
    from llguidance import LLMatcher  # an optional package

    if kind == "json":
        if source == "false":
            raise ValueError("the schema false allows no text")
        schema = {} if source == "true" else json.loads(source)  # true has no room for options
        return _of_lark(f"start: {_embedded(schema, COMPACT)}" + _UNFORCED * ('"$ref"' in source))
    if kind == "regex":
        if (len(source) - len(source.rstrip("\\"))) % 2:
            raise ValueError("it ends with a backslash, which escapes nothing")
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        return _of_lark("start: " + " | ".join(map(_quoted, dict.fromkeys(json.loads(source)))))
    if kind == "calls":
        return _of_lark(_prepared(source, {}))
    if kind == "reasoned":
        tag, kind, source = json.loads(source)
        content = json.loads(grammar_text(kind, source, token_ids))["grammars"]
        content[0]["name"] = "content"
        lark = _REASONED.replace("TAG", re.escape(tag).replace("/", r"\/"))
        return json.dumps({"grammars": [{"lark_grammar": lark}, *content]})
    return _of_lark(_prepared(_as_lark(source), token_ids or {}) + _UNFORCED)


def _of_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _quoted(value: Any) -> str:
    """Return JSON as llguidance reads it within a grammar."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.replace("\x7f", "\\u007f")


def _as_lark(source: str) -> str:
    """Return a grammar in Lark, or one with `::=`, in Lark."""
    if _IS_LARK.search(source):
        return source
    size = len(source.encode())
    if size > MAX_EBNF_BYTES:
        raise ValueError(
            f"it has no rule named start, and is read as EBNF with ::=, of which {MAX_EBNF_BYTES}"
            f" bytes are allowed, not {size}"
        )
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(_ESCAPE.sub(_character, source))
    except Exception as error:
        raise ValueError(
            f"it has no rule named start, and is no EBNF with ::= either: {error}"
        ) from error
    return lark


def _character(escape: re.Match[str]) -> str:
    """Return the character of an escape beyond ASCII, which the conversion gets wrong."""
    code = int(escape[1] or "0", 16)
    is_text = code >= 0x80 and not 0xD800 <= code < 0xE000
    return chr(code) if is_text else escape[0]


def _prepared(lark: str, token_ids: Mapping[str, int]) -> str:
    """Return a grammar with prepared schemas, and with ids in the place of names of added tokens:
    llguidance knows no names of text.
    """
    parts: list[str] = []
    start = 0
    while found := _TOKEN.search(lark, start):
        end = found.end()
        parts.append(lark[start : found.start()])
        if found["keyword"] is None:
            token_id = token_ids.get(found["token"])
            parts.append(found[0] if token_id is None else f"<[{token_id}]>")
        else:
            try:
                value, end = _DECODER.raw_decode(lark, end)
                json.dumps(value, allow_nan=False)
            except ValueError as error:
                raise ValueError(
                    f"%{found['keyword']} is followed by no valid JSON: {error}"
                ) from error
            if found["keyword"] == "json" and isinstance(value, dict):
                options = value.get(_OPTIONS)
                layout = COMPACT | options if isinstance(options, dict) else COMPACT
                parts.append(_embedded(value, layout))
            else:
                parts.append(lark[found.start() : end])
        start = end
    return "".join((*parts, lark[start:]))


def _embedded(schema: dict[str, Any], layout: Mapping[str, Any]) -> str:
    """Return a schema as a part of a rule."""
    return "%json " + _quoted(prepared_schema(schema, layout))


def prepared_schema(schema: dict[str, Any], layout: Mapping[str, Any] = COMPACT) -> dict[str, Any]:
    """Change a parsed JSON schema for llguidance, and return it with the options `layout`.

    Raises `ValueError` if outputs could be invalid or take too long.
    """
    walk = _Walk()
    walk.visit(schema)
    walk.check_numbers()
    escapes = {"json_allowed_escapes": 'nrbtf\\"'} if walk.has_open_names else {}
    return {**schema, _OPTIONS: {**layout, **escapes}}


class _Walk:
    """Changes a schema and those in it, and checks them."""

    def __init__(self) -> None:
        self.has_open_names = False
        """Whether an object may have properties besides the named ones."""
        self._combines = False
        """Whether a value may have to follow several schemas."""
        self._factors: list[Fraction] = []
        self._bounds: list[_Bound] = []

    def visit(self, schema: Any) -> None:
        """Visit a schema, or a list of these. Raises `ValueError`."""
        if isinstance(schema, list):
            for item in schema:
                self.visit(item)
        if not isinstance(schema, dict):
            return
        for keyword in [k for k, value in schema.items() if _is_ignored(k, value)]:
            del schema[keyword]
        is_closed = schema.get("additionalProperties") is False
        patterns = schema.get("patternProperties")
        self.has_open_names |= bool(patterns or (schema.get("properties") and not is_closed))
        others = schema.keys() - _NAMING
        self._combines |= bool(schema.keys() & _COMBINING) or (
            bool(schema.keys() & _REFERRING) and len(others) > 1
        )
        _check_counts(schema, is_closed and not patterns)
        self._add_factor(schema.get("multipleOf"))
        self._narrow_bounds(schema)
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
            _check_together(self._bounds, bool(self._factors))

    def _add_factor(self, factor: Any) -> None:
        if not _is_number(factor) or not factor:  # 0 is refused by llguidance
            return
        number = Decimal(str(factor)).normalize()
        _, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)
        size = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
        if size > MAX_FACTOR or exponent < -MAX_DECIMALS:
            raise ValueError(
                f"multipleOf is {_shown(factor)}; written without its decimal point"
                f" it may be at most {MAX_FACTOR}, with at most {MAX_DECIMALS} decimals"
            )
        self._factors.append(Fraction(number))

    def _narrow_bounds(self, schema: dict[str, Any]) -> None:
        """Narrow the bounds of a schema to numbers that llguidance compares exactly."""
        types = schema.get("type")
        is_integer = types == "integer" or (
            isinstance(types, list) and "integer" in types and "number" not in types
        )
        bounds: list[_Bound] = []
        for sign, names in _SIDES:
            given = {k: schema[k] for k in names if _is_number(schema.get(k))}
            if not given:
                continue
            excluded = schema.get(names[1]) is True  # in draft 4
            keyword = max(given, key=lambda k: (sign * given[k], k == names[1]))
            number, excluded = given[keyword], excluded or keyword == names[1]
            if sign * number < -LARGEST_EXACT:
                number, excluded = -sign * LARGEST_EXACT, False
            elif not _is_exact(number) or (
                sign * number == LARGEST_EXACT and (excluded or "multipleOf" in schema)
            ):
                raise ValueError(
                    f"{keyword} is {_shown(number)}, which is beyond 2^53, or needs more digits"
                    " than double precision"
                )
            elif is_integer and number != int(number):
                number, excluded = math.floor(number) + (sign > 0), False
            bounds.append((sign, number, excluded))
        if _meet_badly(bounds) and not is_integer:
            bounds = [
                (sign, n + sign * _EDGE if excluded and n == int(n) else n, excluded)
                for sign, n, excluded in bounds
            ]
        for sign, number, excluded in bounds:
            names = _SIDES[sign < 0][1]
            for name in names:
                schema.pop(name, None)
            schema[names[excluded]] = int(number) if number == int(number) else number
        _check_together(bounds, bool(schema.get("multipleOf")))
        self._bounds += bounds


_Bound = tuple[int, float, bool]
"""1 for a lower bound and -1 for an upper one, the number, and whether it is excluded."""


def _check_together(bounds: list[_Bound], has_factor: bool) -> None:
    """Refuse bounds that llguidance would get wrong together, or with a `multipleOf`."""
    if has_factor and any(number != int(number) for _, number, _ in bounds):
        raise ValueError("multipleOf cannot be used with bounds that have a fraction")
    if _meet_badly(bounds):
        raise ValueError(
            "a bound that excludes an integer cannot be used with one that has a fraction and the"
            " same integer part"
        )


def _meet_badly(bounds: list[_Bound]) -> bool:
    """Whether llguidance would allow an integer that some bounds exclude.

    It does so where a range leaves out an integer at one end, and has no other.
    """
    ends = {(sign, number) for sign, number, excluded in bounds if excluded}
    return any(
        sign * number < 0 and number != int(number) and (-sign, int(number)) in ends
        for sign, number, _ in bounds
    )


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: Any) -> bool:
    """Whether llguidance reads the numbers within a value as they are."""
    if isinstance(value, dict | list):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    if not _is_number(value) or isinstance(value, int):
        return not _is_number(value) or abs(value) <= LARGEST_EXACT
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    # So far llguidance rounds a text to double precision correctly.
    return abs(value) <= LARGEST_EXACT >= int("".join(map(str, digits))) and abs(exponent) <= 22


def _shown(value: Any) -> str:
    return bounded_text(json.dumps(value, ensure_ascii=False), 60)


def _is_ignored(keyword: str, value: Any) -> bool:
    """Return whether a keyword says nothing about which texts are valid."""
    if keyword == "format":
        return isinstance(value, str) and value not in _SPECIFIED
    return keyword in _IGNORED or value in _DEMANDS_NOTHING.get(keyword, ())


def _check_counts(schema: dict[str, Any], is_closed: bool) -> None:
    """Leave out counts that no output reaches; refuse those that llguidance gets wrong."""
    for keyword in _LEAST + _MOST:
        count = schema.get(keyword)
        if isinstance(count, float) and count.is_integer():
            schema[keyword] = count = int(count)  # llguidance takes integers only
        if _is_number(count) and count > MAX_COUNT:
            if keyword in _LEAST:
                raise ValueError(f"{keyword} is {_shown(count)}; allowed are up to {MAX_COUNT}")
            del schema[keyword]
    least, required = schema.get("minProperties"), schema.get("required")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, known) and not is_closed:
        raise ValueError(
            f"minProperties is {least}, which repeated names of other properties could reach: list"
            " the names under required, or forbid others with additionalProperties: false"
        )


def _check_texts(keyword: str, value: Any) -> None:
    """Refuse a keyword with texts that are too long to be forced, or inexact constants."""
    if keyword in ("const", "enum"):
        texts = value if keyword == "enum" and isinstance(value, list) else [value]
        for text in texts:
            if not _is_exact(text):
                raise ValueError(
                    f"the constant {_shown(text)} has a number beyond 2^53, or with more digits"
                    " than double precision"
                )
    elif keyword in _NAMED or keyword == "required":
        texts = list(value) if isinstance(value, list | dict) else []
    else:
        return
    longest = max((len(json.dumps(text, ensure_ascii=False)) for text in texts), default=0)
    if longest > MAX_FORCED_CHARS:
        raise ValueError(
            f"{keyword} has a text of {longest} characters; allowed are {MAX_FORCED_CHARS}"
        )
