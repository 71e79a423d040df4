"""`stepgraph` itself: its public names, what its import costs, and the command it installs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stepgraph
from stepgraph import runtime
from stepgraph.__main__ import COMMANDS

from .test_imports import BLOCK_TORCH, run


def test_the_public_names_are_those_of_the_runtime() -> None:
    assert set(stepgraph.__all__) == {*runtime.__all__, "__version__"}
    for name in runtime.__all__:
        assert getattr(stepgraph, name) is getattr(runtime, name)
    assert set(stepgraph.__all__) <= set(dir(stepgraph))
    with pytest.raises(AttributeError):
        stepgraph.Engines  # noqa: B018


USAGE_ERRORS = (
    *("--verbose bench", "bench --batch-size x", "bench --num-steps 400", "bench --no-such"),
    *("explain", "explain step --batch 2", "explain memory --device-memory lots", "report"),
    *("serve", "serve demo --max-num-seqs 0", "serve demo --dtype int3", "serve demo --port x"),
    *("serve demo --ssl-certfile missing", "serve demo --speculation '{'", "serve demo --no-such"),
    *("serve demo --port 99999", "serve demo --tenant-weights a", "serve demo --host ''"),
    *("serve demo --max-queued-requests 0", ""),
    *("chat --no-such", "chat ''", "chat demo --temperature hot", "run demo", "run demo a b"),
    "chat demo --memory-bytes 1 --memory-tokens 1",
)
HELP = ("--version", "--help", "explain memory --help", *(f"{name} --help" for name in COMMANDS))


def test_import_help_and_usage_errors_load_no_torch() -> None:
    """An error is one line with the name of the command."""
    run(
        BLOCK_TORCH
        + f"""
import contextlib, io, shlex
import stepgraph, stepgraph.__main__
from stepgraph import profiling
assert stepgraph.__version__ and "Engine" in dir(stepgraph)
assert not hasattr(stepgraph, "no_such_name")
sys.argv = ["stepgraph"]
for line in {[*HELP, *USAGE_ERRORS]}:
    if line == "explain memory --help":
        assert not {{"numpy", "stepgraph.runtime"}} & sys.modules.keys(), sys.modules
    out, err, words = io.StringIO(), io.StringIO(), shlex.split(line)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = stepgraph.__main__.main(words)
        except SystemExit as end:
            status = end.code
    command = " ".join(["stepgraph", *words[:1]]) if words and words[0][0] != "-" else "stepgraph"
    if line in {HELP}:
        assert (status, err.getvalue()) == (0, ""), line
        assert line == "--version" or out.getvalue().startswith("usage: " + command + " "), line
    else:
        assert (status, out.getvalue(), err.getvalue().count("\\n")) == (2, "", 1), (line, status)
        assert err.getvalue().startswith(command) and ": error: " in err.getvalue(), line
    assert not {{"torch", "numpy"}} & sys.modules.keys(), line
"""
    )


def fake_torch(folder: Path) -> dict[str, str]:
    """An environment whose torch reports its import on stdout and then takes a minute."""
    (folder / "torch.py").write_text("import time; print('torch', flush=True); time.sleep(60)")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arguments", [["bench"], ["explain", "memory"], ["chat"]], ids=" ".join)
def test_an_interrupt_while_torch_loads(tmp_path: Path, arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stepgraph", *arguments],
        env=fake_torch(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "torch\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    (line,) = err.splitlines()
    assert line.startswith(f"stepgraph {arguments[0]}: interrupted")
