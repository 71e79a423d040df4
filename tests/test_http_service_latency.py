"""What the HTTP service costs a step: the same traffic from 20 clients and from one loop."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from stepgraph.runtime import Engine, EngineConfig, SamplingParams

CLIENTS, ROUNDS, SECONDS = 20, 3, 8.0
BODY = {"prompt": "def main(", "max_tokens": 64, "temperature": 0.0, "ignore_eos": True}


def step_ms(engine: Engine, traffic: Callable[[], None]) -> list[float]:
    """Milliseconds of each step of a traffic, host and device."""
    engine.timeline().clear()
    traffic()
    records = engine.timeline().records()
    return [(r.ended_ns - r.started_ns) / 1e6 for r in records]


def offline(engine: Engine) -> None:
    """Keep 20 requests under way, in one thread."""
    prompt = BODY["prompt"]
    params = SamplingParams(**{k: v for k, v in BODY.items() if k != "prompt"})  # type: ignore[arg-type]
    ends = time.monotonic() + SECONDS
    for _ in range(CLIENTS):
        engine.add_request(prompt, params)  # type: ignore[arg-type]
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished and time.monotonic() < ends:
                engine.add_request(prompt, params)  # type: ignore[arg-type]


async def client(port: int, ends: float) -> None:
    data = json.dumps(BODY | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(data)
    while time.monotonic() < ends:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + data)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        writer.close()


async def clients(port: int) -> None:
    ends = time.monotonic() + SECONDS
    await asyncio.gather(*[client(port, ends) for _ in range(CLIENTS)])


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="the clients need a core of their own")
def test_steps_beside_the_service_are_as_steps_alone() -> None:
    """p99 of a step within 1.5 times, in the best of three rounds."""
    if os.getloadavg()[0] > (os.cpu_count() or 1) - 1:
        pytest.skip("other processes take the core that the clients need")
    from .test_http_service import Running  # not in the process of the clients

    config = EngineConfig(device="cpu", max_num_seqs=32, threads=-1)
    ratios = []
    with Engine.from_pretrained("demo", config) as engine:
        service = Running(engine)
        for _ in range(ROUNDS):
            alone = step_ms(engine, lambda: offline(engine))
            command = [sys.executable, __file__, str(service.port)]
            served = step_ms(engine, lambda c=command: subprocess.run(c, check=True))  # type: ignore[misc]
            p99 = [statistics.quantiles(times, n=100)[98] for times in (alone, served)]
            ratios.append(p99[1] / p99[0])
            print(
                f"p99 alone {p99[0]:.2f} ms (n={len(alone)}, p50 {statistics.median(alone):.2f}),"
                f" served {p99[1]:.2f} ms (n={len(served)}, p50 {statistics.median(served):.2f}),"
                f" ratio {ratios[-1]:.2f}"
            )
        service.stop()
    assert min(ratios) <= 1.5


if __name__ == "__main__":
    asyncio.run(clients(int(sys.argv[1])))
