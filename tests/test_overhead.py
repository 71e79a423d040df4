"""The measured instrumentation is that of a steady step of an engine."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stepgraph.profiling import ranges
from stepgraph.profiling.collector import CollectorWatch
from stepgraph.profiling.overhead import instrument_steps, measure_overhead
from stepgraph.profiling.timeline import Timeline
from stepgraph.runtime import Engine
from stepgraph.runtime.bench.instrumentation import (
    instrumentation_to_json,
    scopes_of_a_launch,
)
from stepgraph.runtime.bench.scenarios.host_overhead import HostRig
from stepgraph.runtime.execution import outputs as launch
from stepgraph.runtime.execution.outputs import HostOutputs

from .fake_graphs import FakeGraphs, FakeStream, fake_events, make_fake_graphs  # noqa: F401
from .listeners import Heard

WARM = 4
STEPS = 3


class Trace(Heard):
    """All instrumentation of steps: ranges, reads of the clock, records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._patch = monkeypatch

    def watch(self, owner: Any, name: str, shown: Callable[..., tuple[Any, ...]]) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._note(*shown(*args, **kwargs))
            return original(*args, **kwargs)

        self._patch.setattr(owner, name, noted)

    def begin(self) -> None:
        """Watch from here on."""
        self.watch(time, "perf_counter_ns", lambda: ("clock",))
        self.watch(Timeline, "record", lambda timeline, *values: ("record", len(values)))

    def shape(self) -> list[tuple[Any, ...]]:
        """Without the numbers that are those of the rig."""
        return [event[:2] if event[0] == "push" else event for event in self.events]


def trace_of_an_engine(monkeypatch: pytest.MonkeyPatch, *, is_async_device: bool) -> Trace:
    rig = HostRig(
        5, 3, num_blocks=200, num_steps=40, block_size=1024, in_flight=int(is_async_device)
    )
    trace = Trace(monkeypatch)
    if is_async_device:
        stream = FakeStream()
        outputs = HostOutputs(5, rig.runner.max_prefill_rows, 1024, device=torch.device("cpu"))
        outputs._events = fake_events(stream)
        monkeypatch.setattr(launch, "current_stream", lambda device: stream)
        rig.runner.outputs = outputs
    for _ in range(WARM):
        rig.loop.step()
    trace.begin()
    with ranges.listening(trace):
        for _ in range(STEPS):
            rig.loop.step()
    assert rig.loop.timeline.records()[-1].rows == 5
    return trace


def trace_of_what_is_measured(monkeypatch: pytest.MonkeyPatch, *, is_async_device: bool) -> Trace:
    trace = Trace(monkeypatch)
    trace.begin()
    watch = CollectorWatch()
    with ranges.listening(trace):
        instrument_steps(STEPS, Timeline(8), watch, is_async_device=is_async_device)
    watch.close()
    return trace


@pytest.fixture
def no_collection() -> Iterator[None]:
    """The collector looks at the clock whenever it runs."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("is_async_device", [False, True])
def test_what_is_measured_is_what_a_steady_step_does(is_async_device: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        engine = trace_of_an_engine(patch, is_async_device=is_async_device)
    with pytest.MonkeyPatch.context() as patch:
        measured = trace_of_what_is_measured(patch, is_async_device=is_async_device)
    assert measured.shape() == engine.shape()
    assert measured.names("push") == ["step", "plan", "launch", "replay", "commit"] * STEPS
    records = [event for event in measured.shape() if event[0] == "record"]
    assert records == [("record", 14)] * STEPS


def test_listeners_and_scopes_are_in_the_measurement() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def scope(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    heard = Heard()
    with ranges.listening(heard):
        overhead = measure_overhead(rounds=2, steps=3, scope=scope, scopes=5)
    assert (overhead.rounds, overhead.launches_per_round) == (2, 3)
    assert overhead.ns_per_launch > 0
    assert heard.names("push").count("step") == 3 * 3, "one round warms up"
    assert len(entered) == 3 * 3 * 5
    with pytest.raises(ValueError, match="both must be at least 1"):
        measure_overhead(steps=0)


def test_the_scopes_of_a_launch_are_counted(open_engine: Callable[..., Engine]) -> None:
    one, two = (open_engine("base", steps_per_launch=steps) for steps in (1, 2))
    scopes = scopes_of_a_launch(one)
    assert scopes > one.model_config.num_layers
    assert scopes_of_a_launch(two) == 2 * scopes + 1  # the scope `outputs`
    one.check_integrity()


def test_a_replay_has_no_scopes(
    open_engine: Callable[..., Engine],
    fake_graphs: FakeGraphs,
) -> None:
    engine = open_engine("base", mode="graph", compile=False, max_model_len=64)
    assert scopes_of_a_launch(engine) == 0


def test_the_share_is_that_of_the_fastest_step(open_engine: Callable[..., Engine]) -> None:
    for steps_per_launch in (1, 4):
        engine = open_engine("base", steps_per_launch=steps_per_launch)
        shown = instrumentation_to_json(engine, [3.0, 0.5, 1.0])
        assert 0 < shown["ns_per_step"] < 1e6
        assert shown["fraction"] == pytest.approx(shown["ns_per_step"] / 0.5e6)
