"""Bodies of requests, drawn from the OpenAPI document of the service, and hostile ones."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from stepgraph.runtime.service.http.app import openapi_document

DOCUMENT = openapi_document(needs_key=False)
POSTS = {
    path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, operations in DOCUMENT["paths"].items()
    if "post" in operations
}
"""Path → schema of its body."""

WIDE = 100_000
HOSTILE = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1e308", b"5e-324", b"-0.0", b"0"),
    *(b"-1", b"1.5", b"9" * 20, b"-" + b"9" * 400, b"9" * 5000, b"true", b"null", b"nul", b""),
    *(b'""', b'"a', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff"', b'"\xed\xa0\x80"'),
    *(b'"\x00"', b'"' + b"x" * WIDE + b'"', b'"' + b"<" * WIDE + b'"', "漢".encode(), b"// 1"),
    *(b"[]", b"{}", b"[[]]", b"[{}]", b'{"": {}}', b"[1, null]", b'[1, "a", [1]]', b'["", ""]'),
    *(b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500, b"[" * WIDE, b'[{"a":' * 5000),
    *(b"[" + b"1," * WIDE + b"1]", b"[" + b'"",' * WIDE + b'""]', b"[" + b"[]," * WIDE + b"[]]"),
    *(b"[" + b"{}," * WIDE + b"{}]", b"[" + b"9" * 4000 + b"]", b"[2147483648]", b"[-1]"),
    b"{" + b",".join(b'"%d": 1' % i for i in range(WIDE)) + b"}",
]
"""Texts in place of a value."""

TEXTS = st.text(max_size=20) | st.sampled_from(["a b", "<tool_call>", "{{ x }}", "\u202e", "\0"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = DOCUMENT["components"]["schemas"][name]
    return schema


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return st.one_of([values(each) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            small = st.integers(low, high).filter(lambda value: abs(value) < 10)
            return small | st.integers(low, high)
        case "number":
            above = "exclusiveMinimum" in schema
            low = schema.get("exclusiveMinimum", low)
            return st.floats(low, high, exclude_min=above, allow_nan=False, allow_infinity=False)
        case "string":
            least, most = schema.get("minLength", 0), schema.get("maxLength", 1 << 20)
            return TEXTS.filter(lambda text: least <= len(text) <= most)
        case "array":
            return st.lists(values(schema["items"]), max_size=min(schema.get("maxItems", 4), 4))
        case "object" if "properties" in schema:
            fields = {name: values(each) for name, each in schema["properties"].items()}
            required = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(required, optional=fields)
        case "object":
            keys = TEXTS
            if "propertyNames" in schema:
                keys = st.from_regex(schema["propertyNames"]["pattern"], fullmatch=True)
            items = schema.get("additionalProperties") or {}
            return st.dictionaries(keys, values(items), max_size=4)
    return ANYTHING


CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXTS, "arguments": st.just("{}") | ANYTHING})}
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"])},
        optional={"content": TEXTS, "name": ANYTHING, "tool_calls": CALLS},
    ),
    min_size=1,
    max_size=3,
)
TOOLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXTS, "x": ANYTHING})}),
    max_size=2,
)
IDS = st.lists(st.integers(0, 10), min_size=1, max_size=8)
ACCEPTED = {
    "prompt": IDS | st.lists(IDS, min_size=1, max_size=3) | st.sampled_from(["a b", "{", "漢"]),
    "messages": MESSAGES,
    "tools": st.none() | TOOLS,
    "tool_choice": st.sampled_from([None, "none", "auto"]),
    "tokens": IDS,
    "model": st.sampled_from([None, "stepgraph"]),
    "min_tokens": st.integers(0, 2),
    "best_of": st.none(),
    "chat_template": st.none(),
    "response_format": st.just({"type": "text"}),
    "structured_outputs": st.none(),
    "stop_token_ids": st.lists(st.integers(0, 10), max_size=2),
    "logit_bias": st.dictionaries(st.sampled_from("0123"), st.floats(-100, 100), max_size=2),
}
"""Values that pass the checks which the schema does not express."""
NEEDED = {"stream_options": "stream", "top_logprobs": "logprobs"}


@st.composite
def bodies(draw: st.DrawFn, path: str, hostile: bool = False) -> bytes:
    """A body for a path: what its schema allows, mostly accepted; `hostile`: also what it does not.

    Hostile bodies have a field in place of another, or one of them twice; some are cut off.
    """
    schema = resolved(POSTS[path])
    properties, required = schema["properties"], schema["required"]
    optional = st.sets(st.sampled_from(sorted(set(properties) - set(required))), max_size=8)
    names = [*required, *sorted(draw(optional))]
    if path == "/tokenize":
        names = (
            [*{*names, "prompt"} - {"messages"}] if draw(st.booleans()) else [*names, "messages"]
        )
    body = {}
    for name in sorted(set(names)):
        accepted = ACCEPTED.get(name, st.none() if not _is_typed(properties[name]) else None)
        if path == "/tokenize" and name == "prompt":
            accepted = None if "messages" not in names else st.none()
        if accepted is None or not draw(st.integers(0, 19)):
            accepted = values(properties[name])
        body[name] = draw(accepted)
        if name in NEEDED:
            body[NEEDED[name]] = True
    fields = [(name, json.dumps(value).encode()) for name, value in body.items()]
    if hostile:
        for _ in range(draw(st.integers(1, 2))):
            name = draw(st.sampled_from([*properties, "unknown", ""]))
            place = draw(st.integers(0, len(fields)))
            fields[place : place + draw(st.integers(0, 1))] = [
                (name, draw(st.sampled_from(HOSTILE)))
            ]
    text = b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields)
    if hostile and not draw(st.integers(0, 9)):
        return text[: draw(st.integers(0, len(text)))] + draw(st.binary(max_size=4))
    return text


def _is_typed(schema: dict[str, Any]) -> bool:
    return bool({"$ref", "anyOf", "type"} & schema.keys())
