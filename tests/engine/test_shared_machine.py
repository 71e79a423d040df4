"""A machine over what may happen to a shared engine: threads, interrupts, ids and aborts."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stepgraph.runtime import EngineFailedError, RequestError, RequestOutput, SamplingParams

from ..rigs.engine_rig import parts_of
from ..rigs.fake_engine import check_serves, expected, fake_engine, params
from .test_shared_engine import in_launch

PROMPTS = st.lists(st.integers(0, 10), min_size=1, max_size=14)
SECONDS = 120
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
        add = (prompt, own, name)
        run = self.pool.submit(self.engine.add_request, *add).result if other else None
        if name in self.open:
            with pytest.raises(RequestError, match="in use"):
                run(SECONDS) if run is not None else self.engine.add_request(*add)
        else:
            assert (run(SECONDS) if run is not None else self.engine.add_request(*add)) == name
            self.open[name] = prompt, own

    @precondition(lambda self: not self.failed)
    @rule(name=st.sampled_from("abcd"), other=st.booleans())
    def abort(self, name: str, other: bool) -> None:
        if other:
            done = self.pool.submit(self.engine.abort, name).result(SECONDS)
        else:
            done = self.engine.abort(name)
        if done:
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
    max_examples=25, stateful_step_count=25, deadline=None, phases=[Phase.generate]
)
