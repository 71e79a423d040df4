"""Modes that are measured side by side: whose turn it is, what each may take, how noise is told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.memory.device_memory import DeviceMemory
from stepgraph.cache.memory.handler import MemoryBudgetError
from stepgraph.profiling.stats import Summary
from stepgraph.runtime import ConfigError, Engine, EngineConfig
from stepgraph.runtime.bench import engine_memory as shares
from stepgraph.runtime.bench.benchmark_run import ModelKind, StepMode
from stepgraph.runtime.bench.engine_memory import share_memory
from stepgraph.runtime.bench.options import parse_arguments
from stepgraph.runtime.bench.results.caveats import warnings
from stepgraph.runtime.bench.scenarios import steady as steady_module
from stepgraph.runtime.bench.scenarios import steady_run as run_steady
from stepgraph.runtime.bench.scenarios.steady_run import SteadyRun
from stepgraph.runtime.bench.workload import interleave, spread

from .bench_rig import run_bench

CPU = torch.device("cpu")


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


def test_a_side_that_takes_long_is_run_less_often(monkeypatch):
    clock, log = [0.0], []

    def side(name: str, seconds: float) -> Any:
        def run() -> None:
            clock[0] += seconds
            log.append(name)

        return run

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    interleave([side("long", 11.0), side("half", 4.5), side("short", 0.5)], 3, 10.0)
    assert [log.count(name) for name in ("long", "half", "short")] == [1, 2, 3]
    log.clear()
    interleave([side("long", 11.0)], 3)
    assert log == ["long"] * 3


def test_spread_is_that_of_the_repetitions():
    assert spread([2.0]) is None
    assert spread([2.0, 2.0]) == 0.0
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)


@dataclass
class FakeMachine:
    """Engines that only note what was asked of them, in a machine with a clock."""

    log: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    slow: frozenset[int] = frozenset()
    """Entries of the log that take twice as long."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("stepgraph.profiling.bandwidth.measure_read_bandwidth", lambda device: 30e9)
        patch.setattr(Engine, "from_pretrained", self.start)
        patch.setattr(run_steady, "describe_start", lambda stats: "started")
        patch.setattr(run_steady, "CaseRun", self.case_run)
        patch.setattr(run_steady, "to_json", self.to_json)

    def start(self, model: str, config: EngineConfig, progress: bool) -> Any:
        machine = self

        class FakeEngine:
            def __init__(self) -> None:
                self.config = config
                self.memory_plan = SimpleNamespace(format=lambda: "plan")

            def stats(self) -> None:
                return None

            def __enter__(self) -> FakeEngine:
                machine.open.append(config.mode)
                return self

            def __exit__(self, *_: object) -> None:
                machine.open.remove(config.mode)

        return FakeEngine()

    def case_run(self, engine: Any, case: Any, *, seed: int) -> Any:
        machine, mode = self, engine.config.mode
        repetitions: list[float] = []

        class Run:
            def __init__(self) -> None:
                self.engine, self.prompts = engine, [[1]]

            def warm_up(self) -> None:
                machine.log.append(f"warm up {mode}")

            def repeat(self) -> None:
                machine.log.append(f"{mode} {case.batch_size}")
                repetitions.append(2.0 if len(machine.log) - 1 in machine.slow else 1.0)

            def result(self) -> Any:
                return SimpleNamespace(
                    case=case,
                    repetition_ms=repetitions,
                    step_ms=repetitions,
                    token_ids=[[1]],
                    records=[],
                )

        return Run()

    def to_json(self, engine: Any, measured: Any, **how: Any) -> dict[str, Any]:
        return {
            "mode": engine.config.mode,
            "batch_size": measured.case.batch_size,
            "open": list(self.open),
            "memory_bytes": engine.config.memory_bytes,
            "spread": spread(measured.repetition_ms),
            **how,
        }


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    made = FakeMachine()
    made.install(monkeypatch)
    return made


def steady(arguments: str) -> SteadyRun:
    return SteadyRun(parse_arguments(f"--num-iters 2 --input-len 8 {arguments}".split()))


def test_modes_interleave_repetition_by_repetition(machine):
    run = steady("--mode compile eager --batch-size 1 2 --num-warmup 1")
    run.run()
    assert machine.log == [
        *("warm up eager", "warm up compile"),
        *("eager 1", "compile 1", "compile 1", "eager 1"),
        *("warm up eager", "warm up compile"),
        *("eager 2", "compile 2", "compile 2", "eager 2"),
    ]
    cases = run.document["cases"]
    assert [(c["mode"], c["batch_size"]) for c in cases] == [
        *(("eager", 1), ("compile", 1)),
        *(("eager", 2), ("compile", 2)),
    ]
    assert all(case["interleaved"] for case in cases)
    assert all(case["open"] == ["eager", "compile"] for case in cases)
    for one, other in zip(cases[::2], cases[1::2], strict=True):
        assert one["eager"] is other["eager"]  # what correctness is judged by
    assert machine.open == []


