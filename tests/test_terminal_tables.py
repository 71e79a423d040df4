"""Tables on terminals of any width: cells are whole, and every part identifies its rows."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from stepgraph.profiling.markdown import aligned
from stepgraph.runtime.bench.results.columns import TABLES
from stepgraph.runtime.bench.results.table_cells import Table
from stepgraph.runtime.bench.results.terminal_tables import NAMES, for_terminal

from .bench_rig import ROOT, run_bench

CELLS = st.text("ab1.[/]%|", min_size=1, max_size=30)
LONG = "/checkpoints/of/a/model/with/a/long/path/and-a-name-of-many-characters-in-it"
LARGE = "12345.67 / 12345.67"


def shown(text: str, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(for_terminal(text, width))
    return console.export_text().splitlines()


@settings(deadline=None)
@given(st.lists(st.tuples(*[CELLS] * 6), min_size=1, max_size=4), st.integers(40, 200))
def test_every_cell_is_whole_and_no_line_is_too_long(rows, width):
    columns = ("model", "mode", "batch", "step ms p50 / p90 / p99", "n", "max logit error")
    lines = shown("\n".join(aligned(columns, rows, 5)), width)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    above = "".join("".join(line for line in lines if "│" not in line).split())
    body = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    for index, name in enumerate(columns):
        for row in rows:
            in_table = any(row[index] in line for line in body)
            folded = len(row[index]) + 10 > width
            assert in_table or folded or (name in NAMES and f"{name}{row[index]}" in above)


@pytest.mark.parametrize("table", [t for tables in TABLES.values() for t in tables])
@pytest.mark.parametrize("width", [80, 120, 600])
@pytest.mark.parametrize("count", [1, 2])
def test_every_table_of_the_benchmark_fits(table: Table, width: int, count: int):
    """With large numbers and long names of rows, which each part repeats."""
    heads = list(table.columns)
    rows = [[f"{LONG}-{i}" if h == heads[0] else LARGE for h in heads] for i in range(count)]
    lines = shown("\n".join(aligned(heads, rows, table.text_columns)), width)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    parts = sum(line.startswith("┏") for line in lines)
    values = sum(head not in NAMES for head in heads)
    # No part has a row without its values, and none is shown twice.
    assert sum(line.count(LARGE) for line in lines if "│" in line) == values * count
    assert parts == 1 or width < 600
    if count == 2 and parts > 1:
        assert sum(line.startswith("│   1 ") or LONG[:20] in line for line in lines) >= parts


def test_bench_on_a_terminal(tmp_path, monkeypatch, capsys):
    """80 columns wide, and a model whose directory is named like markup of rich."""
    model = tmp_path / "[red]demo["
    model.symlink_to(ROOT / "runtime" / "demo")
    ours, theirs = pty.openpty()
    pieces = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while piece := os.read(ours, 65536):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    arguments = "--mode eager --batch-size 1 2 --input-len 24 --output-len 6 --num-iters 1"
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        status = run_bench(monkeypatch, f"--num-warmup 0 --model {model} {arguments}")
    reader.join()
    os.close(ours)
    progress = capsys.readouterr().err
    assert status == 0, progress
    printed = b"".join(pieces).decode()
    assert "[red]demo[" in printed.replace("\r\n", "")
    assert "…" not in printed
    for name in ("mode", "batch", "TTFT", "roofline", "eager", "error"):
        assert name in printed
    assert "[red]demo[" in progress.replace("\n", "")
