"""`/v1/completions` over the fake engine, whose tokens are known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from stepgraph.runtime import AsyncEngine, SamplingParams, ServiceConfig

from ..rigs.fake_engine import expected, fake_engine, runner_of
from ..rigs.http_rig import COMPLETIONS, Connection, Rig, events_of, service, slow_engine
from ..rigs.service_rig import in_event_loop

PROMPT = [1, 2, 3, 4, 5]
BODY = {
    "prompt": PROMPT,
    "seed": 3,
    "max_tokens": 6,
    "ignore_eos": True,
    "return_token_ids": True,
}


def reference(rig: Rig, prompt: list[int], **changes: Any) -> list[int]:
    own = SamplingParams(**{"seed": 3, "max_tokens": 6, "ignore_eos": True, **changes})
    return expected(rig.inner, prompt, own)


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


@in_event_loop
async def test_whole_and_streamed_tokens_are_those_of_the_engine() -> None:
    async with service() as rig:
        body = (await rig.post(BODY)).json()
        events = await rig.events(BODY)
        tokens = reference(rig, PROMPT)
    (choice,) = body["choices"]
    assert choice["token_ids"] == tokens
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["total_tokens"] == 11
    assert joined(events) == {0: tokens}
    assert len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in events)


@in_event_loop
async def test_choices_of_several_prompts_are_numbered_by_prompt() -> None:
    prompts = [PROMPT, [9, 8], [7]]
    async with service() as rig:
        body = {**BODY, "prompt": prompts, "n": 2}
        whole = (await rig.post(body)).json()
        streamed = joined(await rig.events(body))
        first = [reference(rig, prompt) for prompt in prompts]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert {c["index"]: c["token_ids"] for c in whole["choices"]} == streamed
    assert [streamed[2 * number] for number in range(3)] == first
    assert whole["usage"]["prompt_tokens"] == 8
    assert whole["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("continuous", [False, True])
@in_event_loop
async def test_usage_of_streams(continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    async with service() as rig:
        *events, last = await rig.events({**BODY, "stream_options": options})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    if continuous:
        seen = 0
        for event in events:
            seen += len(event["choices"][0]["token_ids"])
            assert event["usage"]["completion_tokens"] == seen
            assert event["usage"]["prompt_tokens"] == 5
    else:
        assert all(event["usage"] is None for event in events)


def test_parameters_reach_the_engine() -> None:
    """Each field of a request against the same field of `SamplingParams`."""
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"3": 2.0},
        "seed": 9,
        "n": 3,
        "stop_token_ids": [4],
        "min_tokens": 2,
        "skip_special_tokens": False,
        "logprobs": 2,
    }

    async def run() -> SamplingParams:
        async with service() as rig:
            seen = []
            prepare = rig.inner.prepare

            def note(prompt: Any, params: Any, *arguments: Any, **more: Any) -> Any:
                seen.append((params, more))
                return prepare(prompt, params, *arguments, **more)

            rig.inner.prepare = note  # type: ignore[method-assign]
            extra = {"priority": 7, "cache_salt": "s", "user": "u", "timeout": 50.0, "unknown": {}}
            response = await rig.post({**BODY, **fields, **extra})
            assert response.status_code == 200, response.text
            ((params, more),) = seen
            assert more == {"priority": 7, "cache_salt": "s"}
            return params

    own = {**fields, "logit_bias": {3: 2.0}}
    assert asyncio.run(run()) == SamplingParams(max_tokens=6, ignore_eos=True, **own)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["decoding", "queued"])
@in_event_loop
async def test_a_disconnected_client_leaves_nothing(stream: bool, phase: str) -> None:
    async with service(lambda: slow_engine(max_num_seqs=1)) as rig:
        body = {**BODY, "max_tokens": 40, "stream": stream}
        first = Connection(rig, body)
        while not (await rig.engine.stats())["running"]:
            await asyncio.sleep(0.001)
        if phase == "queued":
            second = Connection(rig, body)
            while not (await rig.engine.stats())["queued"]:
                await asyncio.sleep(0.001)
            await second.disconnect()
        await first.disconnect()
        steps = (await rig.engine.stats())["steps"]
        await rig.until_idle()
        assert (await rig.engine.stats())["steps"] <= steps + 2


@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_deadlines(stream: bool) -> None:
    """What has passed its deadline ends with the tokens it has."""
    async with service(slow_engine) as rig:
        body = {**BODY, "max_tokens": 40, "timeout": 0.3}
        if stream:
            events = await rig.events(body)
            tokens, reason = joined(events)[0], events[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = (await rig.post(body)).json()["choices"]
            tokens, reason = choice["token_ids"], choice["finish_reason"]
        assert reason == "deadline"
        assert 0 < len(tokens) < 40
        assert tokens == reference(rig, PROMPT, max_tokens=40)[: len(tokens)]


@in_event_loop
async def test_overload_is_refused_with_retry_after() -> None:
    config = ServiceConfig(max_queued_requests=1)
    async with service(lambda: slow_engine(max_num_seqs=1), config) as rig:
        body = {**BODY, "max_tokens": 20}
        first = asyncio.create_task(rig.post(body))
        while not (await rig.engine.stats())["running"]:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(rig.post(body))
        while not (await rig.engine.stats())["queued"]:
            await asyncio.sleep(0.001)
        for stream in (False, True):
            response = await rig.post({**body, "stream": stream})
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "service_unavailable_error"
        tokens = [r.json()["choices"][0]["token_ids"] for r in (await first, await second)]
        assert tokens == [reference(rig, PROMPT, max_tokens=20)] * 2


@in_event_loop
async def test_a_failure_within_a_stream_ends_it_with_an_error() -> None:
    async with service(slow_engine) as rig:
        connections = [
            Connection(rig, {**BODY, "max_tokens": 40, "stream": True, "prompt": prompt})
            for prompt in (PROMPT, [PROMPT, [1]])
        ]
        for connection in connections:
            await connection.received(3)
        runner = runner_of(rig.inner)

        def fail(*_: Any) -> Any:
            raise RuntimeError("the device is gone")

        runner.launch = fail
        for connection in connections:
            await connection.task
            body = b"".join(m.get("body", b"") for m in connection.messages).decode()
            *_, last = events_of(body)
            assert "the device is gone" in last
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
