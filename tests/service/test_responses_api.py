"""The Responses API over HTTP: events, stored conversations, the store, background, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stepgraph.runtime import Engine, ServiceConfig
from stepgraph.runtime.loading.chat_template import ChatTemplates
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from stepgraph.runtime.service.http.exchange import HttpError
from stepgraph.runtime.service.http.response_store import ResponseStore, StoredResponse
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ..rigs.fake_engine import fake_engine, runner_of
from ..rigs.http_rig import Rig, service, slow_engine
from ..rigs.service_rig import SECONDS, in_event_loop

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ARGUMENTS = '<tool_call>\n{"name": "f", "arguments": {"x": '
REST = "1}}\n</tool_call>d "
PIECES = ["<unk>", "a ", "b ", "<think>", "</think>", CALL, "c ", ARGUMENTS, REST]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
PARSERS: dict[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "think"}


def text_engine(start: Any = fake_engine) -> Engine:
    """A fake engine whose tokens are texts, reasoning and calls in any order."""
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(PIECES)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    templates = ChatTemplates({"default": TEMPLATE}, {})
    engine: Engine = start(
        tokenizer=TextTokenizer(tokenizer, templates=templates), max_model_len=512, num_blocks=600
    )
    return engine


async def create(rig: Rig, **body: Any) -> dict[str, Any]:
    response = await rig.post({"ignore_eos": True, **body}, PATH)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, with their names and numbers checked."""
    events = []
    for number, event in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def replay(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Play a stream, whose items follow each other; return the response at its end."""
    created, in_progress, *events, end = events
    assert created["type"] == "response.created"
    assert in_progress["type"] == "response.in_progress"
    response = created["response"]
    assert response == in_progress["response"]
    assert response["output"] == []
    assert response["status"] == "in_progress"
    output: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    text, part = "", None
    for event in events:
        kind = event["type"].removeprefix("response.")
        index = len(output)
        assert event["output_index"] == index, event
        if kind == "output_item.added":
            assert item is None
            item, text, part = event["item"], "", None
            assert item["status"] == "in_progress"
            continue
        assert item is not None, event
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            assert part == "done" or item["type"] == "function_call"
            output.append(event["item"])
            item = None
            continue
        assert event["item_id"] == item["id"]
        name, _, what = kind.rpartition(".")
        if name.endswith("part"):
            assert part == {"added": None, "done": "text"}[what]
            assert event["part"]["text"] == text
            part = what
        elif what == "delta":
            assert event["delta"]
            text += event["delta"]
        else:
            assert event["arguments" if item["type"] == "function_call" else "text"] == text
            part = "text"
    assert item is None
    assert end["type"] == f"response.{end['response']['status']}"
    assert end["response"]["output"] == output
    assert {**end["response"], **{k: response[k] for k in ("status", "output")}} == {
        **response,
        "usage": end["response"]["usage"],
        "incomplete_details": end["response"]["incomplete_details"],
    }
    final: dict[str, Any] = end["response"]
    return final


def contents(response: dict[str, Any]) -> dict[str, str]:
    """All text of the items of each type."""
    found = dict.fromkeys(("message", "reasoning", "function_call"), "")
    for item in response["output"]:
        parts = item.get("summary") or item.get("content") or ()
        found[item["type"]] += "".join(part["text"] for part in parts) + item.get("arguments", "")
    return found


@pytest.mark.parametrize("summary", [None, "auto"])
@in_event_loop
async def test_events_are_those_of_the_response(summary: str | None) -> None:
    """Each item and part that is added is done, deltas join to its text, and the stream has what
    the whole response has."""
    said = dict.fromkeys(("message", "reasoning", "function_call"), "")
    fields = {"tools": TOOLS, "reasoning": {"summary": summary}, "max_output_tokens": 24}
    async with service(text_engine, **PARSERS) as rig:
        for seed in range(40):
            body = {"input": "a", "seed": seed, "ignore_eos": True, **fields}
            whole = await create(rig, **body)
            streamed = replay(events_of((await rig.post({**body, "stream": True}, PATH)).text))
            assert contents(streamed) == contents(whole)
            for name in ("output_tokens", "output_tokens_details"):
                assert streamed["usage"][name] == whole["usage"][name]
            for response in (whole, streamed):
                assert (await rig.http.get(f"{PATH}/{response['id']}")).json() == response
            said = {kind: text + said[kind] for kind, text in contents(whole).items()}
    assert all(said.values())


def prompts_of(rig: Rig) -> list[Any]:
    """The prompts that the engine gets from now on."""
    prompts: list[Any] = []
    stream = rig.engine.stream

    def recorded(prompt: Any, *arguments: Any, **options: Any) -> Any:
        prompts.append((prompt.messages, prompt.tools))
        return stream(prompt, *arguments, **options)

    rig.engine.stream = recorded  # type: ignore[method-assign]
    return prompts


@in_event_loop
async def test_a_stored_conversation_is_the_one_sent_whole() -> None:
    """Also by references to its items, and with the output of calls."""
    async with service(text_engine, **PARSERS) as rig:
        prompts, items, previous = prompts_of(rig), [], None
        for turn in range(4):
            calls = [item for item in items if item["type"] == "function_call"]
            new: list[Any] = [
                {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
                for call in calls[-1:]
            ]
            new.append({"type": "message", "role": "user", "content": f"turn {turn}"})
            items += new
            fields = {"instructions": f"be {turn}", "tools": TOOLS, "max_output_tokens": 20}
            fields["seed"] = turn
            references = [
                {"type": "item_reference", "id": item["id"]} if "id" in item else item
                for item in items
            ]
            for whole in (items, references):
                await create(rig, input=whole, store=False, **fields)
            stored = await create(rig, input=new, previous_response_id=previous, **fields)
            assert prompts[-1] == prompts[-2] == prompts[-3]
            previous = stored["id"]
            listed: list[Any] = []
            more = True
            while more:
                query = f"order=asc&limit=3&after={listed[-1]['id'] if listed else ''}"
                page = (await rig.http.get(f"{PATH}/{previous}/input_items?{query}")).json()
                listed, more = [*listed, *page["data"]], page["has_more"]
            assert [item["type"] for item in listed] == [item["type"] for item in items]
            items += stored["output"]
        assert {"message", "reasoning", "function_call"} <= {item["type"] for item in items}


class StoreMachine(RuleBasedStateMachine):
    """The store against a list of responses, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(3, 1000)
        self.kept: list[StoredResponse] = []
        self.count = 0

    @rule(size=st.integers(0, 1100), continues=st.booleans(), owner=st.sampled_from([None, b"k"]))
    def add(self, size: int, continues: bool, owner: bytes | None) -> None:
        self.count += 1
        items = [{"id": f"i{self.count}"}]
        if continues and self.kept:
            items = [*self.kept[-1].items, *items]
        response = StoredResponse(f"r{self.count}", owner, items, 1, " " * size)
        if self.store.add(response):
            self.kept.append(response)
        else:
            assert response.num_bytes > 1000
        while len(self.kept) > 3 or sum(each.num_bytes for each in self.kept) > 1000:
            del self.kept[0]

    @rule(number=st.integers(1, 30))
    def remove(self, number: int) -> None:
        self.store.remove(f"r{number}")
        self.kept = [each for each in self.kept if each.id != f"r{number}"]

    @invariant()
    def finds_what_is_kept(self) -> None:
        self.store.check_integrity()
        for number in range(1, self.count + 1):
            for owner in (None, b"k"):
                own = [each for each in self.kept if each.owner == owner]
                responses = [each for each in own if each.id == f"r{number}"]
                items = [i for each in own for i in each.items if i["id"] == f"i{number}"]
                assert found(self.store.find, f"r{number}", owner) == (responses or [None])[0]
                assert found(self.store.item, f"i{number}", owner) == (items or [None])[0]


def found(find: Any, name: str, owner: bytes | None) -> Any:
    try:
        return find(name, owner, "field")
    except HttpError:
        return None


test_store = StoreMachine.TestCase


@in_event_loop
async def test_a_response_larger_than_the_store_is_served() -> None:
    for config in (ServiceConfig(max_stored_bytes=500), ServiceConfig(max_stored_responses=0)):
        async with service(text_engine, config) as rig:
            response = await create(rig, input="a", max_output_tokens=2)
            assert response["store"] is False
            assert (await rig.http.get(f"{PATH}/{response['id']}")).status_code == 404


@in_event_loop
async def test_a_response_belongs_to_its_api_key() -> None:
    async with service(text_engine, api_keys=["mine", "other"]) as rig:
        rig.http.headers["x-api-key"] = "mine"
        kept = await create(rig, input="a", max_output_tokens=2)
        reference = {"type": "item_reference", "id": kept["output"][0]["id"]}
        own = f"{PATH}/{kept['id']}"
        for key, expected in (("other", 404), ("mine", 200), ("mine", 404)):
            rig.http.headers["x-api-key"] = key
            for body in ({"previous_response_id": kept["id"]}, {"input": [reference]}):
                response = await rig.post({"max_output_tokens": 1, "store": False, **body}, PATH)
                assert response.status_code == expected, response.text
            for path in (own, f"{own}/input_items"):
                assert (await rig.http.get(path)).status_code == expected
            cancelled = await rig.post({}, f"{own}/cancel")
            assert cancelled.status_code == (400 if expected == 200 else 404)
            assert (await rig.http.delete(own)).status_code == expected


async def polled(rig: Rig, response: dict[str, Any], until: str) -> dict[str, Any]:
    """A response in the background, once it has a status."""
    async with asyncio.timeout(SECONDS):
        while response["status"] != until:
            await asyncio.sleep(0.001)
            response = (await rig.http.get(f"{PATH}/{response['id']}")).json()
    return response


@in_event_loop
async def test_background_responses_are_polled_cancelled_and_drained() -> None:
    body: dict[str, Any] = {"input": "a", "seed": 1, "max_output_tokens": 30}
    async with service(lambda: text_engine(slow_engine), **PARSERS) as rig:

        async def begin() -> dict[str, Any]:
            begun = await create(rig, **body, background=True)
            assert begun["status"] in ("queued", "in_progress")
            return await polled(rig, begun, "in_progress")

        whole = await create(rig, **body)
        ended = await polled(rig, await begin(), "incomplete")
        assert contents(ended) == contents(whole)
        assert (await rig.post({}, f"{PATH}/{ended['id']}/cancel")).json() == ended
        for query, status in (("stream=false", 200), ("stream=true", 400)):
            got = await rig.http.get(f"{PATH}/{ended['id']}?{query}")
            assert got.status_code == status
        listed = await rig.http.get(f"{PATH}/{ended['id']}/input_items?after=msg_1")
        assert listed.json()["error"]["param"] == "after"
        body["max_output_tokens"] = 400
        begun = await begin()
        follows = {"input": "b", "previous_response_id": begun["id"], "max_output_tokens": 1}
        early = await rig.post(follows, PATH)
        assert early.json()["error"]["param"] == "previous_response_id"
        cancelled = (await rig.post({}, f"{PATH}/{begun['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert (await rig.http.get(f"{PATH}/{begun['id']}")).json() == cancelled
        await create(rig, **follows)
        begun = await begin()
        assert (await rig.http.delete(f"{PATH}/{begun['id']}")).json()["deleted"]
        assert (await rig.http.get(f"{PATH}/{begun['id']}")).status_code == 404
        await rig.until_idle()
        begun = await begin()
        await rig.engine.drain(0)
        aborted = await polled(rig, begun, "incomplete")
        assert aborted["incomplete_details"] == {"reason": "abort"}
        assert (await rig.post({**body, "background": True}, PATH)).status_code == 503


@pytest.mark.parametrize("background", [False, True])
@in_event_loop
async def test_a_failed_engine_fails_the_response(background: bool) -> None:
    engines = []

    def start() -> Engine:
        engines.append(text_engine(slow_engine))
        return engines[-1]

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    async with service(start, **PARSERS) as rig:
        body = {"input": "a", "max_output_tokens": 400, "ignore_eos": True}
        if background:
            begun = await polled(rig, await create(rig, **body, background=True), "in_progress")
            runner_of(engines[0]).launch = fail
            failed = await polled(rig, begun, "failed")
        else:
            streaming = asyncio.create_task(rig.post({**body, "stream": True}, PATH))
            while not (await rig.engine.stats())["running"]:
                await asyncio.sleep(0.001)
            runner_of(engines[0]).launch = fail
            *_, error, end = events_of((await streaming).text)
            assert (error["type"], end["type"]) == ("error", "response.failed")
            failed = end["response"]
            assert (await rig.http.get(f"{PATH}/{failed['id']}")).json() == failed
        assert failed["error"]["code"] == "server_error"


PART: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
NO_SCHEMA = {"format": {"type": "json_schema"}}
FORCED = {"tools": [{**TOOLS[0], "parameters": 1}], "tool_choice": "required"}
ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input", {"input": "c" * 600}),
    ("input[1].content[0]", {"input": [PART, {**PART, "content": [{"type": "input_image"}]}]}),
    ("input[0].content[0].text", {"input": [{**PART, "content": [{"type": "input_text"}]}]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "a"}]}),
    ("input[0]", {"input": [{"type": "web_search_call"}]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "a"}]}),
    ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("max_output_tokens", {"max_output_tokens": -1}),
    ("text.format.schema", {"text": NO_SCHEMA}),
    ("reasoning.effort", {"reasoning": {"effort": "huge"}}),
    ("tools[0]", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools[0].parameters", FORCED),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
    ("background", {"background": True, "store": False}),
    ("messages", {"messages": [PART]}),
    ("n", {"n": 2}),
]


@in_event_loop
async def test_errors_name_fields_of_this_api() -> None:
    async with service(text_engine, **PARSERS) as rig:
        for field, body in ERRORS:
            response = await rig.post({"input": "a", **body}, PATH)
            assert response.status_code in (400, 404), response.text
            error = response.json()["error"]
            assert error["param"] == field, error
