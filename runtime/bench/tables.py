"""The benchmark's tables as Markdown, from its JSON document."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...profiling.markdown import aligned
from . import steady_rows
from .caveats import warnings
from .comparison_table import comparison_text
from .instrumentation import instrumentation_line
from .scenario_rows import SCENARIO_TABLES

__all__ = [
    "columns",
    "describe_start",
    "markdown_table",
    "rows",
    "tables",
]


class ShownTable(NamedTuple):
    """A table as text."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    title: str | None = None
    text_columns: int = 5
    """The first ones, which are aligned to the left."""


def markdown_table(document: dict[str, Any]) -> str:
    """Return the tables, and below them warnings and the comparison.

    They are aligned so that they read as plain text too.
    """
    lines: list[str] = []
    for shown in tables(document):
        if shown.title is not None:
            lines += [shown.title, ""]
        lines += [*aligned(shown.columns, shown.rows, shown.text_columns), ""]
    lines.append(caption(document))
    lines += [line for warning in warnings(document) for line in ("", warning)]
    if "comparison" in document:
        lines += ["", comparison_text(document["comparison"])]
    return "\n".join(lines)


def describe_start(stats: dict[str, Any]) -> str:
    """Return one line about the start of an engine, from its statistics."""
    start, steps = stats["start"], stats["prepared"]["steps"]
    phases = ", ".join(f"{name} {took:.1f}" for name, took in start["phases"].items())
    code = start["code_cache"]
    built = {None: "", True: "; kernels built", False: "; kernels found"}[start["kernels_built"]]
    compiled = start["compiled_kernels"]
    if compiled is not None:
        built += f"; {compiled['kernels']} kernels compiled in {compiled['threads']} threads"
    return (
        f"started in {start['seconds']:.1f} s ({phases}), {steps} steps ready{built};"
        f" compiled code: {code['hits']} pieces found, {code['misses']} made"
    )


def caption(document: dict[str, Any]) -> str:
    """Return what the numbers were measured on, and what observing the steps took of them."""
    environment = document["environment"]
    measured_on = (
        f"{environment['device']}, {environment['threads']} threads,"
        f" reads {environment['bandwidth_gb_s']:.1f} GB/s (measured);"
        f" torch {environment['torch']}, Python {environment['python']};"
        f" {environment['command']}"
    )
    instrumentation = instrumentation_line(document)
    return measured_on if instrumentation is None else f"{measured_on}\n{instrumentation}"


def tables(document: dict[str, Any]) -> list[ShownTable]:
    """Return the tables of a document's scenario, without those that have no row."""
    for name, kinds in SCENARIO_TABLES.items():
        if name in document:
            shown = [
                ShownTable(
                    kind.columns,
                    [row for entry in document[name] for row in kind.rows(entry)],
                    kind.title,
                    kind.text_columns,
                )
                for kind in kinds
            ]
            return [table for table in shown if table.rows] or shown[:1]
    return [ShownTable(steady_rows.columns(document), steady_rows.rows(document))]


def columns(document: dict[str, Any]) -> tuple[str, ...]:
    """Return the head of the first table of a document's scenario."""
    return tables(document)[0].columns


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of the first table, as text."""
    return tables(document)[0].rows
