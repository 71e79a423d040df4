"""The benchmark's tables, for a terminal and as Markdown, from its JSON document."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from . import steady_rows
from .cells import aligned
from .comparison_table import comparison_text
from .scenario_rows import SCENARIO_TABLES

__all__ = ["columns", "describe_start", "markdown_table", "remarks", "rich_table", "rows"]

TEXT_COLUMNS = 5


def rich_table(document: dict[str, Any]) -> Table:
    """Return the table for a terminal."""
    table = Table(caption=caption(document))
    for index, name in enumerate(columns(document)):
        table.add_column(name, justify="left" if index < TEXT_COLUMNS else "right")
    for row in rows(document):
        table.add_row(*row)
    return table


def markdown_table(document: dict[str, Any]) -> str:
    """Return the table as Markdown, aligned so that it reads as plain text too."""
    table = aligned(columns(document), rows(document), TEXT_COLUMNS)
    return "\n".join([*table, "", caption(document), *remarks(document)])


def remarks(document: dict[str, Any]) -> list[str]:
    """Return what stands below the table and its caption: warnings and the comparison."""
    lines = [line for warning in steady_rows.warnings(document) for line in ("", warning)]
    if "comparison" in document:
        lines += ["", comparison_text(document["comparison"])]
    return lines


def describe_start(stats: dict[str, Any]) -> str:
    """Return one line about the start of an engine, from its statistics."""
    start, steps = stats["start"], stats["prepared"]["steps"]
    phases = ", ".join(f"{name} {took:.1f}" for name, took in start["phases"].items())
    code = start["code_cache"]
    built = {None: "", True: "; kernels built", False: "; kernels found"}[start["kernels_built"]]
    return (
        f"started in {start['seconds']:.1f} s ({phases}), {steps} steps ready{built};"
        f" compiled code: {code['hits']} pieces found, {code['misses']} made"
    )


def caption(document: dict[str, Any]) -> str:
    """Return what the numbers were measured on."""
    environment = document["environment"]
    return (
        f"{environment['device']}, {environment['threads']} threads,"
        f" reads {environment['bandwidth_gb_s']:.1f} GB/s (measured);"
        f" torch {environment['torch']}, Python {environment['python']};"
        f" {environment['command']}"
    )


def columns(document: dict[str, Any]) -> tuple[str, ...]:
    """Return the head of the table of a document's scenario."""
    for name, table in SCENARIO_TABLES.items():
        if name in document:
            return table.columns
    return steady_rows.columns(document)


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of each case or entry, as text."""
    for name, table in SCENARIO_TABLES.items():
        if name in document:
            return [table.row(entry) for entry in document[name]]
    return steady_rows.rows(document)
