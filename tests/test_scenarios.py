"""The scenarios on small engines: who comes when, what is counted, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from stepgraph.graphs.buckets import default_token_buckets
from stepgraph.profiling.timeline import StepRecord
from stepgraph.runtime import Engine
from stepgraph.runtime.bench.scenarios import churn, interference
from stepgraph.runtime.bench.scenarios.churn import ChurnCase, measure_churn
from stepgraph.runtime.bench.scenarios.interference import (
    Chunks,
    Interference,
    InterferenceCase,
    measure_interference,
)

if TYPE_CHECKING:
    from conftest import TinyModel

CASE = InterferenceCase("micro", batch_size=2, input_len=30, num_steps=40)


def open_for(open_engine: Callable[..., Engine], case: InterferenceCase, **config: Any) -> Engine:
    return open_engine(
        "micro",
        prefix_cache=False,
        max_num_seqs=case.max_num_seqs,
        prefill_chunk=16,
        max_model_len=case.longest_sequence,
        **config,
    )


def test_interference_counts_a_gap_for_each_step(
    open_engine: Callable[..., Engine],
) -> None:
    engine = open_for(open_engine, CASE)
    measured = measure_interference(engine, CASE, seed=3)
    assert len(measured.itl_ms) == CASE.num_steps
    assert all(gap > 0 for gap in measured.itl_ms)
    assert measured.num_arrivals == len(measured.ttft_ms) == 4
    # Each prompt takes two chunks and decodes alone in another row for three steps more.
    assert sum(chunks.n for chunks in measured.chunks) == 8
    assert {chunks.bucket for chunks in measured.chunks} == {16}
    assert len(measured.decode_step_ms) == interference.SETTLING_STEPS + CASE.num_steps - 4 * 5
    assert len(measured.decode_steps) == len(measured.decode_step_ms)
    assert not engine.has_unfinished()
    engine.check_integrity()
    # Rows have from 33 tokens, which the first step reads, to 31 + 30 + 40 and more.
    document = interference.to_json(engine, measured, None, 1e10)
    kv_bytes = document["roofline"]["bytes_per_step"] - engine.weight_bytes_per_step
    assert 2 * engine.kv_bytes_read(33) < kv_bytes < 2 * engine.kv_bytes_read(110)
    p50 = document["decode_step_ms"]["p50"]
    assert document["roofline"]["fraction"] == pytest.approx(document["roofline"]["floor_ms"] / p50)


def test_interference_beside_a_device(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step under way when `step` returns there is a gap for each step all the same."""
    engine = open_for(open_engine, CASE)
    engine._loop._in_flight = 1
    ended: list[float] = []
    records: list[StepRecord] = []

    def chunks(step_ms: Any, seen: Any, *rest: Any) -> Any:
        ended.extend(step_ms)
        records.extend(seen)
        return [1.0], []

    monkeypatch.setattr(interference, "_chunks", chunks)
    monkeypatch.setattr(interference, "steps_in_flight", lambda engine: 1)
    measured = measure_interference(engine, CASE, seed=3)
    assert len(measured.itl_ms) == CASE.num_steps
    assert len(ended) == len(records) == interference.SETTLING_STEPS + CASE.num_steps
    assert all(record.rows >= CASE.batch_size for record in records)
    assert sum(record.prefill_tokens for record in records) == 4 * CASE.input_len


def test_chunks_are_told_apart_by_bucket_and_place() -> None:
    def record(rows: int, prefill_tokens: int) -> StepRecord:
        return StepRecord(0, rows, 8, prefill_tokens, 0, 0, 0, 0, 0, None)

    case = InterferenceCase("m", batch_size=8, input_len=600, num_steps=40)
    steps = [
        (10.0, record(8, 0)),
        (12.0, record(8, 0)),
        (11.0, record(8, 0)),
        (30.0, record(8, 250)),  # from 0
        (31.0, record(8, 240)),  # from 250: the same kind
        (60.0, record(8, 110)),  # from 490
        (15.0, record(9, 0)),  # nobody's decode step
        (33.0, record(9, 256)),  # from 0 again
    ]
    decode_ms, chunks = interference._chunks(
        [ms for ms, _ in steps], [r for _, r in steps], case, default_token_buckets(512)
    )
    assert decode_ms == [10.0, 12.0, 11.0]
    assert chunks == [Chunks(0, 256, 250, 3, 20.0), Chunks(256, 128, 110, 1, 49.0)]


def measured_interference(chunks: list[Chunks], itl_ms: list[float]) -> Interference:
    return Interference(CASE, itl_ms, [10.0, 11.0, 12.0], [], chunks, [], 4, [])


