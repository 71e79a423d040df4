"""The table of what prefix sharing brings: a row an entry of the document."""

from __future__ import annotations

from typing import Any

from .cells import engine_cells, percentiles, roofline, share

__all__ = ["PREFIX_COLUMNS", "prefix_row"]

PREFIX_COLUMNS = (
    "model",
    "dtype",
    "weights",
    "KV",
    "mode",
    "rows",
    "prompt",
    "shared",
    "first TTFT ms p50: off / on",
    "cold TTFT ms p50 / p90 / p99",
    "warm TTFT ms p50 / p90 / p99",
    "n",
    "cold / warm",
    "hit rate",
    "computed tokens: off / on",
    "prompt tok/s: off / on",
    "tok/s saved",
    "ITL ms p50: off / on",
    "spread: off / on",
    "blocks: off / on",
    "roofline",
    "= unshared",
)


def prefix_row(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of an entry of `prefix`; `off` is without a prefix cache, `on` with one."""
    off, on = entry["unshared"], entry
    return (
        *engine_cells(entry),
        str(entry["batch_size"]),
        str(entry["input_len"]),
        str(entry["prefix_len"]),
        f"{off['first_ttft_ms']['p50']:.1f} / {on['first_ttft_ms']['p50']:.1f}",
        percentiles(off["ttft_ms"]),
        percentiles(on["ttft_ms"]),
        str(on["ttft_ms"]["n"]),
        f"{entry['ttft_ratio']:.2f}",
        f"{entry['hit_rate']:.0%}",
        f"{off['computed_tokens']:,} / {on['computed_tokens']:,}",
        f"{off['prompt_tokens_per_second']:,.0f} / {on['prompt_tokens_per_second']:,.0f}",
        f"{entry['saved_tokens_per_second']:,.0f}",
        f"{off['itl_ms']['p50']:.2f} / {on['itl_ms']['p50']:.2f}",
        f"{share(off['spread'])} / {share(on['spread'])}",
        f"{off['blocks_in_use']} / {on['blocks_in_use']}",
        roofline(entry["roofline"]),
        f"{entry['tokens_equal']:.0%}",
    )
