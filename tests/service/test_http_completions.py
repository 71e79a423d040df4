"""The HTTP service over the fake engine: known tokens, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from stepgraph.runtime import AsyncEngine, ConfigError, SamplingParams, ServiceConfig
from stepgraph.runtime.service import app
from stepgraph.runtime.service.http import exchange

from ..rigs.fake_engine import expected, fake_engine, runner_of
from ..rigs.http_rig import CHAT, COMPLETIONS, Connection, Rig, events_of, service, slow_engine
from ..rigs.service_rig import fail, in_event_loop

PROMPT = [1, 2, 3, 4, 5]
BODY = {"prompt": PROMPT, "seed": 3, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


def reference(rig: Rig, prompt: list[int], **changes: Any) -> list[int]:
    own = SamplingParams(**{"seed": 3, "max_tokens": 6, "ignore_eos": True, **changes})
    return expected(rig.inner, prompt, own)


async def until(rig: Rig, name: str) -> None:
    """Wait until the engine counts a request."""
    while not (await rig.engine.stats())[name]:
        await asyncio.sleep(0.001)


def joined(events: list[Any]) -> dict[int, list[int]]:
    """The tokens of each choice of a stream, which ends with its last event."""
    tokens: dict[int, list[int]] = {}
    ended = set()
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in ended
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
            if choice["finish_reason"]:
                ended.add(choice["index"])
    assert ended == tokens.keys()
    return tokens


@pytest.mark.parametrize(("prompts", "n"), [([PROMPT], 1), ([PROMPT, [9, 8], [7]], 2)])
@in_event_loop
async def test_whole_and_streamed_tokens_are_those_of_the_engine(
    prompts: list[list[int]], n: int
) -> None:
    """Choices are numbered by prompt."""
    async with service() as rig:
        body = {**BODY, "prompt": prompts if len(prompts) > 1 else prompts[0], "n": n}
        whole = (await rig.post(body)).json()
        *events, last = await rig.events({**body, "stream_options": {"include_usage": True}})
        first = [reference(rig, prompt) for prompt in prompts]
    choices, usage = whole["choices"], whole["usage"]
    tokens = {choice["index"]: choice["token_ids"] for choice in choices}
    assert list(tokens) == list(range(n * len(prompts)))
    assert [tokens[n * number] for number in range(len(prompts))] == first
    assert [c["prompt_token_ids"] for c in choices] == [p for p in prompts for _ in range(n)]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert whole["object"] == "text_completion"
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == 6 * len(choices)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert joined(events) == tokens
    assert len({event["id"] for event in events}) == 1
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == usage["total_tokens"]
    assert all(event["usage"] is None for event in events)


@in_event_loop
async def test_usage_of_streams() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with service() as rig:
        assert not any("usage" in event for event in await rig.events(BODY))
        *events, _ = await rig.events({**BODY, "stream_options": options})
    seen = 0
    for event in events:
        seen += len(event["choices"][0]["token_ids"])
        assert event["usage"]["completion_tokens"] == seen
        assert event["usage"]["prompt_tokens"] == 5


@in_event_loop
async def test_the_usage_has_the_times_of_each_completion_when_asked() -> None:
    async with service() as rig:
        asked = {**BODY, "n": 2, "return_timings": True}
        whole = (await rig.post(asked)).json()["usage"]["timings"]
        *events, last = await rig.events(asked)
        assert "timings" not in (await rig.post(BODY)).json()["usage"]
    for timings in (whole, last["usage"]["timings"]):
        assert [len(each["inter_token_ms"]) for each in timings] == [5, 5]
        for each in timings:
            assert min(each["inter_token_ms"]) <= each["inter_token_p50_ms"]
            assert each["inter_token_p99_ms"] is None
            assert each["queue_ms"] >= 0
            assert each["prefill_ms"] > 0
            assert each["accepted_drafts"] == each["inter_token_ms"].count(0)
    assert all(event["usage"] is None for event in events)


@in_event_loop
async def test_parameters_reach_the_engine() -> None:
    """Each field of a request against the same field of `SamplingParams`."""
    fields: dict[str, Any] = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 9, "n": 3},
        **{"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        **{"stop_token_ids": [4], "min_tokens": 2, "skip_special_tokens": False, "logprobs": 2},
    }
    extra = {"priority": 7, "cache_salt": "s", "user": "u", "timeout": 50.0, "unknown": {}}
    async with service() as rig:
        seen: list[tuple[Any, ...]] = []
        prepare = rig.inner.prepare

        def note(prompt: Any, params: Any, *arguments: Any, **more: Any) -> Any:
            seen.append((params, more))
            return prepare(prompt, params, *arguments, **more)

        rig.inner.prepare = note  # type: ignore[method-assign]
        body = {**BODY, **fields, **extra, "logit_bias": {"3": 2.0}}
        assert (await rig.post(body)).status_code == 200
    own = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={3: 2.0}, **fields)
    assert seen == [(own, {"priority": 7, "cache_salt": "s"})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["decoding", "queued"])
@in_event_loop
async def test_a_disconnected_client_leaves_nothing(stream: bool, phase: str) -> None:
    async with service(lambda: slow_engine(max_num_seqs=1)) as rig:
        body = {**BODY, "max_tokens": 40, "stream": stream}
        first = Connection(rig, body)
        await until(rig, "running")
        if phase == "queued":
            second = Connection(rig, body)
            await until(rig, "queued")
            await second.disconnect()
        await first.disconnect()
        steps = (await rig.engine.stats())["steps"]
        await rig.until_idle()
        assert (await rig.engine.stats())["steps"] <= steps + 2


@in_event_loop
async def test_deadlines() -> None:
    """What has passed its deadline ends with the tokens it has."""
    async with service(slow_engine) as rig:
        events = await rig.events({**BODY, "max_tokens": 40, "timeout": 0.3})
        tokens = joined(events)[0]
        assert events[-1]["choices"][0]["finish_reason"] == "deadline"
        assert 0 < len(tokens) < 40
        assert tokens == reference(rig, PROMPT, max_tokens=40)[: len(tokens)]


@in_event_loop
async def test_overload_is_refused_with_retry_after() -> None:
    config = ServiceConfig(max_queued_requests=1)
    async with service(lambda: slow_engine(max_num_seqs=1), config) as rig:
        body = {**BODY, "max_tokens": 12}
        first = asyncio.create_task(rig.post(body))
        await until(rig, "running")
        second = asyncio.create_task(rig.post(body))
        await until(rig, "queued")
        for stream in (False, True):
            response = await rig.post({**body, "stream": stream})
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "service_unavailable_error"
        tokens = [r.json()["choices"][0]["token_ids"] for r in (await first, await second)]
        assert tokens == [reference(rig, PROMPT, max_tokens=12)] * 2


@in_event_loop
async def test_a_failure_within_a_stream_ends_it_with_an_error() -> None:
    async with service(slow_engine) as rig:
        connections = [
            Connection(rig, {**BODY, "max_tokens": 40, "stream": True, "prompt": prompt})
            for prompt in (PROMPT, [PROMPT, [1]])
        ]
        for connection in connections:
            await connection.received(3)
        runner_of(rig.inner).launch = fail
        for connection in connections:
            await connection.task
            body = b"".join(m.get("body", b"") for m in connection.messages).decode()
            *_, last = events_of(body)
            assert "injected" in last
            assert "server_error" in last
            assert "[DONE]" not in body
            assert connection.messages[-1]["more_body"] is False
        assert (await rig.post(BODY)).status_code == 500
        assert (await rig.http.get("/health")).status_code == 503
        assert (await rig.http.get("/ready")).status_code == 503


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/tokenize"])
@in_event_loop
async def test_an_engine_that_was_not_started_refuses(path: str) -> None:
    """An application that is mounted without a lifespan."""
    rig = Rig(AsyncEngine(fake_engine))
    call = rig.http.get(path) if "models" in path else rig.post({"prompt": "a"}, path)
    response = await call
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "not_started"
    assert "retry-after" not in response.headers
    ready = await rig.http.get("/ready")
    assert (ready.status_code, ready.json()["phase"]) == (503, "not_started")


@in_event_loop
async def test_drained_and_closed_engines_refuse() -> None:
    async with service() as rig:
        await rig.engine.drain()
        assert (await rig.post({**BODY, "stream": True})).status_code == 503
        assert (await rig.http.get("/health")).status_code == 200
        assert (await rig.http.get("/ready")).json()["reason"] == "draining"
        await rig.engine.wake()
        assert (await rig.post(BODY)).status_code == 200
        await rig.engine.aclose()
        assert (await rig.post(BODY)).status_code == 503


HI = [{"role": "user", "content": "hi"}]
DEEP = 100_000


def completion(**body: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"prompt": [1, 2], "max_tokens": 2, **body}


def chat(**body: Any) -> tuple[str, Any]:
    return CHAT, {"messages": HI, **body}


def user(content: Any) -> tuple[str, Any]:
    return chat(messages=[{"role": "user", "content": content}])


PROMPTS: list[Any] = [
    *(None, [], "", [[]], [1, "x"], [1, [2]], [10**6], [-1], [1] * 48, [1] * 49, "text"),
    *([[1], [1] * 49], [[1]] * 257, ["a"] * 300),
]
GRAMMARS = ({"regex": "a"}, {"regex": "a", "grammar": "b"}, {"whitespace": "a"})
CHOICES = ("required", "other", {"type": "function"})
BODIES = [
    *(b"", b"nonsense", b"[]", b'{"prompt": "x"', b'{"prompt": "x"} {}', b'{"prompt": "\xff"}'),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": [NaN]}'),
    b'{"unknown": ' + b"[" * DEEP + b"]" * DEEP + b', "prompt": [1]}',
    b'{"unknown": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
]
INVALID: list[tuple[tuple[str, Any], str | None]] = [
    *((completion(prompt=prompt), "prompt") for prompt in PROMPTS),
    *((completion(prompt=prompt), "prompt[0]") for prompt in ([1.5], [True])),
    (completion(prompt=[[1], ["x"]]), "prompt[1][0]"),
    (completion(max_tokens=10**30), "max_tokens"),
    (completion(min_tokens=3), "min_tokens"),
    *((completion(stop=stop), "stop") for stop in ([""], "x")),
    (completion(stop=[1]), "stop[0]"),
    (completion(stop_token_ids=[11]), "stop_token_ids"),
    *((completion(logit_bias=b), "logit_bias") for b in ({"x": 1}, {"1": 101}, {"11": 1})),
    (completion(allowed_token_ids=[1]), "allowed_token_ids"),  # the engine has no masks
    (completion(bad_words=["a"]), "bad_words"),
    (completion(stream=False, stream_options={"include_usage": True}), "stream_options"),
    (completion(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (completion(response_format={"type": "json_object"}), "response_format"),
    (completion(response_format={"type": "xml"}), "response_format.type"),
    (completion(response_format={"type": "json_schema"}), "response_format.json_schema"),
    *((completion(structured_outputs=grammar), "structured_outputs") for grammar in GRAMMARS),
    *((chat(messages=messages), "messages") for messages in ([], [{"content": "hi"}])),
    (chat(messages=["hi"]), "messages[0]"),
    (user(5), "messages"),
    (user([{"type": "image_url"}]), "messages[0].content[0]"),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    (chat(messages=[{"role": "assistant", "tool_calls": 5}]), "messages[0].tool_calls"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(tools=[{"type": "function"}]), "tools[0].function.name"),
    *((chat(tool_choice=choice), "tool_choice") for choice in CHOICES),
    (chat(tool_choice="required", tools=[{"function": {"name": "f"}}]), "tool_choice"),
    (chat(chat_template="{{ 1 }}"), "messages"),
    (chat(functions=[{"name": "f"}]), "functions"),
    *((("/tokenize", body), "prompt") for body in ({}, {"prompt": "x", "messages": HI})),
    *((("/detokenize", {"tokens": ids}), "tokens") for ids in ([-1], [1] * 49, [1 << 40])),
    (completion(unknown=[[]] * 300_000), None),
    *(((COMPLETIONS, body), None) for body in BODIES),
    ((COMPLETIONS, b'{"prompt": [1], "seed": ' + b"9" * 5000 + b"}"), "seed"),
    ((COMPLETIONS, b'{"prompt": [1], "temperature": 1e999}'), "temperature"),
    ((COMPLETIONS, b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}"), "prompt[0][0]"),
]


@in_event_loop
async def test_invalid_requests() -> None:
    """Each is 400 with the field's name, streamed or not, and costs the engine nothing."""
    async with service() as rig:
        for (path, body), param in INVALID:
            kinds = [body]
            if isinstance(body, dict) and "tokenize" not in path:
                kinds.append({"stream": True, **body})
            for kind in kinds:
                response = await rig.post(kind, path)
                shown = f"{path} {str(body)[:80]}: {response.text}"
                assert response.status_code == 400, shown
                error = response.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert 0 < len(error["message"]) <= 1000
                assert error["param"] == param, shown
        assert (await rig.engine.stats())["requests"] == 0


