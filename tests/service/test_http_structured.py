"""Structured outputs over HTTP, through an `AsyncEngine`, with the demo model."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from stepgraph.runtime import AsyncEngine, SamplingParams
from stepgraph.runtime.service.http.tool_calls import TOOL_FORMATS
from stepgraph.runtime.structured import compiler

from ..rigs.http_rig import CHAT, COMPLETIONS, Rig, demo_with_template, quick_config
from ..rigs.service_rig import in_event_loop

TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}def "
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"enum": [3, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
UNSUPPORTED = {"type": "string", "not": {}}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "trip", "parameters": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    return demo_with_template(tmp_path_factory.mktemp("chat"), TEMPLATE)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[AsyncEngine]:
    """An engine with the default token masks."""
    with AsyncEngine.from_pretrained(checkpoint, quick_config(256)) as engine:
        yield engine


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"], "json": None}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, "b*a"),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
        ({"response_format": {"type": "json_schema", "schema": {"const": 7}}}, "7"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, None),
    ],
    ids=str,
)
@in_event_loop
async def test_outputs_follow_the_fields(
    engine: AsyncEngine, fields: dict[str, Any], pattern: str | None
) -> None:
    def check(text: str) -> None:
        if pattern is None:
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert re.fullmatch(pattern, text)

    rig = Rig(engine)
    common = {"max_tokens": 200, "seed": 4, **fields}
    answer = (await rig.post({"prompt": "def main(", **common})).json()
    check(answer["choices"][0]["text"])
    answer = (await rig.post({"messages": HI, **common}, CHAT)).json()
    check(answer["choices"][0]["message"]["content"])
    events = await rig.events({"messages": HI, **common}, CHAT)
    check("".join(event["choices"][0]["delta"].get("content", "") for event in events))


@pytest.mark.parametrize("number", ["-9007199254740992", "9007199254740991", "0.123456789012345"])
@in_event_loop
async def test_numbers_keep_their_digits_on_the_way(engine: AsyncEngine, number: str) -> None:
    properties = f'"properties": {{"n": {{"const": {number}}}}}, "required": ["n"]'
    schema = f'{{"type": "object", {properties}, "additionalProperties": false}}'
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
    bodies = [
        f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}',
        f'"structured_outputs": {{"json": {schema}}}',
        f'"tools": [{tool}], "tool_choice": "required"',
        f'"structured_outputs": {{"grammar": {json.dumps(f"start: %json {schema}")}}}',
    ]
    rig = Rig(engine, tool_parser="hermes")
    for fields in bodies:
        body = f'{{"messages": {json.dumps(HI)}, "max_tokens": 60, {fields}}}'
        response = await rig.post(body.encode(), CHAT)
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        calls = message.get("tool_calls")
        text = calls[0]["function"]["arguments"] if calls else message["content"]
        assert json.loads(text, parse_int=str, parse_float=str) == {"n": number}


@pytest.mark.parametrize("parser", TOOL_FORMATS)
@in_event_loop
async def test_a_demanded_call_is_found_in_every_format(engine: AsyncEngine, parser: str) -> None:
    rig = Rig(
        engine, tool_parser=parser, reasoning_parser="harmony" if parser == "harmony" else None
    )
    body = {"messages": HI, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    (choice,) = (await rig.post(body, CHAT)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "trip"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
@in_event_loop
async def test_a_demanded_call_follows_parameters_that_refer_to_themselves(
    engine: AsyncEngine, parser: str, keyword: str
) -> None:
    def tool(name: str, place: dict[str, Any]) -> dict[str, Any]:
        again = {"$ref": "#/properties/to", "description": "as \x7f" * 10_000}
        parameters = {
            **{"type": "object", "properties": {"to": {"$ref": f"#/{keyword}/Place"}, "by": again}},
            **{"required": ["to", "by"], "additionalProperties": False},
            keyword: {"Place": place},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("go", {"enum": ["Rome"]}), tool("come", {"const": {"$ref": "#/\x7f"}})]
    rig = Rig(engine, tool_parser=parser)
    body = {"messages": HI, "tools": tools, "max_tokens": 200, "seed": 1}
    places = {"go": "Rome", "come": {"$ref": "#/\x7f"}}
    named = [{"type": "function", "function": {"name": name}} for name in places]
    for choice in ("required", *named):
        (found,) = (await rig.post({**body, "tool_choice": choice}, CHAT)).json()["choices"]
        assert found["finish_reason"] == "tool_calls"
        (call,) = found["message"]["tool_calls"]
        name, place = call["function"]["name"], places[call["function"]["name"]]
        assert choice == "required" or name == choice["function"]["name"]
        assert json.loads(call["function"]["arguments"]) == {"to": place, "by": place}


LARGE = {"const": "LARGE"}
"""A schema with a number that is out of range."""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "schema": LARGE}}, "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"json": LARGE}}, "structured_outputs"),
    (
        {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": LARGE}}]},
        "tools[0].function.parameters",
    ),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": UNSUPPORTED}}, "structured_outputs"),
    ({"response_format": {"type": "json_object", "schema": UNSUPPORTED}}, "response_format"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "missing"}}}, "tool_choice"),
    (
        {
            "tools": [{"function": {"name": "f", "parameters": UNSUPPORTED}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"chat_template": "other"}, "chat_template"),
]


@in_event_loop
async def test_refusals_name_the_field(engine: AsyncEngine) -> None:
    rig = Rig(engine, tool_parser="hermes")
    for fields, field in REFUSED:
        text = json.dumps({"messages": HI, "max_tokens": 5, **fields})
        for number in ("1" * 4000, "1e9999"):
            response = await rig.post(text.replace('"LARGE"', number).encode(), CHAT)
            assert response.status_code == 400, text
            # Numbers out of range are refused before their place in the field is known.
            named = response.json()["error"]["param"]
            assert named.startswith(field) or field.startswith(named), text


@in_event_loop
async def test_a_missing_package_is_named_by_the_first_grammar(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncEngine.from_pretrained(checkpoint, quick_config(256)) as engine:
        rig = Rig(engine, tool_parser="hermes")
        monkeypatch.setitem(sys.modules, "llguidance", None)
        for path, body, demand in (
            (COMPLETIONS, {"prompt": "def "}, {"response_format": {"type": "json_object"}}),
            (CHAT, {"messages": HI, "tools": [TOOL]}, {"tool_choice": "required"}),
        ):
            response = await rig.post({**body, **demand}, path)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] in demand
            assert "stepgraph[structured]" in error["message"]


@pytest.mark.parametrize("prompt", ["def", [5, 6, 7]], ids=["text", "tokens"])
@in_event_loop
async def test_a_compilation_delays_no_other_request(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    """Neither the event loop nor the step thread nor other prompts wait for a grammar."""
    made = compiler.GrammarCompiler._made
    assert engine.config.preparation_threads == 1
    loop, go_on = asyncio.get_running_loop(), asyncio.Event()

    def slow(self: Any, kind: str, source: str) -> Any:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return made(self, kind, source)

    monkeypatch.setattr(compiler.GrammarCompiler, "_made", slow)
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 60.0)
    pattern = f"[xy]{{4}}{type(prompt).__name__}"  # the cache has no other test's
    params = SamplingParams(max_tokens=20, structured={"regex": pattern})
    held = [asyncio.ensure_future(engine.generate(prompt, params)) for _ in range(2)]
    await asyncio.sleep(0)  # they begin first
    plain = await engine.generate("def", SamplingParams(max_tokens=5))
    assert len(plain.token_ids) <= 5
    assert not any(task.done() for task in held)
    go_on.set()
    for output in await asyncio.gather(*held):
        assert re.fullmatch(pattern, output.text)
