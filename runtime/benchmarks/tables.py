"""The benchmark's tables, for a terminal and as Markdown, from its JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ...cache.benchmark import OperationCost
from ...profiling.kernel_costs import KernelCost
from .host import HostCost

__all__ = [
    "cache_table",
    "describe_start",
    "host_table",
    "markdown_table",
    "rich_table",
    "step_table",
]

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
)
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
    table = _aligned(columns(document), rows(document), TEXT_COLUMNS)
    return "\n".join([*table, "", caption(document)])


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


def host_table(costs: Sequence[HostCost]) -> str:
    """Return what the host takes for a step, as Markdown.

    The ratio is that of the medians, to the first line of as many rows.
    """
    head = ["rows", "queued", "blocks", "host µs p50 / p90 / p99", "min", "ratio"]
    first: dict[int, float] = {}
    cells = [
        [
            str(cost.rows),
            f"{cost.queued:,}",
            f"{cost.num_blocks:,}",
            _percentiles(cost.host_us.to_json()),
            f"{cost.host_us.min:.1f}",
            f"{cost.host_us.p50 / first.setdefault(cost.rows, cost.host_us.p50):.2f}",
        ]
        for cost in costs
    ]
    unit = f"microseconds of a step, outputs included, n = {costs[0].host_us.n}"
    return "\n".join([*_aligned(head, cells, 0), "", unit])


def step_table(costs: Sequence[KernelCost], bandwidth: float) -> str:
    """Return the kernels of a step, as Markdown: what one launch of each moves, and how long.

    Microseconds are those of the bytes at `bandwidth`, in bytes per second.
    """
    head = ["kernel", "launches", "weights MB", "cache MB", "other MB", "µs", "µs a step", "share"]
    step_bytes = sum(cost.launches * cost.bytes for cost in costs)
    cells = [
        [
            cost.name if cost.window is None else f"{cost.name}, window {cost.window:,}",
            str(cost.launches),
            *(f"{n / 1e6:.2f}" for n in (cost.weight_bytes, cost.cache_bytes, cost.other_bytes)),
            f"{cost.seconds(bandwidth) * 1e6:.2f}",
            f"{cost.launches * cost.seconds(bandwidth) * 1e6:.1f}",
            f"{cost.launches * cost.bytes / step_bytes:.1%}",
        ]
        for cost in costs
    ]
    return "\n".join(_aligned(head, cells, 1))


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


def columns(document: dict[str, Any]) -> tuple[str, ...]:
    """Return the head of the table of a document's scenario."""
    if "interference" in document:
        return INTERFERENCE_COLUMNS
    if "start" in document:
        return START_COLUMNS
    if "kernels" in document:
        return KERNEL_COLUMNS
    if "churn" in document:
        return CHURN_COLUMNS
    return (*COLUMNS, *BASELINE_COLUMNS) if _compares(document) else COLUMNS


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of each case, as text."""
    if "interference" in document:
        return [_interference_row(entry) for entry in document["interference"]]
    if "start" in document:
        return [_start_row(entry) for entry in document["start"]]
    if "kernels" in document:
        return [_kernel_row(entry) for entry in document["kernels"]]
    if "churn" in document:
        return [_churn_row(entry) for entry in document["churn"]]
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


def _start_row(entry: dict[str, Any]) -> tuple[str, ...]:
    start, total = entry["start"], entry["total_seconds"]
    phases, code = start["phases"], start["code_cache"]
    shown = [entry["import_seconds"]]
    shown += [phases[name] for name in ("kernels", "load", "prepare", "measure")]
    built = start["kernels_built"]
    return (
        *_engine_cells(entry),
        " ".join(map(str, entry["buckets"])),
        str(entry["number"]),
        f"{total:.1f}",
        *(f"{seconds:.1f}" for seconds in (*shown, total - sum(shown))),
        "-" if built is None else "built" if built else "found",
        f"{code['hits']} / {code['misses']}",
    )


def _kernel_row(entry: dict[str, Any]) -> tuple[str, ...]:
    names = ("model", "dtype", "weight_dtype", "kv_dtype", "kernel")
    return (
        *(entry[name] for name in names),
        *(str(entry[name]) for name in ("rows", "context", "launches")),
        f"{entry['bytes'] / 1e6:.1f}",
        f"{entry['predicted_us']:.2f}",
        _percentiles(entry["measured_us"]),
        f"{entry['measured_us']['p50'] / entry['predicted_us']:.2f}",
        f"{entry['bandwidth_fraction']:.0%}",
    )


def _interference_row(entry: dict[str, Any]) -> tuple[str, ...]:
    itl, budget, sizes = entry["itl_ms"], entry["step_budget"], entry["chunks"]
    tokens = sorted(round(chunk["tokens"]) for chunk in sizes for _ in range(chunk["n"]))
    return (
        *_engine_cells(entry),
        str(entry["batch_size"]),
        str(entry["input_len"]),
        _budget(entry),
        f"{tokens[0]} - {tokens[-1]}, p50 {tokens[len(tokens) // 2]}" if tokens else "-",
        f"{entry['decode_step_ms']['p50']:.2f}",
        f"{entry['chunk_ms']:.2f}",
        _percentiles(itl),
        f"{itl['max']:.2f}",
        str(itl["n"]),
        f"{entry['bound_ms']:.2f}",
        "-" if itl["p99"] is None else f"{itl['p99'] / entry['bound_ms']:.2f}",
        "-" if budget is None else f"{budget['over_budget']} of {budget['n']}",
        _median(entry["ttft_ms"]),
        f"{entry['first_tokens']} of {entry['arrivals']}",
    )


def _churn_row(entry: dict[str, Any]) -> tuple[str, ...]:
    itl = entry["itl_ms"]
    return (
        *_engine_cells(entry),
        str(entry["batch_size"]),
        str(entry["input_len"]),
        str(entry["output_len"]),
        _budget(entry),
        "-" if itl is None else _percentiles(itl),
        "-" if itl is None else f"{itl['max']:.2f}",
        "0" if itl is None else str(itl["n"]),
        _percentiles(entry["step_ms"]),
        _median(entry["ttft_ms"]),
        f"{entry['occupancy']:.0%}",
        f"{entry['padding']:.0%}",
        str(entry["preemptions"]),
        f"{entry['requests']}, {entry['aborted']} left",
    )


def _engine_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    names = ("model", "dtype", "weight_dtype", "kv_dtype", "mode")
    return tuple(entry[name] for name in names)


def _budget(entry: dict[str, Any]) -> str:
    return "-" if entry["max_itl_ms"] is None else f"{entry['max_itl_ms']:g}"


def _median(summary: dict[str, Any] | None) -> str:
    return "-" if summary is None else f"{summary['p50']:.1f}"


def _percentiles(summary: dict[str, Any]) -> str:
    """Return p50 / p90 / p99, with a dash where there are too few samples to tell."""
    values = (summary[name] for name in ("p50", "p90", "p99"))
    return " / ".join("-" if value is None else f"{value:.2f}" for value in values)
