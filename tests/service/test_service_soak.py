"""A soak: many requests with random cancels, deadlines and disconnects; nothing is left.

The long one: `pytest -m slow tests/service/test_service_soak.py`, 10^5 requests and 10^6 steps.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stepgraph.runtime.errors import OverloadedError

from ..rigs.fake_device import VOCAB, oracle
from ..rigs.fake_engine import completions_of, params, runner_of
from ..rigs.service_rig import SECONDS, Rig, config, resident_bytes

pytestmark = pytest.mark.usefixtures("no_tracebacks")
MEBIBYTE = 1 << 20


class Client:
    """Makes requests of every kind, and counts how they were answered."""

    def __init__(self, r: Rig, seed: int) -> None:
        self.r = r
        self.engine = r.engine
        self.random = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.requests = 0

    async def request(self) -> None:
        rng = self.random
        self.requests += 1
        own = params(self.requests, max_tokens=rng.randint(1, 40), n=rng.choice([1, 1, 1, 2]))
        prompt: Any = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 7))]
        if rng.random() < 0.2:
            prompt = tuple(prompt)  # prepared in a thread
        options: Any = {"tenant": rng.choice("abc"), "priority": rng.choice([0, 0, 1])}
        if rng.random() < 0.2:
            options["deadline"] = rng.choice([0.0005, 0.005, 60.0])
        if rng.random() < 0.1:
            options["first_token_deadline"] = rng.choice([0.0005, 60.0])
        kind = rng.choice(["generate", "stream", "stream", "cancel", "abort", "future", "future"])
        try:
            self.answers[await getattr(self, f"_{kind}")(prompt, own, options)] += 1
        except OverloadedError:
            self.answers["shed"] += 1
            await asyncio.sleep(0.001)

    def _check(self, prompt: Any, own: Any, tokens: list[list[int]]) -> None:
        alone = completions_of(self.r.made[-1], list(prompt), own)
        for request, found in zip(alone, tokens, strict=True):
            assert found == oracle(request)[0][: len(found)]

    async def _generate(self, prompt: Any, own: Any, options: Any) -> str:
        output = await self.engine.generate(prompt, own, **options)
        self._check(prompt, own, [completion.token_ids for completion in output.completions])
        return str(output.finish_reason)

    async def _stream(self, prompt: Any, own: Any, options: Any) -> str:
        found: dict[int, list[int]] = {index: [] for index in range(own.n)}
        leaves = self.random.random() < 0.5
        async with self.engine.stream(prompt, own, **options) as stream:
            async for delta in stream:
                found[delta.index] += delta.token_ids
                if leaves and self.random.random() < 0.3:
                    return "left"
                if self.random.random() < 0.05:
                    await asyncio.sleep(0.002)
        self._check(prompt, own, [*found.values()])
        return "streamed"

    async def _cancel(self, prompt: Any, own: Any, options: Any) -> str:
        task = asyncio.ensure_future(self._generate(prompt, own, options))
        await asyncio.sleep(self.random.choice([0, 0.001, 0.003]))
        task.cancel()
        await asyncio.wait([task])
        return "cancelled" if task.cancelled() else task.result()

    async def _abort(self, prompt: Any, own: Any, options: Any) -> str:
        name = f"{id(self)} {self.requests}"
        task = asyncio.ensure_future(self._generate(prompt, own, {**options, "request_id": name}))
        await asyncio.sleep(self.random.choice([0, 0.001]))
        self.engine.abort(name)
        return await task

    async def _future(self, prompt: Any, own: Any, options: Any) -> str:
        def take(delta: Any) -> None:
            if self.random.random() < 0.02:
                raise ZeroDivisionError("injected")

        callback = self.random.choice([None, take])
        future = self.engine.submit(prompt, own, callback=callback, **options)
        if callback is None and self.random.random() < 0.3:
            future.cancel()
        try:
            return str((await asyncio.wrap_future(future)).finish_reason)
        except (asyncio.CancelledError, ZeroDivisionError):
            assert future.cancelled() == (callback is None)
            return "cancelled"


def resources() -> tuple[list[str], list[str], int]:
    """Threads, open files and resident bytes of this process."""
    resident = resident_bytes()
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    files = [os.readlink(name) for name in names if os.path.exists(name)]
    threads = [thread.name for thread in threading.enumerate()]
    return sorted(threads), sorted(files), resident


@pytest.mark.parametrize(
    ("num_requests", "num_steps"),
    [(700, 500), pytest.param(100_000, 1_000_000, marks=pytest.mark.slow)],
)
def test_a_soak_leaves_nothing(num_requests: int, num_steps: int) -> None:
    before, loops, workers = resources(), 2, 8
    r = Rig(config(max_queued_requests=12), max_num_seqs=2, num_blocks=30)
    r.on_step = lambda: runner_of(r.made[-1]).plans.clear()  # it keeps them for other tests
    clients: list[Client] = []

    async def worker(client: Client, share: int, until: int) -> None:
        while client.requests < share or r.num_steps < until:
            await asyncio.wait_for(client.request(), SECONDS)

    async def work(number: int, share: int, until: int) -> None:
        own = [Client(r, 1000 * number + i) for i in range(workers)]
        clients.extend(own)
        await asyncio.gather(*[worker(client, share, until) for client in own])
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"

    def run(share: int, until: int) -> tuple[list[str], list[str], int]:
        with ThreadPoolExecutor(loops) as pool:
            list(pool.map(lambda number: asyncio.run(work(number, share, until)), range(loops)))
        asyncio.run(asyncio.wait_for(r.engine.drain(SECONDS), 2 * SECONDS))
        asyncio.run(r.engine.wake())
        r.check_idle()
        return resources()

    with r.engine:
        share = num_requests // (loops * workers) + 1
        warm = run(share // 10 + 1, num_steps // 10)
        clients.clear()
        after = run(share, num_steps)
        assert after[:2] == warm[:2], "a thread or a file is left"
        assert after[2] - warm[2] < 16 * MEBIBYTE, "memory grows"
        answers: Counter[str] = sum((client.answers for client in clients), Counter())
        assert answers.total() == sum(client.requests for client in clients) >= num_requests
        assert r.num_steps >= num_steps
    assert resources()[:2] == before[:2]
    for kind in ("length", "streamed", "left", "cancelled", "abort", "deadline", "shed"):
        assert answers[kind], kind
