"""Modes that are measured together: order of repetitions, memory shares, warnings of noise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.memory.handler import MemoryBudgetError
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.bench.results import settle_bandwidth, warnings
from stepgraph.runtime.bench.workload import EngineRun, interleave, summarize_repetitions

from ..rigs.bench_rig import measured


@given(st.integers(1, 5), st.integers(0, 9))
def test_every_round_runs_every_side_once_and_none_is_always_first(sides, repetitions):
    log: list[int] = []
    interleave([lambda side=side: log.append(side) for side in range(sides)], repetitions)
    rounds = [log[i : i + sides] for i in range(0, len(log), sides)]
    assert len(rounds) == repetitions
    for number, order in enumerate(rounds):
        assert order == sorted(range(sides), reverse=number % 2 == 1)


@pytest.mark.parametrize("fits", [True, False])
def test_modes_are_interleaved_where_they_fit_together(monkeypatch, tmp_path, capsys, fits):
    """Nothing is compiled: the engines of all modes run eagerly."""
    log: list[tuple[str, int]] = []
    budgets: list[int | None] = []
    repeat, start = EngineRun.repeat, Engine.from_pretrained
    modes: dict[int, str] = {}

    def logged(run: EngineRun) -> None:
        log.append((modes[id(run.engine)], run.case.batch_size))
        repeat(run)

    def start_eager(model: str, config: EngineConfig, progress: bool) -> Engine:
        budgets.append(config.memory_tokens)
        if len(budgets) == 2 and not fits:
            raise MemoryBudgetError("the total of 9 bytes is over the budget\nterm by term")
        fields = {name: getattr(config, name) for name in config.__slots__}
        fields |= {"mode": "eager", "kernels": "torch"}
        engine = start(model, EngineConfig(**fields), progress=progress)
        modes[id(engine)] = config.mode
        return engine

    monkeypatch.setattr(EngineRun, "repeat", logged)
    monkeypatch.setattr(Engine, "from_pretrained", start_eager)
    sizes = "--batch-size 1 2 --input-len 8 --output-len 4 --num-warmup 0 --num-iters 3"
    cases = measured(monkeypatch, tmp_path, f"--mode compile eager {sizes}")["cases"]
    error = capsys.readouterr().err
    assert len(cases) == 4
    assert len(set(budgets)) == 1
    assert None not in budgets
    assert [case["interleaved"] for case in cases] == [fits] * 4
    assert ("not interleaved: the total of 9" in error) == (not fits)
    assert "term by term" not in error
    if fits:
        rounds = ["eager", "compile", "compile", "eager", "eager", "compile"]
        assert log == [(mode, rows) for rows in (1, 2) for mode in rounds]
    else:
        one = [(rows, mode) for mode in ("eager", "compile") for rows in (1, 2)]
        assert log == [(mode, rows) for rows, mode in one for _ in range(3)]
    for case in cases:
        assert case["tokens_equal_eager"] == 1.0
        samples = [case["samples"]["step_ms"][i : i + 3] for i in (0, 3, 6)]
        assert case == case | summarize_repetitions(samples)


def case_with(spread: float | None, mode: str = "eager") -> dict[str, Any]:
    names = ("dtype", "weight_dtype", "activation_dtype", "kv_dtype")
    dtypes = dict.fromkeys(names, "bfloat16")
    sizes = {"batch_size": 1, "input_len": 8, "output_len": 4}
    return {"model": "m", "mode": mode, "spread": spread, "device_state": None} | dtypes | sizes


READS = {"bandwidth_gb_s": 10.0}


def test_noisy_cases_are_named():
    assert summarize_repetitions([[2.0, 3.0]])["spread"] is None
    found = summarize_repetitions([[9.0], [9.0, 12.0, 10.0], [12.0]])
    assert found["repetition_ms"] == [9.0, 10.0, 12.0]
    assert found["spread"] == pytest.approx(0.3)
    assert warnings({"environment": READS, "cases": [case_with(0.05), case_with(None)]}) == []
    cases = [case_with(0.0501), case_with(0.01, "compile")]
    (line,) = warnings({"environment": READS, "cases": cases})
    assert "1 of 2 cases" in line
    assert "m bfloat16 eager 1 x 8 x 4 (5.0%)" in line
    assert "compile" not in line


def test_larger_bandwidth_counts_and_a_difference_is_told():
    def settled(after: float) -> tuple[dict[str, Any], list[str]]:
        case = case_with(0.0) | {"roofline": {"floor_ms": 2.0, "fraction": 0.8}}
        document = {"environment": dict(READS), "cases": [case]}
        settle_bandwidth(document, after)
        return document["cases"][0]["roofline"], warnings(document)

    assert settled(9.5e9) == ({"floor_ms": 2.0, "fraction": 0.8}, [])
    roofline, told = settled(16e9)
    assert (roofline["floor_ms"], roofline["fraction"]) == (1.25, 0.5)
    assert len(told) == len(settled(5e9)[1]) == 1
