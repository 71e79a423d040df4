"""Tables as wide as a terminal: none of their cells is cut, and none is broken over lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

__all__ = ["terminal_tables"]

NAMES = (
    *("model", "dtype", "weights", "KV", "mode", "kernel", "term"),
    *("batch", "rows", "input", "prompt", "output", "context", "max ITL ms", "busy", "runtime"),
)
"""Columns that say what a row is about: where there are several tables, each begins with them."""

EDGES = 3
"""Characters of a column beside its cells: its line, and a space on either side."""


def terminal_tables(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: int,
    width: int,
) -> Group:
    """Return a table in as many parts, one below the other, as fit a terminal.

    What all rows are called alike is said once, above them.

    Args:
        title: of the table.
        columns: the heads.
        rows: the cells.
        text_columns: the first ones, which are aligned to the left.
        width: of the terminal, in characters.
    """
    names = [i for i, name in enumerate(columns) if name in NAMES]
    alike = [i for i in names if len({row[i] for row in rows}) == 1] if len(rows) > 1 else []
    repeated = [i for i in names if i not in alike]
    values = [i for i in range(len(columns)) if i not in names]
    said = ", ".join(f"{columns[i]} {rows[0][i]}" for i in alike)
    above = ": ".join(part for part in (title, said) if part)
    needed = [_width(name, [row[i] for row in rows]) for i, name in enumerate(columns)]
    parts: list[Table | Text] = [Text(above)] if above else []
    for some in _parts(repeated, values, needed, width):
        table = Table()
        spare = width - 1 - sum(needed[i] + EDGES for i in some)
        for i in some:
            whole = max(len(columns[i]), needed[i])  # the head in one line, where there is room
            wide = whole if whole - needed[i] <= spare else needed[i]
            spare -= wide - needed[i]
            justify: Literal["left", "right"] = "left" if i < text_columns else "right"
            table.add_column(columns[i], justify=justify, width=wide)
        for row in rows:
            table.add_row(*(Text(row[i]) for i in some))  # no markup: a path may have brackets
        parts.append(table)
    return Group(*parts)


def _width(name: str, cells: Sequence[str]) -> int:
    """Return how wide a column is whose head may be broken between words."""
    return max(map(len, [*name.split(), *cells]))


def _parts(
    repeated: Sequence[int], values: Sequence[int], needed: Sequence[int], width: int
) -> Iterator[list[int]]:
    """Yield the columns of each part: those that are repeated, and as many others as fit."""
    least = 1 + sum(needed[i] + EDGES for i in repeated)
    part, taken = [*repeated], least
    for i in values:
        if taken + needed[i] + EDGES > width and len(part) > len(repeated):
            yield part
            part, taken = [*repeated], least
        part.append(i)
        taken += needed[i] + EDGES
    yield part
