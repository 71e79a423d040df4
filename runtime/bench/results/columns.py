"""The tables of the benchmark: for each scenario the heads of its columns and their cells."""

from __future__ import annotations

from collections.abc import Callable

from .table_cells import Cell, Entry, Table, format_cell

__all__ = ["CHECK_COLUMN", "TABLES", "baseline_columns"]


def _mode(entry: Entry) -> str:
    """Return the mode, and kernels and layers unless they are the usual ones."""
    found = [entry["mode"]]
    usual = "torch" if entry["mode"] == "eager" else "native"
    if entry.get("kernels", usual) != usual:
        found.append(entry["kernels"])
    if entry.get("model_impl") == "transformers":
        found.append("layers of transformers")
    if entry.get("tensor_parallel", 1) > 1:
        found.append(f"{entry['tensor_parallel']} ranks")
    return ", ".join(found)


_DTYPES = {"dtype": "{dtype}", "weights": "{weight_dtype}", "KV": "{kv_dtype}"}
_ENGINE: dict[str, Cell] = {"model": "{model}", **_DTYPES, "mode": _mode}
_ROOFLINE = "{roofline[fraction]:.0%}"
_SIZES = {"batch": "{batch_size}", "input": "{input_len}", "output": "{output_len}"}
_ROWS = {"rows": "{batch_size}", "prompt": "{input_len}"}

_STEADY = Table(
    {
        **_ENGINE,
        **_SIZES,
        "TTFT ms p50": "{ttft_ms[p50]:.1f}",
        "step ms p50 / p90 / p99": "{step_ms:dist}",
        "ITL ms p50 / p90 / p99": "{itl_ms:dist}",
        "n": "{step_ms[n]}",
        "spread": "{spread:.1%}",
        "host µs": "{host_us[p50]:.0f}",
        "tok/s": "{tokens_per_second:.1f}",
        "MB/step": "{roofline[bytes_per_step]:MB}",
        "roofline": _ROOFLINE,
        "padding": "{padding:.0%}",
        "KV MB": "{kv_bytes:MB}",
        "= eager": "{correct[tokens_equal_eager]:.0%}",
        "max logit error": "{correct[max_abs_logit_error]:.2g}",
    }
)
CHECK_COLUMN: dict[str, Cell] = {
    "tokens checked": lambda entry: (
        "-"
        if entry.get("check") is None
        else f"{entry['check']['tokens']} {'ok' if entry['check']['passed'] else 'FAILED'}"
    )
}


def baseline_columns(method: str) -> dict[str, Cell]:
    """Return the columns of a decoding method of transformers; failed cases have dashes."""

    def column(cell: str) -> Callable[[Entry], str]:
        def show(entry: Entry) -> str:
            for found in entry["baselines"]:
                if found["method"] == method and found["error"] is None:
                    return format_cell(cell, found)
            return "-"

        return show

    return {
        f"transformers {method} step ms p50 (n)": column("{step_ms[p50]:.2f} ({step_ms[n]})"),
        f"times faster than {method}": column("{speedup:.2f}"),
        f"= {method}": column("{tokens_equal:.0%}"),
    }


def _chunk_tokens(entry: Entry) -> str:
    tokens = sorted(round(c["tokens"]) for c in entry["chunks"] for _ in range(c["n"]))
    return f"{tokens[0]} - {tokens[-1]}, p50 {tokens[len(tokens) // 2]}" if tokens else "-"


def _p99_to_bound(entry: Entry) -> str:
    p99 = entry["itl_ms"]["p99"]
    return "-" if p99 is None else f"{p99 / entry['bound_ms']:.2f}"


_INTERFERENCE = Table(
    {
        **_ENGINE,
        **_ROWS,
        "max ITL ms": "{max_itl_ms:g}",
        "chunk tokens": _chunk_tokens,
        "decode ms p50": "{decode_step_ms[p50]:.2f}",
        "chunk ms": "{chunk_ms:.2f}",
        "ITL ms p50 / p90 / p99": "{itl_ms:dist}",
        "max": "{itl_ms[max]:.2f}",
        "n": "{itl_ms[n]}",
        "bound ms": "{bound_ms:.2f}",
        "p99 / bound": _p99_to_bound,
        "over budget": lambda entry: (
            "-"
            if entry["step_budget"] is None
            else "{over_budget} of {n}".format_map(entry["step_budget"])
        ),
        "roofline": _ROOFLINE,
        "TTFT ms p50": "{ttft_ms[p50]:.1f}",
        "served": "{first_tokens} of {arrivals}",
    }
)
_NEIGHBOURS = Table(
    {
        **_ENGINE,
        **{name: _SIZES[name] for name in ("batch", "input")},
        "busy": "{neighbours}",
        "runtime": "{name}",
        "step ms p50 / p90 / p99": lambda e: (
            "failed" if e["step_ms"] is None else format_cell("{step_ms:dist}", e)
        ),
        "p50 to peer": "{ratio_p50:.2f}",
        "p90 to peer": "{ratio_p90:.2f}",
        "p99 / p50": "{p99_to_p50:.2f}",
        "n": "{step_ms[n]}",
        "spread": "{spread:.1%}",
    },
    lambda entry: [{"name": "stepgraph", **entry}, *(entry | peer for peer in entry["peers"])],
    text_columns=9,
)
_SERVE = Table(
    {
        **_ENGINE,
        "max ITL ms": "{max_itl_ms:g}",
        "runtime": lambda e: e["runtime"] + (" engine" if e["transport"] == "engine" else ""),
        "arrivals": "{arrivals}",
        "of capacity": "{fraction:g}",
        "req/s": "{rate:.2f}",
        "TTFT ms p50 / p90 / p99": "{ttft_ms:dist}",
        "n": "{ttft_ms[n]}",
        "ITL ms p50 / p90 / p99": "{itl_ms:dist}",
        "ITL n": "{itl_ms[n]}",
        "goodput/s": "{goodput:.2f}",
        "good": "{good} of {requests}",
        "shed": "{shed}",
        "missed": "{missed}",
        "failed": "{failed}",
        "unfinished": "{unfinished}",
        "SLO ms TTFT, ITL": "{slo_ttft_ms:.0f}, {slo_itl_ms:.0f}",
        "lag ms p99": "{lag_ms[p99]:.2f}",
    },
    text_columns=7,
)
TABLES = {
    "interference": _INTERFERENCE,
    "neighbours": _NEIGHBOURS,
    "serve": _SERVE,
    "cases": _STEADY,
}
"""By the name of the list in the document; `cases` is that of steady."""
