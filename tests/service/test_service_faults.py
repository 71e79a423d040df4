"""Faults injected at every boundary: what the client sees, and what is left. See the table in
docs/guarantees.md."""

from __future__ import annotations

import asyncio
import itertools
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepgraph.runtime import service
from stepgraph.runtime.detokenizer import IncrementalDetokenizer
from stepgraph.runtime.errors import (
    EngineFailedError,
    EngineUnavailableError,
    NonFiniteLogitsError,
    RequestError,
)
from stepgraph.runtime.service.health import Phase

from ..rigs import line_faults
from ..rigs.fake_engine import params, runner_of
from ..rigs.service_rig import PROMPT, SECONDS, do, fail, in_event_loop, rig, wait_until

pytestmark = pytest.mark.usefixtures("no_tracebacks")


def once(error: BaseException, after: threading.Event | None = None) -> Callable[..., None]:
    """Return a function that raises at its first call, as soon as `after` is set."""
    calls = itertools.count()

    def fail(*_: object) -> None:
        if next(calls) == 0:
            assert after is None or after.wait(SECONDS)
            raise error

    return fail


@pytest.mark.parametrize("where", ["launch", "read", "prefill", "handling"])
def test_step_failure_ends_all_requests(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`handling`: another exception interrupts how the failure of a launch is handled."""
    with rig(max_num_seqs=1) as r:
        lose_all, interrupt = r.requests.lose_all, once(MemoryError("injected"))
        queued = threading.Event()
        error = RuntimeError("injected")
        no_memory = once(torch.OutOfMemoryError("injected"), queued)
        if where in ("launch", "handling"):
            r.on_launch = once(error, queued)
            if where == "handling":
                monkeypatch.setattr(r.requests, "lose_all", lambda e: (interrupt(), lose_all(e)))
        elif where == "read":
            runner_of(r.made[0]).read = once(error, queued)
        else:
            r.on_launch = lambda plan: no_memory() if plan.prefill else None
        futures = [r.engine.submit(PROMPT, params(seed)) for seed in range(3)]
        queued.set()
        errors = [future.exception(SECONDS) for future in futures]
        assert all(isinstance(error, EngineFailedError) for error in errors)
        assert len({id(error) for error in errors}) == 3, "raising changes an exception"
        r.thread.join()
        assert r.engine.health().phase is Phase.FAILED
        assert not r.engine.health().live
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT)
        assert not r.requests.handles


def test_failure_keeps_no_memory_of_the_engine() -> None:
    with rig() as r:
        memory = runner_of(r.made[0])

        def fail_with_locals(held: object = memory) -> None:  # as the frames of a failed step
            fail()

        r.on_step = fail_with_locals
        error = r.engine.submit(PROMPT).exception(SECONDS)
        r.thread.join()
        assert error is not None
        assert error.__cause__ is not None
        frames = traceback.walk_tb(error.__cause__.__traceback__)
        assert not any("held" in frame.f_locals for frame, _ in frames)


def test_a_tokenizer_that_raises_ends_its_request_alone() -> None:
    with rig() as r:
        builder: Any = r.made[0]._builder
        builder._tokenizer = SimpleNamespace(least_tokens=fail, encode=fail)
        with pytest.raises(RequestError):
            r.engine.submit("text", params(1)).result(SECONDS)
        builder._tokenizer = None


def test_a_tokenizer_that_hangs_delays_texts_alone() -> None:
    with rig() as r:
        r.preparations.close()
        own = params(1, n=2)
        texts = [r.engine.submit(tuple(PROMPT), own, deadline=0.05) for _ in range(3)]
        r.preparations.permit()
        r.preparations.wait()
        for text in texts[1:]:  # although the preparation has not ended
            completions = text.result(SECONDS).completions
            assert [c.finish_reason for c in completions] == ["deadline"] * 2
        assert do(r.engine.stats())["preparing"] == 2
        r.preparations.open()


def test_a_detokenizer_that_raises_ends_its_request_alone() -> None:
    with rig() as r:
        engine = r.made[0]
        prepare, prepared = engine.prepare, itertools.count()

        def prepare_broken(*args: Any, **options: Any) -> Any:
            group = prepare(*args, **options)
            if next(prepared) == 0:
                group.requests[0].detokenizer = IncrementalDetokenizer(fail)
            return group

        engine.prepare = prepare_broken  # type: ignore[method-assign]
        failed, other = (r.engine.submit(PROMPT, params(seed)) for seed in range(2))
        output = failed.result(SECONDS)
        assert output.finish_reason == "error"
        assert str(output.error) == "injected"
        assert other.result(SECONDS).token_ids == r.expected(PROMPT, params(1))


@in_event_loop
async def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    with rig() as r:
        device = runner_of(r.made[0]).device
        device.nan_tokens = frozenset({9})
        stream, good = r.engine.stream([9, 1], params(1)), r.engine.generate([1], params(1))
        assert (await anext(stream)).finish_reason == "error"
        with pytest.raises(NonFiniteLogitsError):
            await anext(stream)
        assert (await good).finish_reason in ("length", "error")
        device.nan_tokens = frozenset()


@pytest.mark.parametrize("error", [ValueError("injected"), SystemExit(3)])
def test_a_callback_that_raises_ends_its_request_alone(error: BaseException) -> None:
    with rig() as r:
        r.steps.close()
        own = params(1, max_tokens=40)
        failed = r.engine.submit(PROMPT, own, callback=once(error))
        other = r.engine.submit(PROMPT, own)
        r.steps.permit(3)
        assert failed.exception(SECONDS) is error
        r.steps.open()
        assert other.result(SECONDS).token_ids == r.expected(PROMPT, own)


def test_a_future_s_callback_that_raises_ends_nothing() -> None:
    with rig() as r:
        r.steps.close()
        future = r.engine.submit(PROMPT, params(1))
        future.add_done_callback(once(SystemExit(3)))
        r.steps.open()
        assert future.result(SECONDS).finish_reason == "length"


def test_a_consumer_that_hangs_costs_one_output() -> None:
    with rig() as r:
        hang = threading.Event()
        deltas: list[Any] = []

        def slow(delta: Any) -> None:
            deltas.append(delta)
            assert hang.wait(SECONDS)

        own = params(1, max_tokens=40)
        future = r.engine.submit(PROMPT, own, callback=slow)
        assert do(r.engine.generate(PROMPT, own)).finish_reason == "length", "it does not wait"
        hang.set()
        output = future.result(SECONDS)
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert output.token_ids == tokens == r.expected(PROMPT, own)
        assert len(deltas) < 40


def test_an_event_loop_that_is_closed_ends_its_requests() -> None:
    with rig() as r:
        r.steps.close()
        loop = asyncio.new_event_loop()
        own = params(1, max_tokens=40)

        async def begin() -> None:
            r.engine.stream(PROMPT, own)

        loop.run_until_complete(begin())
        loop.run_until_complete(asyncio.sleep(0))
        r.steps.wait()
        loop.close()  # without a word to its tasks
        r.steps.permit(2)
        wait_until(lambda: not r.requests.handles)
        assert r.num_steps <= 2
        r.steps.open()
        r.check_serves()


def test_jumps_of_the_clock_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    with rig() as r:
        future = r.engine.submit(PROMPT, params(1), deadline=5.0, first_token_deadline=5.0)
        for days in (365, -365):
            monkeypatch.setattr(time, "time", lambda days=days: now() + days * 86400)
            timed = r.engine.submit(PROMPT, params(1), deadline=5.0)
            assert timed.result(SECONDS).finish_reason == "length"
        assert future.result(SECONDS).finish_reason == "length"


def test_a_full_disk_changes_nothing() -> None:
    """No write to a file succeeds meanwhile."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with rig() as r:
            r.check_serves()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_no_thread_for_preparations(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig() as r:
        no_thread = once(RuntimeError("can't start new thread"))
        monkeypatch.setattr(r.engine._pool, "submit", no_thread)
        with pytest.raises(EngineUnavailableError):
            r.engine.submit(tuple(PROMPT), params(1)).result(SECONDS)


SERVICE = str(Path(service.__file__).parent)


def serve_with_fault(at: int) -> int:
    """Serve requests with an exception at a line of the step thread; return the lines it ran."""
    fault = line_faults.LineFault(at, KeyboardInterrupt)
    with rig(max_num_seqs=2) as r:
        r.on_thread(lambda: sys.settrace(fault._trace))

        async def stream(prompt: Any, **options: Any) -> None:
            with suppress(EngineFailedError):
                async for _ in r.engine.stream(prompt, params(1), **options):
                    pass

        async def main() -> None:
            tasks = [asyncio.ensure_future(stream(PROMPT, deadline=60.0)) for _ in range(3)]
            tasks.append(asyncio.ensure_future(stream([1], request_id="aborted")))
            await asyncio.sleep(0)
            r.engine.abort("aborted")
            await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)

        with suppress(EngineFailedError):
            futures = [r.engine.submit(tuple(PROMPT), params(1), deadline=60.0) for _ in range(2)]
            asyncio.run(main())
            for future in futures:
                error = future.exception(SECONDS)
                assert error is None or isinstance(error, EngineFailedError)
        lines, fault.at = fault.lines, 0
        assert do(r.engine.drain(5.0)) in (True, False)
        if r.engine.health().live:
            do(r.engine.wake())
            r.check_serves()
        else:
            assert not r.requests.handles
            wait_until(lambda: not r.requests.limits.num_requests)  # prepared
    return lines


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=[pytest.mark.slow] if n else []) for n in range(12)]
)
def test_an_exception_at_any_line_of_the_step_thread(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_faults, "ROOMS", (SERVICE,))
    stride = 12 if first else 101
    for at in itertools.count(first + 1, stride):
        if serve_with_fault(at) < at:
            assert at > 300
            break
