"""JSON schemas as rules in Lark, where a number needs more digits than llguidance computes with.

Only the way to such numbers becomes rules, with `exact_json.py` for the numbers. Every part of
the schema without one stays a schema, which llguidance compiles. What this file cannot write as
rules raises `NoRulesError`: the caller narrows the numbers or refuses the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Context, Decimal
from functools import reduce
from itertools import combinations
from operator import and_
from typing import Any, Final
from urllib.parse import unquote

from ..exact_json import MAX_NUMBER_CHARS, NumberRange, dumps, is_number

__all__ = ["BOUNDS", "NoRulesError", "decimals_of", "schema_rules", "types_of"]

TYPES: Final = ("null", "boolean", "number", "integer", "string", "array", "object")
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_NUMERIC: Final = (*BOUNDS, "multipleOf")
_OF_TYPE: Final[dict[str, tuple[str, ...]]] = {
    "number": _NUMERIC,
    "integer": _NUMERIC,
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties"),
}
_COMBINING: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_KNOWN: Final = frozenset(("type", *_COMBINING, *(k for keys in _OF_TYPE.values() for k in keys)))
_NO_RULES: Final = frozenset(
    (
        *("if", "then", "else", "not", "contains", "minContains", "maxContains", "uniqueItems"),
        *("additionalItems", "unevaluatedItems", "unevaluatedProperties", "dependencies"),
        *("dependentSchemas", "dependentRequired", "patternProperties", "propertyNames"),
        *("maxProperties", "$dynamicRef", "$recursiveRef", "$id", "id", "$anchor"),
    )
)
_NAME: Final = r'"([^"\\\x00-\x1F\x7F]|\\[nrbtf\\"])*"'
"""A string as llguidance has it, without `\\u` escapes."""
_MAX_BRANCHES: Final = 250
"""Of a terminal, one a digit of a bound; llguidance limits its states."""
_LONGEST_PLAIN: Final = 64
"""Characters of a number that may be written without an exponent."""


class NoRulesError(Exception):
    """The schema has a part that cannot be written as rules."""


def types_of(schema: Mapping[str, Any]) -> Set[str]:
    """Return the types that a schema names, or all of them."""
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list) and all(isinstance(name, str) for name in types):
        return set(types)
    return set(TYPES)


def decimals_of(factor: Any) -> int | None:
    """Return how many decimals the multiples of 1, 0.1, 0.01 and so on have; None for others."""
    if not is_number(factor) or factor <= 0:
        return None
    exponent = Decimal(factor).adjusted()
    return -exponent if exponent <= 0 and factor == Decimal(1).scaleb(exponent) else None


def schema_rules(root: Any, exact: Set[int], options: Mapping[str, Any]) -> str:
    """Return a grammar in Lark that follows a schema.

    Args:
        root: the parsed schema.
        exact: `id` of each schema within it whose numbers llguidance would get wrong.
        options: of llguidance, for the schemas that stay.

    Raises:
        NoRulesError: a part cannot be written as rules.
    """
    return _Rules(root, exact, options).text()


class _Rules:
    """The rules and terminals of a grammar. Expressions are names of these, or literal texts."""

    def __init__(self, root: Any, exact: Set[int], options: Mapping[str, Any]) -> None:
        self._root, self._exact, self._options = root, exact, options
        self._rules: dict[str, str] = {"start": ""}
        self._terminals: dict[str, str] = {}
        """Names by definitions."""
        self._leaves: dict[str, str] = {}
        self._references: dict[str, str] = {}
        self._ruled: dict[int, bool] = {}
        self._comma = self._terminal(_regex(options["item_separator"]))
        self._colon = self._terminal(_regex(options["key_separator"]))
        self._pending: list[tuple[str, Any]] = []
        self._rules["start"] = self._expression(root)
        while self._pending:
            name, schema = self._pending.pop()
            self._rules[name] = self._expression(schema)

    def text(self) -> str:
        """Return the grammar."""
        lines = [f"{name}: {text}" for name, text in self._rules.items()]
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join(lines).replace("\x7f", "\\u007f")  # not read otherwise

    def _rule(self, expression: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules[name] = expression
        return name

    def _either(self, expressions: Iterable[str]) -> str:
        found = list(dict.fromkeys(expressions))
        return found[0] if len(found) == 1 else self._rule(" | ".join(found))

    def _terminal(self, definition: str) -> str:
        return self._terminals.setdefault(definition, f"T{len(self._terminals)}")

    def _expression(self, schema: Any) -> str:
        """Return what follows a schema."""
        if not self._needs_rules(schema):
            return self._leaf(schema)
        if found := schema.keys() & _NO_RULES:
            raise NoRulesError(", ".join(sorted(found)))
        known = {key: value for key, value in schema.items() if key in _KNOWN}
        combining = [key for key in known if key in _COMBINING]
        if "const" in known or "enum" in known:
            return self._constants(known)
        if combining == ["allOf"]:
            return self._all_of(known)
        if len(combining) == 1 and known.keys() == set(combining):
            (key,) = combining
            if key == "$ref":
                return self._reference(known[key])
            return self._alternatives(key, known[key])
        if combining:
            raise NoRulesError(" and ".join(known))
        types = types_of(known)
        return self._either(
            self._of_type(name, known)
            for name in TYPES
            if name in types and (name != "integer" or "number" not in types)
        )

    def _needs_rules(self, schema: Any) -> bool:
        """Whether a schema has numbers that need rules, or refers to others."""
        if not isinstance(schema, dict | list):
            return False
        key = id(schema)
        if key not in self._ruled:
            parts = schema.values() if isinstance(schema, dict) else schema
            self._ruled[key] = (
                key in self._exact
                or (isinstance(schema, dict) and isinstance(schema.get("$ref"), str))
                or any(self._needs_rules(part) for part in parts)
            )
        return self._ruled[key]

    def _leaf(self, schema: Any) -> str:
        """Return a schema that llguidance compiles."""
        if not isinstance(schema, dict) and schema is not True:
            raise NoRulesError(f"the schema {dumps(schema)}")
        draft = {key: value for key, value in self._root.items() if key == "$schema"}
        kept = {} if schema is True else schema
        text = f"%json {dumps({**draft, **kept, 'x-guidance': self._options})}"
        if text not in self._leaves:
            self._leaves[text] = self._rule(text)
        return self._leaves[text]

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return what follows the keywords of a schema that concern a type."""
        own = {key: schema[key] for key in _OF_TYPE.get(name, ()) if key in schema}
        if name == "array":
            return self._array(own)
        if name == "object":
            return self._object(own)
        if name in ("number", "integer") and not own.keys().isdisjoint(BOUNDS):
            decimals = None
            if "multipleOf" in own:
                decimals = decimals_of(own["multipleOf"])
                if decimals is None:
                    raise NoRulesError("multipleOf")
            return self._numbers(NumberRange.of(own), name == "integer", decimals)
        return self._leaf({"type": name, **own})

    def _numbers(self, span: NumberRange, integer: bool, decimals: int | None = None) -> str:
        if (span.integers() if integer else span).is_empty():
            raise NoRulesError("bounds that allow no number")
        if span.low is not None and span.low == span.high:
            return self._constant(int(span.low) if integer else span.low)
        terminal = span.terminal(integer, decimals)
        if terminal.count("|") > _MAX_BRANCHES:
            raise NoRulesError("bounds with many digits")
        return self._terminal(terminal)

    def _all_of(self, schema: Mapping[str, Any]) -> str:
        """Return what follows several schemas: bounds of numbers, or a single demand."""
        own = {key: value for key, value in schema.items() if key != "allOf"}
        parts = [part for part in schema["allOf"] if part is not True]
        if not all(isinstance(part, dict) and _NO_RULES.isdisjoint(part) for part in parts):
            raise NoRulesError("allOf")
        parts = [part for part in (own, *parts) if not _KNOWN.isdisjoint(part)]
        if len(parts) == 1 and parts[0] is not own:
            return self._expression(parts[0])
        if not all(_KNOWN & part.keys() <= {"type", *BOUNDS} for part in parts):
            raise NoRulesError("allOf")
        types = [types_of(part) for part in parts]
        shared = reduce(
            and_, (names | {"integer"} if "number" in names else names for names in types)
        )
        if not shared or not shared <= {"number", "integer"}:
            raise NoRulesError("allOf of such types")
        span = reduce(and_, map(NumberRange.of, parts))
        return self._numbers(span, "number" not in shared)

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            self._references[reference] = name = self._rule("")
            self._pending.append((name, self._target(reference)))
        return self._references[reference]

    def _target(self, reference: str) -> Any:
        found = self._root
        pointer, *path = reference.split("/")
        for part in path if pointer == "#" else [None]:
            key = unquote(part or "").replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif part is not None and isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise NoRulesError(f"the reference {reference}")
        return found

    def _alternatives(self, keyword: str, options: Any) -> str:
        if not isinstance(options, list) or not options:
            raise NoRulesError(keyword)
        if keyword == "oneOf" and any(_overlap(a, b) for a, b in combinations(options, 2)):
            raise NoRulesError("oneOf whose schemas may allow the same value")
        return self._either(self._expression(option) for option in options)

    def _constants(self, schema: Mapping[str, Any]) -> str:
        """Return the values of `const` or `enum` that the type and the bounds allow."""
        others = schema.keys() - {"type", *BOUNDS}
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if len(others) > 1 or not isinstance(values, list):
            raise NoRulesError(" and ".join(sorted(others)))
        types, span = types_of(schema), NumberRange.of(schema)
        kept = [
            value
            for value in values
            if types & _types_of_value(value) and (not is_number(value) or value in span)
        ]
        if not kept:
            raise NoRulesError("constants that the type or the bounds forbid")
        return self._either(map(self._constant, kept))

    def _constant(self, value: Any) -> str:
        """Return how a value is written."""
        if is_number(value):
            return self._terminal(_regex(_number_pattern(value)))
        if isinstance(value, dict):
            return self._enclosed(
                "{}", [self._pair(k, self._constant(v)) for k, v in value.items()]
            )
        if isinstance(value, list):
            return self._enclosed("[]", [self._constant(item) for item in value])
        return _quoted(dumps(value))

    def _enclosed(self, brackets: str, items: Sequence[str]) -> str:
        inner = f" {self._comma} ".join(items)
        return self._rule(f'"{brackets[0]}" {inner} "{brackets[1]}"')

    def _pair(self, name: str, value: str) -> str:
        return f"{_quoted(dumps(name))} {self._colon} {value}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(prefix, list) or isinstance(items, list):
            raise NoRulesError("items of an older draft")
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and most < least:
            raise NoRulesError("a number of items that is not possible")
        prefix = prefix[:most]
        fixed, body = len(prefix), ""
        if most is None or most > fixed:
            item = self._expression(items)
            begun = fixed or 1  # items before the first that a comma separates
            last = "" if most is None else most - begun
            more = f"({self._comma} {item}){{{max(least - begun, 0)},{last}}}"
            body = "" if last == 0 else more
            if not fixed:
                body = f"{item} {body}" if least else f"({item} {body})?"
        for place in range(fixed - 1, -1, -1):
            comma = self._comma if place else ""
            body = f"{comma} {self._expression(prefix[place])} {body}"
            body = body if place < least else f"({body})?"
        return self._rule(f'"[" {body} "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        named, required = schema.get("properties", {}), schema.get("required", [])
        others, comma = schema.get("additionalProperties", True), self._comma
        if schema.get("minProperties", 0) > len(set(required)):
            raise NoRulesError("minProperties")
        # What may follow a property, and what may come without one before it.
        after = first = ""
        if others is not False:
            more = self._rule(
                f"{self._other_name([*named, *required])} {self._colon} {self._expression(others)}"
            )
            after = self._rule(f"({comma} {more})*")
            first = self._rule(f"({more} {after})?")
        for name in reversed(dict.fromkeys([*named, *required])):
            value = named.get(name, others)
            if value is False and name not in required:
                continue
            pair = self._pair(name, self._expression(value))
            if name in required:
                first, after = self._rule(f"{pair} {after}"), self._rule(f"{comma} {pair} {after}")
            else:
                begun = f"{pair} {after}"
                first = self._rule(f"{begun} | {first}" if first else f"({begun})?")
                after = self._rule(f"({comma} {pair})? {after}")
        return self._rule(f'"{{" {first} "}}"')

    def _other_name(self, taken: Sequence[str]) -> str:
        """Return any name of a property but those of others, without `\\u` escapes."""
        if not taken:
            return self._leaf({"type": "string"})
        known = " | ".join(_quoted(dumps(name)) for name in dict.fromkeys(taken))
        return self._terminal(f"{_regex(_NAME)} & ~({known})")


def _overlap(one: Any, other: Any) -> bool:
    """Whether two schemas may allow the same value."""
    values, others = _values_of(one), _values_of(other)
    if values is not None and others is not None:
        return any(value in others for value in values)
    return bool(_sorts(one, values) & _sorts(other, others))


def _values_of(schema: Any) -> list[Any] | None:
    """Return the only values that a schema allows, if it lists them."""
    if not isinstance(schema, dict):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else None


def _sorts(schema: Any, values: list[Any] | None) -> Set[str]:
    """Return the types of values that a schema may allow; integers are numbers."""
    if values is not None:
        types: Set[str] = {name for value in values for name in _types_of_value(value)}
    else:
        types = types_of(schema) if isinstance(schema, dict) else set(TYPES)
    return {"number" if name == "integer" else name for name in types}


def _types_of_value(value: Any) -> Set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if is_number(value):
        return {"number", "integer"} if value == int(value) else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def _number_pattern(number: int | Decimal) -> str:
    """Return a regular expression for what JSON writers make of a number."""
    if isinstance(number, int):
        return str(number)
    if not number:
        return r"-?0(\.0)?"
    sign, digits, _ = number.normalize(Context(prec=MAX_NUMBER_CHARS)).as_tuple()
    forms = []
    plain = f"{number.copy_abs():f}"
    if len(plain) <= _LONGEST_PLAIN:
        whole, _, fraction = plain.partition(".")
        fraction = fraction.rstrip("0")
        forms.append(rf"{whole}\.{fraction}" if fraction else rf"{whole}(\.0)?")
    exponent = number.adjusted()
    if not -5 < exponent < 16 or not forms:
        first, *others = map(str, digits)
        mantissa = rf"{first}\.{''.join(others)}" if others else rf"{first}(\.0)?"
        forms.append(f"{mantissa}[eE]{'-' if exponent < 0 else '[+]?'}0?{abs(exponent)}")
    return f"{'-' * sign}({'|'.join(forms)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("/", r"\/") + "/"
