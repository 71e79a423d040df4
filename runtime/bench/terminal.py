"""Markdown tables on a terminal of any width: no cell is cut, no line is wider."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["for_terminal"]

NAMES = (
    *("model", "dtype", "weights", "KV", "mode", "kernels", "kernel", "device", "term"),
    *("batch", "rows", "input", "prompt", "output", "context", "max ITL ms", "busy", "runtime"),
    *("prefill_chunk", "steps_per_launch", "steps", "operation", "ms"),
)
"""Columns that say what a row is about: where a table is split, each part begins with them."""

EDGES = 3
"""Characters of a column beside its cells: its line, and a space on either side."""


def for_terminal(text: str, width: int) -> Group:
    """Return text with Markdown tables for a terminal of `width` characters.

    A table that is too wide becomes several, one below the other. What all its rows have in common
    is said once, above it.
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
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return [cell.strip().replace("\\|", "|") for cell in cells]


def _tables(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int
) -> Iterator[RenderableType]:
    """Yield a table in as many parts as fit; those with `right` are aligned to the right."""
    names = [i for i, name in enumerate(columns) if name in NAMES]
    alike = [i for i in names if len({row[i] for row in rows}) == 1]
    repeated = [i for i in names if i not in alike]
    values = [i for i in range(len(columns)) if i not in names]
    if not values:
        values, alike, repeated = names, [], []
    if alike:
        yield Text(", ".join(f"{columns[i]} {rows[0][i]}" for i in alike))
    needed = [_width(name, [row[i] for row in rows]) for i, name in enumerate(columns)]
    widest = max(needed[i] for i in values)
    if repeated and 1 + sum(needed[i] + EDGES for i in repeated) + widest + EDGES > width:
        for number, row in enumerate(rows, 1):
            yield Text(f"{number}: " + ", ".join(f"{columns[i]} {row[i]}" for i in repeated))
        columns, right = [*columns, "row"], [*right, True]
        rows = [[*row, str(number)] for number, row in enumerate(rows, 1)]
        needed.append(_width("row", [str(len(rows))]))
        repeated = [len(columns) - 1]
    room = width - 1 - sum(needed[i] + EDGES for i in repeated) - EDGES
    for i in values:
        needed[i] = min(needed[i], max(room, 1))  # a longer cell is folded
    for part in _parts(repeated, values, needed, width):
        table = Table()
        spare = width - 1 - sum(needed[i] + EDGES for i in part)
        for i in part:
            whole = max(len(columns[i]), needed[i])  # the head in one line, where there is room
            wide = whole if whole - needed[i] <= spare else needed[i]
            spare -= wide - needed[i]
            justify: Literal["left", "right"] = "right" if right[i] else "left"
            table.add_column(columns[i], justify=justify, width=wide, overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[i]) for i in part))  # no markup: a path may have brackets
        yield table


def _width(name: str, cells: Iterable[str]) -> int:
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
