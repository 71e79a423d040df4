""".ci/gpu runs its parts stage by stage and says what was reached."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from stepgraph.runtime.bench.options import parse_arguments

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


@pytest.fixture
def make_run(script: ModuleType, tmp_path: Path) -> Callable[..., Any]:
    def make(minutes: float = 10, dry_run: bool = False) -> Any:
        scratch = tmp_path / f"scratch {time.monotonic_ns()}"
        return script.Run(tmp_path, scratch, dry_run, time.monotonic() + 60 * minutes, {})

    return make


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_command_lines_are_right(
    script: ModuleType, make_run: Callable[..., Any], tmp_path: Path, dry_run: bool
) -> None:
    run, parts = make_run(dry_run=dry_run), script.every_part()
    assert len({part.name for part in parts}) == len(parts)
    assert [part.stage for part in parts] == sorted(part.stage for part in parts)
    seen = 0
    for part in parts:
        _, program, *arguments = run.command(part, tmp_path / "a.json")
        if program == "bench.py":
            options = parse_arguments(arguments)
            assert options.output_json == tmp_path / "a.json"
            timed = options.scenario == "steady" and part.name != "warm"
            assert options.check or not timed, part.name
            seen += 1
    assert seen >= 15
    for stage, minutes in zip("acdef", (4, 9, 4, 5, 9), strict=True):
        assert sum(part.seconds for part in parts if part.stage == stage) <= 60 * minutes


def case(p50: float, floor: float, *, passed: bool = True, **more: Any) -> dict[str, Any]:
    entry = {"batch_size": 1, "step_ms": {"p50": p50}, "roofline": {"floor_ms": floor}}
    return {"cases": [{**entry, "check": {"passed": passed}, **more}]}


def shown(script: ModuleType, documents: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """What was aimed at and measured, and whether it reached its aim."""
    text = script.summary({"parts": {}, **documents})
    rows = [line.strip("| ").split(" | ") for line in text.split("\n\n")[0].splitlines()[2:]]
    return {cells[0]: tuple(cells[1:]) for cells in rows}


def test_the_summary_compares_with_the_aims(script: ModuleType) -> None:
    unmeasured = shown(script, {})
    assert {cells[1:] for cells in unmeasured.values()} == {("not measured", "-")}
    found = shown(
        script,
        {
            "1b": case(1.0, 0.835),  # of an H100
            "0.6b": case(0.43, 0.305),  # of an H200
            "8b": case(3.9, 3.5, passed=False),
            "8b int8": case(2.5, 1.7),
            "1b, 32 rows": case(float("nan"), 2.5),
            "transformers": case(0.7, 0.5, baselines=[{"speedup": 3.5}, {"speedup": None}]),
            "tail": case(0.7, 0.5, itl_ms={"p50": 0.7, "p99": 0.714, "n": 4999}),
            "8 steps in a launch": case(0.8, 0.5),
            "idle": [{"uncovered_us": {"p50": 3.25}}],
            "quality": [{"weight_dtype": w, "perplexity": p} for w, p in (("auto", 5.0),
                        ("int8", 5.01), ("fp8", 5.1))],
            "verify 1": [{"passed": True}],
            "verify 8": [{"passed": False}],
            "verify 32": [],
            "start": {"start": [{"total_seconds": 26.0}]},
        },
    )  # fmt: skip
    expected = {
        "Llama-3.2-1B, batch 1, context 1k": ("≤ 1031 µs, 81% of the limit", "1000 µs", "yes"),
        "Qwen3-0.6B, batch 1, context 1k": ("≤ 424 µs, 72% of the limit", "430 µs", "no"),
        "Llama-3.1-8B, batch 1, context 1k": ("88% of the limit", "wrong tokens", "no"),
        "8B with int8 weights, batch 1": ("≥ 1.5 times", "wrong tokens", "no"),
        "Llama-3.2-1B, batch 32, context 8k": ("≤ 2941 µs, 85% of the limit", "nan µs", "no"),
        "1B against transformers, batch 1": ("≥ 3 times", "3.5 times", "yes"),
        "p99 / p50 of ITL, 1B, n >= 5000": ("≤ 1.03", "not measured", "-"),
        "8 steps in a launch, 1B, batch 1": ("≥ 1 times", "1.25 times", "yes"),
        "between two steps of 1B no kernel runs": ("≤ 5 µs", "3.25 µs", "yes"),
        "perplexity of the demo model, int8 weights": ("≤ 1 % more", "0.2 % more", "yes"),
        "perplexity of the demo model, fp8 weights": ("≤ 1 % more", "2 % more", "no"),
        "checks of kernels that fail": ("≤ 0", "1", "no"),
        "start of 1B with 12 buckets, cold": ("≤ 25 s", "26 s", "no"),
        "start of 1B with 12 buckets, warm": ("≤ 8 s", "not measured", "-"),
    }
    assert {what: found[what] for what in expected} == expected


def test_a_part_that_fails_or_hangs_stops_none_of_the_others(
    script: ModuleType, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(script, "GRACE_SECONDS", 4.0)
    monkeypatch.setattr(script, "LEAST_SECONDS", 0.1)
    endless = """-c '
