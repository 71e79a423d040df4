"""The benchmark's tables as Markdown, from its JSON document."""

from __future__ import annotations

from collections.abc import Sequence

from ....profiling.markdown import aligned
from .caveats import warnings
from .columns import CHECK_COLUMN, TABLES, baseline_columns
from .result_comparison import comparison_text
from .table_cells import Cell, Entry, Table, table_rows

__all__ = ["describe_start", "host_table", "markdown_table", "table_of"]


def table_of(document: Entry) -> tuple[Table, list[dict[str, str]]]:
    """Return the table of a document's scenario, and its rows."""
    name = next(name for name in TABLES if name in document)
    table = TABLES[name]
    if name == "cases":
        table = table._replace(columns={**table.columns, **_optional(document["cases"])})
    return table, table_rows(table, document[name])


def _optional(cases: Sequence[Entry]) -> dict[str, Cell]:
    """Return the columns that a table of steady has if a case has values for them."""
    columns = CHECK_COLUMN if any(case.get("check") is not None for case in cases) else {}
    for entry in (entry for case in cases for entry in case["baselines"]):
        columns = columns | baseline_columns(entry["method"])
    return columns


def markdown_table(document: Entry) -> str:
    """Return the table, and below it warnings and the comparison."""
    table, rows = table_of(document)
    cells = [list(row.values()) for row in rows]
    lines = [*aligned(list(table.columns), cells, table.text_columns), ""]
    lines.append(caption(document))
    lines += [line for warning in warnings(document) for line in ("", warning)]
    if "comparison" in document:
        lines += ["", comparison_text(document["comparison"])]
    return "\n".join(lines)


def caption(document: Entry) -> str:
    """Return the hardware, software and command line."""
    return (
        "{device}, {threads} threads, reads {bandwidth_gb_s:.1f} GB/s (measured); torch {torch},"
        " Python {python}; {command}".format_map(document["environment"])
    )


def describe_start(stats: Entry) -> str:
    """Return one line about the start of an engine, from its statistics."""
    start, steps = stats["start"], stats["prepared"]["steps"]
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start["phases"].items())
    code = start["code_cache"]
    built = {None: "", True: "; kernels built", False: "; kernels found"}[start["kernels_built"]]
    compiled = start["compiled_kernels"]
    if compiled is not None:
        built += f"; {compiled['kernels']} kernels compiled in {compiled['threads']} threads"
    return (
        f"started in {start['seconds']:.1f} s ({phases}), {steps} steps ready{built};"
        f" compiled code: {code['hits']} graphs found, {code['misses']} compiled"
    )


def host_table(costs: Sequence[Entry]) -> str:
    """Return the host time of a step as Markdown; ratios are to the first entry of equal rows."""
    first: dict[int, float] = {}
    for cost in costs:
        first.setdefault(cost["rows"], cost["host_us"]["p50"])
    columns: dict[str, Cell] = {
        "rows": "{rows}",
        "queued": "{queued:,}",
        "blocks": "{num_blocks:,}",
        "host µs p50 / p90 / p99": "{host_us:dist}",
        "min": "{host_us[min]:.1f}",
        "ratio": lambda cost: f"{cost['host_us']['p50'] / first[cost['rows']]:.2f}",
    }
    rows = table_rows(Table(columns), costs)
    unit = f"microseconds of a step, outputs included, n = {costs[0]['host_us']['n']}"
    return "\n".join([*aligned(list(columns), [[*row.values()] for row in rows], 0), "", unit])