@in_event_loop
async def test_paths_methods_and_models() -> None:
    async with service(model_names=["one", "org/two"]) as rig:
        for method, path, status in (
            ("GET", "/", 404),
            ("GET", "/metrics", 404),
            ("GET", "/v1/models/three", 404),
            ("GET", "/v1/completions", 405),
            ("POST", "/v1/models", 405),
        ):
            response = await rig.http.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["message"]
        for name, status in (("one", 200), ("org/two", 200), ("three", 404), ("", 404)):
            path, body = completion(model=name)
            response = await rig.post(body, path)
            assert response.status_code == status
            assert response.json().get("model", name) == name
        listed = (await rig.http.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["one", "org/two"]
        assert (await rig.http.get("/v1/models/org/two")).json()["id"] == "org/two"


@in_event_loop
async def test_api_keys() -> None:
    async with service(api_keys=["first", "zweiter-ß", "voilà"]) as rig:
        path, body = completion()
        for header in (None, "first", "Bearer", "Bearer firs", "Bearer first2", "Basic first"):
            headers = {} if header is None else {"authorization": header}
            for target in (path, "/unknown", "/metrics"):
                response = await rig.post(body, target, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "zweiter-ß", "voilà"):
            header = f"Bearer {key}".encode()
            for name in (b"authorization", b"x-api-key"):
                value = header if name == b"authorization" else key.encode()
                response = await rig.post(body, path, headers={name: value})
                assert response.status_code == 200
        assert (await rig.post(body, path, headers={"x-api-key": "firs"})).status_code == 401
        both = {"x-api-key": "none", "authorization": "Bearer first"}
        assert (await rig.post(body, path, headers=both)).status_code == 200
        for probe in ("/health", "/ready"):
            assert (await rig.http.get(probe)).status_code == 200


@in_event_loop
async def test_large_and_slow_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            await asyncio.sleep(0)
            yield b" " * 100

    async with service(max_body_bytes=1000) as rig:
        path, body = completion()
        assert (await rig.post(body, path)).status_code == 200
        for content in (b" " * 1001, chunks(11)):
            response = await rig.http.post(path, content=content)
            assert (response.status_code, response.headers["connection"]) == (413, "close")
        assert (await rig.http.post(path, content=chunks(9))).status_code == 400
        headers = {"content-length": "9" * 5000}
        assert (await rig.post(b"{}", path, headers=headers)).status_code == 413
        monkeypatch.setattr(exchange, "BODY_SECONDS", 0.05)
        connection = Connection(rig, body)
        connection.requests.get_nowait()
        await connection.received(2)
        assert connection.messages[0]["status"] == 408
        await connection.task


@in_event_loop
async def test_a_client_that_disconnects_within_its_body_gets_no_response() -> None:
    async with service() as rig:
        connection = Connection(rig, {})
        connection.requests.get_nowait()
        connection.requests.put_nowait(
            {"type": "http.request", "body": b'{"prompt"', "more_body": True}
        )
        await connection.disconnect()
        assert connection.messages == []


@in_event_loop
async def test_other_origins_only_where_allowed() -> None:
    path, body = completion()
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    async with service() as rig:
        response = await rig.post(body, path, headers=asked)
        assert not [name for name in response.headers if name.startswith("access-control")]
    async with service(allow_origins=["https://a.example"], api_keys=["k"]) as rig:
        preflight = await rig.http.options(path, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = await rig.http.options(path, headers={**asked, "origin": "https://b.example"})
        assert other.status_code == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("model_names", value) for value in ([], [""], "name")),
        *(("api_keys", [""]), ("tool_parser", "unknown"), ("reasoning_parser", "unknown")),
    ],
)
def test_invalid_options(name: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        app(AsyncEngine(fake_engine), **{name: value})


@in_event_loop
async def test_a_defect_is_an_error_without_details(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def exposition(self, accept: str = "") -> tuple[bytes, str]:
            raise LookupError("secret")

    async with service(metrics=Broken()) as rig:
        response = await rig.http.get("/metrics")
        assert response.status_code == 500
        assert "secret" not in response.text
    assert "secret" in caplog.text


def test_the_extra_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import stepgraph.runtime.service as package

    for name in list(sys.modules):
        if name.startswith("stepgraph.runtime.service.http."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ModuleNotFoundError, match=r"stepgraph\[server\]"):
        _ = package.app
