"""The ingress and the replica without a cluster: retries, errors, health. Needs Ray Serve."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import httpx
import pytest
from stepgraph.runtime import AsyncEngine, EngineConfig, ServiceConfig
from stepgraph.runtime.errors import EngineFailedError
from stepgraph.runtime.service.ray_app import ReplicaOptions

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray Serve", allow_module_level=True)

from ray.exceptions import RayActorError
from stepgraph.runtime.service.ray_app.replica import (
    Accepted,
    EngineReplica,
    Head,
    Ingress,
    NotServed,
    RemoteRequest,
)

from ..rigs.service_rig import Rig, fail, in_event_loop

OPTIONS = {"model": "demo", "routing": {"policy": "balanced"}}
STREAM = Head(200, ((b"content-type", b"text/event-stream"),), b"data: 1\n\n")
WHOLE = Head(200, ((b"content-type", b"application/json"),), b"{}")
LOST = RayActorError()
COMPLETION = RemoteRequest("POST", "/v1/completions", (), b'{"prompt": [1, 2, 3], "max_tokens": 4}')


class Replicas:
    """A deployment handle: each call gets the next script, of parts and errors."""

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = iter(scripts)
        self.calls: list[RemoteRequest] = []
        self.num_cancelled = 0
        self.respond = self

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    def remote(self, request: RemoteRequest, prompt: bytes) -> Replicas:
        """Return itself as the call in progress: there is one at a time."""
        self.calls.append(request)
        self._parts = iter(next(self._scripts))
        return self

    def __aiter__(self) -> Replicas:
        return self

    async def __anext__(self) -> Any:
        try:
            part = next(self._parts)
        except StopIteration:
            raise StopAsyncIteration from None
        if isinstance(part, Exception):
            raise part
        if part is None:  # it hangs
            await asyncio.Event().wait()
        return part

    def cancel(self) -> None:
        self.num_cancelled += 1


def answer(replicas: Replicas, **options: Any) -> httpx.Response:
    ingress = Ingress(ReplicaOptions.of({**OPTIONS, **options}), replicas)

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json={"prompt": "x"})

    return asyncio.run(post())


@pytest.mark.parametrize("lost", [[LOST], [Accepted(), LOST], [Accepted(), NotServed("it drains")]])
def test_a_request_is_sent_again_until_its_response_begins(lost: list[Any]) -> None:
    replicas = Replicas(lost, lost, [Accepted(), WHOLE])
    response = answer(replicas)
    assert (response.status_code, response.content) == (200, b"{}")
    assert len(replicas.calls) == 3
    assert len(set(replicas.calls)) == 1
    assert replicas.calls[0].path == "/v1/completions"
    assert replicas.calls[0].body == b'{"prompt":"x"}'


@pytest.mark.parametrize("end", [LOST, NotServed("its engine failed")])
def test_a_stream_that_is_lost_ends_with_an_error(end: Any) -> None:
    replicas = Replicas([Accepted(), STREAM, end])
    response = answer(replicas)
    events = response.text.split("\n\n")
    assert events[0] == "data: 1"
    assert '"error"' in events[1]
    assert "[DONE]" not in response.text
    assert len(replicas.calls) == 1


def test_attempts_are_limited() -> None:
    replicas = Replicas([LOST], [Accepted(), NotServed("it drains")])
    response = answer(replicas, max_attempts=2)
    assert response.status_code == 503
    assert "it drains" in response.json()["error"]["message"]
    assert len(replicas.calls) == 2


def test_a_request_that_no_replica_accepts_is_refused() -> None:
    replicas = Replicas([None])
    response = answer(replicas, route_seconds=0.05)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert replicas.num_cancelled == 1


def test_errors_of_a_replica_are_passed_on() -> None:
    refusal = Head(400, ((b"content-type", b"application/json"),), b'{"error": {}}')
    response = answer(Replicas([Accepted(), refusal]))
    assert (response.status_code, response.json()) == (400, {"error": {}})


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Makes a replica's engine, whose steps can be held back or fail."""
    made = Rig(max_num_seqs=2)

    def make(model: str, engine: EngineConfig, service: ServiceConfig) -> AsyncEngine:
        return AsyncEngine(made.make, service)

    monkeypatch.setattr(AsyncEngine, "from_pretrained", make)
    return made


async def parts_of(replica: EngineReplica, request: RemoteRequest = COMPLETION) -> list[Any]:
    return [part async for part in replica.respond(request, b"")]


@in_event_loop
async def test_a_replica_answers(held: Rig) -> None:
    replica = EngineReplica(ReplicaOptions.of(OPTIONS))
    await replica.check_health()
    accepted, head, *body = await parts_of(replica)
    assert accepted == Accepted()
    assert head.status == 200
    assert b'"completion_tokens":4' in head.body
    assert not body


@in_event_loop
async def test_a_step_that_takes_too_long_is_unhealthy(held: Rig) -> None:
    replica = EngineReplica(ReplicaOptions.of({**OPTIONS, "step_seconds": 0.05}))
    held.steps.close()
    task = asyncio.create_task(parts_of(replica))
    await asyncio.to_thread(held.steps.wait)
    await asyncio.sleep(0.1)
    with pytest.raises(EngineFailedError):
        await replica.check_health()
    held.steps.open()
    assert (await task)[1].status == 200


@in_event_loop
async def test_a_failed_engine_serves_nothing_and_is_unhealthy(held: Rig) -> None:
    """The request that it loses has no response yet, so another replica can serve it."""
    replica = EngineReplica(ReplicaOptions.of(OPTIONS))
    held.on_step = fail
    for _ in range(2):  # the second one finds a failed engine
        accepted, refused = await parts_of(replica)
        assert accepted == Accepted()
        assert isinstance(refused, NotServed)
        assert "injected" in refused.reason
    with pytest.raises(EngineFailedError):
        await replica.check_health()
    health = await parts_of(replica, RemoteRequest("GET", "/health", (), b""))
    assert health[1].status == 503
