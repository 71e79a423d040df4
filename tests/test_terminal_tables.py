"""Tables on terminals of any width: cells are whole, and every part says what it is about."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from stepgraph.runtime.benchmarks.steady_rows import COLUMNS
from stepgraph.runtime.benchmarks.terminal import NAMES, terminal_tables

from .bench_rig import ROOT

LEAST = 100
"""Characters that all names and any one other column take here."""

CELLS = st.text("ab1.[/]%", min_size=1, max_size=12)


def shown(columns: tuple[str, ...], rows: list[tuple[str, ...]], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True, soft_wrap=True)
    console.print(terminal_tables(None, columns, rows, text_columns=5, width=width))
    return console.export_text().splitlines()


@given(
    st.lists(st.tuples(*[CELLS] * 6), min_size=1, max_size=4),
    st.integers(LEAST, 300),
)
def test_every_cell_is_whole_and_no_line_is_too_long(rows, width):
    columns = ("model", "mode", "batch", "step ms p50 / p90 / p99", "n", "max logit error")
    lines = shown(columns, rows, width)
    said, *drawn = lines if not lines[0].startswith("┏") else ("", *lines)
    assert all(len(line) <= width for line in drawn)
    body = [[cell.strip() for cell in line.split("│")[1:-1]] for line in drawn if "│" in line]
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows]
        if name in NAMES and len(rows) > 1 and len(set(cells)) == 1:
            assert f"{name} {cells[0]}" in said
        else:
            for number, cell in enumerate(cells):
                assert any(cell in line for line in body[number :: len(rows)])


@pytest.mark.parametrize("width", [80, 120, 200, 400])
def test_each_part_begins_with_what_its_rows_are_about(width):
    names = {"mode": ("eager", "compile"), "batch": ("1", "8")}
    rows = [tuple(names.get(name, ("0.12",) * 2)[i] for name in COLUMNS) for i in (0, 1)]
    lines = shown(COLUMNS, rows, width)
    assert lines[0].startswith("model 0.12, dtype 0.12")
    assert all(len(line) <= width for line in lines[1:])
    eager = [line for line in lines if line.startswith("│ eager ")]
    assert len(eager) == sum(line.startswith("┏") for line in lines)
    assert (len(eager) == 1) == (width >= 200)


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
