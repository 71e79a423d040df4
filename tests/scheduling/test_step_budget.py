"""Chunks chosen by time: never more than fits, always something, and decoding goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.graphs.buckets import Buckets
from stepgraph.runtime.request import Request
from stepgraph.runtime.sampling_params import SamplingParams
from stepgraph.runtime.scheduling.plan import RowSpan, StepPlan
from stepgraph.runtime.scheduling.step_budget import StepBudget
from stepgraph.runtime.scheduling.step_times import SHARE_AFTER, PhaseTimes, StepTimes

from ..rigs.scheduler_rig import Rig, make_request

SMALLEST = 4


def times_of(
    *,
    base: float = 1e-3,
    token: float = 1e-4,
    position: float = 1e-6,
    largest: int = 32,
    one_pass: bool = False,
) -> StepTimes:
    """A decode step takes `base` seconds, each prompt token `token` and each position more."""
    tokens = Buckets([SMALLEST, *range(8, largest, 4), largest, largest + 8 * one_pass])
    rows = Buckets([1, 4, 8])

    def decode() -> PhaseTimes:
        return PhaseTimes(rows, [base] * len(rows), position, 10)

    def prefill() -> PhaseTimes:
        return PhaseTimes(tokens, [token * size for size in tokens], position, 10)

    pairs = (decode(), decode()), (prefill(), prefill())
    return StepTimes(pairs[0], lambda context: context, prefill=pairs[1], one_pass=one_pass)


def budget_of(max_itl_ms: float, **times: float) -> StepBudget:
    return StepBudget(max_itl_ms, times_of(**times))  # type: ignore[arg-type]


def request_of(num_computed: int = 0, *, sampled: bool = False) -> Request:
    request = make_request([1] * 500, params=SamplingParams(temperature=float(sampled)))
    request.num_computed = num_computed
    assert request.params.needs_full_sampler == sampled
    return request


def decoding(rows: int = 4, context: int = 20) -> StepPlan:
    return StepPlan(decode=[request_of(context) for _ in range(rows)])


def mixed(tokens: int = 16, **requests: bool) -> StepPlan:
    """A step that decodes and prefills."""
    return with_chunk(decoding(), request_of(**requests), 0, tokens)


def chunk_of(budget: StepBudget, **requests: bool) -> int:
    """The first chunk of a step that decodes."""
    return budget.fit(decoding(), request_of(**requests), 0, 32)


def learn(budget: StepBudget, seconds: float, *plans: StepPlan, times: int = 1) -> None:
    for _ in range(times):
        for plan in plans:
            budget.times.learn(plan, seconds)


def with_chunk(plan: StepPlan, request: Request, start: int, count: int) -> StepPlan:
    return replace(plan, prefill=[*plan.prefill, RowSpan(request, 5, start, count, False)])


@given(
    st.floats(0.1, 20),
    st.integers(1, 8),
    st.integers(0, 300),
    st.integers(0, 400),
    st.booleans(),
    st.data(),
)
def test_a_chunk_is_the_largest_that_fits(max_itl_ms, rows, context, start, one_pass, data) -> None:
    budget = budget_of(max_itl_ms, one_pass=one_pass)
    plan = decoding(rows, context)
    room = 32
    for _ in range(data.draw(st.integers(1, 3))):
        request = request_of(start)
        asked = data.draw(st.integers(1, max(room, 1)))
        if room < asked:
            break
        first = not plan.prefill
        count = budget.fit(plan, request, start, asked)
        assert first <= count <= asked
        assert count >= min(asked, SMALLEST) or not first
        if count and not (first and budget.stats()["forced"]):
            fitting = with_chunk(plan, request, start, count)
            assert budget.times.predict(fitting) <= max_itl_ms / 1e3 + 1e-12
        if count < asked and not budget.stats()["forced"]:
            larger = with_chunk(plan, request, start, count + 1)
            assert budget.times.predict(larger) > max_itl_ms / 1e3 - 1e-12
        if not count:
            break
        plan = with_chunk(plan, request, start, count)
        room -= count


def test_the_full_sampler_has_costs_of_its_own() -> None:
    budget = budget_of(2.7, position=0.0)
    learn(budget, 4e-3, with_chunk(StepPlan(), request_of(sampled=True), 0, 16), times=50)
    assert chunk_of(budget) == 16
    assert chunk_of(budget, sampled=True) < 16
    assert budget.fit(mixed(4, sampled=True), request_of(), 0, 12) < 12


@given(st.floats(1e-9, 1e9), st.booleans(), st.booleans())
def test_one_outlier_moves_next_to_nothing(seconds, mixes, prefills) -> None:
    budget = budget_of(5.0)
    plan = StepPlan() if prefills else decoding()
    if prefills or mixes:
        plan = with_chunk(plan, request_of(), 40, 16)
    before = budget.times.predict(plan)
    budget.times.learn(plan, seconds)
    assert 0.9 * before - 1e-9 <= budget.times.predict(plan) <= 1.11 * before


def test_steps_that_only_decode_teach_the_decode_step() -> None:
    budget = budget_of(5.0, position=0.0)
    assert budget.times.prefill is not None
    prefill = budget.times.prefill[False].seconds
    learn(budget, 2e-3, decoding(), times=100)
    assert budget.times.predict(decoding()) == pytest.approx(2e-3, rel=0.01)
    assert budget.times.prefill[False].seconds == prefill
    decode = budget.times.predict(decoding())
    for _ in range(100):
        learn(budget, 6e-3, mixed())
        learn(budget, decode, decoding())
    assert budget.times.predict(mixed()) == pytest.approx(6e-3, rel=0.01)
    assert budget.times.predict(decoding()) == pytest.approx(decode)


def test_where_no_step_only_decodes_each_part_learns_its_share() -> None:
    """Else what decoding more costs than it did would be taken for the cost of prompts."""
    budget = budget_of(50.0, base=3e-3, position=0.0)  # mixed: 3 ms and 1.6
    learn(budget, 5e-3, mixed(), times=SHARE_AFTER)
    assert budget.times.predict(decoding()) == 3e-3
    before = budget.times.predict(mixed())
    learn(budget, 9.2e-3, mixed(), times=300)
    assert budget.times.predict(mixed()) == pytest.approx(9.2e-3, rel=0.01)
    assert budget.times.predict(decoding()) == pytest.approx(3e-3 * 9.2e-3 / before, rel=0.02)
    learn(budget, budget.times.predict(decoding()), decoding())
    decode = budget.times.predict(decoding())
    learn(budget, 20e-3, mixed())
    assert budget.times.predict(decoding()) == decode


def test_one_pass_takes_the_time_of_all_its_tokens() -> None:
    """Of decoding rows it adds only their attention, because it reads the weights anyway."""
    budget = budget_of(5.0, one_pass=True, position=0.0)
    assert budget.times.predict(decoding()) == 1e-3
    assert budget.times.predict(mixed(16)) == pytest.approx(20e-4)
    learn(budget, 4e-3, mixed(16), times=100)
    assert budget.times.predict(mixed(16)) == pytest.approx(4e-3, rel=0.01)
    assert budget.times.predict(decoding()) == 1e-3
    assert chunk_of(budget) < 32


@pytest.mark.parametrize(("one_pass", "least_ms"), [(False, 1.4), (True, 1.2)])
def test_budget_below_the_smallest_mixed_step_warns_at_start(
    caplog: pytest.LogCaptureFixture, one_pass: bool, least_ms: float
) -> None:
    """7 rows decode, and the chunk has 4 tokens."""
    budget_of(least_ms + 0.01, one_pass=one_pass)
    assert not caplog.records
    budget = budget_of(least_ms - 0.01, one_pass=one_pass)
    assert [f"{least_ms:.2f}" in record.getMessage() for record in caplog.records] == [True]
    for _ in range(2):
        assert budget.fit(decoding(7), request_of(), 0, 32) > 0
    assert budget.stats()["forced"] == 2
    assert len(caplog.records) == 1


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=12),
    st.floats(0.2, 6),
    st.sampled_from([0, 1]),
    st.booleans(),
    st.sampled_from([(None,), (None, 6)]),
    st.sampled_from([30, 100]),
    st.sampled_from([None, 0, 5]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_everybody_is_served_and_decoding_never_waits(
    requests, max_itl_ms, in_flight, prefix, windows, usable_blocks, snapshots, one_pass, rng
) -> None:
    budget = budget_of(max_itl_ms, one_pass=one_pass)
    fit = budget.fit

    def watched(plan: StepPlan, request: Request, start: int, count: int) -> int:
        forced = budget.stats()["forced"]
        given_count = fit(plan, request, start, count)
        if plan.decode and given_count and budget.stats()["forced"] == forced:
            chosen = with_chunk(plan, request, start, given_count)
            assert budget.times.predict(chosen) <= max_itl_ms / 1e3 + 1e-12
        return given_count

    budget.fit = watched  # type: ignore[method-assign]
    rig = Rig(
        windows=windows,
        in_flight=in_flight,
        prefix=prefix,
        usable_blocks=usable_blocks,
        step_budget=budget,
        snapshots=snapshots,
    )
    made = []
    for prompt_len, max_tokens in requests:
        made += rig.add_group(prompt_len, max_tokens=max_tokens, shared=prompt_len // 2)
        for _ in range(rng.randrange(3)):
            open_groups = rig.loop.requests.groups.values()
            requests = [r for group in open_groups for r in group.requests if r.row is not None]
            ready = [r for r in requests if r.decoding and not r.reached_max_tokens]
            rig.loop.step()
            rig.loop.check_integrity()
            plan = rig.runner.plans[-1] if rig.runner.plans else None
            if ready and plan is not None and not plan.preempted:
                assert set(ready) <= set(plan.decode)
    rig.finish(*made)
