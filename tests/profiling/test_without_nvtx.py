"""Without the package nvtx everything runs, and what needs its ranges says so.

Each program runs in a process of its own, in which importing nvtx fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = """
import sys, warnings
warnings.simplefilter("error")
from stepgraph.profiling import ranges
from stepgraph.profiling.trace import read_trace, torch_trace
from stepgraph.runtime import Engine, EngineConfig, SamplingParams

names = []

class Listener:
    def push(self, name, payload): names.append(name)
    def pop(self): pass

assert not ranges.attached
config = EngineConfig(device="cpu", mode="eager", num_blocks=8)
with Engine.from_pretrained("demo", config) as engine:
    with ranges.listening(Listener()), torch_trace(sys.argv[1]):
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, min_tokens=4))
    records = engine.timeline().records()
assert len(output.token_ids) == 4
assert sum(record.rows for record in records) >= 3, records
assert all(record.device_ns > 0 for record in records)
assert {"step", "plan", "launch", "prefill", "replay", "commit"} <= set(names)
traced = [event["name"] for event in read_trace(sys.argv[1])["traceEvents"]]
assert traced.count("replay") == names.count("replay")
assert "nvtx" not in sys.modules
"""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python where importing nvtx fails."""
    (folder / "nvtx.py").write_text("raise ImportError('no nvtx here')")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NVTX_", "NSYS_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": path} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_engine_runs_and_is_observed(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", ENGINE, str(tmp_path / "a.trace.json.gz"))
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        ({"NSYS_PROFILING_SESSION_ID": "7"}, True),
        ({"NVTX_INJECTION64_PATH": "/opt/tool.so"}, True),
        ({"NVTX_INJECTION64_PATH": "/opt/tool.so", "NVTX_DISABLE": "1"}, False),
    ],
    ids=str,
)
def test_a_profiled_process_warns_once(
    tmp_path: Path, environment: dict[str, str], warned: bool
) -> None:
    program = "from stepgraph.profiling import ranges; assert not ranges.attached"
    done = run(tmp_path, "-c", program, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == warned
    if warned:
        assert "pip install 'nvtx>=" in done.stderr
