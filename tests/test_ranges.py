import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stepgraph.profiling import ranges
from stepgraph.profiling.dictionary import COUNTERS, STEP_NUMBERS

from .listeners import Listening

PLAIN = sorted(name for name, info in ranges.RANGES.items() if not info.fields)
OF_STEPS = sorted(set(ranges.RANGES) - set(PLAIN))
int64 = st.integers(-(2**63), 2**63 - 1)
numbers = st.tuples(*[int64] * len(STEP_NUMBERS))


class Recorder:
    """An NVTX domain that writes down what a tool would see."""

    def __init__(self) -> None:
        self.registered: list[tuple[str, int, str]] = []
        self.events: list[tuple[Any, ...]] = []
        self.counters: list[tuple[str, tuple[str, ...], str]] = []
        self.samples: list[tuple[int, ...]] = []

    def get_event_attributes(self, message: str, color: int, category: str) -> SimpleNamespace:
        self.registered.append((message, color, category))
        return SimpleNamespace(message=message, payload=None)

    def get_counter(self, name: str, dtype: "np.dtype[Any]", *, description: str) -> Any:
        self.counters.append((name, dtype.names, description))
        return SimpleNamespace(sample=lambda record: self.samples.append(record.item()))

    def payload_of(self, attributes: SimpleNamespace) -> int | tuple[int, ...]:
        """What NVTX reads at the event: an integer, or what is then at the address of a record."""
        payload = attributes.payload
        if type(payload) is int:
            return payload
        assert type(payload) is np.ndarray, "nvtx looks at the exact type"
        assert payload.shape == ()
        assert all(payload.dtype[name] == np.int64 for name in payload.dtype.names)
        assert payload.dtype.itemsize == 8 * len(payload.dtype.names)
        return tuple(payload.item())

    def push_range(self, attributes: SimpleNamespace) -> None:
        self.events.append(("push", attributes.message, self.payload_of(attributes)))

    def pop_range(self) -> None:
        self.events.append(("pop",))

    def mark(self, attributes: SimpleNamespace) -> None:
        self.events.append(("mark", attributes.message, self.payload_of(attributes)))


