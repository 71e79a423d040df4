"""Cells that tables of several measurements have, and how a table is laid out as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["aligned", "engine_cells", "median", "percentiles", "roofline", "share"]


def aligned(head: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int) -> list[str]:
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


def engine_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return model, dtypes and mode."""
    names = ("model", "dtype", "weight_dtype", "kv_dtype", "mode")
    return tuple(entry[name] for name in names)


def median(summary: dict[str, Any] | None) -> str:
    """Return the median, or a dash where nothing was observed."""
    return "-" if summary is None else f"{summary['p50']:.1f}"


def percentiles(summary: dict[str, Any]) -> str:
    """Return p50 / p90 / p99, with a dash where there are too few samples to tell."""
    values = (summary[name] for name in ("p50", "p90", "p99"))
    return " / ".join("-" if value is None else f"{value:.2f}" for value in values)


def roofline(reached: dict[str, Any] | None) -> str:
    """Return the fraction of the roofline, or a dash where no step only decoded."""
    return "-" if reached is None else f"{reached['fraction']:.0%}"


def share(value: float | None) -> str:
    """Return a share in per cent, or a dash where there is none."""
    return "-" if value is None else f"{value:.1%}"