import time
print("{\\"measured\\": 1}")
try: time.sleep(600)
finally: print("what it has")'"""
    deaf = """-c '
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)'"""
    written = '-c \'import sys; open(sys.argv[1], "w").write("[2]")\' JSON'
    parts = [
        script.Part("a", "broken", 60, "-c 'print(\"no\"); raise SystemExit(3)'", ""),
        script.Part("c", "endless", 2, endless, ""),
        script.Part("c", "deaf", 2, deaf, ""),
        script.Part("c", "written", 60, written, ""),
    ]
    monkeypatch.setattr(script, "every_part", lambda: parts)
    assert not make_run().run(["a"])
    assert not make_run().run(["c"])  # a command of its own, in the same folder
    document = json.loads((tmp_path / "gpu.json").read_text())
    states = {name: part["status"].split()[0] for name, part in document["parts"].items()}
    assert states == {"broken": "failed:", "endless": "over", "deaf": "over", "written": "done"}
    assert document["endless"] == [{"measured": 1}]
    assert document["written"] == [2]
    log = (tmp_path / "log.txt").read_text()
    assert "=== a: broken" in log
    assert "what it has" in log
    assert "| c | written | done |" in (tmp_path / "summary.md").read_text()


def test_time_that_is_left_goes_to_the_next_part(
    script: ModuleType, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    parts = [script.Part("d", str(i), 50, "-c pass", "") for i in range(3)]
    monkeypatch.setattr(script, "every_part", lambda: parts)
    limits: list[float] = []

    def execute(self: object, command: object, limit: float, *_: object) -> str:
        limits.append(limit)
        return "done"

    monkeypatch.setattr(script.Run, "execute", execute)
    assert make_run().run(["d"])
    assert limits == pytest.approx([50, 100, 150], abs=1)
    assert not make_run(minutes=0.05).run(["d"])
    assert len(limits) == 3
    assert "| d | 0 | no time left |" in (tmp_path / "summary.md").read_text()


def test_kernels_that_failed_run_alone_under_the_sanitizer(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(kernel: str, passed: bool) -> dict[str, Any]:
        return {"kernel": kernel, "passed": passed}

    documents = {
        "verify 1": [entry("down", True), entry("head", False), entry("head", False)],
        "verify 8": [entry("layer", False)],  # whose kernels are right one by one
        "verify 32": [entry("norm_linear", True)],
        "parts": {"verify 32": {"status": "over 40 s"}},
    }
    for found in (None, "/usr/bin/compute-sanitizer"):
        monkeypatch.setattr(script.shutil, "which", lambda name, found=found: found)
        one, all_of_32 = script.failed_kernels(documents)
        assert one.command.endswith("--rows 1 --replays 1 --kernel head")
        assert all_of_32.command.endswith("--rows 32 --replays 1")
        assert one.prefix[:1] == ((found,) if found else ())
    assert list(script.failed_kernels({"parts": {}})) == []


def test_where_nothing_can_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if not torch.cuda.is_available():
        assert script.main(["a", "--output", str(tmp_path / "a")]) == 2
        assert "no CUDA device" in capsys.readouterr().out
    monkeypatch.setattr(script, "NEEDED", ("json", "no_such_module"))
    monkeypatch.setattr(script, "WANTED", ("neither_this",))
    assert script.main(["--output", str(tmp_path / "b"), "--dry-run"]) == 2
    assert "not installed: no_such_module, neither_this" in capsys.readouterr().out
    document = json.loads((tmp_path / "b" / "gpu.json").read_text())
    assert document["missing"] == ["no_such_module", "neither_this"]
    assert document["parts"] == {}
    with pytest.raises(SystemExit):
        script.main(["g"])


def test_parts_import_this_tree(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("runtime", "graphs", "cache", "profiling"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    (tmp_path / "tree" / "runtime" / "package").mkdir()
    (tmp_path / "tree" / "runtime" / "package" / "__init__.py").touch()
    (tmp_path / "tree" / "graphs" / "__init__.py").write_text("print('this tree')")
    monkeypatch.setattr(script, "ROOT", tmp_path / "tree")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    environment = script.environment_of_parts(tmp_path, False)
    assert "TRITON_INTERPRET" not in environment
    command = [sys.executable, "-c", "import stepgraph.graphs"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert said == "this tree\n"


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    document = json.loads((tmp_path / "gpu.json").read_text())
    states = {name: part["status"] for name, part in document["parts"].items()}
    assert set(states.values()) == {"done"}, states
    assert done.returncode == 0
    assert len(states) == 28
    assert all(entry["passed"] for entry in document["verify 1"])
    assert document["environment"][0]["bandwidth_gb_s"] > 0
    assert all(b["speedup"] > 0 for b in document["transformers"]["cases"][1]["baselines"])
    assert (tmp_path / "trace.trace.json.gz").exists()
