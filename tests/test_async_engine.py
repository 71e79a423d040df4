"""Requests of an `AsyncEngine`: tokens, event loops, cancellation in every phase, limits."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

import pytest
from stepgraph.runtime import ServiceConfig
from stepgraph.runtime.errors import (
    DeadlineUnreachableError,
    EngineBusyError,
    OverloadedError,
    RequestError,
)
from stepgraph.runtime.service.loop_mailbox import LoopMailbox
from stepgraph.runtime.service.request_handle import Delta, HandleState

from .fake_engine import params
from .service_rig import PROMPT, SECONDS, Rig, rig

LONG = list(range(10)) * 4
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 9, 9], [8]]


def new_loops() -> list[Any]:
    factories: list[Any] = [asyncio.new_event_loop]
    try:
        import uvloop
    except ImportError:
        return factories
    return [*factories, uvloop.new_event_loop]


async def joined(stream: Any) -> dict[int, tuple[list[int], str | None]]:
    """The tokens and the finish reason of each completion of a stream."""
    found: dict[int, tuple[list[int], str | None]] = {}
    async for delta in stream:
        tokens, reason = found.setdefault(delta.index, ([], None))
        assert reason is None, "a delta after the last one"
        found[delta.index] = ([*tokens, *delta.token_ids], delta.finish_reason)
    return found


async def wait_for(condition: Any) -> None:
    """Wait until a condition holds, which another thread makes true."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def run(main: Any, factory: Any = asyncio.new_event_loop) -> Any:
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(asyncio.wait_for(main, SECONDS))


@pytest.mark.parametrize("factory", new_loops())
def test_stream_and_generate_return_the_tokens_of_a_request_alone(factory: Any) -> None:
    with rig() as r:

        async def main() -> None:
            own = [params(i) for i in range(len(PROMPTS))]
            streams = [r.engine.stream(p, o) for p, o in zip(PROMPTS, own, strict=True)]
            outputs = await asyncio.gather(
                *[r.engine.generate(p, o) for p, o in zip(PROMPTS, own, strict=True)],
                *[joined(stream) for stream in streams],
            )
            wanted = [r.expected(p, o) for p, o in zip(PROMPTS, own, strict=True)]
            whole, streamed = outputs[: len(PROMPTS)], outputs[len(PROMPTS) :]
            assert [output.token_ids for output in whole] == wanted
            assert streamed == [{0: (tokens, "length")} for tokens in wanted]

        run(main(), factory)
        r.check_idle()


