"""The table of a comparison, and what is to be said below it, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...profiling.markdown import aligned
from .comparison import slower_than

__all__ = ["comparison_text", "describe_case"]

_HEADS = {
    "weight_dtype": "weights",
    "kv_dtype": "KV",
    "batch_size": "batch",
    "input_len": "input",
    "output_len": "output",
    "max_itl_ms": "max ITL ms",
    "neighbours": "busy",
}
LEAST_REPETITIONS = 5
"""Of both runs: bounds from fewer hold with less than 88 %, and say nothing."""

_SELDOM = ("device", "prefill_chunk", "steps_per_launch", "steps")
"""Left out where all cases have the same."""
_TEXT = ("model", "dtype", "weight_dtype", "kv_dtype", "mode", "kernels", "device")


def comparison_text(comparison: Mapping[str, Any]) -> str:
    """Return the comparison as Markdown that reads as plain text too."""
    entries = comparison["entries"]
    new = comparison["new"] or "this run"
    lines = [f"{new} against {comparison['old']}: ratios of times, below 1 is faster", ""]
    if entries:
        keys = [key for key in entries[0]["case"] if _shown(key, entries)]
        keys.sort(key=lambda key: key not in _TEXT)  # stable
        head = [*(_HEADS.get(key, key) for key in keys), *_COLUMNS]
        cells = [[*(_cell(e["case"][key]) for key in keys), *_row(e)] for e in entries]
        lines += [*aligned(head, cells, sum(key in _TEXT for key in keys)), ""]
        notes = [*_bounds(entries)]
    else:
        notes = ["No case is in both."]
    notes += [f"Only in {comparison['old']}: {describe_case(c)}" for c in comparison["only_old"]]
    notes += [f"Only in {new}: {describe_case(c)}" for c in comparison["only_new"]]
    if comparison["not_matched_by"]:
        names = ", ".join(comparison["not_matched_by"])
        notes.append(f"Matched without {names}, which not all cases tell.")
    notes += [
        f"Different {row['name']}: {_cell(row['old'])} before, {_cell(row['new'])} now"
        for row in comparison["environment"]
    ]
    limit = comparison["fail_above"]
    if limit is not None:
        notes.append(f"Above {limit:g}: {len(slower_than(comparison))} of {len(entries)} ratios.")
    return "\n".join([*lines, *(f"- {note}" for note in notes)])


def describe_case(case: Mapping[str, Any]) -> str:
    """Return what a case is, in a line."""
    dtypes = dict.fromkeys(case[key] for key in ("dtype", "weight_dtype", "kv_dtype"))
    sizes = [f"{_HEADS.get(k, k)} {_cell(v)}" for k, v in case.items() if k not in _TEXT]
    return f"{case['model']} {' '.join(dtypes)} {case['mode']} {case['device']}, {', '.join(sizes)}"


_COLUMNS = ("ms", "old", "new", "ratio", "bounds", "repetitions old, new", "n old, new", "")


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = (entry[name] if _enough(entry) else None for name in ("low", "high"))
    return (
        entry["metric"].replace("_ms.", " "),
        f"{entry['old']:.3f}",
        f"{entry['new']:.3f}",
        f"{entry['ratio']:.3f}",
        "-" if low is None else f"{low:.3f} - {high:.3f}",
        f"{entry['repetitions_old']}, {entry['repetitions_new']}",
        f"{entry['n_old']}, {entry['n_new']}",
        _verdict(low, high) + ("; above the limit" if entry["above"] else ""),
    )


def _enough(entry: Mapping[str, Any]) -> bool:
    fewest: int = min(entry["repetitions_old"], entry["repetitions_new"])
    return fewest >= LEAST_REPETITIONS


def _verdict(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "too few to compare"
    return "slower" if low > 1 else "faster" if high < 1 else "within noise"


def _bounds(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Say how far the bounds can be trusted, and where there are none."""
    known = [entry["confidence"] for entry in entries if _enough(entry)]
    if known:
        yield (
            f"Bounds: medians of the repetitions, farthest apart; they hold with {min(known):.0%}"
            " or more, as far as noise goes that repetitions of one run see."
        )
    if len(known) < len(entries):
        yield (
            f"Too few to compare: fewer than {LEAST_REPETITIONS} repetitions on one side"
            f" (--num-iters {LEAST_REPETITIONS} or more), or a time that is not told of each."
        )


def _shown(key: str, entries: list[dict[str, Any]]) -> bool:
    return key not in _SELDOM or len({str(entry["case"][key]) for entry in entries}) > 1


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None else str(value)
