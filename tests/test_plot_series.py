"""The numbers that a picture of a timeline is made of."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from stepgraph.profiling.plot.series import phase_times, series_of
from stepgraph.profiling.timeline import StepRecord
from stepgraph.runtime import Engine, SamplingParams

from .plot_rig import any_records, run_of, step


def test_a_gap_is_from_the_end_of_a_step_to_the_end_of_the_next() -> None:
    records = run_of([10, 20, 30], between_ms=5)
    series = series_of(records)
    assert [gap.ms for gap in series.gaps] == [25, 35]
    assert [gap.record.step for gap in series.gaps] == [1, 2]
    assert [gap.seconds for gap in series.gaps] == pytest.approx([0.035, 0.070])
    assert series.seconds == pytest.approx(0.070)
    assert series.pauses == []


@pytest.mark.parametrize(
    ("records", "ended"),
    [
        # No row waits for a step that only prefills.
        (run_of([10, 20, 30], rows=[0, 0, 4], prefill_tokens=[64, 64, 0]), [2]),
        # Steps 1 and 3 are not consecutive.
        (run_of([10] * 2) + run_of([10] * 2, first=3, at_ms=30), [1, 4]),
        # The clock started again.
        ([step(7, 10**9), step(8, 0)], []),
        # The call of step 6 took nothing in: no step was in flight.
        (
            [
                step(5, 0, is_async_device=True, wait_ms=1),
                step(6, 60_000, rows=0, prefill_tokens=8, is_async_device=True),
            ],
            [],
        ),
    ],
)
def test_steps_that_end_a_gap(records: list[StepRecord], ended: list[int]) -> None:
    assert [gap.record.step for gap in series_of(records).gaps] == ended


def test_tokens_of_an_asynchronous_device_come_with_the_next_call() -> None:
    """A device works on step N while step N + 1 is launched; its chunk makes that call wait."""
    records = [
        step(0, 0, rows=0, prefill_tokens=64, is_async_device=True),  # took nothing in
        step(1, 1, rows=4, wait_ms=10, is_async_device=True, prefill_tokens=32),
        step(2, 12, rows=4, wait_ms=30, is_async_device=True),
        step(3, 43, rows=4, wait_ms=5, is_async_device=True),
    ]
    series = series_of(records)
    # The call that launched step 1 took in step 0, which nobody waited for.
    assert [(gap.record.step, gap.ms) for gap in series.gaps] == [(1, 31), (2, 6)]
    chunks = series.marks["chunk"]
    assert [mark.amount for mark in chunks] == [64, 32]
    assert chunks[1].seconds == series.gaps[0].seconds
    assert len(series.marks["bucket"]) == 0


@pytest.mark.parametrize(("at_ms", "seconds"), [(60_000, 1.0), (510, 1.010)])
def test_long_pauses_are_cut_out_and_short_ones_stay(at_ms: float, seconds: float) -> None:
    after = run_of([10] * 50, first=50, at_ms=at_ms, rows=[0] + [1] * 49)
    series = series_of(run_of([10] * 50) + after)
    assert series.seconds == pytest.approx(seconds)
    assert len(series.gaps) == 49 + 49
    cut = [(pytest.approx(0.5), pytest.approx(59.5))] if at_ms == 60_000 else []
    assert series.pauses == cut


def test_marks_are_what_the_records_say() -> None:
    records = run_of(
        [10] * 6,
        rows=[0, 1, 2, 2, 0, 3],
        bucket=[512, 1, 2, 2, 512, 4],
        prefill_tokens=[300, 40, 0, 0, 500, 0],
        joined=[1, 1, 0, 0, 1, 0],
        collected_ns=[0, 0, 0, 7_000_000, 0, 0],
    )
    marks = series_of(records).marks
    assert [mark.amount for mark in marks["chunk"]] == [300, 40, 500]
    assert [mark.amount for mark in marks["join"]] == [1, 1, 1]
    # The bucket of a step that only prefills is one of tokens.
    assert [mark.amount for mark in marks["bucket"]] == [2, 4]
    assert [mark.amount for mark in marks["collection"]] == [7_000_000]
    assert marks["collection"][0].seconds == pytest.approx(0.040)


def test_only_a_collection_that_takes_a_good_part_of_a_gap_is_its_reason() -> None:
    records = run_of([10] * 3, collected_ns=[0, 100_000, 6_000_000])
    assert [gap.collected for gap in series_of(records).gaps] == [False, True]


@given(records=any_records())
def test_any_records_have_a_series(records: list[StepRecord]) -> None:
    series = series_of(records)
    assert len(series.gaps) <= max(0, len(records) - 1)
    times = [gap.seconds for gap in series.gaps]
    assert times == sorted(times)
    for marks in series.marks.values():
        assert all(0 <= mark.seconds <= series.seconds for mark in marks)
    assert all(0 < gap.seconds <= series.seconds or gap.ms == 0 for gap in series.gaps)
    assert all(gap.ms >= 0 for gap in series.gaps)
    assert len(series.marks["chunk"]) == sum(record.prefill_tokens > 0 for record in records)
    assert len(series.marks["join"]) == sum(record.joined > 0 for record in records)
    assert len(series.marks["collection"]) == sum(record.collected_ns > 0 for record in records)
    for prefill in (False, True):
        times = phase_times(records, prefill=prefill)
        assert times is None or times.n > 0


def test_phases_are_medians_that_follow_each_other() -> None:
    records = run_of([10, 12, 14], between_ms=2)
    times = phase_times(records, prefill=False)
    assert times is not None
    assert times.n == 3
    assert times.device_ms is None
    assert list(times.phases) == ["plan", "launch", "device", "commit", "caller"]
    assert times.phases["device"] == statistics.median([9.7, 11.7, 13.7])
    assert times.phases["caller"] == 2
    assert phase_times(records, prefill=True) is None


def test_phases_of_a_launch_of_several_steps_are_those_of_one() -> None:
    (record,) = run_of([8], steps=[4])
    times = phase_times([record], prefill=False)
    assert times is not None
    assert times.phases["device"] == pytest.approx((8 - 0.3) / 4)


def test_an_asynchronous_step_is_waited_for_in_the_next_call() -> None:
    records = [
        step(0, 0, prefill_tokens=64, wait_ms=0, device_ms=40, is_async_device=True),
        step(1, 1, wait_ms=39, device_ms=8, is_async_device=True),
        step(2, 41, wait_ms=7, device_ms=None, is_async_device=True),
    ]
    chunk, decode = (phase_times(records, prefill=prefill) for prefill in (True, False))
    assert chunk is not None
    assert decode is not None
    assert (chunk.phases["wait"], chunk.device_ms) == (39, 40)
    assert (decode.phases["wait"], decode.device_ms) == (7, 8)
    assert "device" not in decode.phases


def test_a_real_run_has_what_it_did(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("base", max_num_seqs=4, prefill_chunk=8)
    prompts = [list(range(1, 1 + n)) for n in (20, 3, 5)]
    engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0))
    records = engine.timeline().records()
    series = series_of(records)
    assert sum(mark.amount for mark in series.marks["chunk"]) == 20 + 3 + 5
    assert sum(mark.amount for mark in series.marks["join"]) == 3
    assert [gap.record for gap in series.gaps] == [r for r in records[1:] if r.rows]
    ends = {record.step: record.ended_ns for record in records}
    for gap in series.gaps:
        number = gap.record.step
        assert gap.ms == pytest.approx((ends[number] - ends[number - 1]) / 1e6)
