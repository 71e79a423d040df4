"""Scenarios on small engines: arrivals, counted steps and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.runtime import Engine
from stepgraph.runtime.bench.results import report
from stepgraph.runtime.bench.scenarios import interference
from stepgraph.runtime.bench.scenarios.interference import (
    InterferenceCase,
    measure_interference,
)

from ..rigs.bench_rig import run_bench
from ..rigs.engine_rig import loop_of

CASE = InterferenceCase(batch_size=2, input_len=30, steps=40)


def open_for(open_engine: Callable[..., Engine], rows: int, case: Any, **config: Any) -> Engine:
    sizes = {"max_num_seqs": rows, "max_model_len": case.longest_sequence}
    return open_engine("micro", prefix_cache=False, prefill_chunk=16, **sizes, **config)


@pytest.mark.parametrize("max_itl_ms", [None, 1e-3])
def test_interference_counts_a_gap_for_each_step(
    open_engine: Callable[..., Engine], max_itl_ms: float | None
) -> None:
    engine = open_for(open_engine, CASE.max_num_seqs, CASE, max_itl_ms=max_itl_ms)
    entry = measure_interference(engine, CASE, seed=3, bandwidth=1e10)
    assert entry["itl_ms"]["n"] == CASE.steps
    assert entry["itl_ms"]["min"] > 0
    assert not engine.has_unfinished()
    engine.check_integrity()
    if max_itl_ms is not None:
        budget = engine.stats()["step_budget"]
        assert budget["forced"] == budget["n"] > 0
        return
    assert entry["arrivals"] == entry["first_tokens"] == entry["ttft_ms"]["n"] == 4
    # Each prompt takes two chunks and decodes alone in another row for three steps more.
    assert entry["chunk_tokens"]["n"] == entry["prefill_step_ms"]["n"] == 8
    assert entry["decode_step_ms"]["n"] == interference.SETTLING_STEPS + CASE.steps - 4 * 5
    p50 = entry["decode_step_ms"]["p50"]
    # Rows have from 33 tokens, which the first step reads, to 31 + 30 + 40 and more.
    kv_bytes = entry["roofline"]["bytes_per_step"] - engine.weight_bytes_read(1)
    assert 2 * engine.kv_bytes_read(33) < kv_bytes < 2 * engine.kv_bytes_read(110)
    assert entry["roofline"]["fraction"] == pytest.approx(entry["roofline"]["floor_ms"] / p50)


def test_interference_on_an_asynchronous_device(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step in flight when `step` returns there is a gap for each step all the same."""
    engine = open_for(open_engine, CASE.max_num_seqs, CASE)
    loop_of(engine)._in_flight = 1
    monkeypatch.setattr(interference, "steps_in_flight", lambda engine: 1)
    entry = measure_interference(engine, CASE, seed=3, bandwidth=1e10)
    assert entry["itl_ms"]["n"] == CASE.steps
    chunks = entry["chunk_tokens"]
    assert chunks["n"] * chunks["mean"] == pytest.approx(4 * CASE.input_len)


RUNS = {
    "interference": "--batch-size 1 --input-len 24 --num-steps 30",
    "serve": "--batch-size 2 --input-len 8 --output-len 4 --rates 0.5 --duration 1 --no-http",
}


@pytest.mark.parametrize("name", RUNS)
def test_scenario_writes_what_it_prints(monkeypatch, tmp_path, capsys, name):
    flags = f"--scenario {name} --mode eager {RUNS[name]}"
    assert run_bench(monkeypatch, f"{flags} --output-json {tmp_path}/a.json") == 0
    printed = capsys.readouterr()
    assert printed.err
    document = json.loads((tmp_path / "a.json").read_text())
    assert printed.out == report(document) + "\n"
    entries = document[name]
    if name == "interference":
        plain, budgeted = entries
        assert plain["max_itl_ms"] is plain["step_budget"] is None
        eight = round(8 * plain["decode_step_ms"]["p50"], 2)
        assert budgeted["max_itl_ms"] == budgeted["step_budget"]["max_itl_ms"] == eight
        assert (plain["automatic_budget"], budgeted["automatic_budget"]) == (False, True)
