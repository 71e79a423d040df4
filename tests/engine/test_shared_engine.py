"""Threads, re-entry, forks and interrupts: who may call an engine when, and what others see."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stepgraph.runtime import (
    Engine,
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    RequestError,
    RequestOutput,
    SamplingParams,
)

from ..rigs.engine_rig import parts_of, run
from ..rigs.fake_engine import check_serves, expected, fake_engine, params
from .test_engine_lifetime import USES, USES_OF_OPEN

SECONDS = 120
"""What a test that would hang waits."""


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    """Threads take turns within a step, many times."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_launch(engine: Engine, use: Callable[[], object]) -> None:
    """Let the next launch call `use` in the middle of its step."""
    runner = parts_of(engine).runner
    launch = runner.launch

    def hooked(*arguments: Any) -> Any:
        runner.launch = launch  # type: ignore[method-assign]
        use()
        return launch(*arguments)

    runner.launch = hooked  # type: ignore[method-assign]


@contextmanager
def step_under_way(engine: Engine) -> Iterator[None]:
    """Run the block while another thread is in the middle of a step of one request."""
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(SECONDS)

    engine.add_request([1, 2], params(1), "under way")
    in_launch(engine, wait)
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(engine.step)
        assert inside.wait(SECONDS)
        try:
            yield
        finally:
            go_on.set()
        stepping.result(SECONDS)


def random_prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(11), k=rng.randint(1, 20)) for _ in range(count)]


# Threads -----------------------------------------------------------------------------------------


def test_generate_from_many_threads() -> None:
    """Each gets its own outputs in order."""
    engine = fake_engine(num_blocks=25, max_num_seqs=6)  # and preemptions

    def call(number: int) -> None:
        rng = random.Random(number)
        for turn in range(4):
            prompts = random_prompts(100 * number + turn, rng.randint(1, 3))
            own = [params(rng.randrange(99), rng.randint(1, 9)) for _ in prompts]
            outputs = engine.generate(prompts, own)
            for output, prompt, each in zip(outputs, prompts, own, strict=True):
                assert output.token_ids == expected(engine, prompt, each)

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(call, number) for number in range(8)]:
            each.result(SECONDS)
    assert engine.stats()["steps"] < engine.stats()["output_tokens"], "they share the batch"
    check_serves(engine)


def test_operations_wait_for_the_step_of_another_thread() -> None:
    engine = fake_engine()
    uses: list[Callable[[], object]] = [
        engine.reset_prefix_cache,
        engine.check_integrity,
        lambda: engine.step() and None,
        lambda: engine.generate([[1, 2]], params(4))[0].token_ids,
        engine.close,
    ]
    for use in uses:
        with ThreadPoolExecutor(1) as pool:
            with step_under_way(engine):
                waiting = pool.submit(use)
                assert not waiting.done()
            if waiting.result(SECONDS) is not None:
                assert waiting.result() == expected(engine, [1, 2], params(4))
            if use != engine.close:
                run(engine)
    with pytest.raises(EngineClosedError):
        engine.step()


@pytest.mark.parametrize("how", ["close", "fail"])
def test_waiting_calls_learn_of_the_end(how: str) -> None:
    """Whichever call runs the steps, the end of the engine is the end of all of them."""
    engine = fake_engine()
    error = EngineClosedError if how == "close" else EngineFailedError
    begun = threading.Barrier(5)

    def call(number: int) -> None:
        begun.wait(SECONDS)
        while True:
            engine.generate([[number] * 5], params(number, 20))

    def fail() -> None:
        raise RuntimeError("the device is gone")

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, number) for number in range(4)]
        begun.wait(SECONDS)
        if how == "close":
            engine.close()
        else:
            in_launch(engine, fail)
        for each in calls:
            with pytest.raises(error):
                each.result(SECONDS)
    if how == "fail":
        assert engine.stats()["healthy"] is False
        engine.close()


# Re-entry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["step", "generate", "score"])
def test_a_callback_within_a_step(outer: str) -> None:
    engine = fake_engine()
    seen: list[object] = []
    refused: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.generate([[1]]),
        lambda: engine.score([1, 2]),
        engine.reset_prefix_cache,
        engine.check_integrity,
        engine.close,
    ]

    def callback() -> None:
        for use in refused:
            with pytest.raises(EngineBusyError):
                use()
        seen.append(engine.add_request([9, 9], params(9), "added"))
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(engine.add_request, [5], params(5), "other")
            seen.append(other.result(SECONDS))
        seen.append(engine.add_request([9, 9], params(9), "aborted"))
        assert engine.abort("aborted") is True
        assert engine.stats()["healthy"] is True
        assert engine.has_unfinished()

    if outer == "step":
        engine.add_request([1, 2, 3], params(1), "outer")
    in_launch(engine, callback)
    if outer == "step":
        engine.step()
    elif outer == "generate":
        (output,) = engine.generate([[1, 2, 3]], params(1))
        assert output.token_ids == expected(engine, [1, 2, 3], params(1))
    else:
        assert engine.score([1, 2, 3], 2).shape == (2, 1)
    assert seen == ["added", "other", "aborted"]
    final = run(engine)
    if outer == "step":
        assert final["outer"].token_ids == expected(engine, [1, 2, 3], params(1))
    assert final["added"].token_ids == expected(engine, [9, 9], params(9))
    assert final["other"].token_ids == expected(engine, [5], params(5))
    assert final["aborted"].finish_reason == "abort"
    check_serves(engine)


