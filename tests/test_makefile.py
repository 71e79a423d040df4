"""The commands of the Makefile that depend on what pyproject.toml says."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_oldest_torch_is_the_one_that_is_declared(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [line for line in project["dependencies"] if re.match(r"torch\b", line)]
    oldest = torch.removeprefix("torch>=").split(",")[0]
    venv = tmp_path / "venv"
    variables = [f"OLDEST_VENV={venv}", "PYTHON=python3.99", "ARGS=-k scheduler"]
    commands = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "test-oldest", *variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert f"python3.99 -m venv {venv}" in commands
    assert any(f'pip install --quiet "torch=={oldest}" --editable' in line for line in commands)
    assert commands[-1].startswith(f"{venv}/bin/python -m pytest ")
    assert commands[-1].endswith(" -k scheduler")
