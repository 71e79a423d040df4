"""`.ci/gpu` runs its parts one by one, and a part that fails loses only itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from stepgraph.runtime.bench.options import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "gpu"
FAULTS = {
    "broken": "print('no'); raise SystemExit(3)",
    "crash": "import ctypes; ctypes.string_at(0)",
    "silent": "import time\nprint('{\"measured\": 1}')\ntime.sleep(600)",
    "deaf": "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)",
    "written": "import sys; open(sys.argv[1], 'w').write('[2]')",
}


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


def new_run(script: ModuleType, folder: Path) -> Any:
    scratch = folder / f"scratch-{time.monotonic_ns()}"
    return script.Run(folder, None, scratch, False, time.monotonic() + 600)


def test_gpu_parts_have_valid_command_lines(script: ModuleType, tmp_path: Path) -> None:
    run = new_run(script, tmp_path)
    wrong = [{"kernel": "head", "rows": 8, "passed": False}]
    for command, seconds in (("quick", 6.8 * 60), ("second", 400)):
        parts = script.COMMANDS[command]({"verify 8 32": wrong, "parts": {}})
        assert len({part.name for part in parts}) == len(parts)
        assert sum(part.seconds for part in parts) <= seconds
        for part in parts:
            words = run.command(part, tmp_path / "a.json")
            if "bench.py" in words:
                options = parse_arguments(words[words.index("bench.py") + 1 :])
                assert options.output_json == tmp_path / "a.json"
    sanitized = script.failed_kernels({"verify 8 32": wrong, "parts": {}})
    assert [part.name for part in sanitized] == ["sanitize 8"]
    assert "--kernel head" in sanitized[0].command
    crashed = {"verify 1": {"status": "killed by SIGSEGV"}}
    assert [part.name for part in script.failed_kernels({"parts": crashed})] == ["sanitize 1"]


def test_gpu_part_with_a_fault_loses_only_itself(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(script, "LEAST_SECONDS", 0.1)
    monkeypatch.setattr(script, "SILENT_SECONDS", 0.5)
    for name, code in FAULTS.items():
        (tmp_path / f"{name}.py").write_text(code)
        limit = {"silent": 2, "deaf": 1}.get(name, 30)
        run = new_run(script, tmp_path)  # a command of its own, in the same folder
        part = script.Part(name, limit, f"{tmp_path / name}.py JSON", "")
        assert run.run([part]) == (name == "written")
    document = json.loads((tmp_path / "results.json").read_text())
    statuses = {name: part["status"] for name, part in document["parts"].items()}
    assert statuses == {
        "broken": "failed: 3",
        "crash": "killed by SIGSEGV",
        "silent": "over 2 s",
        "deaf": "over 1 s",
        "written": "done",
    }
    assert document["silent"] == [{"measured": 1}]
    assert document["written"] == [2]
    log = (tmp_path / "log.txt").read_text()
    assert log.count("string_at") == 1
    assert 'silent.py", line 3' in log.partition("KeyboardInterrupt")[0], "the dumped stack"
    assert "| written | done |" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_gpu_kernels_are_found_where_they_are_carried(tmp_path: Path) -> None:
    """Also by a Triton whose own files are others."""
    pytest.importorskip("triton")
    code = """
import sys
sys.path.insert(0, ".ci")
import carry_kernels
from pathlib import Path
carry_kernels.ROWS = {"demo": [1]}
carry_kernels.pack(Path(sys.argv[1]))
"""
    find = """
import sys
sys.path.insert(0, ".ci")
import carry_kernels, contextlib
from pathlib import Path
import triton
from triton.runtime import cache
key = cache.triton_key()
cache.triton_key = lambda: key.replace("a", "b")
carry_kernels.unpack(Path(sys.argv[1]))
listed = []
triton.knobs.compilation.listener = lambda src, cache_hit, **_: listed.append(cache_hit)
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.bench.workload import BenchmarkCase
from stepgraph.runtime.tools.compile_ahead import compile_kernel_calls
from stepgraph.runtime.tools.compile_ahead import record_steps
longest = BenchmarkCase(1, carry_kernels.CONTEXT, carry_kernels.OUTPUT).longest_sequence(512)
config = EngineConfig(max_num_seqs=1, max_model_len=longest, prefix_cache=False)
for step in record_steps("demo", config, rows=[1], tokens=[]):
    for call in step.kernel_calls:
        with contextlib.suppress(KeyError):  # carried kernels have no PTX to report on
            list(compile_kernel_calls([call], 90))
assert len(listed) > 5 and all(listed), listed
"""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    for program in (code, find):
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "kernels.tar")],
            cwd=ROOT, env=environment, check=True, timeout=600,
        )  # fmt: skip


@pytest.mark.slow
def test_gpu_script_rehearses_on_a_cpu(script: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "quick", "second", "--dry-run"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True)
    document = json.loads((tmp_path / "results.json").read_text())
    statuses = {name: part["status"] for name, part in document["parts"].items()}
    assert set(statuses.values()) == {"done"}, statuses
    assert done.returncode == 0
    assert all(entry["passed"] for entry in document["verify 1"])
    assert document["trace"]["cases"][0]["profile"]["operations"]
    assert document["transformers"]["cases"][0]["baselines"]
    unmeasured = (tmp_path / "summary.md").read_text().count("not measured")
    assert unmeasured == 1, "the p99 of a few steps"
