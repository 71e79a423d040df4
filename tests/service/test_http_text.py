"""Text and fields of requests over HTTP, with the demo model.

Completions, conversations, tokens, log-probabilities; every field has an effect or is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from stepgraph.runtime import AsyncEngine, ChatPrompt, Engine, SamplingParams, ServiceConfig
from stepgraph.runtime.service.http.output_parsers import make_output_parser
from tokenizers import Tokenizer

from ..rigs.http_rig import CHAT, COMPLETIONS, Rig, demo_with_template, quick_config, service
from ..rigs.service_rig import in_event_loop, wait_until

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}# {{ tools | length }} tools\n{% endif %}"
    "{% if style %}# {{ style }}\n{% endif %}"
    "{% if reasoning_effort %}# {{ reasoning_effort }}, {{ enable_thinking }}\n{% endif %}"
    "{% if add_generation_prompt %}def {% endif %}"
)
LONGEST = 96
PROMPT = "def main("
SHORT = {"temperature": 0.0, "max_tokens": 12}
GREEDY = {**SHORT, "ignore_eos": True}
BODY = {"prompt": PROMPT, **SHORT}
HI = [{"role": "user", "content": PROMPT}]
MESSAGES = [
    {"role": "system", "content": "sort"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "list"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        ],
    },
]
FLAT = [
    {"role": "system", "content": "sort"},
    {"role": "user", "content": "a\nlist"},
    {"role": "assistant", "content": ""},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """An engine that all tests share, with a chat template."""
    folder = demo_with_template(tmp_path_factory.mktemp("chat"), TEMPLATE)
    with AsyncEngine.from_pretrained(folder, quick_config(LONGEST)) as shared:
        yield shared


@pytest.fixture
def rig(engine: AsyncEngine) -> Rig:
    return Rig(engine, tool_parser="hermes", reasoning_parser="think")


async def choice(rig: Rig, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = {**(SHORT if path == CHAT else BODY), "return_token_ids": True} | fields
    response = await rig.post(body, path)
    assert response.status_code == 200, response.text
    (found,) = response.json()["choices"]
    assert isinstance(found, dict)
    return found


async def error(rig: Rig, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    response = await rig.post({**(SHORT if path == CHAT else BODY), **fields}, path)
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    assert isinstance(found, dict)
    return found


@in_event_loop
async def test_echo_begins_each_completion_with_its_prompt(rig: Rig) -> None:
    texts = [PROMPT, "import "]
    outputs = [await rig.engine.generate(text, SamplingParams(**GREEDY)) for text in texts]
    expected = [text + output.text for text, output in zip(texts, outputs, strict=True)]
    for prompts in (texts, [output.prompt_token_ids[1:] for output in outputs]):
        body = {"prompt": prompts, "echo": True, **GREEDY}
        choices = (await rig.post(body)).json()["choices"]
        if prompts is texts:
            assert [each["text"] for each in choices] == expected
        for text, each in zip(texts, choices, strict=True):
            assert each["text"].startswith(text)
        joined = {0: "", 1: ""}
        for event in await rig.events(body):
            joined[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert list(joined.values()) == [each["text"] for each in choices]


@in_event_loop
async def test_logprobs_are_those_of_the_engine(rig: Rig) -> None:
    reference = await rig.engine.generate(PROMPT, SamplingParams(**GREEDY, logprobs=2))
    body = {"prompt": PROMPT, "logprobs": 2, **GREEDY}
    found = await choice(rig, **body)
    logprobs = found["logprobs"]
    assert "".join(logprobs["tokens"]) == found["text"]
    assert logprobs["token_logprobs"] == [entry.logprob for entry in reference.logprobs]
    for place, (token, top, offset) in enumerate(
        zip(logprobs["tokens"], logprobs["top_logprobs"], logprobs["text_offset"], strict=True)
    ):
        assert found["text"][offset:].startswith(token)
        assert top[token] == logprobs["token_logprobs"][place]
        assert list(top.values()) == list(reference.logprobs[place].top.values())
    parts = [event["choices"][0]["logprobs"] for event in await rig.events(body)]
    for key, values in logprobs.items():
        assert [value for part in parts for value in part[key]] == values


@in_event_loop
async def test_conversations_are_those_of_the_engine(rig: Rig) -> None:
    prompt = ChatPrompt(FLAT, tools=[{}], template_kwargs={"style": "short"})
    reference = await rig.engine.generate(prompt, SamplingParams(**GREEDY, n=2))
    texts = [completion.text for completion in reference.completions]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "messages": MESSAGES,
        "tools": tools,
        "chat_template_kwargs": {"style": "short"},
        "n": 2,
        **GREEDY,
    }
    answer = (await rig.post(body, CHAT)).json()
    assert answer["object"] == "chat.completion"
    messages = [each["message"] for each in answer["choices"]]
    assert messages == [{"role": "assistant", "content": text} for text in texts]
    assert answer["usage"]["prompt_tokens"] == len(reference.prompt_token_ids)
    contents, roles = ["", ""], [0, 0]
    for event in await rig.events(body, CHAT):
        assert event["object"] == "chat.completion.chunk"
        (part,) = event["choices"]
        contents[part["index"]] += part["delta"].get("content", "")
        roles[part["index"]] += part["delta"].get("role") == "assistant"
    assert (contents, roles) == (texts, [1, 1])
    without = (await rig.post({**body, "tool_choice": "none"}, CHAT)).json()
    assert without["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]


@in_event_loop
async def test_logprobs_of_conversations(rig: Rig) -> None:
    body = {"messages": FLAT, "logprobs": True, "top_logprobs": 3, **GREEDY}
    found = await choice(rig, CHAT, **body)
    content = found["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == found["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
    parts = [event["choices"][0]["logprobs"]["content"] for event in await rig.events(body, CHAT)]
    assert [entry for part in parts for entry in part] == content


@in_event_loop
async def test_a_conversation_without_a_limit_ends_at_the_longest_sequence(rig: Rig) -> None:
    body = {"messages": FLAT, "ignore_eos": True}
    answer = (await rig.post(body, CHAT)).json()
    assert answer["usage"]["total_tokens"] == LONGEST
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = (await rig.post({**body, "max_completion_tokens": 3}, CHAT)).json()
    assert answer["usage"]["completion_tokens"] == 3
    long = [{"role": "user", "content": "x " * LONGEST}]
    assert (await rig.post({**body, "messages": long}, CHAT)).status_code == 400


@in_event_loop
async def test_tokens(rig: Rig) -> None:
    tokenizer = rig.engine.tokenizer
    assert tokenizer is not None
    for special in (True, False):
        body = {"prompt": PROMPT, "add_special_tokens": special, "return_token_strs": True}
        answer = (await rig.post(body, "/tokenize")).json()
        assert answer["tokens"] == tokenizer.encode(PROMPT, special=special)
        assert answer["count"] == len(answer["tokens"])
        assert "".join(answer["token_strs"]).endswith(PROMPT)
    tokens = answer["tokens"]
    answer = await rig.post({"prompt": "some words " * 300_000}, "/tokenize")
    assert answer.status_code == 400
    answer = (await rig.post({"tokens": tokens}, "/detokenize")).json()
    assert answer == {"prompt": PROMPT}
    body = {"messages": MESSAGES, "chat_template_kwargs": {"style": "s"}}
    answer = (await rig.post(body, "/tokenize")).json()
    text = tokenizer.apply_chat_template(
        FLAT, add_generation_prompt=True, style="s", tokenize=False
    )
    assert tokenizer.decode(answer["tokens"]) == text


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
    chat = {"messages": HI, "logprobs": True, "logprob_token_ids": ids}
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
    body = {"messages": HI, "prompt_logprobs": 1}
    assert (await rig.post(body, CHAT)).json()["prompt_logprobs"][0] is None
    assert (await error(rig, prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"


@in_event_loop
async def test_fields_reach_the_chat_template(rig: Rig) -> None:
    async def num_tokens(**fields: Any) -> int:
        response = await rig.post({"messages": HI, "max_tokens": 1, **fields}, CHAT)
        return int(response.json()["usage"]["prompt_tokens"])

    plain = await num_tokens()
    efforts = {e: await num_tokens(reasoning_effort=e) for e in ("none", "high")}
    assert plain < min(efforts.values())
    given = {"reasoning_effort": "high", "enable_thinking": True}
    assert await num_tokens(chat_template_kwargs=given) == efforts["high"]
    wrong = await error(rig, CHAT, messages=HI, reasoning_effort="huge")
    assert wrong["param"] == "reasoning_effort"


def test_fields_leave_one_tool_call() -> None:
    text = "".join(
        f'<tool_call>\n{{"name": "f", "arguments": {{"x": {n}}}}}\n</tool_call>' for n in range(3)
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for one_call, count in ((False, 3), (True, 1)):
        output = make_output_parser("hermes", None, tools=tools, one_call=one_call)
        message = output.message(text, last=True)
        assert isinstance(message.tool_calls, list)
        assert len(message.tool_calls) == count
        assert output.finish_reason("stop") == "tool_calls"


@in_event_loop
async def test_best_of_returns_the_completions_with_the_largest_mean_log_probability(
    rig: Rig,
) -> None:
    body = {"prompt": [PROMPT, "import"], "max_tokens": 6, "seed": 5, "ignore_eos": True}
    every = (await rig.post({**body, "n": 5, "logprobs": 0})).json()["choices"]
    best = (await rig.post({**body, "n": 2, "best_of": 5})).json()
    expected = []
    for own in (every[:5], every[5:]):
        own.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        expected += [choice["text"] for choice in own[:2]]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 60
    assert (await error(rig, n=3, best_of=2))["param"] == "best_of"
    assert (await error(rig, best_of=2, stream=True))["param"] == "best_of"


@in_event_loop
async def test_top_p_0_takes_the_most_probable_tokens_and_seed_minus_1_is_random(rig: Rig) -> None:
    greedy = await choice(rig, **GREEDY)
    sampled = {**GREEDY, "temperature": 1.0}
    assert (await choice(rig, **sampled, top_p=0))["text"] == greedy["text"]
    texts = {(await choice(rig, **sampled, seed=-1))["text"] for _ in range(4)}
    assert len(texts) > 1


@in_event_loop
async def test_the_middle_is_filled_between_prompt_and_suffix(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In the text of a tokenizer with the special tokens; others refuse the suffix."""
    folder = demo_with_template(tmp_path_factory.mktemp("middle"), TEMPLATE)
    file = folder / "tokenizer.json"
    source = json.loads(file.read_text())
    vocabulary, tokens = source["model"]["vocab"], ("prefix", "suffix", "middle")
    del source["model"]["merges"][-len(tokens) :]
    merged = sorted(vocabulary, key=vocabulary.__getitem__)[-len(tokens) :]
    for token, name in zip(merged, tokens, strict=True):
        token_id = vocabulary[f"<fim_{name}>"] = vocabulary.pop(token)
        added = {**source["added_tokens"][0], "id": token_id, "content": f"<fim_{name}>"}
        source["added_tokens"].append(added)
    file.unlink()
    file.write_text(json.dumps(source))
    asked = {"prompt": "def f(", "suffix": "\n    return x", **SHORT, "return_token_ids": True}
    prompt = "<fim_prefix>def f(<fim_suffix>\n    return x<fim_middle>"
    async with service(
        lambda: Engine.from_pretrained(folder, quick_config(LONGEST), progress=False)
    ) as filling:
        found = await choice(filling, **asked)
        assert found["prompt_token_ids"] == Tokenizer.from_file(str(file)).encode(prompt).ids
        for more in ({"echo": True}, {"truncate_prompt_tokens": 4}, {"prompt": [1, 2]}):
            assert (await error(filling, **{**asked, **more}))["param"] == "suffix"
    assert "fills in the middle" in (await error(rig, **asked))["message"]


