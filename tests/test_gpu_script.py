""".ci/gpu runs its parts one by one and says what was reached."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from stepgraph.runtime.benchmark_options import parse_arguments

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "gpu"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("gpu_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_script"] = module  # where dataclasses look for their module
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_command_lines_are_right(script: ModuleType, tmp_path: Path, dry_run: bool) -> None:
    parts = script.parts(tmp_path, dry_run)
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        if part.arguments[0] == "bench.py":
            parse_arguments(part.arguments[1:])


def one_case(model: str, p50: float, **more: Any) -> dict[str, Any]:
    found = {"model": model, "batch_size": 1, "dtype": "bfloat16", "weight_dtype": "bfloat16"}
    return {**found, "step_ms": {"p50": p50}, **more}


def test_the_summary_compares_with_the_aims(script: ModuleType) -> None:
    one, small, eight = "preset:llama-3.2-1b", "preset:qwen3-0.6b", "preset:llama-3.1-8b"
    documents = {
        "batch 1": {"cases": [one_case(one, 0.7), one_case(small, 0.43)]},
        "8b": {
            "cases": [
                one_case(eight, 3.9),
                one_case(eight, 2.5, weight_dtype="int8"),
                one_case(eight, float("nan"), weight_dtype="fp8"),
            ]
        },
        "tail": {"cases": [one_case(one, 0.7, itl_ms={"p50": 0.7, "p99": 0.714})]},
        "baseline": {"cases": [one_case(one, 0.7, baseline={"speedup": 3.5})]},
        "start": {"start": [{"total_seconds": 26.0}, {"total_seconds": 7.0}]},
        "kernel tests": {"failed": 0},
    }
    rows = [line.split(" | ") for line in script.summary(documents).splitlines()[2:]]
    shown = {cells[0].strip("| "): (cells[2], cells[3].strip(" |")) for cells in rows}
    assert shown["Llama-3.2-1B, batch 1, context 1k"] == ("700 µs", "yes")
    assert shown["Qwen3-0.6B, batch 1, context 1k"] == ("430 µs", "no")
    assert shown["Llama-3.1-8B, batch 1, context 1k"] == ("3900 µs", "yes")
    assert shown["Llama-3.1-8B, batch 32, context 8k"] == ("not measured", "-")
    assert shown["1B against transformers, batch 1"] == ("3.5 times", "yes")
    assert shown["1B against transformers, batch 32"] == ("not measured", "-")
    assert shown["p99 / p50 of ITL, 1B, n >= 5000"] == ("1.02", "yes")
    assert shown["start of 1B with 12 buckets, cold"] == ("26 s", "no")
    assert shown["start of 1B with 12 buckets, warm"] == ("7 s", "yes")
    assert shown["8B with int8 weights, batch 1"] == ("1.56 times", "yes")
    assert shown["8B with fp8 weights, batch 1"] == ("nan times", "no")
    assert shown["tests of kernels that fail"] == ("0", "yes")


def test_a_part_that_fails_stops_none_of_the_others(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = (
        "import sys; open(sys.argv[1].partition('=')[2], 'w').write("
        "\"<testsuite><testcase classname='a' name='b'><failure message='wrong&#10;all'/>"
        '</testcase><testcase><skipped/></testcase><testcase/></testsuite>")'
    )
    program = tmp_path / "report.py"
    program.write_text(report)
    xml = f"--junitxml={tmp_path / 'a.xml'}"
    monkeypatch.setattr(
        script,
        "parts",
        lambda folder, dry_run: [
            script.Part("broken", ("-c", "print('no'); raise SystemExit(3)"), 60),
            script.Part("endless", ("-c", "import time; time.sleep(600)"), 6),
            script.Part("kernel tests", (str(program), xml), 60),
            script.Part("environment", ("-c", "print('{\"device\": 1}')"), 60),
        ],
    )
    run = script.Run(tmp_path, True, 100)
    run.run()
    document = json.loads((tmp_path / "gpu.json").read_text())
    states = {name: part["status"] for name, part in document["parts"].items()}
    assert states == {
        "broken": "failed: 3",
        "endless": "over 6 s",
        "kernel tests": "done",
        "environment": "done",
    }
    assert document["kernel tests"] == {
        "tests": 3,
        "passed": 1,
        "skipped": 1,
        "failed": 1,
        "failures": {"a::b": "wrong"},
    }
    assert document["environment"]["device"] == 1
    assert "| tests of kernels that fail | ≤ 0 | 1 | no |" in (tmp_path / "summary.md").read_text()
    assert "=== broken" in (tmp_path / "log.txt").read_text()


def test_no_part_begins_when_time_is_up(script: ModuleType, tmp_path: Path) -> None:
    run = script.Run(tmp_path, True, 1)
    part = script.Part("late", ("-c", "print('{}')"), 60)
    run.part(part, tmp_path, lambda text: None)
    assert run.documents["parts"]["late"]["status"] == "no time left"


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "--dry-run"], capture_output=True, text=True
    )
    document = json.loads((tmp_path / "gpu.json").read_text())
    states = {name: part["status"] for name, part in document["parts"].items()}
    assert states.pop("kernels") == "failed: 1"  # a CPU has none
    assert set(states.values()) == {"done"}, document["parts"]
    assert document["kernel tests"]["failed"] == 0
    assert document["baseline"]["cases"][1]["baseline"]["speedup"] > 0
    assert "| not measured | - |" in done.stdout
    assert (tmp_path / "summary.md").read_text().startswith("Dry run")
