"""Tables of entries of the document: a cell formats the fields of an entry."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Cell", "Entry", "Table", "format_cell", "table_rows"]

Entry = Mapping[str, Any]
Cell = str | Callable[[Entry], str]
"""A format string over the fields of an entry (see `CellFormatter`), or a function."""


class CellFormatter(string.Formatter):
    """Formats fields such as `{step_ms[p50]:.2f}`; a field that is null or absent is a dash.

    Additional formats: `dist` is p50 / p90 / p99, `MB` bytes in 10^6.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name, *keys = field_name.replace("]", "").split("[")
        value = kwargs.get(name)
        for key in keys:
            value = None if value is None else value.get(key)
        return value, name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        if format_spec == "dist":
            return " / ".join(self.format_field(value[p], ".2f") for p in ("p50", "p90", "p99"))
        if format_spec == "MB":
            return f"{value / 1e6:.1f}"
        return format(value, format_spec)


_FORMATTER = CellFormatter()


def format_cell(cell: Cell, entry: Entry) -> str:
    """Return the text of a cell."""
    return _FORMATTER.vformat(cell, (), entry) if isinstance(cell, str) else cell(entry)


class Table(NamedTuple):
    """A table of a scenario."""

    columns: Mapping[str, Cell]
    rows: Callable[[Entry], Sequence[Entry]] = lambda entry: [entry]
    """Splits an entry of the document into the rows of this table."""
    text_columns: int = 5
    """The first columns, which are aligned to the left."""


def table_rows(table: Table, entries: Sequence[Entry]) -> list[dict[str, str]]:
    """Return the cells of each row, by the head of their column."""
    return [
        {head: format_cell(cell, row) for head, cell in table.columns.items()}
        for entry in entries
        for row in table.rows(entry)
    ]
