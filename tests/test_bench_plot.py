"""bench.py --plot: which steps are drawn, the title, and a failure to write."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from stepgraph.profiling.plot import PlotError
from stepgraph.runtime.bench.options import parse_arguments
from stepgraph.runtime.bench.results import step_plot as plot

from .bench_rig import run_bench

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the package matplotlib"
)
SMALL = "--mode eager --input-len 24 --output-len 12 --num-warmup 1 --num-iters 2"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of calls that would draw."""
    calls: list[dict[str, Any]] = []

    def plot_steps(records: Any, path: Any, **rest: Any) -> None:
        calls.append({"records": records, "path": path} | rest)

    monkeypatch.setattr(plot, "plot_steps", plot_steps)
    return calls


@needs_matplotlib
def test_steady_draws_the_repetitions_of_the_largest_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[dict[str, Any]]
) -> None:
    arguments = f"--batch-size 2 1 {SMALL} --plot {tmp_path}/a.png --output-json {tmp_path}/a.json"
    assert run_bench(monkeypatch, arguments) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    (call,) = drawn
    assert call["path"] == tmp_path / "a.png"
    assert call["cases"] == document["cases"]
    assert call["command"] == document["environment"]["command"]
    assert call["max_itl_ms"] is None
    engine, what = call["title"].splitlines()
    assert engine == f"demo, bfloat16, eager, {document['environment']['device']}"
    assert what == (
        "steady: 2 rows, prompts of 24 tokens, 12 decoded (the largest of 2 cases, in its"
        " fastest mode)"
    )
    records = call["records"]
    largest = next(case for case in document["cases"] if case["batch_size"] == 2)
    whole = [r for r in records if r.rows == 2 and not r.prefill_tokens]
    assert len(whole) == largest["step_ms"]["n"] == 2 * 11
    assert sum(r.prefill_tokens for r in records) == 2 * 2 * 24, "all repetitions, no warm-up"


@needs_matplotlib
def test_of_two_modes_the_faster_one_is_drawn(drawn: list[dict[str, Any]]) -> None:
    def case(mode: str, size: int, ms: float) -> dict[str, Any]:
        dtypes = dict.fromkeys(("dtype", "weight_dtype", "kv_dtype"), "bfloat16")
        sizes = {"batch_size": 1, "input_len": 8, "output_len": 2}
        reached = {"roofline": {"bytes_per_step": size}, "step_ms": {"p50": ms}}
        return {"model": "m", "mode": mode, **dtypes, **sizes, **reached}

    options = parse_arguments(["--plot", "a.png"])
    steps = plot.MeasuredSteps(options)
    for mode, size, ms in (("a", 1, 0.1), ("b", 5, 3.0), ("c", 5, 2.0), ("d", 5, 2.5)):
        steps.add(case(mode, size, ms), [])
    steps.write({"cases": [], "environment": {"device": "cpu", "command": ""}})
    (call,) = drawn
    assert call["title"].startswith("m, bfloat16, c, cpu")


@needs_matplotlib
def test_interference_draws_the_run_with_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[dict[str, Any]]
) -> None:
    arguments = (
        "--scenario interference --mode eager --batch-size 1 --input-len 40 --num-steps 30"
        f" --max-itl-ms 200 --plot {tmp_path}/a.svg --output-json {tmp_path}/a.json"
    )
    assert run_bench(monkeypatch, arguments) == 0
    (call,) = drawn
    assert call["max_itl_ms"] == 200
    assert call["cases"] == []
    assert call["title"].splitlines()[1] == (
        "interference: 1 row, a prompt of 40 tokens every 10 steps, budget 200 ms"
        " (the last of 2 runs)"
    )
    entries = json.loads((tmp_path / "a.json").read_text())["interference"]
    assert len(entries) == 2
    assert sum(r.prefill_tokens > 0 for r in call["records"]) >= 3
    assert len(call["records"]) == 30 + 30


@needs_matplotlib
def test_a_plot_is_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the disk is full by then, the table is printed all the same."""
    arguments = (
        "--scenario churn --mode eager --batch-size 2 --input-len 16 --output-len 6"
        f" --num-steps 30 --plot {tmp_path}/a.png"
    )
    assert run_bench(monkeypatch, arguments) == 0
    contents = (tmp_path / "a.png").read_bytes()
    assert struct.unpack(">II", contents[16:24]) == (1600, 1000)
    assert os.listdir(tmp_path) == ["a.png"]

    def full(*args: Any, **rest: Any) -> None:
        raise PlotError("cannot write a.png: No space left on device")

    monkeypatch.setattr(plot, "plot_steps", full)
    capsys.readouterr()
    assert run_bench(monkeypatch, arguments) == 1
    captured = capsys.readouterr()
    assert "bench.py: error: cannot write a.png: No space left on device" in captured.err
    assert "| demo" in captured.out
