"""Modes that are measured together: order of repetitions, memory shares, warnings of noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.memory.handler import MemoryBudgetError
from stepgraph.profiling.stats import Summary
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.bench.results import settle_bandwidth, warnings
from stepgraph.runtime.bench.scenarios.steady import CaseRun
from stepgraph.runtime.bench.workload import interleave, spread
from stepgraph.runtime.kernels import have_compiler

from ..rigs.bench_rig import run_bench

NATIVE = "native" if have_compiler() else "torch"


@given(st.integers(1, 5), st.integers(0, 9))
def test_every_round_runs_every_side_once_and_none_is_always_first(sides, repetitions):
    log: list[int] = []
    interleave([lambda side=side: log.append(side) for side in range(sides)], repetitions)
    rounds = [log[i : i + sides] for i in range(0, len(log), sides)]
    assert len(rounds) == repetitions
    for number, order in enumerate(rounds):
        assert order == sorted(range(sides), reverse=number % 2 == 1)
    # A machine that gets slower and slower is as slow for each, over an even number of rounds.
    if repetitions % 2 == 0:
        times = [sum(i for i, s in enumerate(log) if s == side) for side in range(sides)]
        assert len(set(times)) <= 1


TWO_MODES = "--mode compile eager --batch-size 1 --input-len 24 --output-len 6 --num-warmup 0"


def measured(
    patch: pytest.MonkeyPatch, folder: Path, arguments: str, kernels: str = NATIVE
) -> tuple[list[dict[str, Any]], list[tuple[str, int]], list[int | None]]:
    """Run the benchmark; return its cases, (mode, rows) of each repetition, and memory budgets."""
    log: list[tuple[str, int]] = []
    budgets: list[int | None] = []
    repeat, start = CaseRun.repeat, Engine.from_pretrained
    modes: dict[int, str] = {}

    def logged(run: CaseRun) -> None:
        log.append((modes[id(run.engine)], run.case.batch_size))
        repeat(run)

    def start_eager(model: str, config: EngineConfig, progress: bool) -> Engine:
        """Nothing is compiled: the engines of all modes run eagerly."""
        budgets.append(config.memory_tokens)
        fields = {name: getattr(config, name) for name in config.__slots__}
        engine = start(
            model, EngineConfig(**fields | {"mode": "eager", "kernels": kernels}), progress=progress
        )
        modes[id(engine)] = config.mode
        return engine

    patch.setattr(CaseRun, "repeat", logged)
    patch.setattr(Engine, "from_pretrained", start_eager)
    assert run_bench(patch, f"{arguments} --output-json {folder}/a.json") == 0
    cases: list[dict[str, Any]] = json.loads((folder / "a.json").read_text())["cases"]
    return cases, log, budgets


def test_repetitions_of_modes_are_interleaved(monkeypatch, tmp_path):
    cases, log, budgets = measured(monkeypatch, tmp_path, f"{TWO_MODES} --num-iters 3", "torch")
    assert [mode for mode, _ in log] == ["eager", "compile", "compile", "eager", "eager", "compile"]
    assert len(cases) == len(budgets) == 2
    assert len(set(budgets)) == 1
    assert None not in budgets
    for case in cases:
        assert case["interleaved"]
        assert case["tokens_equal_eager"] == 1.0
        samples = [case["samples"]["step_ms"][i : i + 5] for i in (0, 5, 10)]
        assert case["repetition_ms"] == [Summary.of(part).p50 for part in samples]
        assert case["spread"] == spread(case["repetition_ms"])


def test_modes_that_do_not_fit_together_run_one_after_the_other(monkeypatch, tmp_path, capsys):
    real, started = Engine.from_pretrained, []

    def start(model: str, config: EngineConfig, progress: bool) -> Engine:
        started.append(config)
        if len(started) == 2:
            raise MemoryBudgetError("the total of 9 bytes is over the budget\nterm by term")
        return real(model, config, progress=progress)

    monkeypatch.setattr(Engine, "from_pretrained", start)
    arguments = TWO_MODES.replace("--batch-size 1", "--batch-size 1 2")
    cases, log, budgets = measured(monkeypatch, tmp_path, f"{arguments} --num-iters 2")
    assert log == [(mode, rows) for mode in ("eager", "compile") for rows in (1, 1, 2, 2)]
    assert not any(case["interleaved"] for case in cases)
    assert len(budgets) == 4
    error = " ".join(capsys.readouterr().err.split())
    assert "modes run one after the other, not interleaved: the total of 9" in error
    assert "term by term" not in error


def case_with(
    spread: float | None, mode: str = "eager", interleaved: bool = True
) -> dict[str, Any]:
    dtypes = dict.fromkeys(("dtype", "weight_dtype", "kv_dtype"), "bfloat16")
    sizes = {"batch_size": 1, "input_len": 8, "output_len": 4}
    return {"model": "m", **dtypes, "mode": mode, "spread": spread, **sizes} | {
        "interleaved": interleaved,
        "device_state": None,
    }


READS = {"bandwidth_gb_s": 10.0}


def test_noisy_cases_are_named():
    assert spread([2.0]) is None
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert warnings({"environment": READS, "cases": [case_with(0.05), case_with(None)]}) == []
    (line,) = warnings(
        {"environment": READS, "cases": [case_with(0.0501), case_with(0.01, "compile")]}
    )
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
