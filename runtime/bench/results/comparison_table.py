"""A comparison as Markdown: its table, and notes below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ....profiling.markdown import aligned
from .result_comparison import slower_than

__all__ = ["comparison_text", "describe_case", "failure"]

_HEADS = {
    "weight_dtype": "weights",
    "kv_dtype": "KV",
    "batch_size": "batch",
    "input_len": "input",
    "output_len": "output",
    "max_itl_ms": "max ITL ms",
    "neighbours": "busy",
    "tensor_parallel": "ranks",
}
MIN_REPETITIONS = 5
"""Of both runs: bounds from fewer hold with less than 88 %."""

_HIDDEN_IF_EQUAL = (
    "device",
    "model_impl",
    "tensor_parallel",
    "prefill_chunk",
    "steps_per_launch",
    "steps",
)
_TEXT = ("model", "dtype", "weight_dtype", "kv_dtype", "mode", "kernels", "model_impl", "device")
_COLUMNS = ("ms", "old", "new", "ratio", "bounds", "repetitions old, new", "n old, new", "")


def comparison_text(comparison: Mapping[str, Any]) -> str:
    """Return the comparison as Markdown that reads as plain text too."""
    entries, old = comparison["entries"], comparison["old"]
    new = comparison["new"] or "this run"
    lines = [f"{new} against {old}: ratios of times, below 1 is faster", ""]
    notes: list[str] = []
    if entries:
        keys = [key for key in entries[0]["case"] if _shown(key, entries)]
        keys.sort(key=lambda key: key not in _TEXT)  # stable
        head = [*(_HEADS.get(key, key) for key in keys), *_COLUMNS]
        cells = [[*(_cell(e["case"][key]) for key in keys), *_row(e)] for e in entries]
        lines += [*aligned(head, cells, sum(key in _TEXT for key in keys)), ""]
        notes += _bounds(entries)
    else:
        notes.append("No case is in both.")
    notes += [f"Only in {old}: {describe_case(case)}" for case in comparison["only_old"]]
    notes += [f"Only in {new}: {describe_case(case)}" for case in comparison["only_new"]]
    if comparison["not_matched_by"]:
        names = ", ".join(comparison["not_matched_by"])
        notes.append(f"Matched without {names}, which not all cases have.")
    notes += [
        f"Different {row['name']}: {_cell(row['old'])} before, {_cell(row['new'])} now"
        for row in comparison["environment"]
    ]
    limit = comparison["fail_above"]
    if limit is not None:
        notes.append(f"Above {limit:g}: {len(slower_than(comparison))} of {len(entries)} ratios.")
    return "\n".join([*lines, *(f"- {note}" for note in notes)])


def failure(comparison: Mapping[str, Any]) -> str | None:
    """Return why a comparison fails its limit; None if it does not."""
    limit, entries = comparison["fail_above"], comparison["entries"]
    slower = slower_than(comparison)
    if limit is not None and not entries:
        return f"no case is in {comparison['old']} too: nothing was compared"
    if not slower:
        return None
    worst = max(slower, key=lambda entry: float(entry["ratio"]))
    return (
        f"{len(slower)} of {len(entries)} ratios are above {limit:g}, the largest is"
        f" {worst['ratio']:.3f}: {describe_case(worst['case'])}"
    )


def describe_case(case: Mapping[str, Any]) -> str:
    """Return a case in a line."""
    dtypes = dict.fromkeys(case[key] for key in ("dtype", "weight_dtype", "kv_dtype"))
    sizes = [f"{_HEADS.get(k, k)} {_cell(v)}" for k, v in case.items() if k not in _TEXT]
    return f"{case['model']} {' '.join(dtypes)} {case['mode']} {case['device']}, {', '.join(sizes)}"


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = (entry[name] if _enough(entry) else None for name in ("low", "high"))
    if low is None or high is None:
        verdict = "too few to compare"
    else:
        verdict = "slower" if low > 1 else "faster" if high < 1 else "within noise"
    return (
        entry["metric"].replace("_ms.", " "),
        *(f"{entry[name]:.3f}" for name in ("old", "new", "ratio")),
        "-" if low is None else f"{low:.3f} - {high:.3f}",
        f"{entry['repetitions_old']}, {entry['repetitions_new']}",
        f"{entry['n_old']}, {entry['n_new']}",
        verdict + ("; above the limit" if entry["above"] else ""),
    )


def _enough(entry: Mapping[str, Any]) -> bool:
    return bool(min(entry["repetitions_old"], entry["repetitions_new"]) >= MIN_REPETITIONS)


def _bounds(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield how far the bounds can be trusted, and why some entries have none."""
    known = [entry["confidence"] for entry in entries if _enough(entry)]
    if known:
        yield (
            f"Bounds: the extreme medians of the repetitions; they hold with {min(known):.0%} or"
            " more for noise that varies between the repetitions of one run."
        )
    if len(known) < len(entries):
        yield (
            f"Too few to compare: fewer than {MIN_REPETITIONS} repetitions on one side"
            f" (--num-iters {MIN_REPETITIONS} or more), or a time without a value per repetition."
        )


def _shown(key: str, entries: list[dict[str, Any]]) -> bool:
    return key not in _HIDDEN_IF_EQUAL or len({str(entry["case"][key]) for entry in entries}) > 1


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None else str(value)
