"""Ranges: what listeners receive, what is refused, and the window of an nsys session."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stepgraph.profiling import ranges
from stepgraph.profiling.nsys import CaptureWindowError, capture_window
from stepgraph.profiling.ranges import NvtxTool, StepNumbers

from ..rigs.engine_rig import Open, greedy, run

PLAIN = sorted(ranges.PLAIN_RANGES)
OF_STEPS = sorted(ranges.STEP_RANGES)
int64 = st.integers(-(2**63), 2**63 - 1)


class Heard:
    """Every event in order: ("push", name, payload), ("pop",)."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def push(self, name: str, payload: ranges.Payload) -> None:
        self.events.append(("push", name, payload))

    def pop(self) -> None:
        self.events.append(("pop",))

    def names(self, kind: str) -> list[str]:
        """The names of all events of a kind, in order."""
        return [event[1] for event in self.events if event[0] == kind]

    def said(self) -> list[str]:
        return [" ".join(map(str, event[:2])) for event in self.events]


class ListenersComeAndGo(RuleBasedStateMachine):
    """Each receives the ranges that begin while it listens, and their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[tuple[Any, Heard]] = []
        self.expected: dict[int, list[tuple[Any, ...]]] = {}
        self.open: list[tuple[Any, list[Heard]]] = []
        self.gone: list[Heard] = []

    def active(self) -> list[Heard]:
        return [heard for _, heard in self.listeners]

    def expect(self, *event: Any, of: list[Heard]) -> None:
        for heard in of:
            self.expected[id(heard)].append(event)

    @rule()
    def come(self) -> None:
        heard = Heard()
        listening = ranges.listening(heard)
        listening.__enter__()
        self.listeners.append((listening, heard))
        self.expected[id(heard)] = []

    @precondition(lambda self: self.listeners)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.listeners) - 1))
        listening, heard = self.listeners.pop(which)
        listening.__exit__(None, None, None)
        self.gone.append(heard)

    @rule(name=st.sampled_from(PLAIN), payload=int64)
    def enter_span(self, name: str, payload: int) -> None:
        self.enter(ranges.span(name, payload), name, payload)

    @rule(name=st.sampled_from(OF_STEPS), numbers=st.tuples(*[int64] * len(StepNumbers._fields)))
    def enter_step_span(self, name: str, numbers: tuple[int, ...]) -> None:
        self.enter(ranges.step_span(name, *numbers), name, numbers)

    def enter(self, span: Any, name: str, payload: Any) -> None:
        span.__enter__()
        self.expect("push", name, payload, of=self.active())
        self.open.append((span, self.active()))

    @precondition(lambda self: self.open)
    @rule(error=st.sampled_from([None, KeyboardInterrupt]))
    def leave(self, error: type[BaseException] | None) -> None:
        span, own = self.open.pop()
        span.__exit__(error, None, None)
        self.expect("pop", of=own)

    @invariant()
    def all_received_what_happened(self) -> None:
        for heard in (*self.active(), *self.gone):
            assert heard.events == self.expected[id(heard)]

    def teardown(self) -> None:
        while self.open:
            self.leave(None)
        while self.listeners:
            self.listeners.pop()[0].__exit__(None, None, None)


TestListenersComeAndGo = ListenersComeAndGo.TestCase
TestListenersComeAndGo.settings = settings(max_examples=20)


def test_threads_do_not_share_event_attributes() -> None:
    """Setting a payload and pushing are two calls: a shared object would mix two engines up."""
    pushed: list[SimpleNamespace] = []
    domain = SimpleNamespace(
        get_event_attributes=lambda *_: SimpleNamespace(payload=None), push_range=pushed.append
    )
    tool = NvtxTool(domain)  # test_nvtx.py has a real one
    thread = threading.Thread(target=tool.push, args=("step", 4))
    thread.start()
    thread.join()
    tool.push("step", 2)
    assert [event.payload for event in pushed] == [4, 2]


def test_wrong_names_and_payloads_fail_with_and_without_a_listener() -> None:
    for listener in (contextlib.nullcontext(), ranges.listening(Heard())):
        with listener:
            for name in ("x", ranges.REPLAY):
                with pytest.raises(ValueError):  # noqa: PT011
                    ranges.span(name, 1)
            for name in ("x", ranges.PLAN):
                with pytest.raises(ValueError):  # noqa: PT011
                    ranges.step_span(name, *range(6))


@pytest.mark.parametrize("at", range(4))
def test_a_listener_that_raises_is_unsubscribed_and_breaks_nothing(
    at: int, caplog: pytest.LogCaptureFixture
) -> None:
    heard, calls = Heard(), itertools.count()

    def fail(*_: object) -> None:
        if next(calls) == at:
            raise RuntimeError("out of paper")

    with (
        ranges.listening(SimpleNamespace(push=fail, pop=fail)),
        ranges.listening(heard),
        ranges.span(ranges.STEP, 1),
        ranges.step_span(ranges.REPLAY, *range(6)),
    ):
        pass
    assert heard.names("push") == ["step", "replay"]
    assert [event[0] for event in heard.events] == ["push", "push", "pop", "pop"]
    assert next(calls) == at + 1, "it receives nothing after its error"
    (record,) = caplog.records
    assert "out of paper" in str(record.exc_info)


def test_launches_of_an_engine_carry_the_numbers_of_their_step(open_engine: Open) -> None:
    heard = Heard()
    config = {"mode": "compile", "compile": False, "buckets": (2, 4)}
    with ranges.listening(heard):
        engine = open_engine("micro", **config)
    for prompt in ([1, 2, 3], [4] * 20, [5, 6]):
        engine.add_request(prompt, greedy())
    with ranges.listening(heard):
        engine.step()
        engine.add_request([7] * 10, greedy(), "late")
        run(engine)
    assert set(heard.names("push")) == {
        "step", "plan", "launch", "prepare", "copy", "replay", "prefill", "commit",
        "load", "warmup", "capture",
    }  # fmt: skip
    assert 2 * len(heard.names("push")) == len(heard.events)
    records = {record.step: record for record in engine.timeline().records()}
    launches = [event[1:] for event in heard.events if event[0] == "push"]
    replays, prefills = (
        [payload for name, payload in launches if name == wanted]
        for wanted in (ranges.REPLAY, ranges.PREFILL)
    )
    assert len(replays) == sum(not record.prefill_tokens for record in records.values())
    assert len(prefills) == sum(record.prefill_tokens > 0 for record in records.values())
    for shown in replays:
        record = records[shown.step]
        assert (shown.rows, shown.bucket) == (record.rows, record.bucket)
        assert shown.tokens == record.rows
        assert (shown.tokens + shown.padding) == shown.bucket
    assert [shown.rows for shown in prefills] == [0, 3]
    for shown in prefills:
        record = records[shown.step]
        assert (shown.rows, shown.bucket) == (record.rows, record.bucket)
        assert shown.tokens == record.rows + record.prefill_tokens <= shown.bucket
        assert shown.padding == 0
    for shown in (*replays, *prefills):
        assert shown.blocks_in_use == records[shown.step].blocks_in_use > 0
    assert any(shown.padding for shown in replays)


@pytest.fixture
def recorder() -> Iterator[Heard]:
    recorder = Heard()
    with ranges.listening(recorder):
        yield recorder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, recorder: Heard) -> Heard:
    """A process that works with CUDA; what is done to the device is recorded too."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda.profiler, "start"),
        (torch.cuda.profiler, "stop"),
    ):
        monkeypatch.setattr(owner, name, lambda name=name: recorder.events.append((name,)))
    return recorder


def test_a_window_without_cuda_is_a_range(recorder: Heard) -> None:
    assert not torch.cuda.is_initialized()
    with capture_window():
        recorder.events.append(("inside",))
    assert recorder.said() == ["push window", "inside", "pop"]


def test_a_window_holds_the_work_that_was_started_in_it(cuda: Heard) -> None:
    """Also if it ends with an exception, which leaves nothing open."""
    for error in (ValueError, KeyboardInterrupt, None):
        cuda.events.clear()
        with contextlib.suppress(error or ()), capture_window():
            cuda.events.append(("inside",))
            if error is not None:
                raise error
        assert cuda.said() == [
            "synchronize", "start", "push window", "inside", "synchronize", "pop", "stop",
        ]  # fmt: skip


def test_a_second_window_is_an_error_and_the_first_stays_open(cuda: Heard) -> None:
    def second() -> None:
        with pytest.raises(CaptureWindowError), capture_window():
            pytest.fail("it is not open")

    with ThreadPoolExecutor() as pool, capture_window():
        before = cuda.said()
        second()
        pool.submit(second).result()
        assert cuda.said() == before
    assert cuda.said()[-2:] == ["pop", "stop"]
