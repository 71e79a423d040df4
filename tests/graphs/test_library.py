"""Key -> step: preparation in order, hits and misses, padding, what each step took."""

import gc
import logging
import weakref
from collections import Counter as Tally
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stepgraph.graphs.library import StepLibrary, StepReport
from stepgraph.graphs.steps import (
    Capture,
    CapturedStep,
    CompiledStep,
    EagerStep,
    StepPreparationError,
)


@dataclass(frozen=True)
class Key:
    """A decode step of so many rows that reads so many blocks."""

    rows: int
    read_blocks: int = 4


class PoolCapturer:
    """Counts memory as a shared pool does: it grows only by what it lacks."""

    def __init__(self):
        self.pool_bytes = 0
        self.order = []

    def warm_up(self, fn):
        fn()

    def capture(self, fn):
        output = fn()
        self.order.append(output.numel())
        growth = max(0, output.nbytes - self.pool_bytes)
        self.pool_bytes += growth
        return Capture(lambda: output.copy_(fn()), output, growth)


class Runner:
    """Makes steps that answer with their key, `rows` times, and counts what it makes."""

    def __init__(self):
        self.capturer = PoolCapturer()
        self.made = []
        self.fallbacks = []

    def fn(self, key):
        return lambda: torch.full((key.rows,), 1000.0 * key.read_blocks + key.rows)

    def make_step(self, key):
        self.made.append(key)
        return CapturedStep(self.fn(key), str(key), self.capturer)

    def make_fallback(self, key):
        self.fallbacks.append(key)
        return EagerStep(self.fn(key), str(key))

    def library(self, keys, **replaced):
        makers = {"make_step": self.make_step, "make_fallback": self.make_fallback} | replaced
        return StepLibrary(keys=keys, size_of=lambda key: key.rows, **makers)


KEYS = [Key(1), Key(8), Key(2), Key(16, 4), Key(16, 2), Key(4)]


def test_captures_largest_first_in_one_pool():
    runner = Runner()
    library = runner.library([*KEYS, Key(8)])
    seen = []
    library.prepare(lambda done, total, key: seen.append((done, total, key)))
    order = [Key(16, 4), Key(16, 2), Key(8), Key(4), Key(2), Key(1)]
    assert runner.made == order  # a key given twice is made once
    assert runner.capturer.order == [key.rows for key in order]
    assert seen == [(i, 12, key) for i, key in enumerate(order * 2, start=1)]
    reports = library.reports()
    assert [report.key for report in reports] == order
    assert [report.bytes for report in reports] == [64, 0, 0, 0, 0, 0]
    assert all(report.seconds > 0 and report.kind == "graph" for report in reports)
    assert isinstance(reports[0], StepReport)


@pytest.mark.parametrize("kind", ["graph", "compile"])
def test_all_is_warmed_up_before_anything_is_captured(kind):
    runner, log = Runner(), []

    class Watcher:
        def warmed_up(self, key):
            log.append(key.rows)

        def begin_captures(self):
            log.append(f"{len(runner.capturer.order)} captured")

        def end_captures(self):
            log.append(f"{len(runner.capturer.order)} captured")

    make_step = runner.make_step
    if kind == "compile":
        make_step = lambda key: CompiledStep(runner.fn(key), str(key))  # noqa: E731
    seen = []
    library = runner.library([Key(1), Key(4)], make_step=make_step)
    library.prepare(lambda done, total, key: seen.append((done, total)), Watcher())
    captures = 2 * (kind == "graph")
    assert log == [4, 1, "0 captured", f"{captures} captured"]
    assert seen == [(done, 2 + captures) for done in range(1, 3 + captures)]


def test_a_miss_is_served_counted_and_logged_once(caplog):
    runner = Runner()
    library = runner.library(KEYS)
    library.prepare()
    with caplog.at_level(logging.WARNING, "stepgraph.graphs"):
        for _ in range(5):
            assert library.run(Key(3)).tolist() == [4003.0] * 3
        library.run(Key(16, 9))
        library.run(Key(16, 2))
    stats = library.stats()
    assert (stats.hits, stats.misses) == (1, 6)
    assert stats.missed_keys == (Key(3), Key(16, 9))
    assert runner.fallbacks == [Key(3), Key(16, 9)]
    assert stats.steps == len(KEYS) == len(library.reports())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "Key(rows=3, read_blocks=4): a slower 'eager' step runs instead" in messages[0]


def test_failure_at_start_is_an_error_with_its_reason(caplog):
    def broken(key):
        def fn():
            if key.rows == 2:
                raise MemoryError("no room for 136 MiB")
            return torch.ones(key.rows)

        return CompiledStep(fn, str(key))

    library = Runner().library(KEYS, make_step=broken)
    with pytest.raises(StepPreparationError) as caught:
        library.prepare()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert library.reports() == []  # what was prepared before is let go
    assert not caplog.records
    with pytest.raises(AssertionError):
        library.run(Key(16, 4))


def test_close_lets_go_of_every_step():
    library = Runner().library(KEYS)
    library.prepare()
    library.run(Key(5))
    steps = *library._steps.values(), *library._fallbacks.values()
    alive = [weakref.ref(step) for step in steps]
    del steps
    library.close()
    library.close()
    gc.collect()
    assert [step() for step in alive] == [None] * 7
    assert library.stats().missed_keys == (Key(5),)
    library.prepare()
    assert library.run(Key(2)).tolist() == [4002.0] * 2


class LibraryAgainstATally(RuleBasedStateMachine):
    """Any traffic: right outputs, and counters that add up."""

    def __init__(self):
        super().__init__()
        self.runner = Runner()
        self.library = self.runner.library(KEYS)
        self.library.prepare()
        self.runs = Tally()
        self.lanes = [0, 0]

    @rule(rows=st.integers(1, 17), read_blocks=st.sampled_from([2, 4]))
    def run_step(self, rows, read_blocks):
        output = self.library.run(Key(rows, read_blocks))
        assert output.tolist() == [1000.0 * read_blocks + rows] * rows
        self.runs[Key(rows, read_blocks)] += 1

    @rule(used=st.integers(0, 16), padding=st.integers(0, 16))
    def pad(self, used, padding):
        self.library.record_padding(used, used + padding)
        self.lanes[0] += used
        self.lanes[1] += padding

    @invariant()
    def adds_up(self):
        stats = self.library.stats()
        assert stats.hits == sum(n for key, n in self.runs.items() if key in KEYS)
        assert stats.misses == sum(n for key, n in self.runs.items() if key not in KEYS)
        assert set(stats.missed_keys) == self.runs.keys() - set(KEYS)
        assert self.runner.fallbacks == list(stats.missed_keys)
        assert [stats.used_lanes, stats.padded_lanes] == self.lanes


TestLibraryAgainstATally = LibraryAgainstATally.TestCase
TestLibraryAgainstATally.settings = settings(max_examples=30, deadline=None)
