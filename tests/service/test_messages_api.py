"""Anthropic's Messages API, with an engine that gives known answers."""

from __future__ import annotations

import gc
import json
import threading
import time
from typing import Any

import msgspec
import pytest
from stepgraph.runtime import ServiceConfig
from stepgraph.runtime.service.http import generation
from stepgraph.runtime.service.http.exchange import Exchange
from stepgraph.runtime.service.http.messages_api import MessagesRequest

from ..rigs.fake_engine import runner_of
from ..rigs.http_rig import CHAT, Rig, service
from ..rigs.scripted_engine import PROMPT_TOKENS, scripted_engine
from ..rigs.service_rig import in_event_loop

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{{ ' ' + m.name if m.name else '' }}"
    "{{ ': ' + m.reasoning_content if m.reasoning_content else '' }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function | tojson }}>{% endfor %}"
    "{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}"
    "{% if enable_thinking is defined %} thinks: {{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort %} effort: {{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %} begin{% endif %}"
)
CALL = (
    '<think>\nWhich?</think>\n\nI look.<tool_call>\n{"name": "trip", "arguments":'
    ' {"city": "Rome"}}\n</tool_call><tool_call>\n{"name": "trip", "arguments": {}}\n</tool_call>'
)
TOOL = {"name": "trip", "description": "d", "input_schema": {"type": "object"}}
HI: dict[str, Any] = {"max_tokens": 60, "messages": [{"role": "user", "content": "hi"}]}


def serve(seen: list[str] | None = None, **options: Any) -> Any:
    answers = {"trip": CALL, "": "Hello there, friend."}
    start = lambda: scripted_engine(answers, TEMPLATE, [] if seen is None else seen)  # noqa: E731
    return service(start, tool_parser="hermes", reasoning_parser="think", **options)