REFUSED: dict[str, Any] = {
    **dict.fromkeys(("regex", "ebnf", "grammar", "lora_path"), "a"),
    **{
        "json_schema": {"type": "object"},
        "guided_json": {"type": "object"},
        "web_search_options": {},
    },
    **{"n_predict": 2, "repeat_penalty": 1.1, "mirostat": 2, "typical_p": 0.5},
    **{"dry_multiplier": 0.8, "xtc_probability": 0.5, "use_beam_search": True},
    **{"length_penalty": 2.0, "modalities": ["text", "audio"], "include_reasoning": False},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "max_completion_tokens": 5,
}
NEUTRAL: dict[str, Any] = {
    **{"repeat_penalty": 1.0, "best_of": 1, "n_predict": -1, "modalities": ["text"]},
    **{"mirostat": 0, "use_beam_search": False, "length_penalty": 1, "regex": None},
    **{"guided_json": {}, "tools": [], "metadata": {"a": "b"}},
    **dict.fromkeys(("stream", "n", "temperature", "stop", "logprobs", "echo", "stream_options")),
}


@in_event_loop
async def test_fields_that_would_change_the_result_are_refused(rig: Rig) -> None:
    for name, value in REFUSED.items():
        assert (await error(rig, **{name: value}))["param"] == name
    await choice(rig, max_tokens=1, **NEUTRAL)


