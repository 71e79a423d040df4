"""A consumer that leaves frees its rows and blocks in every phase of its request."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from concurrent.futures import Future, wait
from typing import Any

import pytest
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.service.request_handle import HandleState

from ..rigs.fake_engine import params
from ..rigs.service_rig import LONG, PROMPT, SECONDS, Rig, config, do, joined, rig, wait_until


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
            rows = 4 if phase == "queued" else 1  # which decodes: prompts are prefilled in chunks
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
        handle = self.r.requests.handles["mine"]
        requests = handle.group.requests if handle.group else []
        if phase == "queued":
            return handle.state is HandleState.QUEUED
        if phase == "prefilling":
            return any(0 < request.num_computed < len(LONG) for request in requests)
        if phase == "preempted":
            return any(request.num_preemptions and request.row is None for request in requests)
        return any(request.num_output > 1 for request in requests)


PHASES = ["preparing", "queued", "prefilling", "decoding", "preempted", "siblings"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("streams", "how"),
    [
        *((True, how) for how in ("abort", "cancel", "close")),
        *((False, how) for how in ("abort", "cancel")),
    ],
)
def test_rows_and_blocks_are_free_one_step_after_the_consumer_left(
    phase: str, how: str, streams: bool
) -> None:
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
            task = asyncio.ensure_future(reading)
            await asyncio.sleep(0)
            await at.reach(phase)
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

        do(main())
        r.check_serves()


@pytest.mark.parametrize("streams", [True, False])
def test_a_duplicate_id_is_refused_and_the_first_request_is_served(streams: bool) -> None:
    records: list[Any] = []
    with rig() as r:
        r.engine.add_listener(records.append)
        r.steps.close()
        own = params(1, max_tokens=20)
        first = r.engine.submit(PROMPT, own, request_id="mine")

        async def second() -> None:
            made: Any = r.engine.stream if streams else r.engine.generate
            with pytest.raises(RequestError):
                await made(PROMPT, request_id="mine")

        do(second())
        gc.collect()
        r.steps.open()
        assert first.result(SECONDS).token_ids == r.expected(PROMPT, own)
        r.check_serves()
        wait_until(lambda: len(records) == 2)
        assert [record.outcome for record in records] == ["length", "length"]


def test_refused_requests_are_reported_once_also_after_a_collection() -> None:
    records: list[tuple[str, str]] = []  # without the errors, which keep frames alive
    with rig(config(max_queued_requests=2), max_num_seqs=1) as r:
        r.engine.add_listener(lambda record: records.append((record.request_id, record.outcome)))
        r.steps.close()

        async def main() -> None:
            tasks = [
                asyncio.ensure_future(r.engine.generate(PROMPT, params(i, max_tokens=3)))
                for i in range(20)
            ]
            await asyncio.wait(tasks, timeout=0.1)
            r.steps.open()
            await asyncio.wait(tasks)
            for task in tasks:
                task.exception()

        do(main())
        gc.collect()
        r.check_serves()
        wait_until(lambda: len(records) >= 21)
        assert len(records) == len(dict(records)) == 21
        counts = Counter(outcome for _, outcome in records)
        assert counts.keys() == {"length", "overloaded"}
        assert counts["overloaded"] >= 15


def test_an_id_may_be_reused_while_an_aborted_prompt_is_still_prepared() -> None:
    with rig() as r:
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
        r.check_idle()


def test_a_cancelled_future_is_done_for_its_waiters() -> None:
    with rig() as r:
        r.steps.close()
        future = r.engine.submit(PROMPT, params(1, max_tokens=40))
        assert future.cancel()
        r.steps.open()
        assert wait([future], SECONDS).done == {future}
        r.check_serves()
