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
from stepgraph.runtime.bench import speculation
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


def test_the_command_lines_are_right(
    script: ModuleType,
    make_run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    run, parts = make_run(), script.every_part()
    assert len({part.name for part in parts}) == len(parts)
    assert [part.stage for part in parts] == sorted(part.stage for part in parts)
    seen = 0
    for part in parts:
        _, program, *arguments = run.command(part, tmp_path / "a.json")
        if "--speculate" in arguments:
            monkeypatch.setattr(speculation, "_measure_all", lambda options: None)
            assert speculation.main(arguments) == 0
        elif program == "bench.py":
            options = parse_arguments(arguments)
            assert options.output_json == tmp_path / "a.json"
            timed = options.scenario == "steady" and part.name != "warm"
            assert options.check or not timed, part.name
            seen += 1
    assert seen >= 15
    for stage, minutes in zip("acdefghi", (5, 9, 5, 5, 9, 9, 5, 5), strict=True):
        assert sum(part.seconds for part in parts if part.stage == stage) <= 60 * minutes


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_dry_run(script: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    document = json.loads((tmp_path / "gpu.json").read_text())
    states = {name: part["status"] for name, part in document["parts"].items()}
    assert set(states.values()) == {"done"}, states
    assert done.returncode == 0
    assert set(states) == {part.name for part in script.every_part()}
    assert all(entry["passed"] for entry in document["verify 1"])
    assert document["environment"][0]["bandwidth_gb_s"] > 0
    assert all(b["speedup"] > 0 for b in document["transformers"]["cases"][1]["baselines"])
    assert (tmp_path / "trace.trace.json.gz").exists()