@in_event_loop
async def test_fields_that_are_unknown_are_logged_once_or_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {"prompt": [1, 2], "max_tokens": 1, "of_my_own": 1, "store": True}
    for policy, records in (("warn", 1), ("ignore", 0), ("error", 0)):
        caplog.clear()
        async with service(config=ServiceConfig(unknown_fields=policy)) as rig:
            for _ in range(2):
                response = await rig.post(body)
                assert response.status_code == (400 if policy == "error" else 200)
            assert (await rig.post({"prompt": [1, 2], "max_tokens": 1})).status_code == 200
        assert sum("of_my_own" in r.getMessage() for r in caplog.records) == records
    found = response.json()["error"]
    assert (found["code"], found["param"]) == ("unknown_field", "of_my_own")


@in_event_loop
async def test_request_ids_are_returned_with_every_response(rig: Rig) -> None:
    for given, same in (("job-17", True), ("a" * 128, True), ("a" * 129, False), ("a b", False)):
        for path, body in (
            (COMPLETIONS, BODY),
            (COMPLETIONS, {**BODY, "stream": True}),
            (COMPLETIONS, {"prompt": 1}),
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
    await asyncio.to_thread(wait_until, lambda: len(records) == 2)  # they follow the answers
    assert len(set(records)) == 2
    assert all(found.startswith("job-17/") for found in records)


@in_event_loop
async def test_a_checkpoint_without_a_tokenizer_names_what_it_serves() -> None:
    messages = [{"role": "user", "content": "x"}]
    async with service() as rig:
        for path, body, param in (
            (CHAT, {"messages": messages}, "messages"),
            ("/v1/responses", {"input": "x"}, "input"),
            ("/v1/messages", {"messages": messages, "max_tokens": 1}, None),
            ("/tokenize", {"prompt": "x"}, "prompt"),
        ):
            refused = await rig.post(body, path)
            error = refused.json()["error"]
            assert (refused.status_code, error.get("param")) == (400, param), path
            assert "/v1/completions" in error["message"]
        refused = await rig.http.get("/tokenizer_info")
        assert refused.json()["error"]["param"] is None
