"""What the timeline says of the device's time, by events of a device that works behind the host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from stepgraph.profiling.timeline import StepRecord, Timeline
from stepgraph.runtime import Engine

from ..rigs.engine_rig import Open, greedy, loop_of
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401

CAPTURED = {
    "mode": "graph",
    "compile": False,
    "max_model_len": 96,
    "buckets": (1, 4),
    "prefill_chunk": 16,
}


class Rig:
    """An engine, and for each of its steps what the device will have worked on it."""

    def __init__(self, engine: Engine, graphs: FakeGraphs) -> None:
        graphs.stream.behind = True
        self.engine = engine
        self.graphs = graphs
        self.expected: dict[int, int] = {}

    def add(self, *prompts: list[int], max_tokens: int = 12) -> None:
        for prompt in prompts:
            self.engine.add_request(prompt, greedy(max_tokens))

    def step(self) -> None:
        number, logged = self.engine.stats()["steps"], len(self.graphs.log)
        self.engine.step()
        replays = [e[1] for e in self.graphs.log[logged:] if e[0] == "replay"]
        if replays:
            self.expected[number] = sum(self.graphs.graphs[i].duration_ns for i in replays)

    def drain(self) -> None:
        while self.engine.has_unfinished():
            self.step()

    def shown(self) -> dict[int, int | None]:
        return {record.step: record.device_ns for record in self.engine.timeline().records()}


@pytest.fixture
def rig(open_engine: Open, fake_graphs: FakeGraphs) -> Iterator[Rig]:
    rig = Rig(open_engine("micro", **CAPTURED), fake_graphs)
    with rig.engine.device_timing() as timeline:
        assert timeline is rig.engine.timeline()
        yield rig


def test_every_step_has_the_time_of_its_own_replays(rig: Rig) -> None:
    rig.add([1, 2, 3], [4, 5])
    for _ in range(4):
        rig.step()
    rig.add([6, 7, 8, 9], [3])
    rig.drain()
    assert rig.shown() == rig.expected
    assert len(set(rig.expected.values())) > 2, "chunks, decode steps, and both in one"
    rig.add([5, 6, 7])  # and after a pause
    rig.drain()
    assert rig.shown() == rig.expected
    for before, after in pairwise(rig.engine.timeline().records()):
        assert before.is_async_device
        assert before.started_ns < before.ended_ns < after.started_ns


@pytest.mark.parametrize("capacity", [1, 3])
def test_it_goes_to_the_right_record_of_a_ring_that_wraps(rig: Rig, capacity: int) -> None:
    loop_of(rig.engine).timeline = Timeline(capacity, is_async_device=True)
    rig.add([1, 2, 3], [4, 5])
    for _ in range(9):
        rig.step()
        *earlier, latest = rig.engine.timeline().records()
        assert latest.device_ns is None
        assert [r.device_ns for r in earlier] == [rig.expected[r.step] for r in earlier]
    rig.drain()
    assert rig.shown() == dict(list(rig.expected.items())[-capacity:])


def test_joins_and_blocks_are_those_of_the_step(rig: Rig) -> None:
    rig.add([1, 2, 3], [4, 5])
    shown: list[tuple[StepRecord, int]] = []
    for turn in range(30):
        if turn == 4:
            rig.add([6] * 20)
        if not rig.engine.has_unfinished():
            break
        before: Any = rig.engine.timeline().recorded
        rig.step()
        blocks = rig.engine.stats()["blocks"]
        if rig.engine.timeline().recorded > before:
            held = blocks["usable"] - blocks["free"]
            shown.append((rig.engine.timeline().records()[-1], held))
    assert [record.joined for record, _ in shown[:6]] == [2, 0, 0, 0, 1, 0]
    assert sum(record.joined for record, _ in shown) == 3
    # What finishes is given back behind the launch.
    assert all(record.blocks_in_use >= held for record, held in shown)
    assert [r.blocks_in_use for r, _ in shown[:3]] == [held for _, held in shown[:3]]
    assert shown[5][0].blocks_in_use > shown[3][0].blocks_in_use > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_on_cuda_every_finished_step_is_timed(open_engine: Open, mode: str) -> None:
    engine = open_engine("base", device="cuda", mode=mode, compile=False)
    with engine.device_timing() as timeline:
        engine.generate([[1, 2, 3]], greedy(20))
    records = timeline.records()
    assert len(records) >= 20
    first, last = records[0], records[-1]
    worked = [record.device_ns for record in records]
    assert all(ns is not None and ns > 0 for ns in worked)
    assert sum(ns or 0 for ns in worked) < last.ended_ns - first.started_ns
