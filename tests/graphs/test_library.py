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
from stepgraph.graphs.steps import Capture, Step, StepLibrary, StepPreparationError


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

    def capture(self, fn, identity=None):
        output = fn()
        self.order.append(output.numel())
        growth = max(0, output.nbytes - self.pool_bytes)
        self.pool_bytes += growth
        return Capture(lambda: output.copy_(fn()), output, growth)


class Runner:
    """Makes steps that answer with their key, `rows` times, and counts what it makes."""

    def __init__(self, kind="graph"):
        self.kind = kind
        self.capturer = PoolCapturer()
        self.made = []
        self.fallbacks = []

    def fn(self, key):
        return lambda: torch.full((key.rows,), 1000.0 * key.read_blocks + key.rows)

    def make_step(self, key):
        self.made.append(key)
        if self.kind == "compile":
            return Step("compile", self.fn(key), str(key))
        return Step("graph", self.fn(key), str(key), self.capturer)

    def make_fallback(self, key):
        self.fallbacks.append(key)
        return self.fn(key)

    def library(self, keys, make_step=None):
        make_step = make_step or self.make_step
        return StepLibrary(make_step, keys, lambda key: key.rows, self.make_fallback)


KEYS = [Key(1), Key(8), Key(2), Key(16, 4), Key(16, 2), Key(4)]


@pytest.mark.parametrize("kind", ["graph", "compile"])
def test_all_is_warmed_up_before_anything_is_captured_largest_first(kind):
    runner, seen, captured = Runner(kind), [], []

    def prepared(done, total, key):
        seen.append((done, total, key))
        captured.append(len(runner.capturer.order))

    library = runner.library([*KEYS, Key(8)])
    library.prepare(prepared)
    order = [Key(16, 4), Key(16, 2), Key(8), Key(4), Key(2), Key(1)]
    assert runner.made == order  # a key given twice is made once
    captures = order if kind == "graph" else []
    assert runner.capturer.order == [key.rows for key in captures]
    assert captured == [0] * 6 + [*range(1, len(captures) + 1)]
    stages = enumerate(order + captures, start=1)
    assert seen == [(i, 6 + len(captures), key) for i, key in stages]
    assert list(library.steps) == order
    steps = library.steps.values()
    assert [step.bytes for step in steps] == [64 * (kind == "graph"), 0, 0, 0, 0, 0]
    assert all(step.seconds > 0 and step.kind == kind for step in steps)


def test_failure_at_start_is_an_error_with_its_reason(caplog):
    def broken(key):
        def fn():
            if key.rows == 2:
                raise MemoryError("no room for 136 MiB")
            return torch.ones(key.rows)

        return Step("compile", fn, str(key))

    library = Runner().library(KEYS, make_step=broken)
    with pytest.raises(StepPreparationError) as caught:
        library.prepare()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not library.steps  # what was prepared before is let go
    with pytest.raises(AssertionError):
        library.run(Key(16, 4))


def test_misses_are_logged_once_and_close_lets_go_of_every_step(caplog):
    made = []

    def remembered(key):
        step = runner.make_step(key)
        made.append(weakref.ref(step))
        return step

    runner = Runner()
    library = runner.library(KEYS, make_step=remembered)
    library.prepare()
    with caplog.at_level(logging.WARNING, "stepgraph.graphs"):
        for _ in range(5):
            library.run(Key(3))
        library.run(Key(16, 9))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "Key(rows=3, read_blocks=4)" in messages[0]
    library.close()
    library.close()
    gc.collect()
    assert [step() for step in made] == [None] * 6
    assert runner.fallbacks == [Key(3), Key(16, 9)]


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
        stats = self.library
        assert stats.misses == sum(n for key, n in self.runs.items() if key not in KEYS)
        assert set(self.runner.fallbacks) == self.runs.keys() - set(KEYS)
        assert [stats.used_lanes, stats.padded_lanes] == self.lanes


TestLibraryAgainstATally = LibraryAgainstATally.TestCase
TestLibraryAgainstATally.settings = settings(max_examples=30, deadline=None)
