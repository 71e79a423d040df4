"""The tables of scenarios: columns, and a row an entry of the document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .cells import engine_cells, median, percentiles, roofline, share
from .memory_rows import (
    FULL_COLUMNS,
    SCARCITY_COLUMNS,
    TERM_COLUMNS,
    full_rows,
    scarcity_rows,
    term_rows,
)
from .prefix_rows import PREFIX_COLUMNS, prefix_row

__all__ = [
    "CHURN_COLUMNS",
    "INTERFERENCE_COLUMNS",
    "KERNEL_COLUMNS",
    "NEIGHBOURS_COLUMNS",
    "SCENARIO_TABLES",
    "START_COLUMNS",
]

INTERFERENCE_COLUMNS = (
    "model",
    "dtype",
    "weights",
    "KV",
    "mode",
    "rows",
    "prompt",
    "max ITL ms",
    "chunk tokens",
    "decode ms p50",
    "chunk ms",
    "ITL ms p50 / p90 / p99",
    "max",
    "n",
    "bound ms",
    "p99 / bound",
    "over budget",
    "roofline",
    "TTFT ms p50",
    "served",
)
CHURN_COLUMNS = (
    "model",
    "dtype",
    "weights",
    "KV",
    "mode",
    "rows",
    "prompt",
    "output",
    "max ITL ms",
    "ITL ms p50 / p90 / p99",
    "max",
    "n",
    "step ms p50 / p90 / p99",
    "roofline",
    "TTFT ms p50",
    "occupancy",
    "padding",
    "preempted",
    "requests",
)
START_COLUMNS = (
    "model",
    "dtype",
    "weights",
    "KV",
    "mode",
    "buckets",
    "start",
    "total s",
    "imports",
    "kernels",
    "load",
    "compile kernels",
    "prepare",
    "measure",
    "other",
    "kernel library",
    "compiled code: found / made",
)
KERNEL_COLUMNS = (
    "model",
    "dtype",
    "weights",
    "KV",
    "kernel",
    "rows",
    "context",
    "launches",
    "MB",
    "predicted µs",
    "measured µs p50 / p90 / p99",
    "measured / predicted",
    "bandwidth",
    "torch.mm µs",
)
NEIGHBOURS_COLUMNS = (
    "model",
    "dtype",
    "weights",
    "KV",
    "mode",
    "batch",
    "input",
    "busy",
    "runtime",
    "step ms p50 / p90 / p99",
    "p50 to peer",
    "p90 to peer",
    "p99 / p50",
    "n",
    "spread",
)


def _neighbours_rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each runtime; its ratios are our times over its own."""
    sizes = (str(entry[name]) for name in ("batch_size", "input_len", "neighbours"))
    shared = (*engine_cells(entry), *sizes)
    return [
        (*shared, side["name"], *_measured_cells(side))
        for side in ({"name": "stepgraph", **entry}, *entry["peers"])
    ]


def _measured_cells(side: dict[str, Any]) -> tuple[str, ...]:
    step = side["step_ms"]
    if step is None:
        return ("failed", *("-" for _ in range(5)))
    ratios = (side.get(name) for name in ("ratio_p50", "ratio_p90", "p99_to_p50"))
    return (
        percentiles(step),
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        str(step["n"]),
        share(side["spread"]),
    )


def _start_row(entry: dict[str, Any]) -> tuple[str, ...]:
    start, total = entry["start"], entry["total_seconds"]
    phases, code = start["phases"], start["code_cache"]
    shown = [entry["import_seconds"]]
    shown += [phases[name] for name in ("kernels", "load")]
    shown.append(phases.get("compile_kernels", 0.0))  # only where Triton kernels run
    shown += [phases[name] for name in ("prepare", "measure")]
    built = start["kernels_built"]
    return (
        *engine_cells(entry),
        " ".join(map(str, entry["buckets"])),
        str(entry["number"]),
        f"{total:.1f}",
        *(f"{seconds:.1f}" for seconds in (*shown, total - sum(shown))),
        "-" if built is None else "built" if built else "found",
        f"{code['hits']} / {code['misses']}",
    )