def test_the_bound_is_a_decode_step_and_the_costliest_chunk() -> None:
    seldom = Chunks(512, 512, 512, 2, 500.0)
    measured = measured_interference(
        [Chunks(0, 64, 64, 5, 20.0), Chunks(0, 128, 99, 3, 35.0), seldom], []
    )
    assert measured.chunk_ms == 35.0
    assert measured.bound_ms == pytest.approx(1.1 * (11.0 + 35.0))
    assert measured_interference([seldom], []).chunk_ms == 500.0
    assert measured_interference([], []).chunk_ms == 0.0


@pytest.mark.parametrize(
    ("itl_ms", "within"),
    [([1.0] * 99, None), ([1.0] * 199 + [99.0], True), ([1.0] * 90 + [99.0] * 10, False)],
)
def test_p99_is_judged_where_n_supports_it(
    open_engine: Callable[..., Engine], itl_ms: list[float], within: bool | None
) -> None:
    engine = open_for(open_engine, CASE)
    document = interference.to_json(engine, measured_interference([], itl_ms), None, 1e10)
    assert document["p99_within_bound"] is within
    assert document["bound_ms"] == pytest.approx(12.1)
    assert document["ttft_ms"] is None
    assert (document["arrivals"], document["first_tokens"]) == (4, 0)


def test_interference_with_a_budget(open_engine: Callable[..., Engine]) -> None:
    engine = open_for(open_engine, CASE, max_itl_ms=1e-3)
    measured = measure_interference(engine, CASE, seed=3)
    document = interference.to_json(engine, measured, 1e-3, 1e10)
    assert document["max_itl_ms"] == 1e-3
    assert document["step_budget"]["forced"] == document["step_budget"]["n"] > 0
    assert document["itl_ms"]["n"] == CASE.num_steps


CHURN = ChurnCase("micro", batch_size=3, input_len=20, output_len=6, num_steps=120)


def open_for_churn(open_engine: Callable[..., Engine], **config: Any) -> Engine:
    return open_engine(
        "micro",
        prefix_cache=False,
        max_num_seqs=CHURN.batch_size,
        max_model_len=CHURN.longest_sequence,
        **config,
    )


def test_churn(open_engine: Callable[..., Engine]) -> None:
    engine = open_for_churn(open_engine)
    measured = measure_churn(engine, CHURN, seed=1)
    assert len(measured.step_ms) == len(measured.records) == CHURN.num_steps
    assert measured.num_requests > 20
    assert 0 < measured.num_aborted < measured.num_requests / 2
    assert 0.3 < measured.occupancy <= 1.0
    assert 0.0 <= measured.padding < 0.5
    assert measured.num_preemptions == 0
    assert len(measured.itl_ms) > 100
    assert not engine.has_unfinished()
    engine.check_integrity()
    document = churn.to_json(engine, measured, None, 1e10)
    assert document["itl_ms"]["n"] == len(measured.itl_ms)
    assert document["step_ms"]["n"] == document["steps"] == CHURN.num_steps
    decoding = measured.decode_steps
    assert 0 < len(decoding) < CHURN.num_steps
    floors = [engine.weight_bytes_per_step / 1e10] * len(decoding)
    floors += [engine.kv_bytes_read(n) / 1e10 for step in decoding for n in step.contexts]
    share = 1e3 * sum(floors) / sum(step.ms for step in decoding)
    assert document["roofline"]["fraction"] == pytest.approx(share, rel=1e-3)
    assert document["step_budget"] is None


def test_churn_is_the_same_for_the_same_seed(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel]
) -> None:
    engine = open_for_churn(open_engine)
    config = engine.model_config
    schedule = churn._schedule(config, CHURN, 1)
    assert schedule == churn._schedule(config, CHURN, 1)
    assert schedule != churn._schedule(config, CHURN, 2)
    assert all(5 <= len(arrival.prompt) <= 20 for arrival in schedule)
    assert all(1 <= arrival.output_len <= 24 for arrival in schedule)
    leaving = [arrival for arrival in schedule if arrival.leaves_after is not None]
    assert all(1 <= a.leaves_after < a.output_len for a in leaving if a.leaves_after is not None)
    one, two = (measure_churn(engine, CHURN, seed=7) for _ in range(2))
    assert (one.num_requests, one.num_aborted) == (two.num_requests, two.num_aborted)
    assert [r.rows for r in one.records] == [r.rows for r in two.records]


def test_churn_goes_on_where_nobody_is_there(open_engine: Callable[..., Engine]) -> None:
    case = ChurnCase("micro", batch_size=1, input_len=4, output_len=2, num_steps=40)
    engine = open_engine("micro", max_num_seqs=1, max_model_len=case.longest_sequence)
    measured = measure_churn(engine, case, seed=0)
    assert len(measured.step_ms) <= 40
    assert measured.num_requests >= 5
