"""Whoever listens hears all ranges and marks while it lasts, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stepgraph.profiling import ranges
from stepgraph.runtime import Engine, SamplingParams

from .listeners import Heard

FUNCTIONS = ("span", "step_span", "mark")


def functions() -> list[Any]:
    return [getattr(ranges, name) for name in FUNCTIONS]


class ListenersComeAndGo(RuleBasedStateMachine):
    """Each hears what happens while it listens, and the end of what it heard begin."""

    def __init__(self) -> None:
        super().__init__()
        self.before = functions()
        self.listeners: list[tuple[Any, Heard]] = []
        self.expected: dict[int, list[tuple[Any, ...]]] = {}
        self.open: list[tuple[Any, list[Heard]]] = []

    def tell(self, *event: Any, to: list[Heard] | None = None) -> None:
        for heard in [h for _, h in self.listeners] if to is None else to:
            self.expected[id(heard)].append(event)

    @rule()
    def come(self) -> None:
        heard = Heard()
        listening = ranges.listening(heard)
        listening.__enter__()
        self.listeners.append((listening, heard))
        self.expected[id(heard)] = []

    @precondition(lambda self: self.listeners)
    @rule(data=st.data(), error=st.sampled_from([None, KeyboardInterrupt]))
    def go(self, data: st.DataObject, error: type[BaseException] | None) -> None:
        which = data.draw(st.integers(0, len(self.listeners) - 1))
        listening, heard = self.listeners.pop(which)
        if error is None:
            listening.__exit__(None, None, None)
        else:
            raised = error()
            with contextlib.suppress(error):
                listening.__exit__(error, raised, None)
        self.finished(heard, still_open=[h for _, own in self.open for h in own])

    def finished(self, heard: Heard, still_open: list[Heard]) -> None:
        if heard not in still_open:
            assert heard.events == self.expected.pop(id(heard))

    @rule(name=st.sampled_from([ranges.STEP, ranges.COPY]), payload=st.integers(0, 9))
    def enter_span(self, name: str, payload: int) -> None:
        span = ranges.span(name, payload)
        span.__enter__()
        self.tell("push", name, payload)
        self.open.append((span, [heard for _, heard in self.listeners]))

    @rule(numbers=st.tuples(*[st.integers(0, 9)] * 6))
    def enter_step_span(self, numbers: tuple[int, ...]) -> None:
        span = ranges.step_span(ranges.REPLAY, *numbers)
        span.__enter__()
        self.tell("push", ranges.REPLAY, numbers)
        self.open.append((span, [heard for _, heard in self.listeners]))

    @precondition(lambda self: self.open)
    @rule()
    def leave_span(self) -> None:
        span, own = self.open.pop()
        span.__exit__(None, None, None)
        self.tell("pop", to=own)
        listening = [heard for _, heard in self.listeners]
        for heard in own:
            if heard not in listening:
                self.finished(heard, [h for _, rest in self.open for h in rest])

    @rule(bucket=st.integers(0, 9))
    def fallback(self, bucket: int) -> None:
        ranges.mark(ranges.FALLBACK, bucket)
        self.tell("mark", ranges.FALLBACK, (bucket,))

    @invariant()
    def everybody_heard_what_happened(self) -> None:
        for _, heard in self.listeners:
            assert heard.events == self.expected[id(heard)]

    @invariant()
    def without_listeners_everything_is_as_before(self) -> None:
        if not self.listeners:
            assert functions() == self.before

    def teardown(self) -> None:
        while self.open:
            self.leave_span()
        while self.listeners:
            self.listeners.pop()[0].__exit__(None, None, None)
        assert functions() == self.before


TestListenersComeAndGo = ListenersComeAndGo.TestCase


class Failing(Heard):
    """Raises at one of the events, counted from 0."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def _note(self, *event: Any) -> None:
        if len(self.events) == self.at:
            raise RuntimeError("out of paper")
        super()._note(*event)


