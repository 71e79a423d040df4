"""Numbers in schemas, checked with `decimal`: outputs are valid, and valid integers are allowed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Context, Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema
import pytest
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.structured.grammars import grammar_text
from stepgraph.runtime.structured_output import StructuredOutput

from ..rigs.structured_rig import accepts, byte_matcher, walk

WALKS = 4
EXACT = Context(prec=1000)
IN_DECIMAL = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, x: isinstance(x, int | Decimal) and x == int(x)
    ),
)
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}


def matcher_of(schema: Any) -> Any:
    """Return a matcher of bytes. Raises `ValueError` for a schema that is refused."""
    text = schema if isinstance(schema, str) else json.dumps(schema, default=float)
    return byte_matcher("json", StructuredOutput(json=text).source)


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """Whether a number follows a schema of numbers, in decimal."""
    with localcontext(EXACT):
        return bool(IN_DECIMAL(schema).is_valid(value))


def number_of(draw: random.Random) -> int | Decimal:
    """Return a number, often at an edge of binary or decimal notation."""
    sign, small = draw.choice((1, -1)), draw.choice((-1, 0, 0, 1))
    match draw.randrange(8):
        case 0:
            return draw.randrange(-20, 20)
        case 1:
            return Decimal(draw.randrange(-5000, 5000)).scaleb(-draw.randrange(1, 5))
        case 2:
            return sign * 2 ** draw.choice((31, 32, 52, 53, 54, 62, 63, 64, 65)) + small
        case 3:
            return sign * 10 ** draw.randrange(1, 24) + small
        case 4:
            return sign * Decimal(10) ** -draw.randrange(1, 20)
        case 5:
            return sign * (1 + small * Decimal(10) ** -draw.randrange(1, 18))
        case 6:
            return Decimal(draw.choice(("-0.0", "0.0", "0E+3", "1.0", "1E+2", "2.50", "-1.5e-7")))
    return sign * draw.choice((Decimal("1e300"), Decimal("1.5e-40"), Decimal("6.02E+23"), 10**40))


def schema_of(draw: random.Random) -> dict[str, Any]:
    """Return a random schema of numbers."""
    schema: dict[str, Any] = {}
    kind = draw.random()
    if kind > 0.2 or draw.random() < 0.5:
        schema["type"] = draw.choice(("integer", "number"))
    if kind < 0.15:
        schema["const"] = number_of(draw)
    elif kind < 0.3:
        schema["enum"] = [number_of(draw) for _ in range(draw.randrange(1, 4))]
    if kind > 0.2:
        low = number_of(draw)
        width = abs(number_of(draw)) if draw.random() < 0.7 else Decimal("0.01")
        for keyword, bound in zip(
            (draw.choice(LIMITS[::2]), draw.choice(LIMITS[1::2])), (low, low + width), strict=True
        ):
            if draw.random() < 0.75:
                schema[keyword] = bound
    if kind > 0.85:
        schema["multipleOf"] = draw.choice(
            (1, 2, 5, 3, Decimal("0.1"), Decimal("0.01"), Decimal("0.5"), Decimal("2.50"))
        )
    return schema


def placed(draw: random.Random, schema: dict[str, Any]) -> tuple[Any, str, str]:
    """Return a schema around one of a number, and the text around it."""
    closed = {"type": "object", "required": ["a"], "additionalProperties": False}
    match draw.randrange(9):
        case 0:
            return {"$defs": {"N": schema}, "$ref": "#/$defs/N"}, "", ""
        case 1:
            return {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}, "[", "]"
        case 2:
            return closed | {"properties": {"a": schema}}, '{"a":', "}"
        case 3:
            nullable = {"anyOf": [{"type": "null"}, schema]}
            items = {"prefixItems": [nullable], "items": False, "minItems": 1}
            return {"type": "array", **items}, "[", "]"
        case 4:
            halves = [
                {k: v for k, v in schema.items() if (k in LIMITS[::2]) == half} for half in (0, 1)
            ]
            return {"allOf": halves}, "", ""
        case 5:
            other = {"patternProperties": {"^x[0-9]+$": {"type": "null"}}}
            return closed | other | {"properties": {"a": schema}}, '{"a":', "}"
    return schema, "", ""


@pytest.mark.parametrize(
    ("count", "seed"),
    [(200, 0), *(pytest.param(2500, seed, marks=pytest.mark.slow) for seed in range(1, 9))],
)
def test_numbers_follow_their_schemas_in_decimal(count: int, seed: int) -> None:
    draw = random.Random(seed)
    seen = dict.fromkeys(("refused", "walks", "unfinished", "candidates"), 0)
    for _ in range(count):
        # Numbers of schemas have double precision.
        schema = json.loads(json.dumps(schema_of(draw), default=float), parse_float=Decimal)
        whole, before, after = placed(draw, schema)
        numbers = [n for k, n in schema.items() if k in LIMITS]
        plain = schema.get("type") == "integer" and schema.keys() <= {"type", *LIMITS}
        plain = plain and all(n == int(n) and abs(n) <= 2**53 for n in numbers)
        valid = [n for n in candidates(schema) if is_valid(schema, n)]
        try:
            matcher = matcher_of(whole)
        except ValueError:
            seen["refused"] += 1
            assert not (plain and any(abs(n) <= 2**53 for n in valid)), whole
            continue
        for _ in range(WALKS):
            text = walk(matcher, draw)
            seen["walks" if text is not None else "unfinished"] += 1
            if text is not None:
                value = number_in(json.loads(text, parse_float=decimal_of))
                assert value is None or is_valid(schema, value), (whole, text)
        for value in candidates(schema):
            accepted = accepts(matcher, f"{before}{written(value)}{after}")
            seen["candidates"] += 1
            assert not accepted or value in valid, (whole, value)
            assert accepted or not (plain and value in valid and abs(value) <= 2**53)
    print(f"{count} schemas: {seen}")
    assert seen["refused"] < count / 2


def decimal_of(literal: str) -> Decimal | None:
    """Return a number; None if its exponent is beyond those of `Decimal`."""
    try:
        return Decimal(literal)
    except InvalidOperation:
        return None


def number_in(value: Any) -> Any:
    """Return the number that `placed` put into a value, or None."""
    if isinstance(value, dict):
        return value.get("a")
    return value[0] if isinstance(value, list) else value


def candidates(schema: dict[str, Any]) -> Iterator[int | Decimal]:
    """Return numbers at and around those of a schema, in the type that it demands."""
    constants = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    integer = schema.get("type") == "integer"
    yield from constants
    for bound in () if constants else [*(schema[k] for k in LIMITS if k in schema), 0]:
        for step in (0, 1, -1, Decimal("0.01"), Decimal("-0.001")):
            number = EXACT.add(Decimal(bound), Decimal(step))
            if abs(number.adjusted()) > 30:
                continue
            if number == number.to_integral_value() and (integer or isinstance(bound, int)):
                yield int(number)
            elif not integer:
                yield number


def written(number: int | Decimal) -> str:
    """Return how JSON writers write a number; an exponent is far from what bounds here have."""
    if isinstance(number, int):
        return str(number)
    if abs(number.adjusted()) > 30:
        return repr(float(number))
    whole, _, fraction = f"{number:f}".partition(".")
    return f"{whole}.{fraction.rstrip('0') or '0'}"


@pytest.mark.parametrize("place", range(3), ids=["alone", "named", "with a pattern"])
def test_bounds_of_64_bits_become_those_of_doubles(place: int) -> None:
    def accepted(schema: Any, *texts: str) -> list[str]:
        pattern = {"patternProperties": {"^x": {}}} if place == 2 else {}
        named = {"type": "object", "properties": {"a": schema}, "required": ["a"], **pattern}
        matcher = matcher_of(named if place else schema)
        return [text for text in texts if accepts(matcher, f'{{"a":{text}}}' if place else text)]

    small = ["0", "-1", "9007199254740992"]
    assert accepted(INT64, *small, str(2**53 + 1), str(2**63), str(-(2**63) - 1)) == small
    assert accepted(UINT64, str(2**53), "-1", str(2**53 + 1), str(2**64)) == [str(2**53)]


@pytest.mark.parametrize("kind", ["json", "grammar", "unusual"])
@pytest.mark.parametrize(
    "schema",
    [
        {"const": -(2**63)},
        {"enum": [9007199254740993]},
        {"const": 1e300},
        {"const": 1e-300},
        {"enum": ["a", {"b": [-(2**63)]}]},
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
        {"type": "integer", "minimum": Decimal("-1e300"), "maximum": Decimal("-1e200")},
        {"type": ["string", "integer"], "maximum": Decimal("-1E19")},
        {"allOf": [{"maximum": Decimal("-1e19")}, {"type": "integer"}]},
        {"type": "number", "multipleOf": Decimal("0.01"), "minimum": Decimal("0.01")},
        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": Decimal("0.5")}]},
    ],
    ids=str,
)
def test_numbers_that_would_come_out_wrong_are_refused(schema: Any, kind: str) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema, default=float)
    if kind == "unusual":
        text = f'{{"patternProperties": {{"^x": {text}}}, "properties": {{"a": {text}}}}}'
    if kind == "grammar":
        text = f'start: "%json" %json {text} // %json {text}'
    with pytest.raises(ValueError, match=r"2\^53|multipleOf|an integer"):
        grammar_text("grammar" if kind == "grammar" else "json", text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0"]),
        ({"type": "number", "minimum": -0.9, "exclusiveMaximum": 0}, ["-0.9"], ["-0", "-0.0", "0"]),
        ({"type": "number", "minimum": 1, "maximum": 1.12}, ["1.10", "1.12"], ["1.13", "1.121"]),
        ({"type": "number", "multipleOf": 0.01, "minimum": 0}, ["0.01", "12.34"], ["0.001"]),
        ('{"enum": [1.5, 2]}', ["1.5", "2"], ["1", "2.5"]),
        (
            {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}},
            ['{"a":1,"b":0.5}'],
            ['{"a":0}', '{"b":1}'],
        ),
        ({"type": "array", "items": {"const": 1}, "maxItems": 2.0}, ["[1,1]"], ["[1,1,1]"]),
        (
            {"type": "number", "minimum": -1.7976931348623157e308},
            ["-5", "12.5"],
            ["-1" + "0" * 309],
        ),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_schema(schema: Any, good: list[str], bad: list[str]) -> None:
    matcher = matcher_of(schema)
    assert [text for text in good + bad if accepts(matcher, text)] == good


@pytest.mark.parametrize(
    "number", ["9" * 5000, "1e401", "1e99999999999999999999", "NaN", "-Infinity"]
)
@pytest.mark.parametrize("schema", ['{"const": %s}', '{"items": {"minimum": %s}}'])
def test_numbers_out_of_range_are_refused(schema: str, number: str) -> None:
    with pytest.raises(RequestError):
        StructuredOutput(json=schema % number)
    with pytest.raises(ValueError, match="%json"):
        grammar_text("grammar", f"start: %json {schema % number}")
