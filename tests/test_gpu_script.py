""".ci/gpu runs its parts one by one and says what was reached."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
import time
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from stepgraph.runtime.benchmarks.options import parse_arguments

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


def test_whole_limits_fit_up_to_the_tests(script: ModuleType, tmp_path: Path) -> None:
    parts = script.parts(tmp_path, False)
    names = [part.name for part in parts]
    first = parts[: 1 + max(names.index("kernel tests"), names.index("gpu tests"))]
    assert sum(part.seconds for part in first) <= script.WHOLE_SECONDS
    assert names.index("tune") == len(names) - 2  # what was tuned changes no other part


def one_part(p50: float, **more: Any) -> dict[str, Any]:
    return {"cases": [{"batch_size": 1, "step_ms": {"p50": p50}, **more}]}


def shown(script: ModuleType, documents: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What was measured, and whether it reached its aim."""
    rows = [line.split(" | ") for line in script.summary(documents).splitlines()[2:]]
    return {cells[0].strip("| "): (cells[2], cells[3].strip(" |")) for cells in rows}


def test_the_summary_compares_with_the_aims(script: ModuleType) -> None:
    quality = {"auto": 5.0, "int8": 5.01, "fp8": 5.1}
    found = shown(
        script,
        {
            "1b": one_part(0.7),
            "0.6b": one_part(0.43),
            "8b": one_part(3.9),
            "8b int8": one_part(2.5),
            "8b fp8": one_part(float("nan")),
            "tail": one_part(0.7, itl_ms={"p50": 0.7, "p99": 0.714, "n": 5120}),
            "baseline": one_part(0.7, baselines=[{"speedup": 3.5}, {"speedup": 4.0}]),
            "start": {"start": [{"total_seconds": 26.0}, {"total_seconds": 7.0}]},
            "idle": {"uncovered_us": {"p50": 3.25}},
            "quality": [{"weight_dtype": k, "perplexity": v} for k, v in quality.items()],
            "8 steps in a launch": one_part(0.56),
            "kernel tests": {"failed": 0, "passed": 9},
            "gpu tests": {"failed": 0, "passed": 0},
            "trace": {"trace": {"kernels": 400, "unnamed": {"memset": 4, "fill": 1}}},
            "parts": {name: {"status": "done"} for name in ("kernel tests", "gpu tests")},
        },
    )
    assert found == {
        "Llama-3.2-1B, batch 1, context 1k": ("700 µs", "yes"),
        "Qwen3-0.6B, batch 1, context 1k": ("430 µs", "no"),
        "Llama-3.1-8B, batch 1, context 1k": ("3900 µs", "yes"),
        "Llama-3.2-1B, batch 32, context 8k": ("not measured", "-"),
        "Llama-3.1-8B, batch 32, context 8k": ("not measured", "-"),
        "1B against transformers, batch 1": ("3.5 times", "yes"),
        "1B against transformers, batch 32": ("not measured", "-"),
        "p99 / p50 of ITL, 1B, n >= 5000": ("1.02", "yes"),
        "between two steps of 1B no kernel runs": ("3.25 µs", "yes"),
        "start of 1B with 12 buckets, cold": ("26 s", "no"),
        "start of 1B with 12 buckets, warm": ("7 s", "yes"),
        "8B with int8 weights, batch 1": ("1.56 times", "yes"),
        "8B with fp8 weights, batch 1": ("nan times", "no"),
        "perplexity of int8 weights, demo model": ("0.2 % more", "yes"),
        "perplexity of fp8 weights, demo model": ("2 % more", "no"),
        "8 steps in a launch, 1B, batch 1": ("1.25 times", "yes"),
        "Llama-3.2-1B, batch 1, tuned": ("not measured", "-"),
        "tests of kernels that fail": ("0", "yes"),
        "tests for CUDA that fail": ("not measured", "-"),  # all were skipped
        "kernels of a captured step without a name": ("5", "no"),
    }


