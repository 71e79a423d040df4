"""Markdown tables on a terminal of any width: no cell is cut, no line is wider."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["NAMES", "for_terminal"]

NAMES = (
    *("model", "dtype", "weights", "KV", "mode", "kernels", "kernel", "device", "term"),
    *("batch", "rows", "input", "prompt", "output", "context", "max ITL ms", "busy", "runtime"),
    *("prefill_chunk", "steps_per_launch", "steps", "operation", "ms"),
    *("endpoint", "streams", "idle connections"),
)
"""Columns that identify a row. Where a table is split, each part repeats them."""
EDGES = 3
"""Characters of a column besides its cells: a line, and a space on either side."""


def for_terminal(text: str, width: int) -> Group:
    """Return text with Markdown tables for a terminal of `width` characters.

    A table that is too wide becomes several, one below the other. Identifying columns whose rows
    are all equal become a line above it.
    """
    shown: list[RenderableType] = []
    for is_table, lines in itertools.groupby(text.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            head, rule, *rows = map(_cells, lines)
            shown += _tables(head, rows, [cell.endswith(":") for cell in rule], width)
        else:
            shown += map(Text, lines)
    return Group(*shown)


def _cells(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


class _Column:
    """A column, with the text of all its cells."""

    def __init__(self, head: str, cells: Sequence[str], right: bool) -> None:
        self.head, self.cells, self.right = head, cells, right
        self.min_width = max(map(len, [*head.split(), *cells]))
        """In characters; a head may break between words."""


def _tables(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int
) -> Iterator[RenderableType]:
    """Yield a table in as many parts as fit; columns with `right` are aligned to the right."""
    columns = [_Column(name, [row[i] for row in rows], right[i]) for i, name in enumerate(head)]
    values = [column for column in columns if column.head not in NAMES] or columns
    names = [column for column in columns if column not in values]
    common = [column for column in names if len(set(column.cells)) == 1]
    if common:
        yield Text(", ".join(f"{column.head} {column.cells[0]}" for column in common))
    names = [column for column in names if column not in common]
    if names and not all(_fits([*names, value], width) for value in values):
        numbers = [str(number) for number in range(1, len(rows) + 1)]
        for i, number in enumerate(numbers):
            named = ", ".join(f"{column.head} {column.cells[i]}" for column in names)
            yield Text(f"{number}: {named}")
        names = [_Column("row", numbers, right=True)]
    part = [*names]
    for value in values:
        if len(part) > len(names) and not _fits([*part, value], width):
            yield _table(part, width)
            part = [*names]
        part.append(value)
    yield _table(part, width)


def _fits(columns: Sequence[_Column], width: int) -> bool:
    return 1 + sum(column.min_width + EDGES for column in columns) <= width


def _table(columns: Sequence[_Column], width: int) -> Table:
    """Return a table of at most `width` characters; if its cells are wider, they are folded."""
    widths = [column.min_width for column in columns]
    spare = width - 1 - sum(widths) - EDGES * len(widths)
    while spare < 0:
        widest = widths.index(max(widths))
        widths[widest], spare = widths[widest] - 1, spare + 1
    table = Table()
    for column, cell_width in zip(columns, widths, strict=True):
        more = max(0, len(column.head) - cell_width)  # the head in one line, if there is room
        spare -= (more := more if more <= spare else 0)
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(column.head, justify=justify, width=cell_width + more, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))  # no markup: a path may have brackets
    return table
