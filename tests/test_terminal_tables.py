"""Tables on terminals of any width: cells are whole, and every part says what it is about."""

from __future__ import annotations

import functools
import io
import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from stepgraph.profiling.markdown import aligned
from stepgraph.profiling.stats import Summary
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.bench.comparison import compare
from stepgraph.runtime.bench.comparison_table import comparison_text
from stepgraph.runtime.bench.scenario_rows import SCENARIO_TABLES
from stepgraph.runtime.bench.steady_rows import COLUMNS
from stepgraph.runtime.bench.terminal import NAMES, for_terminal
from stepgraph.runtime.tools.memory_report import explain_memory
from stepgraph.runtime.tools.step_report import explain_step

from .bench_rig import ROOT

CELLS = st.text("ab1.[/]%|", min_size=1, max_size=30)
LONG = "/checkpoints/of/a/model/with/a/long/path/and-a-name-of-many-characters-in-it"


def shown(text: str, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(for_terminal(text, width))
    return console.export_text().splitlines()


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]], text_columns: int = 5) -> str:
    return "\n".join(aligned(columns, rows, text_columns))


@given(st.lists(st.tuples(*[CELLS] * 6), min_size=1, max_size=4), st.integers(40, 200))
def test_every_cell_is_whole_and_no_line_is_too_long(rows, width):
    columns = ("model", "mode", "batch", "step ms p50 / p90 / p99", "n", "max logit error")
    lines = shown(table(columns, rows), width)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    said = "".join("".join(line for line in lines if "│" not in line).split())
    body = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    for index, name in enumerate(columns):
        for row in rows:
            in_table = any(row[index] in line for line in body)
            folded = len(row[index]) + 10 > width
            assert in_table or folded or (name in NAMES and f"{name}{row[index]}" in said)


@pytest.mark.parametrize("width", [80, 120, 200, 400])
def test_each_part_begins_with_what_its_rows_are_about(width):
    names = {"mode": ("eager", "compile"), "batch": ("1", "8")}
    rows = [tuple(names.get(name, ("0.12",) * 2)[i] for name in COLUMNS) for i in (0, 1)]
    lines = shown(table(COLUMNS, rows), width)
    assert lines[0].startswith("model 0.12, dtype 0.12")
    assert all(len(line) <= width for line in lines)
    eager = [line for line in lines if line.startswith("│ eager ")]
    assert len(eager) == sum(line.startswith("┏") for line in lines)
    assert (len(eager) == 1) == (width >= 200)


def comparison(models: int) -> str:
    steps = [123456.789 + i for i in range(6)]
    entry = {
        **dict.fromkeys(("dtype", "weight_dtype", "kv_dtype"), "bfloat16"),
        **{"mode": "compile", "kernels": "native", "device": "cpu"},
        **{"batch_size": 4096, "input_len": 131072, "output_len": 131072},
        **{"prefill_chunk": 131072, "steps_per_launch": 64, "repetition_ms": steps},
        "step_ms": Summary.of(steps * 1000).to_json(),
    }
    cases = [entry | {"model": f"{LONG}-{i}"} for i in range(models)]
    document = {"environment": {}, "cases": cases}
    result = compare(
        document, document, scenario="steady", old_name=LONG, new_name=None, fail_above=None
    )
    return comparison_text(result)


def with_large_numbers(columns: tuple[str, ...], text_columns: int, count: int) -> str:
    """A table of so many rows, of models with long paths."""
    rows = [[f"{LONG}-{i}" if c == "model" else LARGE for c in columns] for i in range(count)]
    return table(columns, [tuple(row) for row in rows], text_columns)


LARGE = "123456.78/234567.89/345678.90"
TABLES = [(COLUMNS, 5)] + [
    (t.columns, t.text_columns) for ts in SCENARIO_TABLES.values() for t in ts
]
REPORTS = {
    "compare one": lambda: comparison(1),
    "compare two": lambda: comparison(2),
    "memory": lambda: explain_memory("demo", EngineConfig(device="cpu"), 80 * 10**9),
    "step": lambda: explain_step(
        "preset:llama-3.1-8b", EngineConfig(), rows=4096, context=131072, bandwidth=1e9
    ),
    **{
        f"{columns[5:8]} {count}": functools.partial(with_large_numbers, columns, left, count)
        for columns, left in TABLES
        for count in (1, 3)
    },
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_fit_80_columns(name):
    """With large numbers, for one row and for several."""
    text = REPORTS[name]()
    lines = shown(text, 80)
    assert all(len(line) <= 80 for line in lines)
    printed = "".join(lines)
    assert "…" not in printed
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = {cell.strip() for row in rows[2:] for cell in row.split("|")}
    for cell in cells:
        assert cell in printed or len(cell) > 60  # a path may be broken, a number may not


def test_bench_on_a_terminal(tmp_path):
    """80 columns wide, and a model whose directory is named as rich marks text up."""
    model = tmp_path / "[red]demo["
    model.symlink_to(ROOT / "runtime" / "demo")
    ours, theirs = pty.openpty()
    arguments = "--mode eager --batch-size 1 2 --input-len 24 --output-len 6 --num-iters 1"
    process = subprocess.Popen(
        [sys.executable, "bench.py", "--model", model, *arguments.split()],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    text = b""
    try:
        while piece := os.read(ours, 65536):
            text += piece
    except OSError:  # the other end was closed
        pass
    os.close(ours)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    printed = text.decode()
    assert "[red]demo[" in printed.replace("\r\n", "")
    assert "…" not in printed
    for name in ("mode", "batch", "TTFT", "roofline", "eager", "error"):
        assert name in printed
    assert b"[red]demo[" in told.replace(b"\n", b"")
