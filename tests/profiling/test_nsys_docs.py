"""docs/profiling.md on nsys sessions: its commands and program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from stepgraph.profiling.nsys import export_command, nsys_command

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "profiling.md").read_text()


def test_the_commands_are_those_of_the_code() -> None:
    program = ["python", "service.py"]
    for command in (
        nsys_command(program, output="service", graph_trace="graph"),
        nsys_command(program, output="service", device="cpu"),
        export_command("service.nsys-rep"),
    ):
        # The page breaks long lines as a shell does.
        assert shlex.join(command) in re.sub(r" \\\n +", " ", PAGE)


def test_the_program_of_the_page_runs(tmp_path, monkeypatch) -> None:
    """Without nsys: the window changes nothing."""
    monkeypatch.chdir(tmp_path)
    _, _, section = PAGE.partition("## An nsys session")
    program = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0]
    scope: dict[str, object] = {"__name__": "service"}
    exec(compile(program, "profiling.md", "exec"), scope)
    assert (tmp_path / "service.kernels.json").is_file()
    scope["engine"].close()
