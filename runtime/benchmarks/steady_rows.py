"""The table of decode steps of whole batches: a row a case."""

from __future__ import annotations

from typing import Any

from .cells import percentiles

__all__ = ["BASELINE_COLUMNS", "COLUMNS", "columns", "rows"]

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
BASELINE_COLUMNS = ("transformers step ms p50 (n)", "times faster")


def columns(document: dict[str, Any]) -> tuple[str, ...]:
    """Return the head of the table."""
    return (*COLUMNS, *BASELINE_COLUMNS) if _compares(document) else COLUMNS


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of each case, as text."""
    compares = _compares(document)
    return [
        (*_row(case), *_baseline_cells(case)) if compares else _row(case)
        for case in document["cases"]
    ]


def _compares(document: dict[str, Any]) -> bool:
    return any(case.get("baseline") is not None for case in document["cases"])


def _baseline_cells(case: dict[str, Any]) -> tuple[str, str]:
    baseline = case["baseline"]
    step = baseline["step_ms"]
    return f"{step['p50']:.2f} ({step['n']})", f"{baseline['speedup']:.2f}"


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
        percentiles(case["step_ms"]),
        percentiles(case["itl_ms"]),
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
