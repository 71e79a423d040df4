"""Requests of an `AsyncEngine`: tokens, event loops, limits."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop
from stepgraph.runtime import ServiceConfig
from stepgraph.runtime.errors import EngineBusyError, OverloadedError, RequestError

from ..rigs.fake_engine import params
from ..rigs.service_rig import LONG, PROMPT, SECONDS, do, in_event_loop, joined, rig

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 9, 9], [8]]


def test_several_loops_of_several_threads_share_the_engine() -> None:
    with rig() as r:
        loops: list[Any] = [asyncio.new_event_loop, uvloop.new_event_loop]

        def serve(number: int) -> None:
            async def main() -> None:
                for turn in range(5):
                    own = params(100 * number + turn)
                    outputs = await asyncio.gather(
                        *[r.engine.generate(prompt, own) for prompt in PROMPTS],
                        joined(r.engine.stream(PROMPT, own)),
                    )
                    wanted = [r.expected(prompt, own) for prompt in PROMPTS]
                    assert [output.token_ids for output in outputs[:-1]] == wanted
                    assert outputs[-1][0][0] == r.expected(PROMPT, own)

            do(main(), loops[number % len(loops)])

        with ThreadPoolExecutor(4) as pool:
            assert len([*pool.map(serve, range(4), timeout=SECONDS)]) == 4


@in_event_loop
async def test_a_second_task_in_a_stream_is_refused_and_the_first_gets_the_tokens() -> None:
    with rig() as r:
        r.steps.close()
        own = params(1)
        stream = r.engine.stream(PROMPT, own)
        first = asyncio.ensure_future(stream.finish())
        await asyncio.sleep(0)
        for second in (anext(stream), stream.finish()):
            with pytest.raises(EngineBusyError):
                await second
        r.steps.open()
        assert (await first).token_ids == r.expected(PROMPT, own)


@pytest.mark.parametrize("prompt", [[], [99], "text", (1, 99), None, [1] * 60])
@in_event_loop
async def test_an_invalid_prompt_ends_its_request_alone(prompt: Any) -> None:
    with rig() as r:
        future = r.engine.submit(prompt, params(1))
        with pytest.raises(RequestError):
            future.result(SECONDS)
        stream = r.engine.stream(prompt, params(1))
        with pytest.raises(RequestError):
            await stream.accepted()
        with pytest.raises(RequestError):
            await anext(stream)


def test_requests_and_tokens_that_wait_are_bounded() -> None:
    limits = ServiceConfig(max_queued_requests=3, max_queued_tokens=12)
    with rig(limits, max_num_seqs=1) as r:
        running = r.hold(PROMPT, params(1))
        queued = [r.engine.submit(PROMPT, params(i)) for i in range(2)]
        too_long = r.engine.submit(PROMPT, params(4))  # of 12 tokens 10 wait
        r.steps.permit()
        with pytest.raises(OverloadedError) as error:
            too_long.result(SECONDS)
        assert error.value.retry_after > 0
        queued.append(r.engine.submit([1], params(5)))
        with pytest.raises(OverloadedError) as error:
            r.engine.submit([1], params(6))
        assert error.value.retry_after > 0
        r.steps.open()
        assert all(f.result(SECONDS).finish_reason == "length" for f in (running, *queued))
        assert r.engine.submit(LONG, params(1)).result(SECONDS)  # more than the limit, alone


def test_tenants_share_the_engine_by_weight() -> None:
    weights = ServiceConfig(tenant_weights={"heavy": 3.0})
    with rig(weights, max_num_seqs=1) as r:
        r.hold(PROMPT, params(0))
        futures = [
            (name, r.engine.submit(PROMPT, params(seed), tenant=name))
            for name in ("light", "heavy")
            for seed in range(24)
        ]
        r.steps.open()
        served = [(future.result(SECONDS).timing.token_ns[0], name) for name, future in futures]
        order = [name for _, name in sorted(served)]
        # While both wait, three of four requests are of the tenant of weight 3.
        assert abs(order[:24].count("heavy") - 18) <= 1


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts wake-ups by other threads."""

    wakes = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
        self.wakes += 1
        return super().call_soon_threadsafe(*args, **options)


def test_a_loop_is_woken_at_most_once_a_step() -> None:
    with rig(max_num_seqs=16, num_blocks=200) as r:

        async def main() -> None:
            loop: Any = asyncio.get_running_loop()
            own = params(1, max_tokens=30)
            streams = [r.engine.stream([1, i % 10], own) for i in range(40)]
            found = await asyncio.gather(*[joined(stream) for stream in streams])
            assert all(len(tokens) == 30 for result in found for tokens, _ in result.values())
            assert loop.wakes <= r.num_steps + 40  # a request that is admitted to an idle engine

        do(main(), CountingLoop)


def test_an_idle_engine_uses_no_cpu() -> None:
    """Its own threads: what earlier tests left may be at work."""
    others = {*threading.enumerate()}
    with rig() as r:
        r.check_serves()
        started = {*threading.enumerate()} - others
        clocks = [time.pthread_getcpuclockid(t.ident) for t in started if t.ident is not None]
        assert clocks
        before = sum(map(time.clock_gettime, clocks))
        time.sleep(0.5)
        assert sum(map(time.clock_gettime, clocks)) - before < 0.01
