"""A soak: many requests with random cancels, deadlines and disconnects; nothing is left.

The long one: `pytest -m slow tests/service/test_service_soak.py`, 10^5 requests and 10^6 steps.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import threading
import time
from collections import Counter
from typing import Any

import psutil
import pytest
from stepgraph.runtime import AsyncEngine, Engine
from stepgraph.runtime.errors import OverloadedError

from ..rigs.fake_device import VOCAB, FakeLaunchedStep
from ..rigs.fake_engine import EngineRunner, fake_engine, params
from ..rigs.service_rig import SECONDS, check_idle, config

MEBIBYTE = 1 << 20


class LightRunner(EngineRunner):
    """Computes nothing: output token `i` of a request is the seed of its parameters plus `i`."""

    steps = itertools.count()

    def swap_out(self, plan: Any) -> None:
        self._fresh.clear()

    def copy_in(self, plan: Any) -> None:
        """There are no contents."""

    def launch(self, number: int, plan: Any) -> FakeLaunchedStep:
        next(self.steps)
        requests = [*plan.decode, *[chunk.request for chunk in plan.prefill if chunk.samples]]
        sampled: list[Any] = [
            (request, (request.params.seed + request.num_output) % VOCAB, None)
            for request in requests
        ]
        now = time.perf_counter_ns()
        launch = FakeLaunchedStep(number, plan, len(plan.decode), now, None, 0, sampled, None)
        self.unread.append(launch)
        return launch


def check_tokens(seed: int, tokens: list[int]) -> None:
    assert tokens == [(seed + i) % VOCAB for i in range(len(tokens))]


class Client:
    """Makes requests of every kind, and counts how they were answered."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.requests = 0

    async def request(self) -> None:
        rng = self.random
        seed = self.requests = self.requests + 1
        own = params(seed, max_tokens=rng.randint(1, 40), n=rng.choice([1, 1, 1, 2]))
        prompt: Any = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 7))]
        if rng.random() < 0.2:
            prompt = tuple(prompt)  # prepared in a thread
        options: Any = {"tenant": rng.choice("abc"), "priority": rng.choice([0, 0, 1])}
        if rng.random() < 0.2:
            options["deadline"] = rng.choice([0.0005, 0.005, 60.0])
        if rng.random() < 0.1:
            options["first_token_deadline"] = rng.choice([0.0005, 60.0])
        kind = rng.choice(["generate", "stream", "break", "cancel", "abort", "future", "callback"])
        try:
            self.answers[await getattr(self, f"_{kind}")(prompt, own, options)] += 1
        except OverloadedError:
            self.answers["shed"] += 1
            await asyncio.sleep(0.001)

    async def _generate(self, prompt: Any, own: Any, options: Any) -> str:
        output = await self.engine.generate(prompt, own, **options)
        for completion in output.completions:
            check_tokens(own.seed, completion.token_ids)
        return str(output.finish_reason)

    async def _stream(self, prompt: Any, own: Any, options: Any) -> str:
        tokens: list[list[int]] = [[] for _ in range(own.n)]
        ends: list[int] = []
        async for delta in self.engine.stream(prompt, own, **options):
            tokens[delta.index] += delta.token_ids
            if delta.finish_reason is not None:
                ends.append(delta.index)
            if self.random.random() < 0.05:
                await asyncio.sleep(0.002)  # a slow consumer
        for some in tokens:
            check_tokens(own.seed, some)
        assert sorted(ends) == list(range(own.n)), "ended once each"
        return "streamed"

    async def _break(self, prompt: Any, own: Any, options: Any) -> str:
        async with self.engine.stream(prompt, own, **options) as stream:
            async for _ in stream:
                if self.random.random() < 0.3:
                    return "left"
        return "streamed"

    async def _cancel(self, prompt: Any, own: Any, options: Any) -> str:
        task = asyncio.ensure_future(self._generate(prompt, own, options))
        await asyncio.sleep(self.random.choice([0, 0.001, 0.003]))
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            return "cancelled"
        return task.result()

    async def _abort(self, prompt: Any, own: Any, options: Any) -> str:
        task = asyncio.ensure_future(
            self._generate(prompt, own, options | {"request_id": f"{id(self)} {self.requests}"})
        )
        name = f"{id(self)} {self.requests}"
        await asyncio.sleep(self.random.choice([0, 0.001]))
        self.engine.abort(name)
        return await task

    async def _future(self, prompt: Any, own: Any, options: Any) -> str:
        future = self.engine.submit(prompt, own, **options)
        if self.random.random() < 0.3:
            future.cancel()
        try:
            output = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            assert future.cancelled()
            return "cancelled"
        return str(output.finish_reason)

    async def _callback(self, prompt: Any, own: Any, options: Any) -> str:
        def take(delta: Any) -> None:
            if self.random.random() < 0.02:
                raise ZeroDivisionError("injected")

        try:
            future = self.engine.submit(prompt, own, callback=take, **options)
            return str((await asyncio.wrap_future(future)).finish_reason)
        except ZeroDivisionError:
            return "callback"


