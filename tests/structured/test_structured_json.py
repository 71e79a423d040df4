"""What is checked, changed and refused of structured outputs before llguidance reads them."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import jsonschema
import pytest
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.sampling_params import SamplingParams
from stepgraph.runtime.structured.grammars import grammar_text, prepared_schema
from stepgraph.runtime.structured_output import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    StructuredOutput,
)

from ..rigs.structured_rig import accepts, byte_matcher

OPTIONS = {"x-guidance": {"lenient": True}}
"""Of llguidance, which are no part of a schema."""
MINE = {"type": "string", "format": "AWS::S3::Bucket.Name"}


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (MINE, {"type": "string"}),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"format": "date", "anyOf": [MINE]}, {"format": "date", "anyOf": [{"type": "string"}]}),
        ({"properties": {"format": MINE}}, {"properties": {"format": {"type": "string"}}}),
        ({"$defs": {"enum": MINE}}, {"$defs": {"enum": {"type": "string"}}}),
        ({"uniqueItems": False, "not": False, "items": {"dependencies": {}}}, {"items": {}}),
        ({"propertyNames": True, "anyOf": [{"unevaluatedItems": {}}]}, {"anyOf": [{}]}),
        (OPTIONS | {"items": OPTIONS, "enum": [OPTIONS]}, {"items": {}, "enum": [OPTIONS]}),
        ({"properties": {"x-guidance": OPTIONS}}, {"properties": {"x-guidance": {}}}),
        ({"properties": {"title": {"title": "A", "default": MINE}}}, {"properties": {"title": {}}}),
        ({"items": {"minItems": 2.0, "maxItems": 3}}, {"items": {"minItems": 2, "maxItems": 3}}),
    ],
)
def test_what_demands_nothing_is_removed_and_counts_are_integers(schema: Any, kept: Any) -> None:
    prepared = prepared_schema(schema)
    shown = json.dumps({k: v for k, v in prepared.items() if k != "x-guidance"})
    assert shown == json.dumps(kept)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "ipv4"},
        {"type": "string", "format": "uri-template"},
        {"enum": [MINE, "format"]},
        {"uniqueItems": True, "not": {}, "propertyNames": False, "dependentRequired": {"a": []}},
        {"properties": {"not": False, "uniqueItems": False}},
        {"const": {"format": "mine"}},
        {"minProperties": 1},
        {"minProperties": 2, "required": ["a", "b"]},
        {"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        {"multipleOf": 0.01},
        {"multipleOf": 1e-8},
        {"properties": {"multipleOf": {"const": 999_983}, "minProperties": {"const": 9}}},
        {"const": "x" * 4094},
        {"multipleOf": 0.01, "items": {"multipleOf": 5}},
    ],
)
def test_all_else_stays_as_it_is(schema: Any) -> None:
    prepared = prepared_schema(copy.deepcopy(schema))
    assert {k: v for k, v in prepared.items() if k != "x-guidance"} == schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"minProperties": 2}, "minProperties is 2"),
        ({"items": {"minProperties": 2, "patternProperties": {"^a": True}}}, "minProperties is 2"),
        ({"type": "integer", "multipleOf": 999_983}, "multipleOf is 999983; .* at most 10000"),
        ({"$defs": {"a": {"multipleOf": 1.000001}}}, "multipleOf is 1.000001"),
        ({"multipleOf": 1e300}, "multipleOf is 1e.300"),
        ({"multipleOf": 1e-30}, "multipleOf is 1e-30"),
        ({"const": "x" * 5000}, "const has a text of 5002 characters; allowed are 4096"),
        ({"enum": ["a", "x" * 5000]}, "enum has a text"),
        ({"properties": {"x" * 5000: True}}, "properties has a text"),
        ({"required": ["x" * 5000]}, "required has a text"),
        (
            {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
            "digits 988027; allowed are 100000",
        ),
        ({"multipleOf": 9999, "$defs": {"a": {"multipleOf": 0.0007}}}, "digits 699930000"),
    ],
)
def test_what_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prepared_schema(schema)


@pytest.mark.parametrize(
    ("schema", "escaped"),
    [
        ({"type": "object"}, True),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, False),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string"}},
                "additionalProperties": False,
            },
            True,
        ),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, False),
    ],
)
def test_escapes_do_not_hide_names(schema: Any, escaped: bool) -> None:
    r"""`{"\u0061": "x"}` has a property `a`, which may be no text. llguidance escapes
    control characters only, unless some names are excluded."""
    texts = [r'{"\u0061":"x"}', r'{"b":"\u0001"}', r'{"a":"\u0001"}']
    allowed = [text for text in texts if follows(schema, text)]
    assert all(jsonschema.Draft202012Validator(schema).is_valid(json.loads(t)) for t in allowed)
    assert bool(allowed) == escaped
    assert follows(schema, r'{"a":1}') or follows(schema, r'{"a":"\n\\"}')


def follows(schema: Any, text: str) -> bool:
    """Whether a text follows the grammar of a schema, of bytes as tokens."""
    return accepts(byte_matcher("json", json.dumps(schema)), text)


@pytest.mark.parametrize(
    ("kind", "source", "texts"),
    [
        ("grammar", '?start: "a" b\nb: "c"', ["ac"]),
        ("grammar", 'start[capture="x"]: "a"', ["a"]),
        ("grammar", 'root ::= "\\u00e9" [a-b]', ["éa", "éb"]),
        ("grammar", '# start here:\nroot ::= "\\\\u00e9"', ["\\u00e9"]),
        ("regex", r"a\\", ["a\\"]),
    ],
)
def test_grammars_of_either_syntax(kind: str, source: str, texts: list[str]) -> None:
    assert all(accepts(byte_matcher(kind, source), text) for text in texts)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("grammar", "\n" * 60_000, "no rule named start, .* 16384 bytes are allowed, not 60000"),
        ("grammar", "words", "is no EBNF with ::= either"),
        ("regex", "a\\", "ends with a backslash"),
        ("regex", r"a\\\\" + "\\", "ends with a backslash"),
        ("json", "false", "allows no text"),
        ("grammar", 'start: %json {"multipleOf": 99999989}', "multipleOf is 99999989"),
    ],
)
def test_grammars_that_are_none(kind: str, source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        grammar_text(kind, source)


def test_json_is_on_one_line() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {"$ref": "#/$defs/b"}, "c": LEAST}}
    for given in (
        schema | {"$defs": {"b": {}}},
        {"$defs": {"b": {}}, "properties": schema["properties"]},
    ):
        assert follows(given, '{"a": [1, 2,3], "b":{"x": null},"c": 3}')
        for text in (
            '{ "a":1}',
            '{"a" :1}',
            '{"a":  1}',
            '{"a":1 }',
            '{"a":1,\n"b":1}',
            '{"a":[ 1]}',
        ):
            assert not follows(given, text)


LEAST = {"type": "integer", "minimum": 3}


def test_schemas_in_grammars_are_on_one_line_too() -> None:
    items = {"type": "array", "items": LEAST}
    for schema in ({"type": "array"}, items):
        lark = f'start: "%json {{}}" %json {json.dumps(schema)} // %json [\n'
        assert accepts(byte_matcher("grammar", lark), "%json {}[3, 4]")
        assert not accepts(byte_matcher("grammar", lark), "%json {}[3 ]")
    own = {"x-guidance": {"whitespace_flexible": True}, **items}
    for schema, number in ((items, 3), (own, 2)):
        matcher = byte_matcher("grammar", f"start: %json {json.dumps(schema)}")
        assert accepts(matcher, f"[{number}]") == (schema is items)


# Types and sizes, when parameters are made --------------------------------------------------------


DEEP: dict[str, Any] = {}
for _ in range(MAX_SCHEMA_DEPTH + 1):
    DEEP = {"items": DEEP}


def test_a_mapping_is_stored_as_the_same_value() -> None:
    params = SamplingParams(structured={"json": {"type": "integer"}})
    assert params.structured == StructuredOutput(json='{"type": "integer"}')
    assert pickle.loads(pickle.dumps(params)) == params
    assert {params} == {SamplingParams(structured=params.structured)}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"json": {"b": 1, "a": [True, None]}}, "json", '{"b": 1, "a": [true, null]}'),
        ({"json": True}, "json", "true"),
        ({"json": ' {"type":"null"}'}, "json", '{"type": "null"}'),
        ({"json_object": True}, "json", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"choice": ["ä", '"']}, "choice", '["ä", "\\""]'),
        ({"regex": "a", "json_object": False}, "regex", "a"),
    ],
)
def test_kind_and_source(fields: dict[str, Any], kind: str, source: str) -> None:
    structured = StructuredOutput(**fields)
    assert (structured.kind, structured.source) == (kind, source)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, regex"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar given"),
        ({"json_object": False}, "none given"),
        ({"json_object": 1}, "json_object must be"),
        ({"whitespace": "a"}, "no field 'whitespace'"),
        ("regex", "structured must be"),
        ({"json": 5}, "json is 5"),
        ({"json": "[1]"}, "json is '"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": {"a": float("nan")}}, "json is no JSON"),
        ({"json": {"a": {1}}}, "json is no JSON"),
        ({"json": {1j: 2}}, "json is no JSON"),
        ({"json": {"a": "\ud800"}}, "json is no JSON"),
        ({"json": DEEP}, f"deeper than {MAX_SCHEMA_DEPTH} levels"),
        ({"json": "[" * 100_000}, "json is no JSON"),
        ({"json": {"a": "x" * MAX_SCHEMA_BYTES}}, f"at most {MAX_SCHEMA_BYTES} bytes"),
        ({"json": " " * (MAX_SCHEMA_BYTES + 1)}, f"at most {MAX_SCHEMA_BYTES} bytes"),
        ({"json": {"a": [0] * (MAX_SCHEMA_BYTES + 1)}}, f"{MAX_SCHEMA_BYTES} bytes"),
        ({"regex": ""}, f"1 to {MAX_REGEX_CHARS}"),
        ({"regex": "a" * (MAX_REGEX_CHARS + 1)}, f"1 to {MAX_REGEX_CHARS}"),
        ({"regex": b"a"}, "not b'a'"),
        ({"regex": "\udfff"}, "valid Unicode"),
        ({"grammar": "ä" * MAX_GRAMMAR_BYTES}, f"1 to {MAX_GRAMMAR_BYTES} bytes"),
        ({"choice": []}, f"1 to {MAX_CHOICES} entries"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"1 to {MAX_CHOICES} entries"),
        ({"choice": "abc"}, "not 'abc'"),
        ({"choice": ["a", ""]}, "each of choice must be"),
        ({"choice": ["a", 1]}, "not 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_types_and_sizes(given: Any, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(structured=given)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 600
