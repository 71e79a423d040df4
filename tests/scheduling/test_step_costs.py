"""The cost model: what it predicts, what moves it, and what does not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.graphs.buckets import Buckets
from stepgraph.runtime.scheduling.step_budget import LARGEST_ERROR, PhaseCosts, StepCosts, calibrate

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
        self.measured: list[tuple[str, int, int]] = []
        self._rng = random.Random(seed)

    def seconds(self, phase: str, size: int, attended: float) -> float:
        base = 0.01 + (1e-4 if phase == "prefill" else 5e-4) * size
        return self.speed * (base + self.slope * attended) * (1 + self.noise * self._rng.random())

    def time_step(self, phase: str, size: int, context: int) -> float:
        self.measured.append((phase, size, context))
        middle = (size + 1) // 2 if phase == "prefill" else 1
        return self.seconds(phase, size, size * reach(context + middle))


def calibrated(machine: Machine, useful_seconds: float = 1.0) -> StepCosts:
    return calibrate(
        machine.time_step,
        rows=ROWS,
        tokens=TOKENS,
        reach=reach,
        context=1000,
        useful_seconds=useful_seconds,
    )


def observe(costs: PhaseCosts, lanes: int, attended: float, seconds: float) -> None:
    costs.correct(lanes, attended, seconds - costs.predict(lanes, attended))


observations = st.lists(
    st.tuples(st.integers(1, 128), st.integers(0, 10**6), st.floats(1e-6, 1.0)), max_size=60
)


@given(observations, st.integers(1, 127), st.integers(0, 10**6), st.integers(0, 10**6))
def test_predictions_rise_in_tokens_and_in_context(seen, tokens, attended, more) -> None:
    costs = calibrated(Machine()).prefill[False]
    for observation in seen:
        observe(costs, *observation)
    assert 0 < costs.predict(tokens, attended) <= costs.predict(tokens + 1, attended)
    assert costs.predict(tokens, attended) <= costs.predict(tokens, attended + more)
    assert all(a <= b for a, b in pairwise(costs.seconds))
    assert sum(costs.seen) == len(seen)


def test_calibration_finds_what_the_machine_does() -> None:
    machine = Machine()
    costs = calibrated(machine)
    for phase, pair in (("decode", costs.decode), ("prefill", costs.prefill)):
        for size in pair[False].sizes:
            for attended in (0, 10**4, 10**6):
                expected = machine.seconds(phase, size, attended)
                assert pair[False].predict(size, attended) == pytest.approx(expected, rel=1e-6)
                assert pair[True].predict(size, attended) == pair[False].predict(size, attended)


def test_calibration_over_few_positions_leaves_steps_most_of_their_time() -> None:
    """The step further back seemed slower by chance, and the difference is of few positions."""

    def time_step(phase: str, size: int, context: int) -> float:
        return 0.05 if context else 0.01

    costs = calibrate(
        time_step, rows=ROWS, tokens=TOKENS, reach=reach, context=2, useful_seconds=1.0
    ).prefill[False]
    assert costs.seconds[3] >= 0.005
    assert costs.predict(128, 128 * reach(64)) == pytest.approx(0.01)


def test_where_nothing_is_attended_to_there_is_no_slope() -> None:
    costs = calibrate(
        lambda phase, size, context: 0.01 + 0.01 * bool(context),
        rows=ROWS,
        tokens=TOKENS,
        reach=lambda context: 0,
        context=1000,
        useful_seconds=1.0,
    )
    assert (costs.decode[False].slope, costs.prefill[False].slope) == (0.0, 0.0)


def test_calibration_takes_turns_and_the_fastest_round_counts() -> None:
    machine = Machine()
    machine.noise = 5.0
    costs = calibrated(machine).prefill[False]
    rounds = machine.measured.count(("prefill", 16, 0))
    first = machine.measured[: len(machine.measured) // rounds]
    assert machine.measured == first * rounds
    assert len(set(first)) == len(first) == len(ROWS) + len(TOKENS) + 2
    assert all(t < 3 * (0.01 + 1e-4 * s) for s, t in zip(costs.sizes, costs.seconds, strict=True))


def test_a_bucket_disturbed_while_measured_is_no_slower_than_a_larger_one() -> None:
    costs = PhaseCosts(TOKENS, [1e-3, 9e-3, 3e-3, 4e-3], 0.0, 10)
    assert costs.seconds == (1e-3, 3e-3, 3e-3, 4e-3)


def test_steps_that_no_budget_has_time_for_are_measured_twice() -> None:
    machine = Machine()
    calibrated(machine, useful_seconds=0.008)  # steps of 128 tokens take 0.0228
    assert machine.measured.count(("prefill", 128, 0)) == 2
    assert machine.measured.count(("prefill", 16, 0)) > 2


@pytest.mark.parametrize("speed", [0.4, 3.0])
def test_it_follows_a_machine_whose_speed_changes(speed: float) -> None:
    machine = Machine()
    costs = calibrated(machine).prefill[False]
    machine.speed, machine.slope = speed, 5e-8
    rng = random.Random(3)
    for _ in range(3000):
        tokens = rng.choice((16, 32, 64))
        attended = tokens * reach(rng.randrange(2000))
        seconds = machine.seconds("prefill", tokens, attended)
        predicted = costs.predict(tokens, attended)
        # As `StepBudget` does it.
        error = max(-LARGEST_ERROR * predicted, min(seconds - predicted, LARGEST_ERROR * predicted))
        costs.correct(tokens, attended, error)
    for tokens in (16, 32, 64):
        for context in (0, 500, 2000):
            attended = tokens * reach(context)
            expected = machine.seconds("prefill", tokens, attended)
            assert costs.predict(tokens, attended) == pytest.approx(expected, rel=0.05)


def test_a_bucket_never_used_follows_its_neighbour() -> None:
    """Else one that a noisy moment at start made look slow would never be tried."""
    costs = calibrated(Machine()).prefill[False]
    before = costs.seconds
    for _ in range(500):
        observe(costs, 16, 0, before[0] / 2)
    after = costs.seconds
    assert after[0] == pytest.approx(before[0] / 2, rel=0.01)
    assert after[3] == pytest.approx(before[3] / 2, rel=0.01)


def test_a_bucket_not_used_any_more_forgets_its_noise() -> None:
    """One that was used goes a little of the way with every step of another."""
    costs = calibrated(Machine()).prefill[False]
    before = costs.seconds
    for _ in range(20):
        observe(costs, 128, 0, 3 * before[3])
    disturbed = costs.seconds[3]
    assert disturbed > 2.5 * before[3]
    observe(costs, 16, 0, before[0])
    assert costs.seconds[3] == pytest.approx(disturbed, rel=0.03)
    for _ in range(400):
        observe(costs, 16, 0, before[0])
    assert costs.seconds == pytest.approx(before, rel=0.02)


def test_a_smaller_bucket_is_no_slower_than_a_larger_one_just_seen() -> None:
    costs = calibrated(Machine()).prefill[False]
    before = costs.seconds
    for _ in range(20):
        observe(costs, 16, 0, 5 * before[3])
    assert costs.seconds[0] == costs.predict(16, 0) > before[3]
    for _ in range(400):
        observe(costs, 128, 0, before[3])
    assert costs.seconds == pytest.approx(before, rel=0.05)


def test_the_least_lanes_are_all_that_cost_no_more_than_the_smallest() -> None:
    assert PhaseCosts(TOKENS, [1e-3, 2e-3, 3e-3, 4e-3], 0.0, 10).least_lanes == 16
    assert PhaseCosts(TOKENS, [2e-3, 2e-3, 3e-3, 4e-3], 0.0, 10).least_lanes == 32
    assert PhaseCosts(TOKENS, [9e-3, 9e-3, 5e-3, 5e-3], 0.0, 10).least_lanes == 128


@given(observations, st.integers(1, 128), st.integers(0, 10**6), st.floats(0, 1e6))
def test_one_step_moves_its_own_prediction_by_a_share(seen, tokens, attended, seconds) -> None:
    costs = calibrated(Machine()).prefill[False]
    for observation in seen:
        observe(costs, *observation)
    predicted = costs.predict(tokens, attended)
    observe(costs, tokens, attended, seconds)
    moved = costs.predict(tokens, attended) - predicted
    slack = 1e-9 * max(seconds, 1.0)
    if seconds >= predicted:
        assert -slack <= moved <= 0.21 * (seconds - predicted) + slack
    else:
        assert -0.06 * (predicted - seconds) - slack <= moved <= slack


def test_predictions_lie_above_the_middle_of_noisy_steps() -> None:
    machine = Machine()
    costs = calibrated(machine).prefill[False]
    machine.noise = 0.4
    later = 0
    for step in range(4000):
        seconds = machine.seconds("prefill", 64, 0)
        if step > 1000:
            later += seconds > costs.predict(64, 0)
        observe(costs, 64, 0, seconds)
    assert 0.2 < later / 3000 < 0.45


def test_the_copy_for_the_full_sampler_learns_on_its_own() -> None:
    costs = calibrated(Machine())
    before = costs.prefill[False].seconds
    observe(costs.prefill[True], 16, 0, 1.0)
    assert costs.prefill[False].seconds == before
    assert costs.prefill[True].seconds != before
