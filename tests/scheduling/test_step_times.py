"""Step times: what it predicts, what moves it, and what does not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.graphs.buckets import Buckets
from stepgraph.runtime.scheduling.step_times import PhaseTimes, Point, StepTimes, calibrate

ROWS = Buckets([1, 2, 4, 8])
TOKENS = Buckets([16, 32, 64, 128])
LAYERS = 3


def reach(context: int) -> int:
    return LAYERS * context


class Machine:
    """Where steps take what a formula says, times `speed`, give or take `noise`."""

    def __init__(self, seed: int = 0) -> None:
        self.speed = 1.0
        self.noise = 0.0
        self.slope = 2e-8
        self._rng = random.Random(seed)

    def seconds(self, phase: str, size: int, attended: float) -> float:
        base = 0.01 + (1e-4 if phase == "prefill" else 5e-4) * size
        return self.speed * (base + self.slope * attended) * (1 + self.noise * self._rng.random())

    def time_step(self, point: Point) -> float:
        middle = (point.size + 1) // 2 if point.phase == "prefill" else 1
        return self.seconds(point.phase, point.size, point.size * reach(point.context + middle))


def calibrated(machine: Machine) -> StepTimes:
    return calibrate(
        machine.time_step,
        rows=ROWS,
        tokens=TOKENS,
        reach=reach,
        context=1000,
        useful_seconds=1.0,
    )


def observe(times: PhaseTimes, lanes: int, attended: float, seconds: float) -> None:
    times.correct(lanes, attended, seconds - times.predict(lanes, attended))


def prefill_times(machine: Machine) -> PhaseTimes:
    times = calibrated(machine)
    assert times.prefill is not None
    return times.prefill[False]


observations = st.lists(
    st.tuples(st.integers(1, 128), st.integers(0, 10**6), st.floats(1e-6, 1.0)), max_size=60
)


@given(observations, st.integers(1, 127), st.integers(0, 10**6), st.integers(0, 10**6))
def test_predictions_rise_in_tokens_and_in_context(seen, tokens, attended, more) -> None:
    times = prefill_times(Machine())
    for observation in seen:
        observe(times, *observation)
    assert 0 < times.predict(tokens, attended) <= times.predict(tokens + 1, attended)
    assert times.predict(tokens, attended) <= times.predict(tokens, attended + more)
    assert all(a <= b for a, b in pairwise(times.seconds))
    assert sum(times.seen) == len(seen)


def test_calibration_finds_what_the_machine_does() -> None:
    machine = Machine()
    times = calibrated(machine)
    assert times.prefill is not None
    for phase, pair in (("decode", times.decode), ("prefill", times.prefill)):
        for size in pair[False].sizes:
            for attended in (0, 10**4, 10**6):
                expected = machine.seconds(phase, size, attended)
                assert pair[False].predict(size, attended) == pytest.approx(expected, rel=1e-6)
                assert pair[True].predict(size, attended) == pair[False].predict(size, attended)


@pytest.mark.parametrize("speed", [0.4, 3.0])
def test_it_follows_a_machine_whose_speed_changes(speed: float) -> None:
    machine = Machine()
    times = prefill_times(machine)
    machine.speed, machine.slope = speed, 5e-8
    rng = random.Random(3)
    for _ in range(3000):
        tokens = rng.choice((16, 32, 64))
        attended = tokens * reach(rng.randrange(2000))
        seconds = machine.seconds("prefill", tokens, attended)
        predicted = times.predict(tokens, attended)
        times.correct(tokens, attended, seconds - predicted)
    for tokens in (16, 32, 64):
        for context in (0, 500, 2000):
            attended = tokens * reach(context)
            expected = machine.seconds("prefill", tokens, attended)
            assert times.predict(tokens, attended) == pytest.approx(expected, rel=0.05)


def test_a_bucket_not_used_any_more_forgets_its_noise() -> None:
    """One that was used goes a little of the way with every step of another."""
    times = prefill_times(Machine())
    before = times.seconds
    for _ in range(20):
        observe(times, 128, 0, 3 * before[3])
    disturbed = times.seconds[3]
    assert disturbed > 2.5 * before[3]
    observe(times, 16, 0, before[0])
    assert times.seconds[3] == pytest.approx(disturbed, rel=0.03)
    for _ in range(400):
        observe(times, 16, 0, before[0])
    assert times.seconds == pytest.approx(before, rel=0.02)
