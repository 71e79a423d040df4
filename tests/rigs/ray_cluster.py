"""A local Ray with Serve, and a client of what runs on it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.serve.config import HTTPOptions

ENGINE = {"mode": "eager", "threads": 1, "dtype": "float32", "max_num_seqs": 2, "num_blocks": 512}
GREEDY = {"temperature": 0, "ignore_eos": True}
BOUND_S = 180.0
"""Time for a deployment to change on a busy machine of two cores."""


@dataclass(frozen=True)
class Cluster:
    """The port of the proxy of a local Ray."""

    http_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def complete(self, prompt: list[int] | str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """Return the response to one request; raise for another status than 200."""
        body = {"prompt": prompt, "max_tokens": max_tokens, **GREEDY, **fields}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=BOUND_S)
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, prompt: list[int] | str, max_tokens: int) -> str:
        return str(self.complete(prompt, max_tokens)["choices"][0]["text"])


@contextmanager
def local_cluster() -> Iterator[Cluster]:
    """Run Ray with two CPUs in processes of its own, and end all of them."""
    cluster = Cluster(free_port())
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        logging_level="error",
        log_to_driver=False,
    )
    try:
        serve.start(http_options=HTTPOptions(port=cluster.http_port))
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()


def free_port() -> int:
    """Return a TCP port that nothing uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def num_running(deployment: str = "EngineReplica") -> int:
    """Return the running replicas of a deployment."""
    application = serve.status().applications.get("llm")
    if application is None or deployment not in application.deployments:
        return 0
    return int(application.deployments[deployment].replica_states.get("RUNNING", 0))


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


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float = BOUND_S) -> float:
    """Wait for a condition and return the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds:g} s"
        time.sleep(0.2)
    return time.monotonic() - began


@dataclass
class Stream:
    """A streamed completion, read in a thread of its own."""

    cluster: Cluster
    prompt: list[int]
    max_tokens: int
    texts: list[str] = field(default_factory=list)
    error: Mapping[str, Any] | None = None
    """The `error` of an error event."""
    done: bool = False
    """Whether it ended with `[DONE]`."""
    broken: bool = False
    """Whether the connection ended before the response did."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def read(self) -> None:
        body = {"prompt": self.prompt, "max_tokens": self.max_tokens, **GREEDY}
        url = f"{self.cluster.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json={**body, "stream": True}, timeout=BOUND_S) as lines:
                assert lines.status_code == 200, lines.read()
                for line in lines.iter_lines():
                    self._take(line.removeprefix("data: "))
        except httpx.RemoteProtocolError:
            self.broken = True

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                self.error = event["error"]
            else:
                self.texts.append(event["choices"][0]["text"])


@contextmanager
def load(cluster: Cluster, request: Callable[[int], Any], clients: int) -> Iterator[list[Any]]:
    """Send requests without pause from some clients; yield the list of their results.

    At the end of the block the clients end their requests; an error of one is raised.
    """
    results: list[Any] = []
    stopped = False

    def client(number: int) -> None:
        turn = number
        while not stopped:
            results.append(request(turn))
            turn += clients

    with ThreadPoolExecutor(clients) as pool:
        futures: list[Future[None]] = [pool.submit(client, number) for number in range(clients)]
        try:
            yield results
        finally:
            stopped = True
        for future in futures:
            future.result(BOUND_S)
