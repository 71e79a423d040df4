"""What the HTTP service refuses, and how; test_http_fuzz has the types and limits of fields."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from stepgraph.runtime import AsyncEngine, ConfigError
from stepgraph.runtime.service import app
from stepgraph.runtime.service.http import exchange

from ..rigs.fake_engine import fake_engine
from ..rigs.http_rig import Connection, service
from ..rigs.service_rig import in_event_loop

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
DEEP = 100_000


def completion(**body: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": [1, 2], "max_tokens": 2, **body}


def chat(**body: Any) -> tuple[str, Any]:
    return CHAT, {"messages": HI, **body}


def raw(body: bytes) -> tuple[str, Any]:
    return "/v1/completions", body


INVALID = [
    (completion(prompt=None), "prompt"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt=""), "prompt"),
    (completion(prompt=[[]]), "prompt"),
    (completion(prompt=[1, "x"]), "prompt"),
    (completion(prompt=[1, [2]]), "prompt"),
    (completion(prompt=[[1], ["x"]]), "prompt[1][0]"),
    (completion(prompt=[1.5]), "prompt[0]"),
    (completion(prompt=[True]), "prompt[0]"),
    (completion(prompt=[10**6]), "prompt"),
    (completion(prompt=[-1]), "prompt"),
    (completion(prompt=[1] * 48), "prompt"),
    (completion(prompt=[1] * 49), "prompt"),
    (completion(prompt=[[1], [1] * 49]), "prompt"),
    (completion(prompt=[[1]] * 257), "prompt"),
    (completion(prompt="text"), "prompt"),
    (completion(max_tokens=10**30), "max_tokens"),
    (completion(min_tokens=3), "min_tokens"),
    (completion(stop=[""]), "stop"),
    (completion(stop=[1]), "stop[0]"),
    (completion(stop="x"), "stop"),
    (completion(stop_token_ids=[99]), "stop_token_ids"),
    (completion(logit_bias={"x": 1}), "logit_bias"),
    (completion(logit_bias={"1": 101}), "logit_bias"),
    (completion(stream=False, stream_options={"include_usage": True}), "stream_options"),
    (completion(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (completion(suffix="x"), "suffix"),
    (completion(best_of=2), "best_of"),
    (completion(response_format={"type": "json_object"}), "response_format"),
    (completion(response_format={"type": "xml"}), "response_format.type"),
    (completion(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (completion(structured_outputs={"regex": "a"}), "structured_outputs"),
    (completion(structured_outputs={"regex": "a", "grammar": "b"}), "structured_outputs"),
    (completion(structured_outputs={"whitespace": "a"}), "structured_outputs"),
    (completion(guided_json={"type": "object"}), "guided_json"),
    (chat(messages=[]), "messages"),
    (chat(messages=["hi"]), "messages[0]"),
    (chat(messages=[{"content": "hi"}]), "messages"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "messages[0].content[0]",
    ),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        "messages[0].content[0].text",
    ),
    (chat(messages=[{"role": "user", "content": 5}]), "messages"),
    (chat(messages=[{"role": "assistant", "tool_calls": 5}]), "messages[0].tool_calls"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(tools=[{"type": "function"}]), "tools[0].function.name"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tool_choice="other"), "tool_choice"),
    (chat(tool_choice="required", tools=[{"function": {"name": "f"}}]), "tool_choice"),
    (chat(tool_choice={"type": "function"}), "tool_choice"),
    (chat(chat_template="{{ 1 }}"), "messages"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"prompt": "x", "messages": HI}), "prompt"),
    (("/detokenize", {"tokens": [-1]}), "tokens"),
    (("/detokenize", {"tokens": [1] * 49}), "tokens"),
    (chat(messages=HI * 20_000), "messages"),
    (chat(tools=[{}] * 20_000), "tools"),
    (chat(documents=[{}] * 20_000), "documents"),
    (completion(prompt=["a"] * 300), "prompt"),
    (completion(unknown=[[]] * 300_000), None),
    (("/detokenize", {"tokens": [1 << 40]}), "tokens"),
    (raw(b""), None),
    (raw(b"nonsense"), None),
    (raw(b"[]"), None),
    (raw(b'{"prompt": "x"'), None),
    (raw(b'{"prompt": "x"} {}'), None),
    (raw(b'{"prompt": "\xff"}'), None),
    (raw(b'{"prompt": "\\ud800"}'), None),
    (raw(b'{"prompt": [NaN]}'), None),
    (raw(b'{"prompt": [1], "seed": ' + b"9" * 5000 + b"}"), "seed"),
    (raw(b'{"prompt": [1], "temperature": 1e999}'), "temperature"),
    (raw(b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}"), "prompt[0][0]"),
    (raw(b'{"unknown": ' + b"[" * DEEP + b"]" * DEEP + b', "prompt": [1]}'), None),
    (raw(b'{"unknown": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}"), None),
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
async def test_null_is_the_default() -> None:
    fields = ("stream", "n", "temperature", "stop", "logprobs", "echo", "user", "logit_bias")
    async with service(fake_engine) as rig:
        path, body = completion(**dict.fromkeys(fields), stream_options=None, suffix=None)
        assert (await rig.post(body, path)).status_code == 200


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
    async with service(api_keys=["first", "zweiter-ß"]) as rig:
        path, body = completion()
        for header in (None, "first", "Bearer", "Bearer firs", "Bearer first2", "Basic first"):
            headers = {} if header is None else {"authorization": header}
            for target in (path, "/unknown", "/metrics"):
                response = await rig.post(body, target, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "zweiter-ß"):
            header = f"Bearer {key}".encode()
            response = await rig.post(body, path, headers={b"authorization": header})
            assert response.status_code == 200
        for probe in ("/health", "/ready"):
            assert (await rig.http.get(probe)).status_code == 200


def test_large_and_slow_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_SECONDS", 0.05)

    async def chunks(count: int, seconds: float = 0.0) -> AsyncIterator[bytes]:
        for _ in range(count):
            await asyncio.sleep(seconds)
            yield b" " * 100

    async def run() -> None:
        async with service(max_body_bytes=1000) as rig:
            path, body = completion()
            assert (await rig.post(body, path)).status_code == 200
            response = await rig.post(b" " * 1001, path)
            assert (response.status_code, response.headers["connection"]) == (413, "close")
            response = await rig.http.post(path, content=chunks(11))
            assert (response.status_code, response.headers["connection"]) == (413, "close")
            assert (await rig.http.post(path, content=chunks(9))).status_code == 400
            headers = {"content-length": "9" * 5000}
            assert (await rig.post(b"{}", path, headers=headers)).status_code == 413
            connection = Connection(rig, body)
            connection.requests.get_nowait()
            await connection.received(2)
            assert connection.messages[0]["status"] == 408
            await connection.task

    asyncio.run(run())


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
    "options",
    [
        {"model_names": []},
        {"model_names": [""]},
        {"model_names": "name"},
        {"api_keys": [""]},
        {"tool_parser": "unknown"},
        {"reasoning_parser": "unknown"},
    ],
)
def test_invalid_options(options: dict[str, Any]) -> None:
    engine = AsyncEngine(fake_engine)
    with pytest.raises(ConfigError):
        app(engine, **options)


def test_a_defect_is_an_error_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        class Broken:
            def exposition(self, accept: str = "") -> tuple[bytes, str]:
                raise LookupError("secret")

        async with service(metrics=Broken()) as rig:
            response = await rig.http.get("/metrics")
            assert response.status_code == 500
            assert "secret" not in response.text

    asyncio.run(run())
    assert "secret" in caplog.text


def test_the_extra_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import stepgraph.runtime.service as package

    for name in list(sys.modules):
        if name.startswith("stepgraph.runtime.service.http."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ModuleNotFoundError, match=r"stepgraph\[server\]"):
        _ = package.app