def test_noise_of_a_round_meets_every_mode(machine):
    machine.slow = frozenset({0, 1})  # the machine is busy in the first round
    run = steady("--mode compile eager --batch-size 1 --num-warmup 0")
    run.run()
    assert [case["spread"] for case in run.document["cases"]] == [pytest.approx(2 / 3)] * 2


def test_parts_of_the_memory_are_equal(machine, monkeypatch):
    monkeypatch.setattr(
        shares.DeviceMemory, "of", lambda device: DeviceMemory(8 << 30, True, 8 << 30)
    )
    run = steady("--mode compile eager --batch-size 1 --num-warmup 0")
    run.run()
    assert [case["memory_bytes"] for case in run.document["cases"]] == [2 << 30] * 2


@pytest.mark.parametrize("at", ["plan", "start"])
def test_modes_that_do_not_fit_together_run_one_after_the_other(machine, monkeypatch, capsys, at):
    reason = "the total of 9 bytes is over the budget\nterm by term"

    def refuse(*_: object) -> list[EngineConfig]:
        raise MemoryBudgetError(reason)

    if at == "plan":
        monkeypatch.setattr(run_steady, "share_memory", refuse)
    else:

        def start(model: str, config: EngineConfig, progress: bool) -> Any:
            if config.mode == "compile" and machine.open:
                refuse()
            return real(model, config, progress)

        real = machine.start
        monkeypatch.setattr(Engine, "from_pretrained", start)
    run = steady("--mode compile eager --batch-size 1 2 --num-warmup 0")
    run.run()
    assert machine.log == [f"{m} {b}" for m in ("eager", "compile") for b in (1, 1, 2, 2)]
    cases = run.document["cases"]
    assert [case["interleaved"] for case in cases] == [False] * 4
    assert [case["open"] for case in cases] == [["eager"]] * 2 + [["compile"]] * 2
    assert [case["memory_bytes"] for case in cases] == [None] * 4
    assert [case["eager"] is cases[0]["eager"] for case in cases] == [True, False, True, False]
    error = " ".join(capsys.readouterr().err.split())
    assert "demo: eager, compile run one after the other, not interleaved: the total of 9" in error
    assert "term by term" not in error


def test_a_mode_alone_takes_no_turns(machine):
    run = steady("--mode eager --batch-size 1 --num-warmup 0")
    run.run()
    (case,) = run.document["cases"]
    assert (case["interleaved"], case["memory_bytes"]) == (False, None)


def test_the_baseline_runs_once_a_round(machine, monkeypatch):
    class Baseline:
        dtype = "bfloat16"

        def prepare(self, prompts: Any, steps: int, chunk: int) -> Any:
            machine.log.append(f"prepare {prompts} {steps} {chunk}")
            return SimpleNamespace(
                run=lambda: machine.log.append("baseline"), to_json=lambda *_: {}
            )

    run = steady("--mode eager --batch-size 1 --num-warmup 1 --output-len 9 --num-iters 3")
    kind = ModelKind("demo", *["auto"] * 3)
    engines = [
        machine.start("demo", run.config(kind, StepMode(mode, "auto")), False)
        for mode in ("eager", "compile")
    ]
    cases = list(run.measure("demo", engines, {}, Baseline()))
    assert machine.log == [
        *("prepare [[1]] 8 512", "warm up eager", "warm up compile"),
        *("eager 1", "compile 1", "baseline"),
        *("baseline", "compile 1", "eager 1"),
        *("eager 1", "compile 1", "baseline"),
    ]
    assert len(cases) == 2


def test_shares_are_planned_without_a_weight(monkeypatch):
    memory = DeviceMemory(64 << 20, True, 64 << 20)
    monkeypatch.setattr(shares.DeviceMemory, "of", lambda device: memory)
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=1, max_model_len=64)
    with pytest.raises(MemoryBudgetError):
        share_memory("preset:llama-3.1-8b", [config] * 2, CPU, 0.5)
    large = DeviceMemory(1 << 40, True, 1 << 40)
    monkeypatch.setattr(shares.DeviceMemory, "of", lambda device: large)
    shared = share_memory("preset:llama-3.1-8b", [config] * 2, CPU, 0.5)
    assert [c.memory_bytes for c in shared] == [1 << 38] * 2
    assert [c.memory_fraction for c in shared] == [None] * 2
    with pytest.raises(ConfigError, match="mode='graph' needs a CUDA device"):
        share_memory("demo", [config, EngineConfig(device="cpu", mode="graph")], CPU, None)


