"""Routing and options of replicas, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.service.ray_app import (
    ReplicaOptions,
    build,
    check_ray,
    replica_bundle,
    routing,
)
from stepgraph.runtime.service.ray_app.replica import Head, RemoteRequest, fingerprints, respond
from stepgraph.runtime.service.ray_app.routing import (
    CachedPrefixes,
    by_preference,
    read_fingerprints,
)

from ..rigs.service_rig import in_event_loop


def chunks_of(**fields: Any) -> Sequence[int]:
    return read_fingerprints(fingerprints(json.dumps(fields).encode()))


# -- what replicas cache ---------------------------------------------------------------------------


def test_fingerprints_are_of_the_prompt_and_of_all_before_a_chunk() -> None:
    turns = [{"role": "user", "content": f"{n} " + "word " * 40} for n in range(3)]
    shorter = chunks_of(messages=turns[:2], temperature=0.5)
    longer = chunks_of(stream=True, messages=turns)
    shared = len(shorter) - 1  # the last chunk may have the end of the list
    assert shared > 5
    assert longer[:shared] == shorter[:shared]
    for other in (
        {"messages": turns, "cache_salt": "s"},
        {"messages": turns, "tools": [{"function": {"name": "f"}}]},
        {"messages": turns[1:]},
    ):
        assert not {*chunks_of(**other)} & {*longer}
    ids = list(range(1000, 1400))
    assert chunks_of(prompt=ids[:200])[:10] == chunks_of(prompt=ids)[:10]
    for body in (b"", b"{", b"[1]", b"{}", b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000):
        assert fingerprints(body) == b""


def test_prefixes_are_known_from_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_SENT", 100)
    known = CachedPrefixes()
    prompt, other = range(40), [*range(20), *range(100, 120)]
    known.sent("a", prompt)
    assert known.num_cached("a", prompt) == 40
    assert known.num_cached("a", other) == 20
    assert known.num_cached("b", prompt) == 0
    for turn in range(1000, 1010):
        known.sent("a", range(100 * turn, 100 * turn + 60))
        known.sent("a", other)
    assert known.num_cached("a", other) == 40
    assert known.num_cached("a", prompt) == 20, "its end was not used lately"
    known.keep(["b"])
    assert known.num_cached("a", prompt) == 0


@given(st.integers(1, 8), st.lists(st.integers(0, 30), max_size=200), st.floats(1, 3))
def test_no_replica_exceeds_its_bound(n: int, prompts: list[int], load_bound: float) -> None:
    """Requests that never end: of m, none of n replicas has more than ceil(c·m / n)."""
    loads = dict.fromkeys(range(n), 0)
    cached: Counter[tuple[int, int]] = Counter()
    for m, prompt in enumerate(prompts, 1):
        order = by_preference(
            loads,
            lambda r, prompt=prompt: cached[r, prompt],
            load_bound=load_bound,
            spare_requests=0,
        )
        assert sorted(order) == sorted(loads)
        first = order[0]
        loads[first] += 1
        assert loads[first] <= -(-load_bound * m // n)
        eligible = [r for r in loads if (loads[r] - (r == first)) + 1 <= -(-load_bound * m // n)]
        assert cached[first, prompt] == max(cached[r, prompt] for r in eligible)
        cached[first, prompt] += 1


# -- requests in other processes -------------------------------------------------------------------


@in_event_loop
async def test_a_response_crosses_in_parts_and_a_closed_one_is_cancelled() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"!", "more_body": True})
        await asyncio.sleep(0)
        if scope["path"] == "/endless":
            try:
                await receive()
            finally:
                ended.set()
        await send({"type": "http.response.body", "body": b"end"})

    request = RemoteRequest("POST", "/", (), b"text")
    parts = [part async for part in respond(app, request)]
    assert parts[0] == Head(200, (), b"text")
    assert b"".join(parts[1:]) == b"!end"  # type: ignore[arg-type]
    endless = respond(app, request._replace(path="/endless"))
    await anext(endless)
    await asyncio.sleep(0)
    await endless.aclose()  # type: ignore[attr-defined]
    assert ended.is_set()

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await anext(respond(failing, request))


# -- arguments -------------------------------------------------------------------------------------


def test_arguments_of_a_config_file_and_of_a_command_line() -> None:
    engine = {"max_num_seqs": 3, "buckets": [1, 3]}
    options = ReplicaOptions.of({"model": "demo", "engine": engine, "replicas": 2})
    text = {"model": "demo", "engine": '{"max_num_seqs": 3, "buckets": [1, 3]}', "replicas": "2"}
    assert ReplicaOptions.of(text) == options
    assert options.engine.buckets == (1, 3)
    assert options.engine.freeze_gc


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "model"),
        ({"model": ""}, "model"),
        ({"model": "demo", "modell": 1}, "modell"),
        ({"model": "demo", "engine": {"max_num_seqs": 0}}, "max_num_seqs"),
        ({"model": "demo", "engine": {"rows": 1}}, "rows"),
        ({"model": "demo", "engine": [1]}, "engine"),
        ({"model": "demo", "engine": "{"}, "engine"),
        ({"model": "demo", "service": {"send_timeout": -1}}, "send_timeout"),
        ({"model": "demo", "http": {"api_keys": [""]}}, "api_keys"),
        ({"model": "demo", "replicas": True}, "replicas"),
        ({"model": "demo", "replicas": 1, "autoscaling": {}}, "autoscaling"),
        ({"model": "demo", "routing": {"load_bound": 0.5}}, "load_bound"),
        ({"model": "demo", "drain_seconds": float("nan")}, "drain_seconds"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ReplicaOptions.of(arguments)


@pytest.mark.parametrize(
    ("engine", "options", "bundle"),
    [
        ({}, {}, {"CPU": 1}),
        ({"threads": 3}, {}, {"CPU": 3}),
        ({"threads": 3, "tensor_parallel": 2}, {}, {"CPU": 6}),
        ({"tensor_parallel": 4}, {"num_gpus": 4, "num_cpus": 8}, {"CPU": 8, "GPU": 4}),
        ({}, {"num_gpus": 0.5}, {"CPU": 1, "GPU": 0.5}),
        (
            {"device": "cuda"},
            {"num_gpus": 1, "accelerator_type": "H100"},
            {"CPU": 1, "GPU": 1, "accelerator_type:H100": 0.001},
        ),
        ({"tensor_parallel": 4}, {"num_gpus": 2}, None),
        ({"tensor_parallel": 2}, {"num_gpus": 0.5}, None),
        ({}, {"num_gpus": 2}, None),
        ({"device": "cuda"}, {}, None),
        ({"device": "cuda:1"}, {"num_gpus": 1}, None),
        ({"device": "cpu"}, {"num_gpus": 1}, None),
        ({"tensor_parallel": 4}, {"num_cpus": 2}, None),
    ],
)
def test_resources_of_a_replica(
    engine: dict[str, Any], options: dict[str, Any], bundle: dict[str, float] | None
) -> None:
    made = ReplicaOptions(model="demo", engine=EngineConfig(**engine), **options)
    if bundle is not None:
        assert replica_bundle(made) == bundle
        return
    with pytest.raises(ConfigError):
        replica_bundle(made)


@pytest.mark.parametrize("version", [None, "2.9.3", "2.59.0", "2.61.0", "3.0.0"])
def test_a_missing_or_other_ray(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    for check in (check_ray, lambda: build({"model": "/no/such/checkpoint"})):
        with pytest.raises(ConfigError):
            check()
