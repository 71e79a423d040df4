"""docs/profiling.md on nsys sessions and reports: its example, columns, commands and program."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

from stepgraph.profiling.kernel_names import KernelNames, Node, OperationCost, StepNodes
from stepgraph.profiling.nsys import cli, export_command, nsys_command
from stepgraph.profiling.nsys.cli import CASES, CHANGES, PARTS, STEPS
from stepgraph.profiling.nsys.steps import STEP_COLUMNS

from .nsys_rig import NEW, Kernel, Launch, Profile

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "profiling.md").read_text()

LAYER = (("qkv", 2_600), ("attention", 3_900), ("out", 1_900), ("gate_up", 7_400), ("down", 4_100))
BYTES = {"qkv": 6_300_000, "out": 4_200_000, "gate_up": 25_200_000, "down": 12_600_000}


def worked_example(folder: Path) -> Path:
    """Write a trace of a model of two layers, and the names of its kernels."""
    kernels, nodes = [], []
    for layer in (0, 1):
        for name, ns in LAYER:
            kernels.append(Kernel(f"{name}_kernel", ns + 50 * layer, len(kernels) + 1))
            nodes.append(Node(layer, name, "kernel", f"{name}_kernel", len(kernels)))
    kernels.append(Kernel("head_kernel", 9_000, len(kernels) + 1))
    nodes.append(Node(None, "head", "kernel", "head_kernel", len(kernels)))
    decode = Launch("decode", 3, 4, 3, kernels, 400)
    prompt = Launch("prefill", 0, 64, 50, [Kernel("prompt_kernel", 61_000, 90)])
    play = Profile(dataclasses.replace(NEW, graph_trace="node"))
    for number in range(20, 26):
        launches = [decode, prompt] if number == 22 else [decode]
        pause = 400_000 if number == 24 else 1_000
        play.step(number, launches, commits=number - 1, wait_ns=25_000, pause_ns=pause)
    costs = [OperationCost(name, 2, count) for name, count in BYTES.items()]
    step = StepNodes("decode", 4, 16, False, 1, tuple(nodes))
    KernelNames("two-layers", "a device", 4_300.0, [step], costs).save(folder / "x.kernels.json")
    return play.write(folder / "x.sqlite")


def test_the_worked_example_is_what_the_report_prints(tmp_path, monkeypatch, capsys) -> None:
    worked_example(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["x.sqlite"]) == 0
    (example,) = re.findall(r"```text\n(# x\.sqlite\n.*?)```", PAGE, flags=re.DOTALL)
    assert capsys.readouterr().out == example


def test_every_column_of_the_report_is_explained() -> None:
    page = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    _, _, section = page.partition("## Reading the report")
    section, _, _ = section.partition("\n## ")
    for column in {*CASES, *PARTS, *STEPS, *CHANGES}:
        assert f"**{column.removesuffix(' p50/p90/p99')}**" in section, column
    for column in STEP_COLUMNS:
        assert f"`{column}`" in section, column


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
