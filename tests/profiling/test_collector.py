"""Python's garbage collector under watch: counted, timed, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from stepgraph.profiling.collector import CollectorWatch

from ..rigs.engine_rig import Open, greedy, loop_of


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The collector runs when it is called, and what watches it is gone at the end."""
    gc.collect()
    gc.disable()
    gc.freeze()  # so that a collection looks at what the test makes, and at nothing else
    before = gc.callbacks.copy()
    yield
    gc.collect()
    gc.enable()
    assert gc.callbacks == before


def test_collections_are_counted_and_timed() -> None:
    watch = CollectorWatch()
    assert (watch.collections, watch.total_ns) == (0, 0)
    for number in range(1, 4):
        before = watch.total_ns
        gc.collect()
        assert watch.collections == number
        assert watch.total_ns > before
    watch.close()
    watch.close()
    counted = (watch.collections, watch.total_ns)
    gc.collect()
    assert (watch.collections, watch.total_ns) == counted
    CollectorWatch()  # one that is dropped stops too: see `alone`


def test_an_engine_watches_as_long_as_it_is_open(open_engine: Open) -> None:
    before = len(gc.callbacks)
    first, second = open_engine("base"), open_engine("micro")
    assert len(gc.callbacks) == before + 2
    gc.collect()
    first.close()
    gc.collect()
    assert len(gc.callbacks) == before + 1
    assert second.stats()["collector"]["collections"] == 2
    assert second.stats()["collector"]["seconds"] > 0
    second.close()


def test_a_step_knows_what_the_collector_took_of_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("micro")
    engine.add_request([1, 2, 3], greedy(9))
    plan = loop_of(engine).scheduler.plan
    collects = iter([False, True, False, True, True, False])

    def plan_and_collect(**kwargs: bool) -> object:
        if next(collects):
            gc.collect()
        return plan(**kwargs)

    monkeypatch.setattr(loop_of(engine).scheduler, "plan", plan_and_collect)
    for _ in range(6):
        engine.step()
        gc.collect()  # between two steps: no part of either
    records = engine.timeline().records()
    held_up = [number for number, record in enumerate(records) if record.collected_ns > 0]
    assert held_up == [1, 3, 4]
    for record in records:
        assert record.collected_ns <= record.plan_ns
