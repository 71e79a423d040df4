"""Structured outputs are checked by type and size when they are made, without llguidance."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.sampling_params import SamplingParams
from stepgraph.runtime.structured_output import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    StructuredOutput,
)

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
def test_refusals(given: Any, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(structured=given)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 600
