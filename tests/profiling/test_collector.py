"""Python's garbage collector under watch: counted, timed, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from stepgraph.profiling import collector
from stepgraph.profiling.collector import CollectorWatch
from stepgraph.runtime import Engine, SamplingParams


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody else watches, and the collector runs when it is called."""
    others = gc.callbacks.copy()
    before = [callback for callback in others if callback is not collector._on_collection]
    gc.callbacks[:] = before
    monkeypatch.setattr(collector, "_watches", [])  # engines that other tests have open
    gc.collect()
    gc.disable()
    gc.freeze()  # so that a collection looks at what the test makes, and at nothing else
    yield
    gc.collect()
    gc.enable()
    left = gc.callbacks.copy(), collector._watches
    gc.callbacks[:] = others
    assert left == (before, [])


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


def test_an_engine_watches_as_long_as_it_is_open(open_engine: Callable[..., Engine]) -> None:
    first, second = open_engine("base"), open_engine("micro")
    assert len(collector._watches) == 2
    gc.collect()
    first.close()
    gc.collect()
    first.close()
    assert len(collector._watches) == 1
    assert second.stats()["collector"]["collections"] == 2
    assert second.stats()["collector"]["seconds"] > 0
    second.close()
    assert collector._on_collection not in gc.callbacks


def test_a_step_knows_what_the_collector_took_of_it(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("micro")
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    plan = engine._loop.scheduler.plan
    collects = iter([False, True, False, True, True, False])

    def plan_and_collect(**kwargs: bool) -> object:
        if next(collects):
            gc.collect()
        return plan(**kwargs)

    monkeypatch.setattr(engine._loop.scheduler, "plan", plan_and_collect)
    for _ in range(6):
        engine.step()
        gc.collect()  # between two steps: no part of either
    records = engine.timeline().records()
    held_up = [number for number, record in enumerate(records) if record.collected_ns > 0]
    assert held_up == [1, 3, 4]
    for record in records:
        assert record.collected_ns <= record.plan_ns
