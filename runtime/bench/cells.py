"""Cells that tables of several measurements have."""

from __future__ import annotations

from typing import Any

__all__ = ["engine_cells", "median", "mode_cell", "percentiles", "roofline", "share"]


def engine_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return model, dtypes and mode."""
    names = ("model", "dtype", "weight_dtype", "kv_dtype")
    return (*(entry[name] for name in names), mode_cell(entry))


def mode_cell(entry: dict[str, Any]) -> str:
    """Return the mode, and the kernels where they are not those that `auto` takes."""
    usual = "torch" if entry["mode"] == "eager" else "native"
    kernels = entry.get("kernels", usual)
    return entry["mode"] if kernels == usual else f"{entry['mode']}, {kernels}"


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
