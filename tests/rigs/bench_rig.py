"""bench.py as its command line runs it, in this process, with a bandwidth that stays the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from stepgraph.__main__ import main
from stepgraph.runtime.kernels import have_compiler

ROOT = Path(__file__).resolve().parents[2]
BANDWIDTH_GB_S = 30.0


def run_bench(patch: pytest.MonkeyPatch, arguments: str) -> int:
    """Run a command line; return the exit status.

    Eager steps have the native kernels where there is a compiler: they are the shortest.
    """
    if "--mode eager" in arguments and "--kernels" not in arguments and have_compiler():
        arguments += " --kernels native"
    patch.setattr(
        "stepgraph.profiling.bandwidth.measure_read_bandwidth", lambda device: 1e9 * BANDWIDTH_GB_S
    )
    return main(["bench", *arguments.split()])


def measured(patch: pytest.MonkeyPatch, folder: Path, arguments: str, status: int = 0) -> Any:
    """Run a measurement; return the document that it writes into a folder."""
    path = folder / "a.json"
    assert run_bench(patch, f"{arguments} --output-json {path}") == status
    return json.loads(path.read_text())
