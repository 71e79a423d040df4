"""`stepgraph` itself: its public names, what its import costs, and the command it installs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stepgraph
from stepgraph import __main__ as command
from stepgraph import runtime
from stepgraph.__main__ import main

from .test_imports import BLOCK_TORCH, run


def test_the_public_names_are_those_of_the_runtime() -> None:
    assert set(stepgraph.__all__) == {*runtime.__all__, "__version__"}
    for name in runtime.__all__:
        assert getattr(stepgraph, name) is getattr(runtime, name)
    assert set(stepgraph.__all__) <= set(dir(stepgraph))
    with pytest.raises(AttributeError):
        stepgraph.Engines  # noqa: B018


def test_the_import_loads_no_torch() -> None:
    run(
        BLOCK_TORCH
        + "import stepgraph, stepgraph.__main__\n"
        + "from stepgraph import profiling\n"
        + "assert stepgraph.__version__ and 'Engine' in dir(stepgraph)\n"
        + "assert not hasattr(stepgraph, 'no_such_name')\n"
        + "for flag in ('--version', '--help'):\n"
        + "    try: stepgraph.__main__.main([flag])\n"
        + "    except SystemExit as end: assert end.code == 0\n"
        + "assert not {'torch', 'numpy', 'stepgraph.runtime'} & {*sys.modules}, sys.modules\n"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "stepgraph: error: the following arguments are required: COMMAND"),
        (["--verbose", "bench"], "stepgraph: error: unrecognized arguments: --verbose"),
        (["explain"], "stepgraph explain: error: the following arguments are required: TOPIC"),
        (
            ["explain", "step", "--batch", "2"],
            "stepgraph explain: error: unrecognized arguments: --batch 2",
        ),
        (["report"], "stepgraph report: error: the following arguments are required: TRACE"),
    ],
)
def test_a_usage_error_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_has_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr("sys.argv", ["stepgraph"])
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: stepgraph {name} ")
    assert err == ""


def fake_torch(folder: Path) -> dict[str, str]:
    """An environment whose torch reports its import on stdout and then takes a minute."""
    (folder / "torch.py").write_text("import time; print('torch', flush=True); time.sleep(60)")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arguments", [["bench"], ["explain", "memory"]], ids=" ".join)
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