class EmitterAgainstStack(RuleBasedStateMachine):
    """An emitter into a domain, and listeners that come and go, against stacks of open ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.emitter = ranges.connect(self.recorder)
        self.stack: list[tuple[str, Any]] = []
        self.spans: list[contextlib.AbstractContextManager[None]] = []
        self.marks: list[tuple[str, Any]] = []

    @rule(name=st.sampled_from(PLAIN), payload=int64)
    def enter(self, name: str, payload: int) -> None:
        self.spans.append(self.emitter.span(name, payload))
        self.spans[-1].__enter__()
        self.stack.append((name, payload))

    @precondition(lambda self: self.stack)
    @rule()
    def leave(self) -> None:
        self.spans.pop().__exit__(None, None, None)
        self.stack.pop()

    @rule(name=st.sampled_from(PLAIN), payload=int64, fails=st.booleans())
    def span(self, name: str, payload: int, fails: bool) -> None:
        self.within(self.emitter.span(name, payload), (name, payload), fails)

    @rule(name=st.sampled_from(OF_STEPS), payload=numbers, fails=st.booleans())
    def step_span(self, name: str, payload: tuple[int, ...], fails: bool) -> None:
        self.within(self.emitter.step_span(name, *payload), (name, payload), fails)
        assert self.recorder.samples[-1] == payload, "counters are sampled with it"

    def within(
        self, span: contextlib.AbstractContextManager[None], shown: tuple[str, Any], fails: bool
    ) -> None:
        try:
            with span:
                assert self.open() == [*self.stack, shown]
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails

    @rule(generation=st.integers(0, 2), microseconds=int64, collected=int64)
    def collection(self, **fields: int) -> None:
        self.emitter.mark(ranges.COLLECTION, *fields.values())
        self.marks.append((ranges.COLLECTION, tuple(fields.values())))

    @rule(bucket=int64)
    def fallback(self, bucket: int) -> None:
        self.emitter.mark(ranges.FALLBACK, bucket)
        self.marks.append((ranges.FALLBACK, bucket))

    def open(self) -> list[tuple[str, Any]]:
        stack: list[tuple[str, Any]] = []
        for kind, *event in self.recorder.events:
            if kind == "push":
                stack.append((event[0], event[1]))
            elif kind == "pop":
                stack.pop()
        return stack

    @invariant()
    def a_tool_sees_the_same_open_ranges(self) -> None:
        assert self.open() == self.stack

    @invariant()
    def a_tool_sees_every_mark(self) -> None:
        marks = [event[1:] for event in self.recorder.events if event[0] == "mark"]
        assert marks == self.marks

    @invariant()
    def every_message_is_registered_once(self) -> None:
        assert len(self.recorder.registered) == len(ranges.RANGES) + len(ranges.MARKS)


TestEmitterAgainstStack = EmitterAgainstStack.TestCase


def test_the_dictionary_is_complete_and_sound() -> None:
    assert set(ranges.RANGES) == {
        "step", "plan", "launch", "prepare", "copy", "replay", "prefill", "commit", "capture",
        "load", "warmup", "swap", "fork", "window",
    }  # fmt: skip
    assert set(ranges.MARKS) == {"collection", "fallback"}
    assert set(ranges.RANGES).isdisjoint(ranges.MARKS)
    assert OF_STEPS == ["prefill", "replay"]
    for name, info in ranges.RANGES.items():
        assert info.name == name
        assert name.isalpha(), "a name holds no id"
        assert info.description
        assert info.payload
        assert 0xFF000000 <= info.color <= 0xFFFFFFFF, "opaque ARGB"
        seen = {name}
        while info.parent is not None:
            assert info.parent in ranges.RANGES
            assert info.parent not in seen
            seen.add(info.parent)
            info = ranges.RANGES[info.parent]
    for mark in ranges.MARKS.values():
        assert mark.description
        assert mark.fields
    with pytest.raises(TypeError):
        ranges.RANGES["step"] = ranges.RANGES["plan"]  # type: ignore[index]


def test_every_range_is_registered_with_its_color_and_category() -> None:
    recorder = Recorder()
    ranges.connect(recorder)
    infos = (*ranges.RANGES.values(), *ranges.MARKS.values())
    assert recorder.registered == [(i.name, i.color, i.category) for i in infos]
    (group,) = COUNTERS.values()
    fields = tuple(field.name for field in group.fields)
    assert recorder.counters == [(group.name, fields, group.description)]
    assert fields == ranges.StepNumbers._fields


EVERY_EMITTER = [ranges.connect(None), ranges.connect(Recorder()), ranges, Listening()]


@pytest.mark.parametrize("emitter", EVERY_EMITTER)
@given(name=st.text().filter(lambda text: text not in {*ranges.RANGES, *ranges.MARKS}))
def test_an_unknown_name_fails_whether_or_not_anybody_listens(emitter: Any, name: str) -> None:
    unknown = r"unknown range .*the ranges are: step, plan"
    with pytest.raises(ValueError, match=unknown):
        emitter.span(name)
    with pytest.raises(ValueError, match=unknown):
        emitter.step_span(name, 1, 2, 3, 4, 5, 6)
    with pytest.raises(ValueError, match=r"unknown mark .*the marks are: collection, fallback"):
        emitter.mark(name, 1)


@pytest.mark.parametrize("emitter", EVERY_EMITTER)
def test_a_payload_of_the_wrong_kind_fails_whether_or_not_anybody_listens(emitter: Any) -> None:
    for name in OF_STEPS:
        with pytest.raises(ValueError, match=f"{name}.* is the step's numbers: use step_span"):
            emitter.span(name, 1)
    for name in PLAIN:
        with pytest.raises(ValueError, match=f"{name}.* is one integer: use span"):
            emitter.step_span(name, 1, 2, 3, 4, 5, 6)
    with pytest.raises(ValueError, match=r"carries generation, microseconds, .*; got 1 numbers"):
        emitter.mark(ranges.COLLECTION, 1)
    with pytest.raises(ValueError, match="mark 'fallback' carries bucket; got 0 numbers"):
        emitter.mark(ranges.FALLBACK)


def test_integers_of_numpy_arrive_as_integers() -> None:
    recorder = Recorder()
    emitter = ranges.connect(recorder)
    with emitter.span(ranges.COPY, np.int32(7)), emitter.span(ranges.COPY, True):  # type: ignore[arg-type]
        pass
    emitter.mark(ranges.FALLBACK, np.int64(3))  # type: ignore[arg-type]
    with emitter.step_span(ranges.REPLAY, np.int64(1), 2, 3, True, 5, 6):  # type: ignore[arg-type]
        pass
    assert recorder.events == [
        ("push", "copy", 7),
        ("push", "copy", 1),
        ("pop",),
        ("pop",),
        ("mark", "fallback", 3),
        ("push", "replay", (1, 2, 3, 1, 5, 6)),
        ("pop",),
    ]


def test_threads_do_not_share_event_attributes() -> None:
    """Setting a payload and pushing are two calls: a shared object would mix two engines up."""
    seen: dict[str, set[int]] = {}

    class PerThread(Recorder):
        def push_range(self, attributes: SimpleNamespace) -> None:
            own = seen.setdefault(threading.current_thread().name, set())
            own |= {id(attributes), id(attributes.payload)}

    emitter = ranges.connect(PerThread())
    barrier = threading.Barrier(2)

    def work() -> None:
        for _ in range(3):
            with emitter.step_span(ranges.REPLAY, 1, 2, 3, 4, 5, 6):
                pass
        barrier.wait(timeout=10)

    threads = [threading.Thread(target=work, name=name) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen["a"]) == len(seen["b"]) == 2
    assert seen["a"].isdisjoint(seen["b"])


def test_without_a_tool_nothing_is_emitted_and_spans_pass_exceptions_on() -> None:
    emitter = ranges.connect(None)
    with emitter.span(ranges.STEP, 1) as outer, emitter.span(ranges.PLAN) as inner:
        assert outer is inner is None
    with pytest.raises(RuntimeError, match="passes"), emitter.span(ranges.STEP):
        raise RuntimeError("passes")


def test_ranges_that_nobody_hears_can_be_stacked() -> None:
    emitter = ranges.connect(None)

    def run() -> None:
        with contextlib.ExitStack() as stack:
            assert stack.enter_context(emitter.span(ranges.WINDOW)) is None
            stack.enter_context(emitter.span(ranges.STEP, 3))
            raise KeyError

    with pytest.raises(KeyError):
        run()


def test_a_mark_while_a_thread_s_events_are_being_built_is_left_out() -> None:
    """Building them makes objects, so it may run the collector, which tells of itself."""

    class Collecting(Recorder):
        def get_event_attributes(self, *args: Any) -> SimpleNamespace:
            if len(self.registered) == 3 and threading.current_thread().name == "late":
                emitter.mark(ranges.COLLECTION, 0, 1, 2)
            return super().get_event_attributes(*args)

    recorder = Collecting()
    emitter = ranges.connect(recorder)
    recorder.registered.clear()

    def work() -> None:
        with emitter.span(ranges.STEP, 4):
            pass

    thread = threading.Thread(target=work, name="late")
    thread.start()
    thread.join()
    assert recorder.events == [("push", "step", 4), ("pop",)]
    assert len(recorder.registered) == len(ranges.RANGES) + len(ranges.MARKS)