def test_a_real_run_of_two_modes(monkeypatch, tmp_path, capsys):
    arguments = "--batch-size 1 --input-len 24 --output-len 6 --num-warmup 0 --num-iters 3"
    asked: list[int | None] = []
    real = Engine.from_pretrained

    def start(model: str, config: EngineConfig, progress: bool) -> Any:
        asked.append(config.memory_bytes)
        eager = EngineConfig(
            **{n: getattr(config, n) for n in config.__slots__} | {"mode": "eager"}
        )
        return real(model, eager, progress=progress)

    monkeypatch.setattr(Engine, "from_pretrained", start)
    files = f"--output-json {tmp_path}/a.json"
    assert run_bench(monkeypatch, f"{arguments} --mode eager compile {files}") == 0
    cases = json.loads((tmp_path / "a.json").read_text())["cases"]
    assert len(cases) == len(asked) == 2
    assert len(set(asked)) == 1
    assert None not in asked
    for case in cases:
        assert len(case["repetition_ms"]) == 3
        samples = [case["samples"]["step_ms"][i : i + 5] for i in (0, 5, 10)]
        assert case["repetition_ms"] == [Summary.of(part).p50 for part in samples]
        assert case["spread"] == spread(case["repetition_ms"])
        assert case["interleaved"]
        assert case["correct"]["tokens_equal_eager"] == 1.0


def case_with(
    spread: float | None, mode: str = "eager", interleaved: bool = True
) -> dict[str, Any]:
    dtypes = dict.fromkeys(("dtype", "weight_dtype", "kv_dtype"), "bfloat16")
    sizes = {"batch_size": 1, "input_len": 8, "output_len": 4}
    return {"model": "m", **dtypes, "mode": mode, "spread": spread, **sizes} | {
        "interleaved": interleaved,
        "device_state": None,
    }


def test_cases_that_are_too_noisy_are_named():
    assert warnings({"cases": [case_with(0.05), case_with(None)]}) == []
    (line,) = warnings({"cases": [case_with(0.0501), case_with(0.01, "compile")]})
    assert "1 of 2 cases" in line
    assert "m bfloat16 eager 1 x 8 x 4 (5.0%)" in line
    assert "compile" not in line


def test_engines_that_share_and_those_that_lack_blocks_are_named_as_well():
    entry = case_with(0.2, "compile")
    prefix = {"cases": [], "prefix": [entry | {"unshared": {"spread": 0.01}}]}
    (line,) = warnings(prefix)
    assert line.endswith(
        "1 of 2 cases lie more than 5% apart (spread): m bfloat16 compile 1 x 8 x 4 on (20.0%)"
    )
    runs = [
        {"preemption": name, "spread": spread, "input_len": 8, "output_len": 4}
        for name, spread in (("none", None), ("recompute", 0.06), ("swap", 0.05))
    ]
    rows = {name: value for name, value in entry.items() if not name.endswith("_len")}
    (line,) = warnings({"cases": [], "memory": [rows | {"scarcity": runs}]})
    assert line.endswith(
        "1 of 3 cases lie more than 5% apart (spread):"
        " m bfloat16 compile 1 x 8 x 4 recompute (6.0%)"
    )


def test_modes_without_turns_are_named():
    apart = [case_with(0.0, mode, interleaved=False) for mode in ("eager", "compile")]
    (line,) = warnings({"cases": apart})
    assert "one after the other" in line
    assert line.endswith(": m bfloat16")
    assert warnings({"cases": apart[:1]}) == []


def test_warnings_are_on_both_sides(monkeypatch, tmp_path, capsys):
    durations = iter((1.0, 2.0) * 3)

    def run(*arguments: Any, **how: Any) -> Any:
        outputs, _, counted = real(*arguments, **how)
        return outputs, [next(durations)], counted

    real = steady_module._run
    monkeypatch.setattr(steady_module, "_run", run)
    arguments = "--mode eager --batch-size 1 --input-len 8 --output-len 4 --num-warmup 0"
    assert run_bench(monkeypatch, f"{arguments} --num-iters 2 --output-md {tmp_path}/a.md") == 0
    captured = capsys.readouterr()
    warning = "Warning: the repetitions of 1 of 1 cases lie more than 5% apart"
    assert captured.err.splitlines()[-1].startswith(f"bench.py: {warning}")
    assert captured.out.splitlines()[-1].startswith(warning)
    assert (tmp_path / "a.md").read_text() == captured.out
    assert "66.7%" in captured.out
