"""What an `AsyncEngine` costs: steps of the bare engine loop against its own, and delivery.

Both run one engine, in turns. A step is the gap between two tokens of a row, as the engine notes
them, while all rows decode. Delivery is the time from there until a consumer reads the token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ....profiling.stats import RequestTiming, Summary
from ...engine.engine import Engine
from ...service.async_engine import AsyncEngine
from ..workload import greedy, interleave

__all__ = ["gaps_of_all", "measure_async_cost"]

RequestTimes = Sequence[int]
"""When the engine had each token of a request."""


def gaps_of_all(times: Sequence[RequestTimes]) -> tuple[int, int, list[float]]:
    """Return when all requests decode, from and to, and the gaps in ms of the first one therein."""
    first, last = max(t[0] for t in times), min(t[-1] for t in times)
    inside = [at for at in times[0] if first <= at <= last]
    return first, last, [(b - a) / 1e6 for a, b in pairwise(inside)]


def _bare(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> list[RequestTimes]:
    """Decode the prompts in the loop of an embedder, which reads every output."""
    ids = [engine.add_request(prompt, greedy(num_tokens)) for prompt in prompts]
    timings: dict[str, RequestTiming] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished and output.timing is not None:
                timings[output.request_id] = output.timing
    return [timings[request_id].token_ns for request_id in ids]


async def _streamed(
    engine: AsyncEngine, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[RequestTimes], list[tuple[int, int]]]:
    """Decode the prompts as streams; also return when each token was ready and when it was read."""
    read: list[tuple[int, int]] = []

    async def consume(prompt: list[int]) -> RequestTimes:
        times: list[int] = []
        async for delta in engine.stream(prompt, greedy(num_tokens)):
            now = time.perf_counter_ns()
            read.extend([(at, now) for at in delta.token_ns])
            times += delta.token_ns
        return times

    return await asyncio.gather(*map(consume, prompts)), read


def measure_async_cost(
    runner: asyncio.Runner,
    engine: AsyncEngine,
    bare: Engine,
    prompts: Sequence[list[int]],
    *,
    num_steps: int,
    num_iters: int,
) -> dict[str, Any]:
    """Return the fields of an entry of `serve` in the JSON.

    Args:
        runner: runs the event loop of the consumers.
        engine: idle.
        bare: the engine that it runs, stepped by this thread in its turns.
        prompts: token ids, one prompt a stream.
        num_steps: tokens of a request, in each round.
        num_iters: rounds; each reverses the order of the last.
    """
    bare_ms: list[float] = []
    async_ms: list[float] = []
    delivery_ms: list[float] = []

    def step_bare() -> None:
        bare_ms.extend(gaps_of_all(_bare(bare, prompts, num_steps))[2])

    def step_async() -> None:
        times, read = runner.run(_streamed(engine, prompts, num_steps))
        first, last, gaps = gaps_of_all(times)
        async_ms.extend(gaps)
        delivery_ms.extend((now - at) / 1e6 for at, now in read if first <= at <= last)

    interleave((step_bare, step_async), 1)  # warms up
    for samples in (bare_ms, async_ms, delivery_ms):
        samples.clear()
    interleave((step_bare, step_async), num_iters)
    plain, wrapped = Summary.of(bare_ms), Summary.of(async_ms)
    return {
        "streams": len(prompts),
        "bare_step_ms": plain.to_json(),
        "async_step_ms": wrapped.to_json(),
        "ratio_p50": wrapped.p50 / plain.p50,
        "ratio_p99": wrapped.p99 / plain.p99 if wrapped.p99 and plain.p99 else None,
        "delivery_ms": Summary.of(delivery_ms).to_json(),
    }
