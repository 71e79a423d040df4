"""The HTTP service against requests drawn from its OpenAPI document, and against hostile ones."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount
from stepgraph.runtime import AsyncEngine, Engine
from stepgraph.runtime.loading.chat_template import ChatTemplates
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from stepgraph.runtime.service.http.app import OPERATIONS, openapi_document
from stepgraph.runtime.service.http.exchange import ErrorBody
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ..rigs.fake_engine import fake_engine
from ..rigs.http_rig import Rig, events_of, service
from ..rigs.service_rig import SECONDS, in_event_loop

PIECES = [
    *("<unk>", "a", " ", "{", "}", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *('{"name": "f", "arguments": {', '"x": "'),
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.name | default(0) | tojson }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"
    "{{ tools | tojson }}{{ documents | tojson(indent=1) }}{{ style | string | length }}"
    "{% if add_generation_prompt %}a{% endif %}"
)
OPTIONS: dict[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "think"}


def text_engine() -> Engine:
    """A fake engine whose tokens are fragments of reasoning and of tool calls."""
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(PIECES)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    templates = ChatTemplates({"default": TEMPLATE}, {})
    return fake_engine(tokenizer=TextTokenizer(tokenizer, templates=templates))


DOCUMENT = openapi_document(needs_key=False)
POSTS = {
    path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, operations in DOCUMENT["paths"].items()
    if "requestBody" in operations.get("post", {})
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
    "suffix": st.sampled_from([None, ""]),
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


Serve = Callable[[Callable[[Rig], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Runs a coroutine with a service that all tests share."""
    with asyncio.Runner() as runner, AsyncEngine(text_engine) as engine:
        rig = Rig(engine, **OPTIONS)
        yield lambda run: runner.run(run(rig))
        runner.run(rig.until_idle())
        rig.inner.check_integrity()


def check_response(path: str, body: bytes, response: httpx.Response) -> None:
    """Assert that a response is one that the document allows for its status."""
    operation, text = OPERATIONS["POST", path], response.text
    shown = f"{path} {body[:300]!r}: {response.status_code} {text[:300]}"
    kind = response.headers["content-type"].partition(";")[0]
    if operation.dialect.error_body is not ErrorBody:
        assert response.status_code in (200, 400, 404), shown
        if response.status_code != 200:
            msgspec.json.decode(text, type=operation.dialect.error_body)
        elif kind == "application/json":
            msgspec.json.decode(text, type=operation.response)
    elif response.status_code != 200:
        error = msgspec.json.decode(text, type=ErrorBody).error
        assert 0 < len(error.message) <= 1000
        expected = {400: "invalid_request_error", 404: "not_found_error"}
        if response.status_code == 503:  # a deadline
            assert int(response.headers["retry-after"]) >= 1, shown
            assert b"timeout" in body, shown
        else:
            assert expected[response.status_code] == error.type, shown
    elif kind == "application/json":
        msgspec.json.decode(text, type=operation.response)
    elif text.startswith("event: "):  # of the Responses API
        *events, rest = text.split("\n\n")
        for event in events:
            msgspec.json.decode(event.partition("\ndata: ")[2], type=operation.event)
        assert rest == ""
    else:
        assert kind == "text/event-stream"
        *events, end = events_of(text)
        assert end == "[DONE]"
        chunks: list[Any] = [msgspec.json.decode(event, type=operation.event) for event in events]
        ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason is not None]
        begun = {choice.index for chunk in chunks for choice in chunk.choices}
        assert sorted(ends) == sorted(begun), shown


def fuzz(serve: Serve, path: str, data: st.DataObject) -> None:
    """Send a body that the document allows, and a hostile one."""

    async def run(rig: Rig) -> None:
        for hostile in (False, True):
            body = data.draw(bodies(path, hostile=hostile))
            async with asyncio.timeout(SECONDS):
                response = await rig.post(body, path)
            check_response(path, body, response)

    serve(run)


QUICK = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", POSTS)
@QUICK
@given(data=st.data())
def test_hostile_bodies(serve: Serve, path: str, data: st.DataObject) -> None:
    fuzz(serve, path, data)


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
@settings(QUICK, max_examples=1000, derandomize=False)
@given(data=st.data())
def test_many_bodies(serve: Serve, path: str, data: st.DataObject) -> None:
    fuzz(serve, path, data)


BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/responses": {"input": "a"},
}
SAMPLES: dict[str, Any] = {
    "boolean": True,
    "integer": 1,
    "number": 0.5,
    "string": "a",
    "array": ["a"],
    "object": {"a": "a"},
}
NEEDS: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": 1 << 20},
    "top_logprobs": {"logprobs": True},
    "n": {"best_of": None},
    "best_of": {"n": 1, "stream": None},
}
"""Other fields without which a field is refused."""
NEED_MORE = frozenset(
    (
        *("allowed_token_ids", "bad_words", "truncate_prompt_tokens", "logprob_token_ids"),
        *("messages", "tools", "documents", "input"),
    )
)
"""Fields whose largest values need token masks, more context, log-probabilities or entries."""

OF_OTHERS = ("max_tokens", "prompt_logprobs", "n")
"""Fields that `/v1/responses` refuses and names another one for."""


def limits(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(value on a limit, value beyond it) for each limit of a schema."""
    step: Any = 1 if schema.get("type") == "integer" else 1e-6
    if "minimum" in schema:
        yield schema["minimum"], schema["minimum"] - step
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"] + step, schema["exclusiveMinimum"]
    if "maximum" in schema:
        above = schema["maximum"] + (step if schema["maximum"] < 1e6 else 1)
        yield schema["maximum"], above
    if "minLength" in schema:
        yield "a" * schema["minLength"], "a" * (schema["minLength"] - 1)
    if "maxLength" in schema:
        yield "a" * schema["maxLength"], "a" * (schema["maxLength"] + 1)
    if "maxItems" in schema:
        item = SAMPLES[schema["items"]["type"]]
        yield [item] * schema["maxItems"], [item] * (schema["maxItems"] + 1)


@pytest.mark.parametrize("path", BASES)
def test_fields_are_accepted_up_to_their_limits(serve: Serve, path: str) -> None:
    """Just beyond a limit of the document, and of a wrong type, a field is 400 with its name."""

    async def run(rig: Rig) -> None:
        async def param_of(name: str, value: Any) -> str | None:
            needs = {} if path == "/v1/responses" else NEEDS.get(name, {})
            response = await rig.post({**BASES[path], **needs, name: value}, path)
            if response.status_code == 200:
                return None
            assert response.status_code == 400, response.text
            param = str(response.json()["error"]["param"])
            return re.split(r"[.\[]", param)[0]

        for name, field in resolved(POSTS[path])["properties"].items():
            kinds = [resolved(each) for each in field.get("anyOf", [field])]
            types = {kind["type"] for kind in kinds if "type" in kind}
            for kind in kinds if types else ():
                for allowed, refused in limits(kind):
                    accepted = await param_of(name, allowed) is None
                    is_other = path == "/v1/responses" and name in OF_OTHERS
                    assert accepted or is_other or name in NEED_MORE, (name, allowed)
                    assert await param_of(name, refused) == name, (name, refused)
            for kind, sample in SAMPLES.items():
                is_number = kind == "integer" and "number" in types
                if not (kind in types or is_number or (name == "prompt" and kind == "array")):
                    assert await param_of(name, sample) == name, (name, sample)

    serve(run)


@in_event_loop
async def test_the_document_names_the_mount_and_the_key() -> None:
    async with service(api_keys=["k"]) as rig:
        rig.http._transport.app = Starlette(routes=[Mount("/llm", rig.app)])  # type: ignore
        assert (await rig.http.get("/llm/openapi.json")).status_code == 401
        assert (await rig.http.get("/llm/health")).status_code == 200
        headers = {"authorization": "Bearer k"}
        assert (await rig.http.get("/llm/v1/models", headers=headers)).status_code == 200
        document = (await rig.http.get("/llm/openapi.json", headers=headers)).json()
        assert document["servers"] == [{"url": "/llm"}]
        paths = document["paths"]
        assert paths.keys() == DOCUMENT["paths"].keys()
        free = [path for path, ops in paths.items() for op in ops.values() if "security" not in op]
        assert free == ["/health", "/ping", "/ready"]
