"""bench.py as its command line runs it, in this process, with a bandwidth that stays the same."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
BANDWIDTH_GB_S = 30.0


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench", ROOT / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_bench(patch: pytest.MonkeyPatch, arguments: str) -> int:
    """Run a command line; return the exit status."""
    patch.setattr(
        "stepgraph.profiling.bandwidth.measure_read_bandwidth", lambda device: 1e9 * BANDWIDTH_GB_S
    )
    patch.setattr("sys.argv", ["bench.py", *arguments.split()])
    return load_bench().main()
