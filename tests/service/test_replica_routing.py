"""Routing and options of replicas, without Ray."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.blocks import BlockPool, PrefixHashes
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.service.ray_app import ReplicaOptions, build, check_ray, replica_bundle
from stepgraph.runtime.service.ray_app.replica import Head, PromptBlocks, RemoteRequest, respond
from stepgraph.runtime.service.ray_app.routing import (
    CachedPrefixes,
    by_preference,
    fingerprints,
    read_fingerprints,
)

from ..rigs.engine_rig import run
from ..rigs.service_rig import in_event_loop


def blocks_of(tokens: Sequence[int], salt: str = "") -> bytes:
    hashes = PrefixHashes(4, salt)
    hashes.extend(lambda a, b: tokens[a:b], len(tokens))
    return fingerprints(hashes[i] for i in range(len(hashes)))


# -- what replicas cache ---------------------------------------------------------------------------


def test_prefixes_are_known_from_reports_and_from_what_was_sent() -> None:
    known = CachedPrefixes()
    prompt = read_fingerprints(blocks_of(range(40)))
    other = read_fingerprints(blocks_of([*range(20), *range(100, 120)]))
    known.report("a", blocks_of(range(24)))
    assert known.num_cached("a", prompt) == 6
    assert known.num_cached("a", other) == 5
    assert known.num_cached("a", read_fingerprints(blocks_of(range(40), "salt"))) == 0
    assert known.num_cached("b", prompt) == 0
    known.sent("b", prompt)
    assert known.num_cached("b", prompt) == 10
    known.report("b", blocks_of([7, 7, 7, 7]))  # perhaps taken before the prompt was computed
    assert known.num_cached("b", prompt) == 10
    known.report("b", blocks_of([8, 8, 8, 8]))  # it was evicted
    assert known.num_cached("b", prompt) == 0
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


@given(st.randoms(use_true_random=False))
def test_cached_keys_are_those_of_the_pool_in_the_order_of_eviction(rng: random.Random) -> None:
    pool = BlockPool(12)
    held: list[int] = []
    for turn in range(40):
        if rng.random() < 0.6 and pool.num_free:
            block = pool.allocate(1)[0]
            held.append(block)
            if rng.random() < 0.7:
                pool.publish(block, b"key %d" % turn)
        elif held:
            pool.free([held.pop(rng.randrange(len(held)))])
    latest = pool.cached_keys()
    listed = latest(100)
    published = [key for key in (b"key %d" % turn for turn in range(40)) if pool.find(key)]
    assert sorted(listed) == sorted(published)
    assert latest(3) == listed[:3]
    while pool.num_free:  # evicts all free blocks
        evicted = [key for key in listed if not pool.find(key)]
        assert evicted == listed[len(listed) - len(evicted) :]
        pool.allocate(1)


def test_an_ingress_computes_the_hashes_of_the_engine() -> None:
    """The blocks that an engine caches after requests are those that their bodies announce."""
    config = EngineConfig(mode="eager", threads=1, num_blocks=128)
    blocks = PromptBlocks(ReplicaOptions(model="demo", engine=config))
    text = "def main(arguments):\n    return sum(arguments)\n" * 8
    body = b'{"prompt": %s, "cache_salt": "s"}' % repr(text).replace("'", '"').encode()
    announced = asyncio.run(blocks.of("/v1/completions", body))
    with Engine.from_pretrained("demo", config) as engine:
        engine.add_request(text, SamplingParams(max_tokens=1), cache_salt="s")
        run(engine)
        cached = fingerprints(engine.cached_hashes()(100))
    assert len(announced) > 4 * 4
    assert sorted(read_fingerprints(cached)) == sorted(read_fingerprints(announced))
    for path, other in (("/v1/completions", b"{"), ("/v1/completions", b"{}"), ("/health", body)):
        assert asyncio.run(blocks.of(path, other)) == b""


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
