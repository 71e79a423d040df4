"""A request that ends early frees its rows and blocks: it is left, too late or not read."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import wait
from typing import Any

import pytest
from stepgraph.runtime import SendTimeoutError, ServiceConfig
from stepgraph.runtime.errors import DeadlineUnreachableError, RequestError
from stepgraph.runtime.service import admission
from stepgraph.runtime.service.request_handle import HandleState

from ..rigs.fake_engine import params
from ..rigs.service_rig import (
    LONG,
    PROMPT,
    SECONDS,
    Rig,
    SkippingClock,
    config,
    in_event_loop,
    joined,
    listening,
    rig,
    wait_until,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SkippingClock:
    clock = SkippingClock()
    monkeypatch.setattr(time, "perf_counter_ns", clock.now_ns)
    return clock


def phase_of(r: Rig) -> str:
    """Return where the request `mine` is."""
    handle = r.requests.handles["mine"]
    requests = handle.group.requests if handle.group else []
    if handle.state is HandleState.QUEUED:
        return "queued"
    if any(request.num_preemptions and request.row is None for request in requests):
        return "preempted"
    if any(request.num_output > 1 for request in requests):
        return "decoding"
    return "prefilling" if any(0 < q.num_computed < len(LONG) for q in requests) else "new"


@pytest.mark.parametrize("phase", ["preparing", "queued", "prefilling", "decoding", "preempted"])
@pytest.mark.parametrize(
    ("streams", "how"),
    [
        *((True, how) for how in ("abort", "cancel", "close")),
        *((False, how) for how in ("abort", "cancel")),
    ],
)
@in_event_loop
async def test_rows_and_blocks_are_free_one_step_after_the_consumer_left(
    phase: str, how: str, streams: bool
) -> None:
    # A pool that two requests of 40 tokens do not fit into makes one of them wait.
    with rig(num_blocks=14 if phase == "preempted" else 60) as r:

        async def step() -> None:
            """Run a step; the next one is held back."""
            r.steps.permit()
            await asyncio.to_thread(r.steps.wait)

        r.steps.close()
        # Of one that decodes, prompts are prefilled in chunks.
        num_others = {"queued": 4, "prefilling": 1, "preempted": 1}.get(phase, 0)
        others = [r.engine.submit([9, i], params(90 + i, max_tokens=40)) for i in range(num_others)]
        if others:
            r.steps.wait()
        own = params(1, max_tokens=40, n=3 if phase == "decoding" else 1)
        prompt: Any = {"preparing": tuple(PROMPT), "prefilling": LONG}.get(phase, PROMPT)
        if phase == "preparing":
            r.preparations.close()
        make: Any = r.engine.stream if streams else r.engine.generate
        stream = make(prompt, own, request_id="mine", priority=1)
        task = asyncio.ensure_future(joined(stream) if streams else stream)
        await asyncio.sleep(0)
        if phase == "preparing":
            await asyncio.to_thread(r.preparations.wait)
        else:
            if not others:
                await asyncio.to_thread(r.steps.wait)
            while phase_of(r) != phase:
                await step()
        if how == "abort":
            assert r.engine.abort("mine")
        elif how == "cancel":
            task.cancel()
            await asyncio.wait([task])
        else:
            await stream.aclose()
        if phase == "preparing":
            await asyncio.wait([task])  # before the preparation ends
            r.preparations.open()
        else:
            await step()  # the one under way
            load, stats = r.made[-1].gauges(), r.made[-1].stats()
            assert load.running + load.waiting == len(others)
            if not others:
                assert stats["blocks"]["free"] == stats["blocks"]["usable"]
        r.steps.open()
        result: Any = (await asyncio.gather(task, return_exceptions=True))[0]
        if how == "abort" and streams:
            assert {reason for _, reason in result.values()} == {"abort"}
            assert len(result) == own.n
        elif how == "abort":
            assert {c.finish_reason for c in result.completions} == {"abort"}
        for future in others:
            future.cancel()


def test_an_id_may_be_reused_while_an_aborted_prompt_is_still_prepared() -> None:
    with rig() as r:
        records = listening(r.engine)
        r.preparations.close()
        first = r.engine.submit(tuple(PROMPT), params(1), request_id="mine")
        assert r.engine.abort("mine")
        assert first.result(SECONDS).finish_reason == "abort"
        own = params(2, max_tokens=40)
        r.steps.close()
        second = r.engine.submit((1, 2), own, request_id="mine")
        with pytest.raises(RequestError):
            r.engine.submit((1, 2), own, request_id="mine")
        r.preparations.open()
        r.steps.open()
        assert second.result(SECONDS).token_ids == r.expected([1, 2], own)
        third = r.engine.submit([1, 2], own, request_id="mine")
        assert third.result(SECONDS).token_ids == r.expected([1, 2], own)
        wait_until(lambda: len(records) == 3)  # none of the one that was refused
        assert [record.outcome for record in records] == ["abort", "length", "length"]


def test_a_cancelled_future_is_done_for_its_waiters() -> None:
    with rig() as r:
        r.steps.close()
        future = r.engine.submit(PROMPT, params(1, max_tokens=40))
        assert future.cancel()
        r.steps.open()
        assert wait([future], SECONDS).done == {future}


def test_a_deadline_that_passes_in_the_queue_ends_a_request_that_is_never_prefilled() -> None:
    with rig(max_num_seqs=1) as r:
        blocker = r.hold(PROMPT, params(0, max_tokens=30))
        late = [
            r.engine.submit([7, 7, 7], params(1), deadline=0.01),
            r.engine.submit([7, 7, 7], params(1), first_token_deadline=0.01),
        ]
        time.sleep(0.02)
        r.steps.permit()
        outputs = [future.result(SECONDS) for future in late]
        assert [o.finish_reason for o in outputs] == ["deadline"] * 2
        assert [o.token_ids for o in outputs] == [[], []]
        r.steps.open()
        blocker.result(SECONDS)
        assert r.made[-1].stats()["requests"] == 1


def test_a_deadline_that_passes_while_decoding_keeps_the_tokens(clock: SkippingClock) -> None:
    with rig() as r:
        own = params(1, max_tokens=40)
        r.on_step = lambda: clock.skip(50 if r.num_steps == 4 else 0)
        future = r.engine.submit(PROMPT, own, deadline=45)
        output = future.result(SECONDS)
        assert output.finish_reason == "deadline"
        assert 0 < len(output.token_ids) < 40
        assert output.token_ids == r.expected(PROMPT, own)[: len(output.token_ids)]


def test_a_first_token_deadline_ends_a_slow_prefill_and_no_decoding(clock: SkippingClock) -> None:
    with rig() as r:
        other = r.hold([1], params(1, max_tokens=40))
        decoding = r.engine.submit([1], params(1, max_tokens=40), first_token_deadline=50)
        slow = r.engine.submit(LONG, params(1), first_token_deadline=50)
        for _ in range(2):  # the other row; the short prompt and a chunk of the long one
            r.steps.permit()
            r.steps.wait()
        clock.skip(50)
        r.steps.open()
        assert slow.result(SECONDS).finish_reason == "deadline"
        assert slow.result().token_ids == []
        assert decoding.result(SECONDS).finish_reason == "length"
        assert other.result(SECONDS).finish_reason == "length"


def test_a_deadline_out_of_reach_is_refused_with_the_delay(clock: SkippingClock) -> None:
    with rig(max_num_seqs=1) as r:
        r.on_launch = lambda plan: clock.skip(3)
        r.engine.submit(LONG, params(0)).result(SECONDS)  # measures the rates
        blockers = [r.engine.submit(LONG, params(i)) for i in range(3)]
        with pytest.raises(DeadlineUnreachableError) as error:
            r.engine.submit(LONG, params(9), first_token_deadline=15).result(SECONDS)
        assert 0 < error.value.retry_after < 1000
        patient = r.engine.submit(LONG, params(9), first_token_deadline=2000)
        for future in (*blockers, patient):
            assert future.result(SECONDS).finish_reason == "length"


def test_tokens_in_the_prefix_cache_take_no_time_before_the_first_token(
    clock: SkippingClock,
) -> None:
    with rig() as r:
        r.on_launch = lambda plan: clock.skip(20)
        r.engine.submit(LONG, params(0, max_tokens=1)).result(SECONDS)  # measures the rates
        r.on_launch = lambda plan: None
        with pytest.raises(DeadlineUnreachableError):
            r.engine.submit(LONG[::-1], params(1), first_token_deadline=40).result(SECONDS)
        again = r.engine.submit(LONG, params(1), first_token_deadline=40)
        assert again.result(SECONDS).finish_reason == "length"


def test_one_slow_step_does_not_make_it_refuse_for_ever(clock: SkippingClock) -> None:
    with rig() as r:
        r.on_launch = lambda plan: clock.skip(50)
        r.engine.submit([1], params(0, max_tokens=1)).result(SECONDS)
        r.on_launch = lambda plan: None
        with pytest.raises(DeadlineUnreachableError):
            r.engine.submit([1], params(1), first_token_deadline=5).result(SECONDS)
        clock.skip(admission.STALE_SECONDS)
        for _ in range(3):
            prompt = r.engine.submit([1], params(1), first_token_deadline=45)
            assert prompt.result(SECONDS).finish_reason == "length"


LONG_OUTPUT = params(1, max_tokens=40)
SHORT = params(2, max_tokens=4)


def paced(**options: Any) -> ServiceConfig:
    return config(max_unread_tokens=4, **options)


def is_paused(r: Rig) -> bool:
    return bool(r.on_thread(lambda: r.requests.handles and not r.requests.has_work))


@in_event_loop
async def test_a_stream_that_is_not_read_gives_its_row_to_others() -> None:
    with rig(paced(), max_num_seqs=1) as r:
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


@pytest.mark.parametrize("how", ["paused", "decoding slowly", "dropped"])
@in_event_loop
async def test_a_stream_that_is_not_read_ends_after_its_time(how: str) -> None:
    slow = how == "decoding slowly"
    with rig(config(send_timeout=0.2) if slow else paced(send_timeout=0.2)) as r:
        records = listening(r.engine)
        r.on_step = lambda: time.sleep(0.02 if slow else 0.0)
        stream = r.engine.stream(PROMPT, LONG_OUTPUT)
        if how == "dropped":
            await anext(stream)
            del stream
            gc.collect()
        await asyncio.to_thread(wait_until, lambda: records)
        if how != "dropped":
            tokens = [*(await anext(stream)).token_ids]
            with pytest.raises(SendTimeoutError) as caught:
                await anext(stream)
            assert caught.value.field == "send_timeout"
            assert len(tokens) == records[0].num_output_tokens
            assert tokens == r.expected(PROMPT, LONG_OUTPUT)[: len(tokens)]
        assert 0 < records[0].num_output_tokens < 40
        assert [record.outcome for record in records] == ["send_timeout"]
        r.on_step = lambda: None


@in_event_loop
async def test_what_does_not_read_deltas_is_not_limited() -> None:
    with rig(paced(send_timeout=0.01)) as r:
        wanted = r.expected(PROMPT, LONG_OUTPUT)
        assert (await r.engine.generate(PROMPT, LONG_OUTPUT)).token_ids == wanted
        r.steps.close()
        stream = r.engine.stream(PROMPT, LONG_OUTPUT)
        last = asyncio.ensure_future(stream.finish())
        await asyncio.sleep(0)
        r.steps.open()
        assert (await last).token_ids == wanted
        calls: list[Any] = []
        future = r.engine.submit(PROMPT, LONG_OUTPUT, callback=calls.append)
        assert future.result(SECONDS).token_ids == wanted


@pytest.mark.parametrize("how", ["abort", "close", "deadline", "drain"])
@in_event_loop
async def test_a_paused_request_can_end(how: str) -> None:
    with rig(paced()) as r:
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