@pytest.mark.parametrize("at", range(5))
def test_a_listener_that_fails_breaks_nothing_and_hears_no_more(
    at: int, caplog: pytest.LogCaptureFixture
) -> None:
    failing, heard = Failing(at), Heard()
    with (
        ranges.listening(failing),
        ranges.listening(heard),
        ranges.span(ranges.STEP, 1),
        ranges.step_span(ranges.REPLAY, *range(6)),
    ):
        ranges.mark(ranges.FALLBACK, 2)
    assert heard.names("push") == ["step", "replay"]
    assert [event[0] for event in heard.events] == ["push", "push", "mark", "pop", "pop"]
    assert failing.events == heard.events[:at]
    (record,) = caplog.records
    assert "hears of no more ranges" in record.message
    assert "out of paper" in str(record.exc_info)


def test_an_engine_goes_on_when_a_listener_fails(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("micro")
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    alone = engine.generate([[1, 2]], params)
    with ranges.listening(Failing(7)):
        observed = engine.generate([[1, 2]], params)
    assert observed[0].token_ids == alone[0].token_ids
    engine.check_integrity()


def test_a_listener_hears_every_thread() -> None:
    heard = Heard()

    def work() -> None:
        with ranges.span(ranges.STEP, 5):
            pass

    with ranges.listening(heard):
        thread = threading.Thread(target=work, name="other")
        thread.start()
        thread.join()
        with ranges.span(ranges.STEP, 6):
            pass
    assert heard.events == [("push", "step", 5), ("pop",), ("push", "step", 6), ("pop",)]
    assert heard.threads[:2] == ["other", "other"]


def test_it_ends_with_an_exception_and_passes_it_on() -> None:
    before = functions()
    with pytest.raises(RuntimeError, match="passes"), ranges.listening(Heard()):
        raise RuntimeError("passes")
    assert functions() == before


def test_a_listener_put_in_place_later_hears_an_engine(
    open_engine: Callable[..., Engine],
) -> None:
    """Nobody keeps a function of `ranges` that was there when its module was imported."""
    heard = Heard()
    with ranges.listening(heard):
        engine = open_engine("base", mode="compile", compile=False, max_num_seqs=2)
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
    names = set(heard.names("push"))
    assert names == {
        "step", "plan", "launch", "prepare", "copy", "replay", "prefill", "commit",
        "load", "warmup", "capture",
    }  # fmt: skip
    assert heard.names("push").count("replay") == 3
    assert len(heard.names("push")) == sum(event == ("pop",) for event in heard.events)


@pytest.mark.parametrize("steps_per_launch", [1, 4])
def test_launches_carry_the_numbers_of_their_step(
    open_engine: Callable[..., Engine], steps_per_launch: int
) -> None:
    engine = open_engine("base", buckets=(2, 4), steps_per_launch=steps_per_launch)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for prompt in ([1, 2, 3], [4] * 20, [5, 6]):
        engine.add_request(prompt, params)
    heard = Heard()
    with ranges.listening(heard):
        while engine.has_unfinished():
            engine.step()
    records = {record.step: record for record in engine.timeline().records()}
    launches = [event[1:] for event in heard.events if event[0] == "push"]
    replays, prefills = (
        [payload for name, payload in launches if name == wanted]
        for wanted in (ranges.REPLAY, ranges.PREFILL)
    )
    assert len(replays) == sum(record.rows > 0 for record in records.values())
    assert len(prefills) == sum(record.prefill_tokens > 0 for record in records.values())
    for shown in replays:
        record = records[shown.step]
        assert (shown.rows, shown.bucket) == (record.rows, record.bucket)
        assert shown.tokens == record.rows * record.steps
        assert (shown.tokens + shown.padding) == shown.bucket * record.steps
    for shown in prefills:
        assert shown.rows == 0
        assert shown.tokens == records[shown.step].prefill_tokens
        assert shown.tokens + shown.padding == shown.bucket
    for shown in (*replays, *prefills):
        assert shown.blocks_in_use == records[shown.step].blocks_in_use > 0
    assert any(shown.padding for shown in replays)
    assert any(record.steps == steps_per_launch for record in records.values())
