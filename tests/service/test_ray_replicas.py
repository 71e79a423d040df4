"""Replicas on a local Ray: failures, updates and scaling under load. Real processes."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from stepgraph import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.service.ray_app import build

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray Serve", allow_module_level=True)

from ray import serve

from ..rigs.ray_cluster import (
    ENGINE,
    Cluster,
    Stream,
    kill,
    load,
    local_cluster,
    num_running,
    replica_pids,
    wait_until,
)

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

pytestmark = pytest.mark.slow

PROMPTS = [[100 + n, *range(20 + n, 60 + n)] for n in range(24)]
STREAMED = [[200 + n, *range(300, 340)] for n in range(4)]
"""Prompts that no replica caches, so that they are spread evenly."""
LONG = 800
"""Tokens of a stream that is still running when a replica is killed."""


@pytest.fixture(scope="module")
def expected() -> dict[int, list[str]]:
    """Texts by number of tokens, of an engine in this process: short ones after `PROMPTS`."""
    with Engine.from_pretrained("demo", EngineConfig(**ENGINE)) as engine:

        def texts(prompts: list[list[int]], length: int) -> list[str]:
            params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
            return [output.text for output in engine.generate(prompts, params)]

        return {16: texts(PROMPTS, 16), LONG: texts(STREAMED, LONG)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster() as found:
        yield found


def deploy(**options: Any) -> DeploymentHandle:
    args = {"model": "demo", "engine": ENGINE, "num_cpus": 1, **options}
    return serve.run(build(args), name="llm", route_prefix="/")


@pytest.fixture
def pair(cluster: Cluster) -> Cluster:
    """Two replicas that run."""
    if num_running() != 2:
        deploy(replicas=2)
    wait_until(lambda: num_running() == 2 and len(replica_pids()) == 2)
    return cluster


def test_routes_and_proxies_answer_as_an_engine_does(
    pair: Cluster, expected: dict[int, list[str]]
) -> None:
    assert [pair.text(prompt, 16) for prompt in PROMPTS[:4]] == expected[16][:4]
    stream = Stream(pair, PROMPTS[5], 16)
    stream.read()
    assert stream.done
    assert stream.text == expected[16][5]
    assert len(stream.texts) > 1, "the tokens came together"
    assert httpx.get(f"{pair.url}/v1/models").json()["data"][0]["id"] == "demo"
    assert httpx.get(f"{pair.url}/ready").json()["ready"]
    refused = httpx.post(f"{pair.url}/v1/completions", json={"prompt": 3})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert httpx.get(f"{pair.url}/nothing").status_code == 404


def test_shared_prefixes_go_where_they_are_cached(pair: Cluster) -> None:
    """After its first request a prefix of ten blocks is found in the cache."""
    prefixes = [[300 + n] * 160 for n in range(4)]
    cached = []
    for turn in range(4):
        for prefix in prefixes:
            usage = pair.complete([*prefix, 50 + turn], 2)["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[4:] == [160] * 12


def test_a_killed_replica_loses_only_what_it_streamed(
    pair: Cluster, expected: dict[int, list[str]]
) -> None:
    """All rows stream and other requests wait when one of two replicas is killed."""
    streams = [Stream(pair, prompt, LONG) for prompt in STREAMED]
    with ThreadPoolExecutor(16) as pool:
        reading = []
        for stream in streams:  # one by one: two for each replica
            reading.append(pool.submit(stream.read))
            wait_until(lambda stream=stream: bool(stream.texts))
        waiting = [pool.submit(pair.text, prompt, 16) for prompt in PROMPTS[4:16]]
        time.sleep(0.3)
        victim = min(replica_pids())
        kill(victim)
        assert [answer.result() for answer in waiting] == expected[16][4:16]
        for reader in reading:
            reader.result()
    for number, stream in enumerate(streams):
        assert stream.done == (stream.error is None)
        if stream.done:
            assert stream.text == expected[LONG][number]
        else:
            assert expected[LONG][number].startswith(stream.text)
            assert stream.error is not None
            assert "replica" in stream.error["message"]
    assert sum(not stream.done for stream in streams) == 2
    wait_until(lambda: num_running() == 2 and victim not in replica_pids())
    assert len(replica_pids()) == 2
    assert pair.text(PROMPTS[0], 16) == expected[16][0]


def test_a_client_that_leaves_frees_its_row(cluster: Cluster) -> None:
    deploy(engine={**ENGINE, "max_num_seqs": 1})
    body = {"prompt": PROMPTS[0], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as lines:
        next(lines.iter_lines())
    began = time.monotonic()
    cluster.text(PROMPTS[1], 2)
    one = time.monotonic() - began
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=180) as lines:
        began = time.monotonic()
        assert sum(1 for line in lines.iter_lines() if line) > 100
        whole = time.monotonic() - began
    assert one < whole / 2


def test_an_update_under_load_loses_no_request(
    pair: Cluster, expected: dict[int, list[str]]
) -> None:
    before = replica_pids()

    def request(turn: int) -> bool:
        number = turn % len(PROMPTS)
        return pair.text(PROMPTS[number], 16) == expected[16][number]

    with load(pair, request, clients=3) as results:
        deploy(replicas=2, service={"max_queued_requests": 99})
        wait_until(lambda: num_running() == 2 and not before & replica_pids())
    assert len(results) > 3
    assert all(results)


def test_replicas_follow_the_load(cluster: Cluster, expected: dict[int, list[str]]) -> None:
    scaling = {
        "max_replicas": 2,
        "target_ongoing_requests": 1.5,
        "upscale_delay_s": 1,
        "downscale_delay_s": 3,
        "look_back_period_s": 3,
    }
    deploy(autoscaling=scaling)
    wait_until(lambda: num_running() == 1 and len(replica_pids()) == 1)

    def request(turn: int) -> bool:
        number = turn % len(PROMPTS)
        return cluster.text(PROMPTS[number], 16) == expected[16][number]

    with load(cluster, request, clients=4) as results:
        wait_until(lambda: num_running() == 2)
    with load(cluster, request, clients=1) as more:
        wait_until(lambda: num_running() == 1 and len(replica_pids()) == 1)
    assert all(results)
    assert more
    assert all(more)


def test_a_replica_holds_the_ranks_of_its_engine(
    cluster: Cluster, expected: dict[int, list[str]]
) -> None:
    """Two ranks in one bundle of two CPUs; both end with the replica."""
    deploy(engine={**ENGINE, "tensor_parallel": 2}, num_cpus=2)
    wait_until(lambda: num_running() == 1 and len(replica_pids()) == 1)
    (replica,) = replica_pids()
    ranks = psutil.Process(replica).children(recursive=True)
    assert ranks
    assert [cluster.text(prompt, 16) for prompt in PROMPTS[:4]] == expected[16][:4]
    serve.delete("llm")
    wait_until(lambda: not any(rank.is_running() for rank in ranks))


def test_a_model_that_cannot_be_loaded_is_not_restarted_forever(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="llm"):
        deploy(model="/no/such/checkpoint", routing={"policy": "balanced"})
    status = serve.status().applications["llm"]
    assert status.status == "DEPLOY_FAILED"
    assert "/no/such/checkpoint" in str(status)
    assert not replica_pids()
    serve.delete("llm")
