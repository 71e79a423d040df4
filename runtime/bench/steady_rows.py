"""The table of decode steps of whole batches: a row a case."""

from __future__ import annotations

from typing import Any

from .cells import engine_cells, percentiles

__all__ = ["CHECK_COLUMN", "COLUMNS", "baseline_columns", "columns", "rows"]

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
    "spread",
    "host µs",
    "tok/s",
    "MB/step",
    "roofline",
    "padding",
    "KV MB",
    "= eager",
    "max logit error",
)
CHECK_COLUMN = "tokens checked"
"""Where any case has a check."""


def columns(document: dict[str, Any]) -> tuple[str, ...]:
    """Return the head of the table."""
    heads = [head for method in _methods(document) for head in baseline_columns(method)]
    return (*COLUMNS, *([CHECK_COLUMN] if _checked(document) else []), *heads)


def baseline_columns(method: str) -> tuple[str, str, str]:
    """Return the heads of what is said of a way in which transformers decodes."""
    return (
        f"transformers {method} step ms p50 (n)",
        f"times faster than {method}",
        f"= {method}",
    )


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of each case, as text."""
    methods, checked = _methods(document), _checked(document)
    return [
        (
            *_row(case),
            *([_check_cell(case.get("check"))] if checked else []),
            *(cell for method in methods for cell in _baseline_cells(case, method)),
        )
        for case in document["cases"]
    ]


def _checked(document: dict[str, Any]) -> bool:
    return any(case.get("check") is not None for case in document["cases"])


def _check_cell(check: dict[str, Any] | None) -> str:
    if check is None:
        return "-"
    return f"{check['tokens']} {'ok' if check['passed'] else 'FAILED'}"


def _methods(document: dict[str, Any]) -> list[str]:
    """What any case is compared with, in the order of the first that says it."""
    found = [entry["method"] for case in document["cases"] for entry in case["baselines"]]
    return list(dict.fromkeys(found))


def _baseline_cells(case: dict[str, Any], method: str) -> tuple[str, str, str]:
    for entry in case["baselines"]:
        if entry["method"] == method and entry["error"] is None:
            step = entry["step_ms"]
            return (
                f"{step['p50']:.2f} ({step['n']})",
                f"{entry['speedup']:.2f}",
                f"{entry['tokens_equal']:.0%}",
            )
    return ("-", "-", "-")


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    correct = case["correct"]
    equal, error = correct["tokens_equal_eager"], correct["max_abs_logit_error"]
    return (
        *engine_cells(case),
        str(case["batch_size"]),
        str(case["input_len"]),
        str(case["output_len"]),
        f"{case['ttft_ms']['p50']:.1f}",
        percentiles(case["step_ms"]),
        percentiles(case["itl_ms"]),
        str(case["step_ms"]["n"]),
        "-" if case["spread"] is None else f"{case['spread']:.1%}",
        f"{case['host_us']['p50']:.0f}",
        f"{case['tokens_per_second']:.1f}",
        f"{case['roofline']['bytes_per_step'] / 1e6:.1f}",
        f"{case['roofline']['fraction']:.0%}",
        f"{case['padding']:.0%}",
        f"{case['kv_bytes'] / 1e6:.1f}",
        "-" if equal is None else f"{equal:.0%}",
        "-" if error is None else f"{error:.2g}",
    )