def test_several_loops_of_several_threads_share_the_engine() -> None:
    with rig() as r:
        found: list[bool] = []

        def serve(number: int, factory: Any) -> None:
            async def main() -> None:
                for turn in range(5):
                    own = params(100 * number + turn)
                    outputs = await asyncio.gather(
                        *[r.engine.generate(prompt, own) for prompt in PROMPTS],
                        joined(r.engine.stream(PROMPT, own)),
                    )
                    wanted = [r.expected(prompt, own) for prompt in PROMPTS]
                    found.append([output.token_ids for output in outputs[:-1]] == wanted)
                    found.append(outputs[-1][0][0] == r.expected(PROMPT, own))

            run(main(), factory)

        loops = new_loops()
        threads = [
            threading.Thread(target=serve, args=(n, loops[n % len(loops)])) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert found == [True] * 40
        r.check_idle()


def test_completions_of_one_prompt() -> None:
    with rig() as r:
        own = params(3, n=3)

        async def main() -> None:
            streamed = await joined(r.engine.stream(PROMPT, own))
            output = await r.engine.generate(PROMPT, own)
            whole = {i: (c.token_ids, c.finish_reason) for i, c in enumerate(output.completions)}
            assert streamed == whole
            assert len(whole) == 3

        run(main())
        r.check_idle()


def test_submit_calls_back_and_completes_the_future() -> None:
    with rig() as r:
        deltas: list[Delta] = []
        own = params(1)
        output = r.engine.submit(PROMPT, own, callback=deltas.append).result(SECONDS)
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == output.token_ids == r.expected(PROMPT, own)
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
        times = [ns for delta in deltas for ns in delta.token_ns]
        assert len(times) == len(tokens)
        assert times == sorted(times)


def test_a_slow_consumer_gets_the_whole_in_fewer_deltas() -> None:
    with rig() as r:
        own = params(1, max_tokens=30)

        async def main() -> None:
            stream = r.engine.stream(PROMPT, own)
            first = await anext(stream)
            await wait_for(lambda: stream.output is not None and stream.output.finished)
            rest = [delta async for delta in stream]
            assert len(rest) <= 1
            tokens = [t for delta in (first, *rest) for t in delta.token_ids]
            assert tokens == r.expected(PROMPT, own)

        run(main())


def test_a_second_task_in_a_stream_is_refused_and_the_first_gets_the_tokens() -> None:
    with rig() as r:
        r.steps.close()
        own = params(1)

        async def main() -> None:
            stream = r.engine.stream(PROMPT, own)
            first = asyncio.ensure_future(stream.finish())
            await asyncio.sleep(0)
            for second in (anext(stream), stream.finish()):
                with pytest.raises(EngineBusyError, match="another task"):
                    await second
            r.steps.open()
            async with asyncio.timeout(SECONDS):
                assert (await first).token_ids == r.expected(PROMPT, own)

        run(main())


class Phase:
    """Brings a request into a phase, with the steps held back."""

    def __init__(self, r: Rig) -> None:
        self.r = r
        self.others: list[Future[Any]] = []

    def prompt(self, phase: str) -> Any:
        return {"preparing": tuple(PROMPT), "prefilling": LONG}.get(phase, PROMPT)

    def hold(self, phase: str) -> None:
        """Close the gates before the request is made."""
        self.r.steps.close()
        if phase == "preparing":
            self.r.preparations.close()
        if phase in ("queued", "prefilling", "preempted"):
            rows = (
                4 if phase == "queued" else 1
            )  # while a row decodes, prompts are prefilled in chunks
            self.others += [
                self.r.engine.submit([9, i], params(90 + i, max_tokens=40)) for i in range(rows)
            ]
            assert self.r.steps.waiting.acquire(timeout=SECONDS)

    async def reach(self, phase: str) -> None:
        """Run steps until the request is in the phase, and the next step is held back."""
        r = self.r
        if phase == "preparing":
            await asyncio.to_thread(r.preparations.waiting.acquire, timeout=SECONDS)
            return
        if not self.others:
            await asyncio.to_thread(r.steps.waiting.acquire, timeout=SECONDS)
        while not self.reached(phase):
            r.steps.permit()
            await asyncio.to_thread(r.steps.waiting.acquire, timeout=SECONDS)

    def reached(self, phase: str) -> bool:
        handle = self.r.engine._thread.dispatcher.handles["mine"]
        requests = handle.group.requests if handle.group else []
        if phase == "queued":
            return handle.state is HandleState.QUEUED
        if phase == "prefilling":
            return any(0 < request.num_computed < len(LONG) for request in requests)
        if phase == "preempted":
            return any(request.num_preemptions and request.row is None for request in requests)
        return any(request.num_output > 1 for request in requests)


PHASES = ["preparing", "queued", "prefilling", "decoding", "preempted", "siblings"]


@pytest.mark.parametrize("how", ["abort", "cancel", "close", "drop"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("streams", [True, False])
def test_rows_and_blocks_are_free_one_step_after_the_consumer_left(
    phase: str, how: str, streams: bool
) -> None:
    if how in ("close", "drop") and not streams:
        pytest.skip("only a stream can be closed")
    # A pool that two requests of 40 tokens do not fit into makes one of them wait.
    with rig(num_blocks=14 if phase == "preempted" else 60) as r:

        async def main() -> None:
            at = Phase(r)
            at.hold(phase)
            own = params(1, max_tokens=40, n=3 if phase == "siblings" else 1)
            options: Any = {"request_id": "mine", "priority": 1}
            make = r.engine.stream if streams else r.engine.generate
            stream: Any = make(at.prompt(phase), own, **options)
            reading = joined(stream) if streams else stream
            task = asyncio.ensure_future(asyncio.sleep(0) if how == "drop" else reading)
            await asyncio.sleep(0)
            await at.reach(phase)
            if how == "abort":
                assert r.engine.abort("mine")
            elif how == "cancel":
                task.cancel()
                await asyncio.wait([task])
            elif how == "close":
                await stream.aclose()
            else:
                reading.close()
            del stream, reading
            if phase == "preparing":
                await asyncio.wait([task])  # before the preparation ends
                r.preparations.open()
            else:
                r.steps.permit()  # the step under way; the next one is held back
                await asyncio.to_thread(r.steps.waiting.acquire, timeout=SECONDS)
                load, stats = r.made[-1].gauges(), r.made[-1].stats()
                assert load.running + load.waiting == len(at.others)
                if not at.others:
                    assert stats["blocks"]["free"] == stats["blocks"]["usable"]
            r.steps.open()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if how == "abort" and streams:
                assert {reason for _, reason in result.values()} == {"abort"}
                assert len(result) == own.n
            elif how == "abort":
                assert {c.finish_reason for c in result.completions} == {"abort"}
            for future in at.others:
                future.cancel()

        run(main())
        r.check_serves()


def test_an_abort_twice_or_of_an_unknown_request_does_nothing() -> None:
    with rig() as r:
        assert not r.engine.abort("unknown")
        r.steps.close()
        future = r.engine.submit(PROMPT, params(1), request_id="mine")
        assert r.engine.abort("mine")
        r.engine.abort("mine")
        r.steps.open()
        assert future.result(SECONDS).finish_reason == "abort"
        assert not r.engine.abort("mine")
        r.check_idle()


def test_an_id_is_free_again_at_the_end() -> None:
    with rig() as r:
        r.steps.close()
        first = r.engine.submit(PROMPT, params(1), request_id="mine")
        with pytest.raises(RequestError, match="'mine' is in use"):
            r.engine.submit(PROMPT, params(2), request_id="mine")
        r.steps.open()
        assert first.result(SECONDS).finish_reason == "length"
        for seed in range(20):
            second = r.engine.submit(PROMPT, params(seed), request_id="mine")
            assert second.result(SECONDS).token_ids == r.expected(PROMPT, params(seed))
        r.check_idle()


def test_an_id_may_be_reused_while_an_aborted_prompt_is_still_prepared() -> None:
    with rig() as r:
        r.preparations.close()
        first = r.engine.submit(tuple(PROMPT), params(1), request_id="mine")
        assert r.engine.abort("mine")
        assert first.result(SECONDS).finish_reason == "abort"
        own = params(2, max_tokens=40)
        r.steps.close()
        second = r.engine.submit((1, 2), own, request_id="mine")
        r.preparations.open()
        r.steps.open()
        assert second.result(SECONDS).token_ids == r.expected([1, 2], own)
        r.check_idle()


def test_a_cancelled_future_is_done_for_its_waiters() -> None:
    with rig() as r:
        r.steps.close()
        future = r.engine.submit(PROMPT, params(1, max_tokens=40))
        assert future.cancel()
        r.steps.open()
        assert wait([future], SECONDS).done == {future}
        r.check_serves()


@pytest.mark.parametrize(
    "options",
    [
        {"priority": "high"},
        {"request_id": ""},
        {"request_id": 3},
        {"deadline": 0},
        {"deadline": float("nan")},
        {"first_token_deadline": 1e10},
        {"deadline": True},
        {"tenant": 1},
        {"cache_salt": 2.0},
        {"tenant": "t" * 257},
        {"dead_line": 1.0},
    ],
)
def test_invalid_options_are_refused_at_once(options: Any) -> None:
    with rig() as r:
        with pytest.raises(RequestError) as error:
            r.engine.submit(PROMPT, params(1), **options)
        assert len(str(error.value)) < 500
        r.check_idle()


@pytest.mark.parametrize("prompt", [[], [99], "text", (1, 99), None, [1] * 60])
def test_an_invalid_prompt_ends_its_request_alone(prompt: Any) -> None:
    with rig() as r:
        future = r.engine.submit(prompt, params(1))
        with pytest.raises(RequestError):
            future.result(SECONDS)

        async def main() -> None:
            stream = r.engine.stream(prompt, params(1))
            with pytest.raises(RequestError):
                await stream.accepted()
            with pytest.raises(RequestError):
                await anext(stream)

        run(main())
        r.check_serves()


def test_requests_and_tokens_that_wait_are_bounded() -> None:
    limits = ServiceConfig(max_queued_requests=3, max_queued_tokens=12)
    with rig(limits, max_num_seqs=1) as r:
        r.steps.close()
        running = r.engine.submit(PROMPT, params(1))
        assert r.steps.waiting.acquire(timeout=SECONDS)
        queued = [r.engine.submit(PROMPT, params(i)) for i in range(2)]
        too_long = r.engine.submit(PROMPT, params(4))  # of 12 tokens 10 wait
        r.steps.permit()
        with pytest.raises(OverloadedError, match="max_queued_tokens=12") as error:
            too_long.result(SECONDS)
        assert error.value.retry_after > 0
        queued.append(r.engine.submit([1], params(5)))
        with pytest.raises(OverloadedError, match="max_queued_requests") as error:
            r.engine.submit([1], params(6))
        assert error.value.retry_after > 0
        r.steps.open()
        assert all(f.result(SECONDS).finish_reason == "length" for f in (running, *queued))
        assert r.engine.submit(LONG, params(1)).result(SECONDS)  # more than the limit, alone
        r.check_serves()


def test_tenants_share_the_engine_by_weight() -> None:
    weights = ServiceConfig(tenant_weights={"heavy": 3.0})
    with rig(weights, max_num_seqs=1) as r:
        r.steps.close()
        r.engine.submit(PROMPT, params(0))
        assert r.steps.waiting.acquire(timeout=SECONDS)
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
        r.check_idle()


def test_a_deadline_that_passes_in_the_queue_ends_a_request_that_is_never_prefilled() -> None:
    with rig(max_num_seqs=1) as r:
        r.steps.close()
        blocker = r.engine.submit(PROMPT, params(0, max_tokens=30))
        assert r.steps.waiting.acquire(timeout=SECONDS)
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
        r.check_serves()


def test_a_deadline_that_passes_while_decoding_keeps_the_tokens() -> None:
    with rig() as r:
        own = params(1, max_tokens=40)
        r.on_step = lambda: time.sleep(0.005)
        future = r.engine.submit(PROMPT, own, deadline=0.06)
        output = future.result(SECONDS)
        assert output.finish_reason == "deadline"
        assert 0 < len(output.token_ids) < 40
        assert output.token_ids == r.expected(PROMPT, own)[: len(output.token_ids)]
        r.check_serves()


def test_a_first_token_deadline_ends_a_slow_prefill_and_no_decoding() -> None:
    with rig() as r:
        r.steps.close()
        other = r.engine.submit([1], params(1, max_tokens=40))
        assert r.steps.waiting.acquire(timeout=SECONDS)
        decoding = r.engine.submit([1], params(1, max_tokens=40), first_token_deadline=0.5)
        slow = r.engine.submit(LONG, params(1), first_token_deadline=0.5)
        for _ in range(2):  # the other row; the short prompt and a chunk of the long one
            r.steps.permit()
            assert r.steps.waiting.acquire(timeout=SECONDS)
        time.sleep(0.5)
        r.steps.open()
        assert slow.result(SECONDS).finish_reason == "deadline"
        assert slow.result().token_ids == []
        assert decoding.result(SECONDS).finish_reason == "length"
        assert other.result(SECONDS).finish_reason == "length"
        r.check_serves()


def test_a_deadline_that_passes_during_preparation_ends_the_request_then() -> None:
    with rig() as r:
        r.preparations.close()
        late = r.engine.submit(tuple(PROMPT), params(1, n=2), deadline=0.01)
        output = late.result(SECONDS)  # although the preparation has not ended
        assert [c.finish_reason for c in output.completions] == ["deadline"] * 2
        assert r.on_thread(r.engine._stats)["preparing"] == 1
        r.preparations.open()
        r.check_serves()


def test_a_deadline_out_of_reach_is_refused_with_the_delay() -> None:
    with rig(max_num_seqs=1) as r:
        r.on_launch = lambda plan: time.sleep(0.01)
        r.engine.submit(LONG, params(0)).result(SECONDS)  # measures the rates
        blockers = [r.engine.submit(LONG, params(i)) for i in range(3)]
        with pytest.raises(DeadlineUnreachableError) as error:
            r.engine.submit(LONG, params(9), first_token_deadline=0.02).result(SECONDS)
        assert 0 < error.value.retry_after < 10
        patient = r.engine.submit(LONG, params(9), first_token_deadline=20.0)
        for future in (*blockers, patient):
            assert future.result(SECONDS).finish_reason == "length"
        r.check_idle()


def test_one_slow_step_does_not_make_it_refuse_for_ever() -> None:
    with rig() as r:
        r.on_launch = lambda plan: time.sleep(0.3)
        r.engine.submit([1], params(0, max_tokens=1)).result(SECONDS)
        r.on_launch = lambda plan: None
        with pytest.raises(DeadlineUnreachableError):
            r.engine.submit([1], params(1), first_token_deadline=0.05).result(SECONDS)
        time.sleep(1.0)
        for _ in range(3):
            prompt = r.engine.submit([1], params(1), first_token_deadline=0.2)
            assert prompt.result(SECONDS).finish_reason == "length"


def test_distant_deadlines_take_memory_only_while_their_requests_run() -> None:
    with rig() as r:
        for _ in range(20):
            futures = [
                r.engine.submit([1], params(1, max_tokens=1), deadline=1e6) for _ in range(50)
            ]
            for future in futures:
                future.result(SECONDS)
        r.check_idle()  # which bounds the entries of ended requests


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts wake-ups by other threads."""

    wakes = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
        self.wakes += 1
        return super().call_soon_threadsafe(*args, **options)


def test_a_loop_is_woken_at_most_once_a_step() -> None:
    with rig(max_num_seqs=16, num_blocks=200) as r:
        loop = CountingLoop()

        async def main() -> None:
            own = params(1, max_tokens=30)
            streams = [r.engine.stream([1, i % 10], own) for i in range(40)]
            found = await asyncio.gather(*[joined(stream) for stream in streams])
            assert all(len(tokens) == 30 for result in found for tokens, _ in result.values())
            assert loop.wakes <= r.num_steps + 40  # a request that is admitted to an idle engine

        try:
            loop.run_until_complete(asyncio.wait_for(main(), SECONDS))
        finally:
            loop.close()


def test_a_mailbox_wakes_its_loop_once_until_it_has_run() -> None:
    class Loop:
        calls: list[Any]

        def is_closed(self) -> bool:
            return False

        def call_soon_threadsafe(self, function: Any) -> None:
            self.calls.append(function)

    loop = Loop()
    loop.calls = []
    mailbox = LoopMailbox(loop)  # type: ignore[arg-type]
    handles: list[Any] = [type("Handle", (), {"posted": False})() for _ in range(64)]
    for _ in range(10):
        for handle in handles:
            mailbox.post(handle)
        mailbox.flush()
    assert len(loop.calls) == 1
    loop.calls[0]()
    mailbox.flush()
    assert len(loop.calls) == 1
    mailbox.post(handles[0])
    mailbox.flush()
    assert len(loop.calls) == 2


def test_an_idle_engine_uses_no_cpu() -> None:
    with rig() as r:
        r.check_serves()
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.01
