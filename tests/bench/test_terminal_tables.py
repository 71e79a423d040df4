"""Tables on a terminal: every cell is whole, and no line is wider than the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from stepgraph.profiling.markdown import aligned
from stepgraph.runtime.bench.console import print_text

HEAD = ("model", "mode", "step ms p50 / p90 / p99", "n", *(f"value {i}" for i in range(14)))


@pytest.mark.parametrize("width", [80, 100, 400])
@pytest.mark.parametrize("count", [1, 8])
def test_table_fits_the_terminal(monkeypatch, width, count):
    rows = [
        (f"[red]demo|{row}", "compile", f"{row}.12 / {row}.34 / -", "64", *["1234.5"] * 14)
        for row in range(count)
    ]
    file = io.StringIO()
    terminal = Console(width=width, file=file, force_terminal=True, color_system=None)
    monkeypatch.setattr("stepgraph.runtime.bench.console.Console", lambda **_: terminal)
    print_text("\n".join(["before", *aligned(HEAD, rows, 2), "after"]))
    lines = file.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert max(map(len, lines)) <= width
    for cell in {cell for row in rows for cell in row}:
        assert sum(line.count(cell) for line in lines) == sum(row.count(cell) for row in rows)