async def message(rig: Rig, **fields: Any) -> dict[str, Any]:
    """The message that a request gets, whole and as a stream."""
    response = await rig.post({**HI, **fields}, MESSAGES)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    stream = await rig.post({**HI, **fields, "stream": True}, MESSAGES)
    assert stream.headers["request-id"] == stream.headers["x-request-id"]
    events = []
    for event in stream.text.removesuffix("\n\n").split("\n\n"):
        kind, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    first, *gains, last, stop = events
    assert (first["type"], last["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    assert first["message"]["stop_reason"] is None
    made = {**first["message"], **last["delta"], "usage": last["usage"]}
    open_block = None
    for event in gains:
        if event["type"] == "content_block_start":
            assert (open_block, event["index"]) == (None, len(made["content"]))
            open_block = event["content_block"]
            made["content"].append(open_block)
        elif event["type"] == "content_block_delta":
            assert open_block is made["content"][event["index"]]
            gained = event["delta"]
            for name in gained.keys() - {"type"}:
                open_block[name] = open_block.get(name, "") + gained[name]
        else:
            assert event == {"type": "content_block_stop", "index": len(made["content"]) - 1}
            if (text := open_block.pop("partial_json", None)) is not None:
                open_block["input"] = json.loads(text)
            open_block = None
    assert open_block is None
    for each in (made, whole):
        assert each.pop("id").startswith("msg_")
        each["tokens"] = {**each.pop("usage"), "cache_read_input_tokens": 0, "input_tokens": 0}
        for block in each["content"]:
            assert block.pop("signature", "s")
            assert block.pop("id", "i")
    assert made == whole
    return whole


@in_event_loop
async def test_answers_are_blocks_of_reasoning_text_and_calls() -> None:
    async with serve() as rig:
        plain = await message(rig)
        assert plain["content"] == [{"type": "text", "text": "Hello there, friend."}]
        assert (plain["role"], plain["type"], plain["model"]) == (
            "assistant",
            "message",
            "stepgraph",
        )
        assert plain["stop_reason"] == "end_turn"
        called = await message(rig, tools=[TOOL])
        assert called["content"] == [
            {"type": "thinking", "thinking": "Which?"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "trip", "input": {"city": "Rome"}},
            {"type": "tool_use", "name": "trip", "input": {}},
        ]
        assert called["stop_reason"] == "tool_use"
        one = await message(
            rig, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        assert len(one["content"]) == 3
        stopped = await message(rig, stop_sequences=["friend", "there"])
        assert stopped["content"] == [{"type": "text", "text": "Hello "}]
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "there")
        cut = await message(rig, max_tokens=1)
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


@in_event_loop
async def test_text_after_a_call_is_a_block_of_its_own() -> None:
    """Also if one delta has the end of the arguments and the text."""
    answer = '[TOOL_CALLS]trip[ARGS]{"city": 123456}. Wait'
    start = lambda: scripted_engine({"": answer}, TEMPLATE, [])  # noqa: E731
    async with service(start, tool_parser="mistral") as rig:
        stream = await rig.post({**HI, "tools": [TOOL], "stream": True}, MESSAGES)
        lines = [line[6:] for line in stream.text.split("\n") if line.startswith("data: ")]
        blocks = [""] * 2
        for event in map(json.loads, lines):
            if event["type"] == "content_block_delta":
                gained = event["delta"]
                blocks[event["index"]] += gained.get("partial_json") or gained["text"]
        assert blocks == ['{"city": 123456}', ". Wait"]


def test_a_conversation_of_many_blocks_is_read_in_linear_time() -> None:
    def seconds(count: int) -> float:
        parts = [{"type": "text", "text": ""}, {"type": "thinking", "thinking": "b"}] * count
        body = json.dumps({**HI, "messages": [{"role": "assistant", "content": parts}]})
        request = msgspec.json.decode(body, type=MessagesRequest)
        gc.disable()  # a collection takes as long as earlier tests have left objects
        try:
            before = time.thread_time()
            assert len(request.chat().messages[0]["content"]) == count
            return time.thread_time() - before
        finally:
            gc.enable()

    assert seconds(32_000) < 32 * seconds(2_000) + 0.1


@in_event_loop
async def test_usage_counts_cached_tokens_apart() -> None:
    async with serve() as rig:
        counts = [(await rig.post(HI, MESSAGES)).json()["usage"] for _ in range(2)]
        assert [usage["cache_read_input_tokens"] for usage in counts] == [0, 8]
        assert [usage["input_tokens"] for usage in counts] == [PROMPT_TOKENS, PROMPT_TOKENS - 8]
        counted = await rig.post({"messages": HI["messages"], "tools": [TOOL]}, COUNT)
        assert counted.json() == {"input_tokens": PROMPT_TOKENS}


@in_event_loop
async def test_conversations_reach_the_template() -> None:
    texts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    use = {"type": "tool_use", "id": "t1", "name": "trip", "input": {"x": [1]}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": texts, "is_error": True},
        {"type": "tool_result", "tool_use_id": "t2"},
    ]
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    messages = [
        {"role": "user", "content": texts},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "?"}, thought, use],
        },
        {"role": "user", "content": [*results, *texts]},
        {"role": "assistant", "content": "So"},
    ]
    function = json.dumps({"name": "trip", "arguments": {"x": [1]}})
    prompt = (
        f"[system] s[user] a\nb[assistant: Hm] <t1 {function}>[tool trip] Error:\na[tool] [user] a"
        "[assistant] So"
    )
    seen: list[str] = []
    async with serve(seen) as rig:

        async def prompt_of(**fields: Any) -> str:
            response = await rig.post({**HI, **fields}, MESSAGES, params={"beta": "true"})
            assert response.status_code == 200, response.text
            return seen[-1]

        assert await prompt_of(messages=messages, system="s") == prompt
        user = {"user_id": "x" * 300}
        assert await prompt_of(
            system=texts, tool_choice={"type": "none"}, tools=[TOOL], metadata=user
        ) == ("[system] a[user] hi begin")
        described = json.dumps({"name": "trip", "parameters": {"type": "object"}})
        tool = {key: TOOL[key] for key in ("name", "input_schema")}
        assert await prompt_of(tools=[{**tool, "type": "custom"}]) == f"[user] hi{described} begin"
        for thinking, is_on in (
            ({"type": "enabled", "budget_tokens": 1024}, True),
            ({"type": "adaptive"}, True),
            ({"type": "disabled"}, False),
        ):
            shown = await prompt_of(thinking=thinking, output_config={"effort": "low"})
            assert shown == f"[user] hi thinks: {is_on} effort: low begin"


