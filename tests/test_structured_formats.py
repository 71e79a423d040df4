"""Formats that JSON Schema does not specify are annotations: they must not refuse a schema."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from stepgraph.runtime.structured.compiler import _grammar
from stepgraph.runtime.structured.json_formats import without_custom_formats

MINE = {"type": "string", "format": "AWS::S3::Bucket.Name"}


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (MINE, {"type": "string"}),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"format": "date", "anyOf": [MINE]}, {"format": "date", "anyOf": [{"type": "string"}]}),
        ({"properties": {"format": MINE}}, {"properties": {"format": {"type": "string"}}}),
        ({"$defs": {"enum": MINE}}, {"$defs": {"enum": {"type": "string"}}}),
        ({"components": {"a": {"b": MINE}}}, {"components": {"a": {"b": {"type": "string"}}}}),
    ],
)
def test_custom_formats_are_removed(schema: Any, kept: Any) -> None:
    assert json.loads(without_custom_formats(json.dumps(schema))) == kept


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "ipv4"},
        {"type": "string", "format": "uri-template"},
        {"enum": [MINE, "format"]},
        {"const": {"format": "mine"}},
        {"properties": {"a": {"default": MINE, "examples": [MINE]}}},
        {"format": ["no", "text"]},
        ["format"],
        True,
    ],
)
def test_all_else_stays_as_it_is(schema: Any) -> None:
    source = json.dumps(copy.deepcopy(schema), indent=1)
    assert without_custom_formats(source) == source


def test_a_schema_with_custom_formats_compiles() -> None:
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"bucket": MINE}, "required": ["bucket"]}
    grammar = _grammar("json", json.dumps(schema))
    assert llguidance.LLMatcher.validate_grammar(grammar) == ""
    unsupported = _grammar("json", json.dumps({"type": "string", "format": "regex"}))
    assert "regex" in llguidance.LLMatcher.validate_grammar(unsupported)
