"""Two runs of steady, case by case: ratios of their times, and bounds from their noise.

The repetitions of a case differ by more than the steps within one: what disturbs a machine lasts
longer than a step. So a repetition counts as one observation, its median, and the bounds of a ratio
come from the least and the greatest of them:

    low  = min(new) / max(old)        high = max(new) / min(old)

where `old` and `new` are the medians of the repetitions and the median of all steps, so that the
ratio of the latter lies between. The least and the greatest of k independent observations have the
true median between them with probability 1 - 2^(1 - k), whatever its distribution: all k lie on one
side of it with probability 2 * 2^-k (David and Nagaraja, "Order Statistics", 3rd edition, section
7.1). If that holds for both runs, the bounds have the true ratio between them, so they do with
at least (1 - 2^(1 - k_old)) * (1 - 2^(1 - k_new)), the `confidence`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...profiling.markdown import aligned
from ..errors import StepgraphError

__all__ = [
    "KEYS",
    "SCHEMA_VERSION",
    "ResultsError",
    "compare",
    "comparison_text",
    "confidence",
    "failure",
    "read_results",
]

SCHEMA_VERSION = 1
"""Of the document."""
ENVIRONMENT = ("device", "driver", "cpu", "threads", "torch", "python", "system", "commit")
"""Fields of the environment whose differences are reported."""
MIN_REPETITIONS = 5
"""Of both runs: bounds from fewer hold with less than 88 %."""
_TEXT = ("model", "dtype", "weight_dtype", "kv_dtype", "mode", "kernels", "model_impl", "device")
_SIZES = ("batch_size", "input_len", "output_len")
_HIDDEN_IF_EQUAL = ("tensor_parallel", "prefill_chunk")
KEYS = (*_TEXT, *_SIZES, *_HIDDEN_IF_EQUAL)
"""Fields that two cases must share to be compared."""
_HEADS = {"weight_dtype": "weights", "kv_dtype": "KV", "tensor_parallel": "ranks"}
_HEADS |= {name: name.partition("_")[0] for name in _SIZES}
_COLUMNS = ("old ms", "new ms", "ratio", "bounds", "repetitions old, new", "n old, new", "")
_MIN_MS, _MAX_MS = 1e-9, 1e12
"""No step takes less than a picosecond, or more than thirty years."""

Comparison = Mapping[str, Any]


class ResultsError(StepgraphError, ValueError):
    """A file has no results that can be compared: the message names it and the reason."""


def confidence(old: int, new: int) -> float:
    """Return the least probability that bounds from these numbers of repetitions hold."""
    return (1 - 2.0 ** (1 - old)) * (1 - 2.0 ** (1 - new))


def read_results(path: Path) -> dict[str, Any]:
    """Read a document that `--output-json` wrote. Checks only what a comparison uses.

    Raises:
        ResultsError: it cannot be read, is not JSON, has another schema version, no results of
            steady, two of one case, or numbers that cannot be times.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        _check_document(document)
    except OSError as error:
        reason = error.strerror or str(error)
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        reason = "it is not JSON"
    except ValueError as error:
        reason = str(error)
    else:
        result: dict[str, Any] = document
        return result
    raise ResultsError(f"cannot compare with {path}: {reason}")


def compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    old_name: str,
    new_name: str | None,
    fail_above: float | None,
) -> dict[str, Any]:
    """Return the `comparison` of the benchmark's JSON.

    Args:
        old: a document as `read_results` returns it.
        new: another, or the one of this run.
        old_name: the file that `old` was read from.
        new_name: the file that `new` was read from; None: this run.
        fail_above: the largest ratio that passes.
    """
    before, after = ([(_key(case), case) for case in side["cases"]] for side in (old, new))
    old_keys, new_keys = ([key for key, _ in side] for side in (before, after))
    return {
        "old": old_name,
        "new": new_name,
        "fail_above": fail_above,
        "entries": [
            _entry(key, theirs, ours, fail_above)
            for key, ours in after
            for other, theirs in before
            if key == other
        ],
        "only_old": [key for key in old_keys if key not in new_keys],
        "only_new": [key for key in new_keys if key not in old_keys],
        "environment": [
            {"name": name, "old": theirs, "new": ours}
            for name in ENVIRONMENT
            for theirs, ours in [(old["environment"].get(name), new["environment"].get(name))]
            if theirs != ours
        ],
    }


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as Markdown that reads as plain text too."""
    entries, old, limit = comparison["entries"], comparison["old"], comparison["fail_above"]
    new = comparison["new"] or "this run"
    lines = [f"{new} against {old}: ratios of times, below 1 is faster", ""]
    notes: list[str] = []
    if entries:
        hidden = {k for k in _HIDDEN_IF_EQUAL if len({e["case"][k] for e in entries}) == 1}
        keys = [key for key in KEYS if key not in hidden]
        cells = [[*(str(e["case"][key]) for key in keys), *_cells(e)] for e in entries]
        head = [*(_HEADS.get(key, key) for key in keys), *_COLUMNS]
        lines += [*aligned(head, cells, len(_TEXT)), ""]
        notes += _bounds(entries)
    else:
        notes.append("No case is in both.")
    notes += [f"Only in {old}: {_describe(case)}" for case in comparison["only_old"]]
    notes += [f"Only in {new}: {_describe(case)}" for case in comparison["only_new"]]
    notes += [
        f"Different {row['name']}: {row['old'] or '-'} before, {row['new'] or '-'} now"
        for row in comparison["environment"]
    ]
    if limit is not None:
        notes.append(f"Above {limit:g}: {sum(e['above'] for e in entries)} of {len(entries)}.")
    return "\n".join([*lines, *(f"- {note}" for note in notes)])


def failure(comparison: Comparison) -> str | None:
    """Return why a comparison fails its limit; None if it does not."""
    limit, entries = comparison["fail_above"], comparison["entries"]
    if limit is None:
        return None
    if not entries:
        return f"no case is in {comparison['old']} too: nothing was compared"
    if not (slower := [entry for entry in entries if entry["above"]]):
        return None
    worst = max(slower, key=lambda entry: float(entry["ratio"]))
    return (
        f"{len(slower)} of {len(entries)} ratios are above {limit:g}, the largest is"
        f" {worst['ratio']:.3f}: {_describe(worst['case'])}"
    )


def _key(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a case is matched by; a device is its type, without a number."""
    return {**{key: case[key] for key in KEYS}, "device": case["device"].partition(":")[0]}


def _entry(
    key: dict[str, Any],
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    fail_above: float | None,
) -> dict[str, Any]:
    before, after = old["step_ms"]["p50"], new["step_ms"]["p50"]
    olds, news = old["repetition_ms"], new["repetition_ms"]
    bounded = min(len(olds), len(news)) > 1
    return {
        "case": key,
        "old": before,
        "new": after,
        "ratio": after / before,
        "low": min(after, *news) / max(before, *olds) if bounded else None,
        "high": max(after, *news) / min(before, *olds) if bounded else None,
        "confidence": confidence(len(olds), len(news)) if bounded else None,
        "repetitions_old": len(olds),
        "repetitions_new": len(news),
        "n_old": old["step_ms"]["n"],
        "n_new": new["step_ms"]["n"],
        "above": None if fail_above is None else after / before > fail_above,
    }


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    bounds, verdict = "-", "too few to compare"
    if _enough(entry):
        low, high = entry["low"], entry["high"]
        bounds = f"{low:.3f} - {high:.3f}"
        verdict = "slower" if low > 1 else "faster" if high < 1 else "within noise"
    return (
        *(f"{entry[name]:.3f}" for name in ("old", "new", "ratio")),
        bounds,
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
            f" (--num-iters {MIN_REPETITIONS} or more)."
        )


def _describe(case: Mapping[str, Any]) -> str:
    dtypes = dict.fromkeys(case[key] for key in ("dtype", "weight_dtype", "kv_dtype"))
    sizes = [f"{_HEADS.get(k, k)} {case[k]}" for k in KEYS if k not in _TEXT]
    return f"{case['model']} {' '.join(dtypes)} {case['mode']} {case['device']}, {', '.join(sizes)}"


def _check_document(document: Any) -> None:
    """Raise `ValueError` unless a document has results of steady that can be compared."""
    try:
        version, cases = document["schema_version"], document["cases"]
        if type(version) is not int or version != SCHEMA_VERSION:
            raise ValueError(f"it has no schema_version {SCHEMA_VERSION}: measure it again")
        document["environment"].get("device")
        keys = [_key(case) for case in cases]
        for case in cases:
            times = [case["step_ms"]["p50"], *case["repetition_ms"]]
            in_range = case["step_ms"]["n"] >= 1 and all(_MIN_MS <= ms <= _MAX_MS for ms in times)
            if len(times) < 2 or not in_range:
                raise ValueError("it has no times of steps")
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it has no valid results of --scenario steady: {error!r:.80}") from error
    if not keys:
        raise ValueError("it has no cases: only results of --scenario steady can be compared")
    if any(key in keys[:number] for number, key in enumerate(keys)):
        raise ValueError("it has a case twice")
