"""Fields of requests over HTTP: what changes the result has an effect, or is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("llguidance")

from stepgraph.runtime import AsyncEngine, EngineConfig, ServiceConfig
from stepgraph.runtime.service.http.output_parsers import ChatOutput, make_output_parser

from ..rigs.http_rig import Rig, demo_with_template, service
from ..rigs.service_rig import in_event_loop

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if reasoning_effort %}# {{ reasoning_effort }}, {{ enable_thinking }}\n{% endif %}"
)
LONGEST = 96
SHORT = {"temperature": 0, "max_tokens": 12}
BODY = {"prompt": "def main(", **SHORT}
MESSAGES = [{"role": "user", "content": "def main("}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """An engine that all tests share."""
    folder = demo_with_template(tmp_path_factory.mktemp("fields"), TEMPLATE)
    config = EngineConfig(mode="eager", max_model_len=LONGEST)
    with AsyncEngine.from_pretrained(folder, config) as shared:
        yield shared


@pytest.fixture
def rig(engine: AsyncEngine) -> Rig:
    return Rig(engine)


async def choice(rig: Rig, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    body = {**(SHORT if path == CHAT else BODY), "return_token_ids": True} | fields
    response = await rig.post(body, path)
    assert response.status_code == 200, response.text
    (found,) = response.json()["choices"]
    assert isinstance(found, dict)
    return found


async def error(rig: Rig, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    response = await rig.post({**(SHORT if path == CHAT else BODY), **fields}, path)
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    assert isinstance(found, dict)
    return found


@in_event_loop
async def test_fields_restrict_tokens(rig: Rig) -> None:
    plain = (await choice(rig))["token_ids"]
    allowed = [plain[0], plain[2]]
    found = await choice(rig, allowed_token_ids=allowed)
    assert set(found["token_ids"]) <= set(allowed)
    text = (await choice(rig))["text"]
    assert text.startswith("self):")
    assert not (await choice(rig, bad_words=["self"]))["text"].startswith("self")
    later = await choice(rig, bad_words=["self):"])  # two tokens: only the last is forbidden
    assert later["text"].startswith("self")
    assert later["token_ids"][1] != plain[1]
    sampled = {"temperature": 2.0, "seed": 1, "max_tokens": 40}
    found = await choice(rig, allowed_token_ids=plain, bad_words=["self"], **sampled)
    assert set(found["token_ids"]) <= set(plain) - {plain[0]}


@in_event_loop
async def test_fields_keep_the_stop_string(rig: Rig) -> None:
    for stop in ("):", "self", "f)"):
        assert not (await choice(rig, stop=stop))["text"].endswith(stop)
        body = {**BODY, "stop": stop, "include_stop_str_in_output": True}
        found = await choice(rig, **body)
        assert found["text"].endswith(stop)
        events = await rig.events(body)
        assert "".join(e["choices"][0]["text"] for e in events) == found["text"]
    first, second = (await choice(rig))["token_ids"][:2]
    ending = {"stop_token_ids": [second]}
    assert (await choice(rig, **ending))["text"] == "self"
    found = await choice(rig, **ending, include_stop_str_in_output=True)
    assert (found["text"], found["token_ids"]) == ("self):", [first, second])


@in_event_loop
async def test_fields_truncate_prompts(rig: Rig) -> None:
    whole = (await choice(rig))["prompt_token_ids"]
    found = await choice(rig, truncate_prompt_tokens=2, echo=True)
    assert found["prompt_token_ids"] == whole[-2:]
    assert found["text"].startswith("main(")
    for prompt in ([5] * 300, "x y " * 300):
        long = {"prompt": prompt, "max_tokens": 10}
        failed = await error(rig, **long)
        assert (failed["code"], failed["param"]) == ("context_length_exceeded", "prompt")
        found = await choice(rig, **long, truncate_prompt_tokens=-1)
        assert len(found["prompt_token_ids"]) == LONGEST - 10
    failed = await error(rig, truncate_prompt_tokens=LONGEST)
    assert failed["param"] == "truncate_prompt_tokens"
    messages = {"messages": [{"role": "user", "content": "x y " * 300}]}
    failed = await error(rig, CHAT, **messages)
    assert (failed["code"], failed["param"]) == ("context_length_exceeded", "messages")
    assert await choice(rig, CHAT, **messages, truncate_prompt_tokens=3)


@in_event_loop
async def test_fields_choose_logprobs(rig: Rig) -> None:
    every = (await choice(rig, logprobs=20))["logprobs"]["top_logprobs"]
    named = (await choice(rig, logprobs=20, return_tokens_as_token_ids=True))["logprobs"]
    assert all(t.startswith("token_id:") for top in named["top_logprobs"] for t in top)
    ids = [int(name.removeprefix("token_id:")) for name in named["top_logprobs"][0]][5:8]
    found = (await choice(rig, logprobs=0, logprob_token_ids=ids))["logprobs"]
    values = [named["top_logprobs"][0][f"token_id:{i}"] for i in ids]
    top = list(found["top_logprobs"][0].values())
    assert top[:3] == pytest.approx(values, abs=1e-4)
    assert len(top) == 4  # the sampled one too
    assert len(every[0]) == 20
    chat = {"messages": MESSAGES, "logprobs": True, "logprob_token_ids": ids}
    content = (await choice(rig, CHAT, **chat))["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert (await error(rig, logprob_token_ids=ids))["param"] == "logprob_token_ids"


@in_event_loop
async def test_fields_report_prompt_logprobs(rig: Rig) -> None:
    found = await choice(rig, prompt_logprobs=2)
    ids, entries = found["prompt_token_ids"], found["prompt_logprobs"]
    assert entries[0] is None
    echoed = (await choice(rig, echo=True, logprobs=2))["logprobs"]["token_logprobs"]
    for token, entry, value in zip(ids[1:], entries[1:], echoed[1:], strict=False):
        assert entry[str(token)]["logprob"] == pytest.approx(value)
        assert [e["rank"] for e in entry.values()][:2] == [1, 2]
    body = {"messages": MESSAGES, "prompt_logprobs": 1}
    assert (await rig.post(body, CHAT)).json()["prompt_logprobs"][0] is None
    assert (await error(rig, prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"


@in_event_loop
async def test_fields_reach_the_chat_template(rig: Rig) -> None:
    async def num_tokens(**fields: Any) -> int:
        response = await rig.post({"messages": MESSAGES, "max_tokens": 1, **fields}, CHAT)
        return int(response.json()["usage"]["prompt_tokens"])

    plain = await num_tokens()
    efforts = {e: await num_tokens(reasoning_effort=e) for e in ("none", "high")}
    assert plain < min(efforts.values())
    given = {"reasoning_effort": "high", "enable_thinking": True}
    assert await num_tokens(chat_template_kwargs=given) == efforts["high"]
    wrong = await error(rig, CHAT, messages=MESSAGES, reasoning_effort="huge")
    assert wrong["param"] == "reasoning_effort"


@in_event_loop
async def test_fields_of_a_json_object_have_a_schema(rig: Rig) -> None:
    for kind in ("json_object", "json_schema"):
        form = {"type": kind, "schema": {"const": 7}}
        assert (await choice(rig, response_format=form))["text"] == "7"


def test_fields_leave_one_tool_call() -> None:
    text = "".join(
        f'<tool_call>\n{{"name": "f", "arguments": {{"x": {n}}}}}\n</tool_call>' for n in range(3)
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for one_call, count in ((False, 3), (True, 1)):
        output = ChatOutput(make_output_parser("hermes", None, tools=tools), one_call=one_call)
        message = output.message(text, "stop")
        assert isinstance(message.tool_calls, list)
        assert len(message.tool_calls) == count
        assert output.finish_reason("stop") == "tool_calls"


REFUSED: list[tuple[str, Any]] = [
    ("regex", "a"),
    ("ebnf", 'root ::= "a"'),
    ("json_schema", {"type": "object"}),
    ("grammar", 'root ::= "a"'),
    ("lora_path", "x"),
    ("n_predict", 2),
    ("repeat_penalty", 1.1),
    ("mirostat", 2),
    ("typical_p", 0.5),
    ("dry_multiplier", 0.8),
    ("xtc_probability", 0.5),
    ("use_beam_search", True),
    ("length_penalty", 2.0),
    ("best_of", 3),
    ("modalities", ["text", "audio"]),
    ("web_search_options", {}),
    ("guided_json", {"type": "object"}),
    ("include_reasoning", False),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("max_completion_tokens", 5),
]
NEUTRAL: list[tuple[str, Any]] = [
    ("repeat_penalty", 1.0),
    ("best_of", 1),
    ("n_predict", -1),
    ("modalities", ["text"]),
    ("mirostat", 0),
    ("use_beam_search", False),
    ("length_penalty", 1),
    ("regex", None),
    ("guided_json", {}),
    ("tools", []),
    ("metadata", {"a": "b"}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
@in_event_loop
async def test_fields_that_would_change_the_result_are_refused(
    rig: Rig, name: str, value: Any
) -> None:
    assert (await error(rig, **{name: value}))["param"] == name


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
@in_event_loop
async def test_fields_with_neutral_values_are_accepted(rig: Rig, name: str, value: Any) -> None:
    await choice(rig, max_tokens=1, **{name: value})


@in_event_loop
async def test_fields_that_are_unknown_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": [1, 2], "max_tokens": 1, "of_my_own": 1, "store": True}
    for policy, records in (("warn", 1), ("ignore", 0)):
        caplog.clear()
        async with service(config=ServiceConfig(unknown_fields=policy)) as rig:
            for _ in range(2):
                assert (await rig.post(body)).status_code == 200
        assert sum("of_my_own" in r.getMessage() for r in caplog.records) == records


@in_event_loop
async def test_fields_that_are_unknown_can_be_refused() -> None:
    async with service(config=ServiceConfig(unknown_fields="error")) as rig:
        response = await rig.post({"prompt": [1, 2], "max_tokens": 1, "of_my_own": 1})
        assert response.status_code == 400
        found = response.json()["error"]
        assert (found["code"], found["param"]) == ("unknown_field", "of_my_own")
        assert (await rig.post({"prompt": [1, 2], "max_tokens": 1})).status_code == 200


@in_event_loop
async def test_fields_of_masks_need_structured_output() -> None:
    async with service() as rig:
        for field, value in (("allowed_token_ids", [1]), ("bad_words", ["a"])):
            response = await rig.post({"prompt": [1, 2], field: value})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field


@in_event_loop
async def test_request_ids_are_returned_with_every_response(rig: Rig) -> None:
    for given, same in (
        ("job-17", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
    ):
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/completions", {**BODY, "stream": True}),
            ("/v1/completions", {"prompt": 1}),
            ("/nowhere", {}),
        ):
            response = await rig.post(body, path, headers={"X-Request-Id": given})
            (found,) = response.headers.get_list("x-request-id")
            assert found
            assert (found == given) == same
    first, second = [(await rig.post(BODY)).headers["x-request-id"] for _ in range(2)]
    assert first != second


@in_event_loop
async def test_request_ids_begin_those_of_the_engine(rig: Rig) -> None:
    records: list[str] = []
    rig.engine.add_listener(lambda record: records.append(record.request_id))
    for _ in range(2):  # the same id twice is not refused
        headers = {"X-Request-Id": "job-17"}
        assert (await rig.post(BODY, headers=headers)).status_code == 200
    while len(records) < 2:  # they follow the answers
        await asyncio.sleep(0.01)
    assert len(set(records)) == 2
    assert all(found.startswith("job-17/") for found in records)
