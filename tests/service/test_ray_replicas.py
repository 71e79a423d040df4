"""Replicas on a local Ray: failures, updates and scaling under load. Real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from stepgraph import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.service.ray_app import build

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray Serve", allow_module_level=True)

import ray
from ray import serve
from ray.serve.config import HTTPOptions

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

pytestmark = pytest.mark.slow

ENGINE = {"mode": "eager", "threads": 1, "dtype": "float32", "max_num_seqs": 2, "num_blocks": 512}
GREEDY = {"temperature": 0, "ignore_eos": True}
BOUND_S = 180.0
"""Time for a deployment to change on a busy machine of two cores."""


@dataclass(frozen=True)
class Cluster:
    """The address of the proxy of a local Ray."""

    url: str

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Return the response to one request; raise for another status than 200."""
        body = {"prompt": prompt, "max_tokens": max_tokens, **GREEDY}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=BOUND_S)
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, prompt: list[int], max_tokens: int) -> str:
        return str(self.complete(prompt, max_tokens)["choices"][0]["text"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Ray with two CPUs in processes of its own, which end with the tests."""
    with socket.socket() as listener:  # finds a free port
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        logging_level="error",
        log_to_driver=False,
    )
    try:
        serve.start(http_options=HTTPOptions(port=port))
        yield Cluster(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()


def num_running() -> int:
    """Return the replicas with an engine that run."""
    application = serve.status().applications.get("llm")
    if application is None or "EngineReplica" not in application.deployments:
        return 0
    return int(application.deployments["EngineReplica"].replica_states.get("RUNNING", 0))


def replica_pids() -> set[int]:
    """Return the processes of the replicas with an engine."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "ServeReplica:llm:EngineReplica" in " ".join(process.cmdline()):
                found.add(process.pid)
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def read_stream(
    cluster: Cluster, prompt: list[int], max_tokens: int, texts: list[str]
) -> str | None:
    """Append the texts of a stream; return its error, None if it ended with `[DONE]`."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **GREEDY}
    url = f"{cluster.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=BOUND_S) as response:
        assert response.status_code == 200, response.read()
        for line in filter(None, response.iter_lines()):
            if line == "data: [DONE]":
                return None
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return str(event["error"]["message"])
            texts.append(event["choices"][0]["text"])
    raise AssertionError("the stream ended without an error")


@contextmanager
def load(cluster: Cluster, expected: list[str], clients: int) -> Iterator[list[bool]]:
    """Send `PROMPTS` without pause from some clients; yield whether the answers are as expected.

    At the end of the block the clients end their requests; an error of one is raised.
    """
    results: list[bool] = []
    stopped = False

    def client(number: int) -> None:
        turn = number
        while not stopped:
            at = turn % len(PROMPTS)
            results.append(cluster.text(PROMPTS[at], 16) == expected[at])
            turn += clients

    with ThreadPoolExecutor(clients) as pool:
        futures: list[Future[None]] = [pool.submit(client, number) for number in range(clients)]
        try:
            yield results
        finally:
            stopped = True
        for future in futures:
            future.result(BOUND_S)


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
    texts: list[str] = []
    assert read_stream(pair, PROMPTS[5], 16, texts) is None
    assert "".join(texts) == expected[16][5]
    assert len(texts) > 1, "the tokens came together"
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
    texts: list[list[str]] = [[] for _ in STREAMED]
    with ThreadPoolExecutor(16) as pool:
        reading = []
        for prompt, own in zip(STREAMED, texts, strict=True):  # one by one: two for each replica
            reading.append(pool.submit(read_stream, pair, prompt, LONG, own))
            wait_until(lambda own=own: bool(own))
        waiting = [pool.submit(pair.text, prompt, 16) for prompt in PROMPTS[4:16]]
        time.sleep(0.3)
        victim = min(replica_pids())
        os.kill(victim, signal.SIGKILL)
        assert [answer.result() for answer in waiting] == expected[16][4:16]
        errors = [reader.result() for reader in reading]
    for own, error, whole in zip(texts, errors, expected[LONG], strict=True):
        text = "".join(own)
        assert text == whole if error is None else whole.startswith(text)
        assert error is None or "replica" in error
    assert sum(error is not None for error in errors) == 2
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

    with load(pair, expected[16], clients=3) as results:
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
    with load(cluster, expected[16], clients=4) as results:
        wait_until(lambda: num_running() == 2)
    with load(cluster, expected[16], clients=1) as more:
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
