"""The benchmark's table, for a terminal and as Markdown, from its JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..cache.benchmark import OperationCost

__all__ = ["cache_table", "markdown_table", "rich_table"]

COLUMNS = (
    "model",
    "dtype",
    "weights",
    "KV",
    "mode",
    "batch",
    "input",
    "output",
    "TTFT ms p50",
    "step ms p50 / p90 / p99",
    "ITL ms p50 / p90 / p99",
    "n",
    "host µs",
    "tok/s",
    "MB/step",
    "roofline",
    "padding",
    "KV MB",
    "= eager",
    "max logit error",
)
TEXT_COLUMNS = 5


def rich_table(document: dict[str, Any]) -> Table:
    """Return the table for a terminal."""
    table = Table(caption=caption(document))
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if index < TEXT_COLUMNS else "right")
    for row in rows(document):
        table.add_row(*row)
    return table


def markdown_table(document: dict[str, Any]) -> str:
    """Return the table as Markdown, aligned so that it reads as plain text too."""
    return "\n".join([*_aligned(COLUMNS, rows(document), TEXT_COLUMNS), "", caption(document)])


def cache_table(costs: Sequence[OperationCost]) -> str:
    """Return what the bookkeeping of the cache costs for each size of its pool, as Markdown."""
    sizes = sorted({cost.num_blocks for cost in costs})
    by_operation: dict[str, dict[int, OperationCost]] = {}
    for cost in costs:
        by_operation.setdefault(cost.operation, {})[cost.num_blocks] = cost
    head = ["operation", *(f"ns, {size:,} blocks" for size in sizes), "ratio"]
    cells = [
        [
            operation,
            *(f"{of_size[size].nanoseconds:.0f}" for size in sizes),
            f"{of_size[sizes[-1]].nanoseconds / of_size[sizes[0]].nanoseconds:.2f}",
        ]
        for operation, of_size in by_operation.items()
    ]
    unit = f"nanoseconds a block (a row for `step`), n = {costs[0].n}"
    return "\n".join([*_aligned(head, cells, 1), "", unit])


def _aligned(head: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    """Return the lines of a Markdown table; the first `text_columns` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return [line(row) for row in (head, rule, *cells)]


def caption(document: dict[str, Any]) -> str:
    """Return what the numbers were measured on."""
    environment = document["environment"]
    return (
        f"{environment['device']}, {environment['threads']} threads,"
        f" reads {environment['bandwidth_gb_s']:.1f} GB/s (measured);"
        f" torch {environment['torch']}, Python {environment['python']};"
        f" {environment['command']}"
    )


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of each case, as text."""
    return [_row(case) for case in document["cases"]]


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    correct = case["correct"]
    equal, error = correct["tokens_equal_eager"], correct["max_abs_logit_error"]
    return (
        case["model"],
        case["dtype"],
        case["weight_dtype"],
        case["kv_dtype"],
        case["mode"],
        str(case["batch_size"]),
        str(case["input_len"]),
        str(case["output_len"]),
        f"{case['ttft_ms']['p50']:.1f}",
        _percentiles(case["step_ms"]),
        _percentiles(case["itl_ms"]),
        str(case["step_ms"]["n"]),
        f"{case['host_us']['p50']:.0f}",
        f"{case['tokens_per_second']:.1f}",
        f"{case['roofline']['bytes_per_step'] / 1e6:.1f}",
        f"{case['roofline']['fraction']:.0%}",
        f"{case['padding']:.0%}",
        f"{case['kv_bytes'] / 1e6:.1f}",
        "-" if equal is None else f"{equal:.0%}",
        "-" if error is None else f"{error:.2g}",
    )


def _percentiles(summary: dict[str, Any]) -> str:
    """Return p50 / p90 / p99, with a dash where there are too few samples to tell."""
    values = (summary[name] for name in ("p50", "p90", "p99"))
    return " / ".join("-" if value is None else f"{value:.2f}" for value in values)