# Forks -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused() -> None:
    engine = fake_engine()
    engine.add_request([1, 2], params(1), "parent's")
    engine.step()

    def child() -> None:
        for use in (*USES, *USES_OF_OPEN):
            with pytest.raises(EngineForkedError):
                use(engine)
        engine.close()
        engine.__exit__(None, None, None)
        check_serves(fake_engine())  # its own

    with step_under_way(engine):  # in a thread that the child does not have
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(SECONDS)
        assert process.exitcode == 0
    final = run(engine)
    assert final["parent's"].token_ids == expected(engine, [1, 2], params(1))
    check_serves(engine)


# All together ------------------------------------------------------------------------------------

PROMPTS = st.lists(st.integers(0, 10), min_size=1, max_size=14)
MAIN = threading.main_thread().ident
assert MAIN is not None


class SharedEngine(RuleBasedStateMachine):
    """Every request ends once, with its own tokens, whichever thread ran the steps.

    A thread of its own runs `generate` calls; the machine adds, aborts, steps and interrupts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(3)
        self.open: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[str] = set()
        self.given_up: set[str] = set()  # of interrupted calls of `generate`
        self.calls: list[tuple[Future[list[RequestOutput]], list[int], SamplingParams]] = []
        self.failed = False

    @initialize(num_blocks=st.sampled_from([16, 60]), max_num_seqs=st.integers(1, 5))
    def begin(self, num_blocks: int, max_num_seqs: int) -> None:
        self.engine = fake_engine(num_blocks, max_num_seqs)

    def call(self, other: bool, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method, in another thread or in this one."""
        if other:
            return self.pool.submit(method, *arguments).result(SECONDS)
        return method(*arguments)

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if not output.finished:
                continue
            if output.request_id not in self.open:
                assert output.request_id.startswith("request-"), "of an interrupted call"
                assert output.request_id not in self.given_up, "one last output"
                self.given_up.add(output.request_id)
                continue
            prompt, own = self.open.pop(output.request_id)
            tokens = expected(self.engine, prompt, own)
            if output.request_id in self.aborted:
                self.aborted.discard(output.request_id)
                assert output.token_ids == tokens[: len(output.token_ids)]
            else:
                assert output.token_ids == tokens

    @precondition(lambda self: not self.failed)
    @rule(name=st.sampled_from("abcd"), prompt=PROMPTS, seed=st.integers(0, 9), other=st.booleans())
    def add(self, name: str, prompt: list[int], seed: int, other: bool) -> None:
        own = params(seed, 1 + seed)
        if name in self.open:
            with pytest.raises(RequestError):
                self.call(other, self.engine.add_request, prompt, own, name)
        else:
            assert self.call(other, self.engine.add_request, prompt, own, name) == name
            self.open[name] = prompt, own

    @precondition(lambda self: not self.failed)
    @rule(name=st.sampled_from("abcd"), other=st.booleans())
    def abort(self, name: str, other: bool) -> None:
        if self.call(other, self.engine.abort, name):
            assert name in self.open
            self.aborted.add(name)

    @precondition(lambda self: not self.failed)
    @rule()
    def step(self) -> None:
        self.take(self.engine.step())

    @precondition(lambda self: not self.failed)
    @rule(prompt=PROMPTS, seed=st.integers(0, 9))
    def generate(self, prompt: list[int], seed: int) -> None:
        (output,) = self.engine.generate([prompt], params(seed))
        assert output.token_ids == expected(self.engine, prompt, params(seed))

    @precondition(lambda self: not self.failed and len(self.calls) < 2)
    @rule(prompt=PROMPTS, seed=st.integers(0, 9))
    def generate_elsewhere(self, prompt: list[int], seed: int) -> None:
        call = self.pool.submit(self.engine.generate, [prompt], params(seed))
        self.calls.append((call, prompt, params(seed)))

    @precondition(lambda self: not self.failed)
    @rule(prompt=PROMPTS)
    def generate_with_a_signal(self, prompt: list[int]) -> None:
        in_launch(self.engine, lambda: signal.pthread_kill(MAIN, signal.SIGINT))
        with suppress(KeyboardInterrupt):
            self.engine.generate([prompt], params(1, 20))
        vars(parts_of(self.engine).runner).pop("launch", None)

    @precondition(lambda self: not self.failed and not self.calls)
    @rule()
    def fail(self) -> None:
        self.engine.add_request([1], params(1))
        in_launch(self.engine, lambda: 1 // 0)
        with pytest.raises(EngineFailedError):
            self.engine.step()
        self.failed = True

    @precondition(lambda self: self.failed)
    @rule()
    def replace(self) -> None:
        with pytest.raises(EngineFailedError):
            self.engine.step()
        self.engine.close()
        self.open, self.aborted, self.given_up, self.failed = {}, set(), set(), False
        self.engine = fake_engine()

    @precondition(lambda self: not self.failed)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @precondition(lambda self: self.calls)
    @rule()
    def wait(self) -> None:
        call, prompt, own = self.calls.pop()
        (output,) = call.result(SECONDS)
        assert output.token_ids == expected(self.engine, prompt, own)

    @invariant()
    def it_counts_and_agrees(self) -> None:
        if not hasattr(self, "engine"):
            return
        stats = self.engine.stats()
        assert min(stats["waiting"], stats["running"]) >= 0
        assert stats["healthy"] is not self.failed
        if not self.failed:
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        if not self.failed:
            while self.calls:
                self.wait()
            while self.engine.has_unfinished():
                self.take(self.engine.step())
            assert not self.open
            check_serves(self.engine)
        self.engine.close()
        self.pool.shutdown()
        assert threading.active_count() < 50


TestSharedEngine = SharedEngine.TestCase
TestSharedEngine.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, phases=[Phase.generate]
)