TEXT = {"role": "user", "content": "a"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
IMAGES = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
USE = {"type": "tool_use", "id": "t", "name": "trip", "input": {}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"messages": [TEXT, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0]"),
        ({"messages": [{**TEXT, "content": [IMAGES]}]}, "messages[0].content[0].content[0]"),
        ({"messages": [TEXT, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [{**TEXT, "content": [{**IMAGES, "content": IMAGE}]}]},
         "messages[0].content[0].content"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 200}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [{**TOOL, "input_schema": {"minimum": 0.5, "multipleOf": 2}}],
          "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}},
         "output_config.format"),
        ({"metadata": {"user_id": 3}}, "metadata"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers"),
        ({"logprobs": 2}, "logprobs"),
        ({"surprise": 1}, "surprise"),
    ],
)  # fmt: skip
@in_event_loop
async def test_errors_name_fields_of_this_api(fields: dict[str, Any], field: str) -> None:
    async with serve(config=ServiceConfig(unknown_fields="error")) as rig:
        response = await rig.post({**HI, **fields}, MESSAGES)
        assert response.status_code == 400, response.text
        body = response.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["message"].startswith(field), body
        assert body["request_id"] == response.headers["request-id"]


@in_event_loop
async def test_error_types_follow_the_status() -> None:
    async with serve(api_keys=["k"], max_body_bytes=300) as rig:
        key = {"x-api-key": "k", "anthropic-version": "2023-06-01"}

        async def error_of(body: Any, **headers: str) -> tuple[int, str, str]:
            response = await rig.post(body, MESSAGES, headers=headers)
            error = response.json()["error"]
            return response.status_code, error["type"], error["message"]

        assert (await error_of(HI))[:2] == (401, "authentication_error")
        large = await error_of({**HI, "system": "x" * 300}, **key)
        assert large[:2] == (413, "request_too_large")
        status, kind, text = await error_of({**HI, "model": "claude-sonnet"}, **key)
        assert (status, kind) == (404, "not_found_error")
        assert "--served-model-name" in text
        assert (await rig.http.get(MESSAGES, headers=key)).status_code == 405
        await rig.engine.drain()
        assert (await error_of(HI, **key))[:2] == (503, "overloaded_error")


@in_event_loop
async def test_pings_keep_a_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PING_SECONDS", 0.01)
    async with serve() as rig:
        runner = runner_of(rig.inner)
        read = runner.read
        runner.read = lambda launch: time.sleep(0.05) or read(launch)
        response = await rig.post({**HI, "stream": True}, MESSAGES)
        pings = response.text.split('event: ping\ndata: {"type":"ping"}\n\n')
        assert len(pings) > 2
        assert "".join(pings).startswith("event: message_start\n")
        chat = await rig.events({"messages": HI["messages"]}, CHAT)
        assert all(event["object"] == "chat.completion.chunk" for event in chat)


@in_event_loop
async def test_an_error_within_a_stream_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, start = threading.Event(), Exchange.start_stream

    async def started(exchange: Exchange) -> None:
        await start(exchange)
        begun.set()

    monkeypatch.setattr(Exchange, "start_stream", started)
    async with serve() as rig:
        runner = runner_of(rig.inner)
        read = runner.read

        def fail(launch: Any) -> Any:
            if begun.wait(0.02):  # the event loop learns of the request between steps
                raise RuntimeError("broken")
            return read(launch)

        runner.read = fail
        response = await rig.post({**HI, "stream": True}, MESSAGES)
        *_, last = response.text.removesuffix("\n\n").split("\n\n")
        assert last.startswith("event: error\n")
        assert json.loads(last.partition("data: ")[2])["error"]["type"] == "api_error"
