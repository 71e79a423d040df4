"""The path of a token from the engine to a client's socket, on one core, with a model that computes
nothing; and what idle connections add to it.

The server is `stepgraph serve` (see `load.idle_server`), the client this process on the other
cores: it only counts what it receives.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....profiling.stats import Summary
from ...config import EngineConfig
from ...errors import StepgraphError
from ...loading.loader import resolve_source
from ..load.servers import Server, engine_command
from ..runtimes.peers import environment_of

__all__ = ["measure_sse"]

SERVER = "stepgraph.runtime.bench.load.idle_server"
PROMPT = "def main("
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/completions": {"prompt": PROMPT},
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The demo checkpoint has no chat template."""
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
"""The end of a stream, with that of its chunked body."""
TIMEOUT_SECONDS = 60
SETTLING_SECONDS = 0.3
"""Pause after connections were opened or closed."""
IDLE_SECONDS = 1.0
"""For the CPU time of a server without requests, in each round."""


@dataclass(slots=True)
class _Samples:
    """What the rounds of a point observed."""

    tokens_per_second: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of the server."""
    events: int = 0
    itl_ms: list[float] = field(default_factory=list)


def measure_sse(
    streams: Sequence[int],
    idle_connections: Sequence[int],
    *,
    num_tokens: int,
    num_iters: int,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yield an entry of `serve` for each endpoint, number of streams and of idle connections.

    Args:
        streams: numbers of requests that decode together.
        idle_connections: numbers of connections that are kept open without a request.
        num_tokens: of a request.
        num_iters: rounds; each reverses the order of the last.
        say: shows progress.

    Raises:
        StepgraphError: the server does not start, a stream does not end as it should, or all
            streams of a point arrived in one piece, which shows no time between tokens.
    """
    points = list(product(BODIES, streams, idle_connections))
    samples = {point: _Samples() for point in points}
    idle_seconds = dict.fromkeys(idle_connections, 0.0)
    say("token path of stepgraph serve, on one core with a model that computes nothing")
    with ExitStack() as stack:
        stack.enter_context(_many_files())
        server = stack.enter_context(closing(_start_server(max(streams))))
        stack.enter_context(_other_cores())
        address = (server.host, server.port)
        for turn in range(num_iters + 1):  # the first one warms up
            if turn == 1:
                samples = {point: _Samples() for point in points}
                idle_seconds = dict.fromkeys(idle_connections, 0.0)
            for number in idle_connections[:: 1 if turn % 2 else -1]:
                with _idle_connections(address, number):
                    time.sleep(SETTLING_SECONDS)
                    began = server.cpu_seconds()
                    time.sleep(IDLE_SECONDS)
                    idle_seconds[number] += server.cpu_seconds() - began
                    for point in points:
                        if point[2] == number:
                            _run_streams(server, point[0], point[1], num_tokens, samples[point])
    for path, rows, number in points:
        found = samples[path, rows, number]
        tokens = num_iters * rows * num_tokens
        if not found.itl_ms:
            raise StepgraphError(
                f"{path}: each stream of {num_tokens} tokens arrived in one piece: "
                "stop other processes, or measure more tokens"
            )
        yield {
            "endpoint": path,
            "sse_streams": rows,
            "idle_connections": number,
            "idle_cpu": idle_seconds[number] / (num_iters * IDLE_SECONDS),
            "tokens_per_second": Summary.of(found.tokens_per_second).to_json(),
            "cpu_us_per_token": 1e6 * found.cpu_seconds / tokens,
            "events_per_token": found.events / tokens,
            "itl_ms": Summary.of(found.itl_ms).to_json(),
        }


def _run_streams(server: Server, path: str, rows: int, num_tokens: int, found: _Samples) -> None:
    """Send requests at once, and receive their streams to the end."""
    body = {**BODIES[path], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    request = _post(path, body | {"temperature": 0.0})
    received: dict[int, bytearray] = {}
    times: dict[int, list[int]] = {}
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for number in range(rows):
            client = stack.enter_context(socket.create_connection((server.host, server.port)))
            selector.register(client, selectors.EVENT_READ, number)
            received[number], times[number] = bytearray(), []
        began, cpu_began = time.perf_counter(), server.cpu_seconds()
        for key in tuple(selector.get_map().values()):
            key.fileobj.sendall(request)  # type: ignore[union-attr]
        while selector.get_map():
            ready = selector.select(TIMEOUT_SECONDS)
            for key, _ in ready:
                data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
                received[key.data] += data
                times[key.data].append(time.perf_counter_ns())
                if not data or received[key.data].endswith(END):
                    selector.unregister(key.fileobj)
            if not ready:
                raise StepgraphError(f"{path}: no token for {TIMEOUT_SECONDS} s")
        found.tokens_per_second.append(rows * num_tokens / (time.perf_counter() - began))
        found.cpu_seconds += server.cpu_seconds() - cpu_began
    for number, text in received.items():
        if not text.endswith(END) or b'"finish_reason":"length"' not in text:
            raise StepgraphError(f"{path}: a stream ended with {bytes(text[-300:])!r}")
        found.events += text.count(b"data: {")
        found.itl_ms += [(b - a) / 1e6 for a, b in pairwise(times[number])]


def _post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _start_server(rows: int) -> Server:
    """Start a server of the demo model, with a chat template."""
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=rows, prefix_cache=False)
    directory = resolve_source("demo").directory
    assert directory is not None
    with TemporaryDirectory(prefix="stepgraph-checkpoint-") as scratch:
        for path in (*directory.glob("*.json"), *directory.glob("*.safetensors")):
            shutil.copy(path, scratch)
        Path(scratch, "chat_template.jinja").write_text(TEMPLATE)
        command = partial(engine_command, scratch, config, program=(SERVER,))
        return Server("stepgraph", command, environment_of())


@contextmanager
def _idle_connections(address: tuple[str, int], number: int) -> Iterator[None]:
    """Keep connections open that have had a response."""
    with ExitStack() as stack:
        for _ in range(number):
            client = stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if not client.recv(1 << 12).startswith(b"HTTP/1.1 200"):
                raise StepgraphError("/health: the server is not healthy")
        yield


@contextmanager
def _other_cores() -> Iterator[None]:
    """Leave the first core, which the server runs on, to it."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {min(cores)} or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _many_files() -> Iterator[None]:
    """Allow this process, and servers that it starts, as many open files as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
