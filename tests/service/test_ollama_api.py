"""Ollama's API, with an engine that gives known answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from stepgraph.runtime import ServiceConfig

from ..rigs.http_rig import Rig, service
from ..rigs.scripted_engine import PROMPT_TOKENS, scripted_engine
from ..rigs.service_rig import in_event_loop

CHAT = "/api/chat"
GENERATE = "/api/generate"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{{ ' ' + m.name if m.name }}"
    "{{ ' to ' + m.tool_call_id if m.tool_call_id }}{{ ': ' + m.thinking if m.thinking }}]"
    " {{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function | tojson }}>"
    "{% endfor %}{% endfor %}{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}"
    "{% if enable_thinking is defined %} thinks: {{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort %} effort: {{ reasoning_effort }}{% endif %} begin"
)
CALL = (
    '<think>\nWhich?</think>\n\nI look.<tool_call>\n{"name": "trip", "arguments":'
    ' {"city": "Rome"}}\n</tool_call><tool_call>\n{"name": "trip", "arguments": {}}\n</tool_call>'
)
TEXT = "Hello there, friend."
TOOL = {"type": "function", "function": {"name": "trip", "parameters": {"type": "object"}}}
CALLS = [
    {"function": {"name": "trip", "arguments": {"city": "Rome"}}},
    {"function": {"name": "trip", "arguments": {}}},
]
HI: dict[str, Any] = {"model": "stepgraph:latest", "messages": [{"role": "user", "content": "hi"}]}
COUNTS = ("load_duration", "prompt_eval_duration", "eval_duration", "total_duration")


def serve(seen: list[str] | None = None, template: str = TEMPLATE, **options: Any) -> Any:
    def start() -> Any:
        return scripted_engine({"trip": CALL, "": TEXT}, template, [] if seen is None else seen)

    return service(start, tool_parser="hermes", reasoning_parser="think", **options)


async def reply(rig: Rig, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """The response to a request, whole, which the lines of its stream equal."""
    body = {**(HI if path == CHAT else {}), **fields}
    whole = await rig.post({**body, "stream": False}, path)
    assert whole.status_code == 200, whole.text
    stream = await rig.post(body, path)
    assert stream.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in stream.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    made: dict[str, Any] = {}
    for line in lines:
        message = line.pop("message", line)
        for name in ("content", "response", "thinking", "tool_calls"):
            if name in message:
                gained = message.pop(name)
                made[name] = made.get(name, type(gained)()) + gained
    found: dict[str, Any] = whole.json()
    found |= found.pop("message", {})
    made |= lines[-1]
    for each in (found, made):
        times = [each.pop(name) for name in COUNTS]
        assert sum(times[:3]) == pytest.approx(times[3], abs=3)
        assert 0 <= times[2] < times[3]
        del each["created_at"]
    assert found.pop("role", None) in (None, "assistant")
    assert made == found
    return found


@in_event_loop
async def test_chats_are_lines_with_whole_calls() -> None:
    async with serve() as rig:
        plain = await reply(rig)
        assert plain == {
            "model": "stepgraph",
            "content": TEXT,
            "done": True,
            "done_reason": "stop",
            "prompt_eval_count": PROMPT_TOKENS,
            "eval_count": 4,
        }
        called = await reply(rig, tools=[TOOL])
        assert (called["thinking"], called["content"]) == ("Which?", "I look.")
        assert (called["tool_calls"], called["done_reason"]) == (CALLS, "stop")
        cut = await reply(rig, options={"num_predict": 1})
        assert (cut["content"], cut["done_reason"]) == (TEXT[:7], "length")
        options = {"num_predict": -1, "num_ctx": 8, "seed": -1, "stop": ["there"], "top_k": 1}
        assert (await reply(rig, options=options, keep_alive="5m"))["content"] == "Hello "


@in_event_loop
async def test_conversations_reach_the_template() -> None:
    call = {"function": {"name": "trip", "arguments": {"x": 1}}}
    messages = [
        *({"role": "system", "content": "s"}, {"role": "user", "content": "a"}),
        {"role": "assistant", "thinking": "Hm", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "trip", "content": "r1"},
        {"role": "tool", "content": "r2"},
    ]
    made = json.dumps(call["function"])
    prompt = (
        f"[system] s[user] a[assistant: Hm] <call00200 {made}><call00201 {made}>"
        "[tool trip to call00200] r1[tool to call00201] r2 begin"
    )
    seen: list[str] = []
    async with serve(seen) as rig:
        for path, fields, expected in (
            (CHAT, {"messages": messages}, prompt),
            (CHAT, {"think": False}, "[user] hi thinks: False begin"),
            (CHAT, {"think": "low"}, "[user] hi thinks: True effort: low begin"),
            (GENERATE, {"prompt": "p", "system": "s"}, "[system] s[user] p begin"),
            (GENERATE, {"prompt": "p", "raw": True}, "p"),
        ):
            await reply(rig, path, **fields)
            assert seen[-1] == expected


@in_event_loop
async def test_prompts_continue_a_context() -> None:
    async with serve() as rig:
        first = await reply(rig, GENERATE, prompt="p")
        assert (first["response"], first["eval_count"]) == (TEXT, 4)
        assert len(first["context"]) == PROMPT_TOKENS + 4
        before = first["context"][:PROMPT_TOKENS]
        following = await reply(rig, GENERATE, prompt="p", context=before)
        assert following["prompt_eval_count"] == 2 * PROMPT_TOKENS
        assert following["context"][: 2 * PROMPT_TOKENS] == before + before
    async with serve(template="") as rig:  # raw answers have no parts
        assert (await reply(rig, GENERATE, prompt="trip", raw=True))["response"] == CALL


@in_event_loop
async def test_empty_requests_report_a_loaded_model() -> None:
    async with serve() as rig:
        loaded = (await rig.post({"model": "stepgraph"}, GENERATE)).json()
        assert (loaded["response"], loaded["done_reason"]) == ("", "load")
        loaded = (await rig.post({"messages": [], "keep_alive": 0}, CHAT)).json()
        assert (loaded["message"]["content"], loaded["done_reason"]) == ("", "load")


IMAGES = [{"role": "user", "content": "a", "images": ["AA=="]}]


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"messages": IMAGES}, "messages[0].images"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature"),
        (CHAT, {"options": {"top_k": "a"}}, "options.top_k"),
        (CHAT, {"options": {"stop": [""]}}, "options.stop"),
        (CHAT, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        (CHAT, {"options": {"num_predict": 1 << 40}}, "options.num_predict"),
        (CHAT, {"options": {"mirostat": 1}}, "mirostat"),
        (CHAT, {"options": {"surprise": 1}}, "surprise"),
        (CHAT, {"format": "yaml"}, "format"),
        (CHAT, {"format": "json"}, "format"),  # this engine has no grammars
        (CHAT, {"think": "maybe"}, "think"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "a", "images": ["AA=="]}, "images"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix"),
        (GENERATE, {"prompt": "a", "context": [1 << 30]}, "prompt"),
    ],
)
@in_event_loop
async def test_errors_name_fields_of_this_api(
    path: str, fields: dict[str, Any], field: str
) -> None:
    async with serve(config=ServiceConfig(unknown_fields="error")) as rig:
        response = await rig.post({**(HI if path == CHAT else {}), **fields}, path)
        assert response.status_code == 400, response.text
        (message,) = response.json().values()
        assert message.startswith(field), message


@in_event_loop
async def test_models_are_described() -> None:
    async with serve(model_names=["a", "b", "a"]) as rig:
        tags = (await rig.http.get("/api/tags")).json()["models"]
        assert [model["name"] for model in tags] == ["a", "b"]
        assert tags[0]["details"]["family"] == "llama"
        assert (await rig.http.get("/api/ps")).json()["models"][1]["context_length"] == 96
        shown = (await rig.post({"model": "b:latest"}, "/api/show")).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["llama.context_length"] == 96
        assert shown["template"] == TEMPLATE
        assert "version" in (await rig.http.get("/api/version")).json()
        unknown = await rig.post({"model": "c"}, "/api/show")
        assert unknown.status_code == 404
        assert "a or b" in unknown.json()["error"]
