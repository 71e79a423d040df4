"""The tables of memory: its terms, steps over a cache that fills, and what too few blocks cost."""

from __future__ import annotations

from typing import Any

from ...cache.memory.memory_plan import format_bytes
from .cells import engine_cells, percentiles, roofline, share

__all__ = [
    "FULL_COLUMNS",
    "SCARCITY_COLUMNS",
    "TERM_COLUMNS",
    "full_rows",
    "scarcity_rows",
    "term_rows",
]

_ENGINE = ("model", "dtype", "weights", "KV", "mode", "rows")

TERM_COLUMNS = (*_ENGINE, "term", "planned", "measured", "measured - planned")
FULL_COLUMNS = (
    *_ENGINE,
    "prompt",
    "context",
    "blocks",
    "full",
    "slack",
    "padding",
    "KV MB",
    "step ms p50 / p90 / p99",
    "n",
    "MB/step",
    "roofline",
)
SCARCITY_COLUMNS = (
    *_ENGINE,
    "prompt",
    "output",
    "out of blocks",
    "blocks",
    "preempted",
    "blocks out / in",
    "computed again",
    "tok/s",
    "of unlimited",
    "spread",
    "ITL ms p50 / p90 / p99",
    "max",
    "roofline",
    "= unlimited",
    "left",
)
_PREEMPTION = {"none": "never", "recompute": "compute again", "swap": "swap"}


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    return (*engine_cells(entry), str(entry["batch_size"]))


def term_rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each term of an entry of `memory`, for their sum, and for the process.

    Terms that are neither planned nor held are left out.
    """
    terms = {
        name.replace("_", " "): (term["planned"], term["measured"])
        for name, term in entry["memory"].items()
        if term["planned"] or term["measured"]
    }
    measured = {name: sizes for name, sizes in terms.items() if sizes[1] is not None}
    held = entry["process_bytes"]
    rows = [(name, *_sizes(*sizes)) for name, sizes in terms.items()]
    both = (sum(planned for planned, _ in measured.values()), sum(m for _, m in measured.values()))
    rows.append(("measured terms", *_sizes(*both)))
    for state in ("started", "filled"):
        grown = held[state] - held["before"]
        rows.append((f"process, {state}", "-", format_bytes(grown), "-"))
    return [(*_cells(entry), *row) for row in rows]


def _sizes(planned: int, measured: int | None) -> tuple[str, str, str]:
    if measured is None:
        return format_bytes(planned), "-", "-"
    difference = measured - planned
    sign = "+" if difference > 0 else ""
    return format_bytes(planned), format_bytes(measured), sign + format_bytes(difference)


def full_rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each prompt length of an entry of `memory`."""
    return [
        (
            *_cells(entry),
            str(step["input_len"]),
            f"{step['mean_context']:.0f}",
            f"{step['blocks_in_use']} of {entry['usable_blocks']}",
            f"{step['fill']:.0%}",
            f"{step['slack']:.1%}",
            f"{step['padding']:.0%}",
            f"{step['kv_bytes'] / 1e6:.1f}",
            percentiles(step["step_ms"]),
            str(step["step_ms"]["n"]),
            f"{step['roofline']['bytes_per_step'] / 1e6:.1f}",
            roofline(step["roofline"]),
        )
        for step in entry["steps"]
    ]


def scarcity_rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each way to preempt of an entry of `memory`."""
    runs = entry["scarcity"]
    return [
        (
            *_cells(entry),
            str(run["input_len"]),
            str(run["output_len"]),
            _PREEMPTION[run["preemption"]],
            str(run["usable_blocks"]),
            str(run["preemptions"]),
            f"{run['swapped_out']} / {run['swapped_in']}",
            str(run["recomputed_tokens"]),
            f"{run['tokens_per_second']:.1f}",
            f"{run['tokens_per_second'] / runs[0]['tokens_per_second']:.0%}",
            share(run["spread"]),
            percentiles(run["itl_ms"]),
            f"{run['itl_ms']['max']:.2f}",
            roofline(run["roofline"]),
            f"{run['tokens_equal']:.0%}",
            str(run["blocks_left"]),
        )
        for run in runs
    ]