def test_kernels_without_a_name_are_counted(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def kernel(name: str, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": "kernel", "name": name, "args": {"step": 3, **args}}

    events = [
        kernel("layer 0/qkv_linear", operation="qkv_linear", layer=0),
        kernel("final_norm", operation="final_norm"),
        kernel("other", operation="other"),
        kernel("fill"),
        kernel("fill"),
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy"},
        {"ph": "X", "name": "step"},
    ]
    (tmp_path / "scratch").mkdir()
    written = tmp_path / "scratch" / "trace.trace.json.gz"
    (part,) = [part for part in script.parts(written.parent, False) if part.name == "trace"]
    (tmp_path / "scratch" / "result.json").write_text('{"cases": []}')
    run = script.Run(tmp_path, False, time.monotonic())
    for found, expected in (
        (events, {"kernels": 5, "unnamed": {"other": 1, "fill": 2}}),
        (events[:2], {"kernels": 2, "unnamed": {}}),
        ([], {"kernels": 0, "unnamed": {}}),
    ):
        written.write_bytes(gzip.compress(json.dumps({"traceEvents": found}).encode()))
        document = run.document(part, tmp_path / "scratch" / "result.json", "")
        assert document == {"cases": [], "trace": {"bytes": written.stat().st_size, **expected}}
        assert (tmp_path / written.name).read_bytes() == written.read_bytes()
        measured = {0: "not measured", 2: "0", 5: "3"}[len(found) and expected["kernels"]]
        row = "kernels of a captured step without a name"
        assert shown(script, {"trace": document})[row][0] == measured
    assert "without a name" not in script.summary({}, dry_run=True)


@pytest.mark.parametrize(
    ("speedups", "measured"),
    [([4.0, 2.5], "2.5 times"), ([None, 3.25], "3.25 times"), ([None, None], "not measured")],
)
def test_the_faster_way_of_transformers_is_what_counts(
    script: ModuleType, speedups: list[float | None], measured: str
) -> None:
    baselines = [{"speedup": speedup} for speedup in speedups]
    found = shown(script, {"baseline": one_part(0.7, baselines=baselines)})
    assert found["1B against transformers, batch 1"][0] == measured


def test_too_little_is_no_measurement(script: ModuleType) -> None:
    found = shown(
        script,
        {
            "tail": one_part(0.7, itl_ms={"p50": 0.7, "p99": 0.7, "n": 4999}),
            "kernel tests": {"failed": 0, "passed": 9},
            "gpu tests": {"failed": 1, "passed": 9},
            "parts": {name: {"status": "over 70 s"} for name in ("kernel tests", "gpu tests")},
        },
    )
    assert found["p99 / p50 of ITL, 1B, n >= 5000"] == ("not measured", "-")
    assert found["tests of kernels that fail"] == ("not measured", "-")
    assert found["tests for CUDA that fail"] == ("1", "no")


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
    endless = "import time\ntry: time.sleep(600)\nfinally: print('what it has')"
    monkeypatch.setattr(
        script,
        "parts",
        lambda folder, dry_run: [
            script.Part("broken", ("-c", "print('no'); raise SystemExit(3)"), 60),
            script.Part("endless", ("-c", endless), 6),
            script.Part("kernel tests", (str(program), xml), 60),
            script.Part("environment", ("-c", "print('{\"device\": 1}')"), 60),
        ],
    )
    run = script.Run(tmp_path, True, time.monotonic() + 100)
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
    log = (tmp_path / "log.txt").read_text()
    assert "=== broken" in log
    assert "what it has" in log


def test_no_part_begins_when_time_is_up(script: ModuleType, tmp_path: Path) -> None:
    run = script.Run(tmp_path, True, time.monotonic() + 1)
    part = script.Part("late", ("-c", "print('{}')"), 60)
    run.part(part, tmp_path, lambda text: None)
    assert run.documents["parts"]["late"]["status"] == "no time left"


def test_what_is_missing_is_written_down(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "NEEDED", ("torch", "no_such_module"))
    monkeypatch.setattr(script, "WANTED", ("neither_this",))
    assert script.main([str(tmp_path / "a"), "--dry-run"]) == 2
    document = json.loads((tmp_path / "a" / "gpu.json").read_text())
    assert document["missing"] == ["no_such_module", "neither_this"]
    assert document["environment"]["packages"]["no_such_module"] is None
    assert document["environment"]["packages"]["torch"]
    assert document["parts"] == {}
    assert "| not measured | - |" in (tmp_path / "a" / "summary.md").read_text()
    assert "not there: no_such_module, neither_this: put wheels" in capsys.readouterr().err


def test_parts_import_this_tree_and_the_wheels_beside_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("runtime", "graphs", "cache", "profiling", ".whl"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    (tmp_path / "tree" / "graphs" / "__init__.py").write_text("print('this tree')")
    with zipfile.ZipFile(tmp_path / "tree" / ".whl" / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "print('this wheel')")
    monkeypatch.setattr(script, "ROOT", tmp_path / "tree")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    environment = script.environment_of_parts(tmp_path / "site", False)
    assert "TRITON_INTERPRET" not in environment
    assert environment["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    status, said = script.execute(
        [sys.executable, "-c", "import stepgraph.graphs, thing"], 60, environment
    )
    assert (status, said) == ("done", "this tree\nthis wheel\n")


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
    assert all(b["speedup"] > 0 for b in document["baseline"]["cases"][1]["baselines"])
    assert "| not measured | - |" in done.stdout
    assert (tmp_path / "summary.md").read_text().startswith("Dry run")
    assert document["trace"]["trace"]["bytes"] == (tmp_path / "trace.trace.json.gz").stat().st_size