def resources() -> tuple[list[str], list[str], int]:
    """Threads, open files and resident bytes of this process."""
    gc.collect()
    files = [os.readlink(f"/proc/self/fd/{name}") for name in open_files()]
    threads = sorted(thread.name for thread in threading.enumerate())
    return threads, sorted(files), psutil.Process().memory_info().rss


def open_files() -> list[str]:
    names = os.listdir("/proc/self/fd")
    return [name for name in names if os.path.exists(f"/proc/self/fd/{name}")]


def soak(num_requests: int, num_steps: int, *, loops: int = 2, workers: int = 8) -> Counter[str]:
    """Serve so many requests and steps, and check what is left; return the answers."""
    logging.getLogger("stepgraph.runtime").disabled = True
    LightRunner.steps = itertools.count()
    clients: list[Client] = []
    errors: list[BaseException] = []
    made: list[Engine] = []

    def make() -> Engine:
        made[:] = [fake_engine(max_num_seqs=2, num_blocks=30, make_runner=LightRunner)]
        return made[0]

    limits = config(max_queued_requests=12)
    before = resources()
    with AsyncEngine(make, limits) as engine:

        def steps() -> int:
            return int(repr(LightRunner.steps)[6:-1])

        async def worker(client: Client, share: int, until: int) -> None:
            while client.requests < share or steps() < until:
                await asyncio.wait_for(client.request(), SECONDS)

        async def work(number: int, share: int, until: int) -> None:
            own = [Client(engine, 1000 * number + i) for i in range(workers)]
            clients.extend(own)
            await asyncio.gather(*[worker(client, share, until) for client in own])
            assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"

        def serve(number: int, share: int, until: int) -> None:
            try:
                asyncio.run(work(number, share, until))
            except BaseException as error:
                errors.append(error)

        def run(share: int, until: int) -> tuple[list[str], list[str], int]:
            threads = [
                threading.Thread(target=serve, args=(number, share, until))
                for number in range(loops)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
            asyncio.run(asyncio.wait_for(engine.drain(SECONDS), 2 * SECONDS))
            asyncio.run(engine.wake())
            check_idle(engine._thread)
            return resources()

        share = num_requests // (loops * workers) + 1
        warm = run(share // 10 + 1, num_steps // 10)
        clients.clear()
        after = run(share, num_steps)
        assert after[:2] == warm[:2], "a thread or a file is left"
        assert after[2] - warm[2] < 16 * MEBIBYTE, "memory grows"
        answers: Counter[str] = sum((client.answers for client in clients), Counter())
        assert answers.total() == sum(client.requests for client in clients) >= num_requests
        assert steps() >= num_steps
    assert resources()[:2] == before[:2]
    logging.getLogger("stepgraph.runtime").disabled = False
    return answers


def test_a_short_soak_leaves_nothing() -> None:
    answers = soak(700, 500)
    for kind in ("length", "streamed", "left", "cancelled", "abort", "deadline", "shed"):
        assert answers[kind], kind


@pytest.mark.slow
def test_a_long_soak_leaves_nothing() -> None:
    soak(100_000, 1_000_000)
