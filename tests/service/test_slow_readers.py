"""Streams whose consumers read too little: their rows, their end, and what the others notice."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest
from stepgraph.runtime import SendTimeoutError, ServiceConfig

from ..rigs.fake_engine import params
from ..rigs.service_rig import PROMPT, SECONDS, Rig, config, do, joined, rig, wait_until

LONG_OUTPUT = params(1, max_tokens=40)
SHORT = params(2, max_tokens=4)


def paced(**options: Any) -> ServiceConfig:
    return config(max_unread_tokens=4, **options)


def is_paused(r: Rig) -> bool:
    return bool(r.on_thread(lambda: r.requests.handles and not r.requests.has_work))


def test_a_stream_that_is_not_read_gives_its_row_to_others() -> None:
    with rig(paced(), max_num_seqs=1) as r:

        async def main() -> None:
            async with r.engine.stream(PROMPT, LONG_OUTPUT) as stream:
                await asyncio.to_thread(wait_until, lambda: is_paused(r))
                stats = r.made[-1].stats()
                assert (stats["running"], stats["blocks"]["free"]) == (0, stats["blocks"]["usable"])
                steps = r.num_steps
                assert r.engine.health().step_age is None, "nothing is due"
                other = await r.engine.generate([7], SHORT)
                assert other.token_ids == r.expected([7], SHORT)
                assert r.num_steps < steps + 10
                (tokens, reason) = (await joined(stream))[0]
                assert (tokens, reason) == (r.expected(PROMPT, LONG_OUTPUT), "length")

        do(main())
        r.check_serves()


@pytest.mark.parametrize("holds", ["paused", "decoding slowly"])
def test_a_stream_that_is_not_read_ends_after_its_time(holds: str) -> None:
    records: list[Any] = []
    service = paced(send_timeout=0.2) if holds == "paused" else config(send_timeout=0.2)
    with rig(service) as r:
        r.engine.add_listener(records.append)
        r.on_step = lambda: time.sleep(0.02 if holds != "paused" else 0.0)

        async def main() -> None:
            stream = r.engine.stream(PROMPT, LONG_OUTPUT)
            await asyncio.to_thread(wait_until, lambda: records)
            tokens = [*(await anext(stream)).token_ids]
            with pytest.raises(SendTimeoutError) as caught:
                await anext(stream)
            assert caught.value.field == "send_timeout"
            assert 0 < len(tokens) < 40
            assert tokens == r.expected(PROMPT, LONG_OUTPUT)[: len(tokens)]

        do(main())
        assert [record.outcome for record in records] == ["send_timeout"]
        r.on_step = lambda: None
        r.check_serves()


def test_a_dropped_stream_ends_after_its_time() -> None:
    records: list[Any] = []
    with rig(paced(send_timeout=0.2)) as r:
        r.engine.add_listener(records.append)

        async def main() -> None:
            async for _ in r.engine.stream(PROMPT, LONG_OUTPUT):
                break
            gc.collect()
            await asyncio.to_thread(wait_until, lambda: records)

        do(main())
        assert records[0].outcome == "send_timeout"
        assert records[0].num_output_tokens < 40
        r.check_serves()


def test_what_does_not_read_deltas_is_not_limited() -> None:
    with rig(paced(send_timeout=0.01)) as r:
        wanted = r.expected(PROMPT, LONG_OUTPUT)

        async def main() -> None:
            assert (await r.engine.generate(PROMPT, LONG_OUTPUT)).token_ids == wanted
            r.steps.close()
            stream = r.engine.stream(PROMPT, LONG_OUTPUT)
            last = asyncio.ensure_future(stream.finish())
            await asyncio.sleep(0)
            r.steps.open()
            assert (await last).token_ids == wanted

        do(main())
        calls: list[Any] = []
        future = r.engine.submit(PROMPT, LONG_OUTPUT, callback=calls.append)
        assert future.result(SECONDS).token_ids == wanted


@pytest.mark.parametrize("how", ["abort", "close", "deadline", "drain"])
def test_a_paused_request_can_end(how: str) -> None:
    with rig(paced()) as r:

        async def main() -> None:
            options: Any = {"deadline": 0.5} if how == "deadline" else {}
            stream = r.engine.stream(PROMPT, LONG_OUTPUT, request_id="mine", **options)
            await asyncio.to_thread(wait_until, lambda: is_paused(r))
            if how == "abort":
                assert r.engine.abort("mine")
            elif how == "close":
                await stream.aclose()
            elif how == "drain":
                assert not await r.engine.drain(0.0)
                await r.engine.wake()
            await asyncio.to_thread(wait_until, lambda: stream._handle.ended)
            assert stream.output is not None
            assert stream.output.finish_reason == ("deadline" if how == "deadline" else "abort")

        do(main())
        r.check_serves()
