"""Text over HTTP with the demo model: completions, conversations, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from stepgraph.runtime import AsyncEngine, ChatPrompt, Engine, EngineConfig, SamplingParams

from ..rigs.http_rig import Rig, demo_with_template
from ..rigs.service_rig import in_event_loop

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}# {{ tools | length }} tools\n{% endif %}"
    "{% if style %}# {{ style }}\n{% endif %}"
    "{% if add_generation_prompt %}def {% endif %}"
)
LONGEST = 96
CONFIG = EngineConfig(mode="eager", max_model_len=LONGEST)
PROMPT = "def main("
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
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
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    pytest.importorskip("jinja2")
    return demo_with_template(tmp_path_factory.mktemp("chat"), TEMPLATE)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(checkpoint, CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[AsyncEngine]:
    with AsyncEngine.from_pretrained(checkpoint, CONFIG) as shared:
        yield shared


@pytest.fixture
def rig(shared: AsyncEngine) -> Rig:
    return Rig(shared, tool_parser="hermes", reasoning_parser="think")


@in_event_loop
async def test_completions_are_those_of_the_engine(engine: Engine, rig: Rig) -> None:
    (reference,) = engine.generate([PROMPT], SamplingParams(**GREEDY))
    body = {"prompt": PROMPT, **GREEDY}
    (choice,) = (await rig.post(body)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (reference.text, "length")
    events = await rig.events(body)
    assert "".join(e["choices"][0]["text"] for e in events) == reference.text
    stop = reference.text[5:8]
    (choice,) = (await rig.post({**body, "stop": stop})).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == reference.text[: reference.text.index(stop)]


@in_event_loop
async def test_echo_begins_each_completion_with_its_prompt(engine: Engine, rig: Rig) -> None:
    texts = [PROMPT, "import "]
    outputs = engine.generate(texts, SamplingParams(**GREEDY))
    expected = [text + output.text for text, output in zip(texts, outputs, strict=True)]
    for prompts in (texts, [output.prompt_token_ids[1:] for output in outputs]):
        body = {"prompt": prompts, "echo": True, **GREEDY}
        choices = (await rig.post(body)).json()["choices"]
        if prompts is texts:
            assert [choice["text"] for choice in choices] == expected
        for text, choice in zip(texts, choices, strict=True):
            assert choice["text"].startswith(text)
        joined = {0: "", 1: ""}
        for event in await rig.events(body):
            joined[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert list(joined.values()) == [choice["text"] for choice in choices]


@in_event_loop
async def test_logprobs_are_those_of_the_engine(engine: Engine, rig: Rig) -> None:
    (reference,) = engine.generate([PROMPT], SamplingParams(**GREEDY, logprobs=2))
    body = {"prompt": PROMPT, "logprobs": 2, **GREEDY}
    (choice,) = (await rig.post(body)).json()["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [entry.logprob for entry in reference.logprobs]
    for place, (token, top, offset) in enumerate(
        zip(logprobs["tokens"], logprobs["top_logprobs"], logprobs["text_offset"], strict=True)
    ):
        assert choice["text"][offset:].startswith(token)
        assert top[token] == logprobs["token_logprobs"][place]
        assert list(top.values()) == list(reference.logprobs[place].top.values())
    parts = [event["choices"][0]["logprobs"] for event in await rig.events(body)]
    for key, values in logprobs.items():
        assert [value for part in parts for value in part[key]] == values


@in_event_loop
async def test_conversations_are_those_of_the_engine(engine: Engine, rig: Rig) -> None:
    prompt = ChatPrompt(FLAT, tools=[{}], template_kwargs={"style": "short"})
    (reference,) = engine.generate([prompt], SamplingParams(**GREEDY, n=2))
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
    messages = [choice["message"] for choice in answer["choices"]]
    assert messages == [{"role": "assistant", "content": text} for text in texts]
    assert answer["usage"]["prompt_tokens"] == len(reference.prompt_token_ids)
    contents, roles = ["", ""], [0, 0]
    for event in await rig.events(body, CHAT):
        assert event["object"] == "chat.completion.chunk"
        (choice,) = event["choices"]
        contents[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += choice["delta"].get("role") == "assistant"
    assert (contents, roles) == (texts, [1, 1])
    without = (await rig.post({**body, "tool_choice": "none"}, CHAT)).json()
    assert without["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]


@in_event_loop
async def test_logprobs_of_conversations(rig: Rig) -> None:
    body = {"messages": FLAT, "logprobs": True, "top_logprobs": 3, **GREEDY}
    (choice,) = (await rig.post(body, CHAT)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
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
async def test_tokens(engine: Engine, rig: Rig) -> None:
    tokenizer = engine.tokenizer
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
