"""bench.py as its command line runs it, in this process, with a bandwidth that stays the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from stepgraph.__main__ import main
from stepgraph.runtime.bench import run_scenarios

ROOT = Path(__file__).resolve().parent.parent
BANDWIDTH_GB_S = 30.0


def schema_errors(document: Any, definition: str | None = None) -> list[str]:
    """What docs/benchmark.schema.json, or one of its definitions, finds wrong in a document.

    Skips the test where the package jsonschema is missing.
    """
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs" / "benchmark.schema.json").read_text())
    if definition is not None:
        schema = {"$defs": schema["$defs"], "$ref": f"#/$defs/{definition}"}
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def run_bench(patch: pytest.MonkeyPatch, arguments: str) -> int:
    """Run a command line; return the exit status."""
    patch.setattr(
        "stepgraph.profiling.bandwidth.measure_read_bandwidth", lambda device: 1e9 * BANDWIDTH_GB_S
    )
    patch.setattr("sys.argv", ["bench.py", *arguments.split()])
    return main(["bench", *arguments.split()])


def refusal(
    patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, arguments: str
) -> str:
    """Return the one line that a scenario is refused with, before an engine is started."""

    def start(*_: object) -> None:
        raise AssertionError("an engine was started")

    patch.setattr(run_scenarios.ScenarioRun, "_start", start)
    path = folder / "a.json"
    assert run_bench(patch, f"{arguments} --output-json {path}") in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("bench.py: error: ")
    assert not path.exists()
    return line