def _kernel_row(entry: dict[str, Any]) -> tuple[str, ...]:
    names = ("model", "dtype", "weight_dtype", "kv_dtype", "kernel")
    library = entry.get("library_us")
    return (
        *(entry[name] for name in names),
        *(str(entry[name]) for name in ("rows", "context", "launches")),
        f"{entry['bytes'] / 1e6:.1f}",
        f"{entry['predicted_us']:.2f}",
        percentiles(entry["measured_us"]),
        f"{entry['measured_us']['p50'] / entry['predicted_us']:.2f}",
        f"{entry['bandwidth_fraction']:.0%}",
        "-" if library is None else f"{library:.2f}",
    )


def _interference_row(entry: dict[str, Any]) -> tuple[str, ...]:
    itl, budget, sizes = entry["itl_ms"], entry["step_budget"], entry["chunks"]
    tokens = sorted(round(chunk["tokens"]) for chunk in sizes for _ in range(chunk["n"]))
    return (
        *engine_cells(entry),
        str(entry["batch_size"]),
        str(entry["input_len"]),
        _budget(entry),
        f"{tokens[0]} - {tokens[-1]}, p50 {tokens[len(tokens) // 2]}" if tokens else "-",
        f"{entry['decode_step_ms']['p50']:.2f}",
        f"{entry['chunk_ms']:.2f}",
        percentiles(itl),
        f"{itl['max']:.2f}",
        str(itl["n"]),
        f"{entry['bound_ms']:.2f}",
        "-" if itl["p99"] is None else f"{itl['p99'] / entry['bound_ms']:.2f}",
        "-" if budget is None else f"{budget['over_budget']} of {budget['n']}",
        roofline(entry["roofline"]),
        median(entry["ttft_ms"]),
        f"{entry['first_tokens']} of {entry['arrivals']}",
    )


def _churn_row(entry: dict[str, Any]) -> tuple[str, ...]:
    itl = entry["itl_ms"]
    return (
        *engine_cells(entry),
        str(entry["batch_size"]),
        str(entry["input_len"]),
        str(entry["output_len"]),
        _budget(entry),
        "-" if itl is None else percentiles(itl),
        "-" if itl is None else f"{itl['max']:.2f}",
        "0" if itl is None else str(itl["n"]),
        percentiles(entry["step_ms"]),
        roofline(entry["roofline"]),
        median(entry["ttft_ms"]),
        f"{entry['occupancy']:.0%}",
        f"{entry['padding']:.0%}",
        str(entry["preemptions"]),
        f"{entry['requests']}, {entry['aborted']} left",
    )


def _budget(entry: dict[str, Any]) -> str:
    return "-" if entry["max_itl_ms"] is None else f"{entry['max_itl_ms']:g}"


_Rows = Callable[[dict[str, Any]], list[tuple[str, ...]]]


class ScenarioTable(NamedTuple):
    """A table of one scenario."""

    columns: tuple[str, ...]
    rows: _Rows
    """Of an entry."""
    title: str | None = None
    """Where a scenario has several tables."""
    text_columns: int = 5
    """The first ones, which are aligned to the left."""


def _one(row: Callable[[dict[str, Any]], tuple[str, ...]]) -> _Rows:
    return lambda entry: [row(entry)]


SCENARIO_TABLES = {
    "interference": (ScenarioTable(INTERFERENCE_COLUMNS, _one(_interference_row)),),
    "start": (ScenarioTable(START_COLUMNS, _one(_start_row)),),
    "kernels": (ScenarioTable(KERNEL_COLUMNS, _one(_kernel_row)),),
    "churn": (ScenarioTable(CHURN_COLUMNS, _one(_churn_row)),),
    "prefix": (ScenarioTable(PREFIX_COLUMNS, _one(prefix_row)),),
    "neighbours": (ScenarioTable(NEIGHBOURS_COLUMNS, _neighbours_rows, text_columns=9),),
    "memory": (
        ScenarioTable(TERM_COLUMNS, term_rows, "What an engine takes", text_columns=7),
        ScenarioTable(FULL_COLUMNS, full_rows, "What a cache costs as it fills"),
        ScenarioTable(SCARCITY_COLUMNS, scarcity_rows, "What too few blocks cost"),
    ),
}
"""By the name of the list in the document, which is that of the scenario."""
