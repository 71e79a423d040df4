"""Two runs of the benchmark, case by case: ratios of their times, and bounds from their noise.

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

Standard library only, but for the errors.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

from ...errors import StepgraphError

__all__ = [
    "COMPARED",
    "SCHEMA_VERSION",
    "Compared",
    "ResultsError",
    "case_of",
    "compare",
    "confidence",
    "read_results",
    "slower_than",
]

SCHEMA_VERSION = 1
"""Of the document."""
ENVIRONMENT = ("device", "driver", "cpu", "threads", "torch", "python", "system", "commit")
"""Fields of the environment whose differences are reported."""


class ResultsError(StepgraphError, ValueError):
    """A file has no results that can be compared: the message names it and the reason."""


class Compared(NamedTuple):
    """What is compared of a scenario."""

    entries: str
    """The list in the document."""
    keys: tuple[str, ...]
    """Fields that two entries must share to be compared."""
    metrics: tuple[tuple[str, str], ...]
    """Distributions in milliseconds, and which of their values."""


_ENGINE = ("model", "dtype", "weight_dtype", "kv_dtype", "mode", "kernels", "model_impl", "device")
_SIZES = (*_ENGINE, "batch_size", "input_len", "tensor_parallel", "prefill_chunk")
_ITL = (("itl_ms", "p50"), ("itl_ms", "p99"))

COMPARED = {
    "steady": Compared("cases", (*_SIZES, "output_len", "steps_per_launch"), (("step_ms", "p50"),)),
    "interference": Compared("interference", (*_SIZES, "steps", "max_itl_ms"), _ITL),
    "churn": Compared("churn", (*_SIZES, "output_len", "steps", "max_itl_ms"), _ITL),
    "prefix": Compared("prefix", (*_SIZES, "output_len"), (("ttft_ms", "p50"), ("step_ms", "p50"))),
    "neighbours": Compared(
        "neighbours", (*_SIZES, "steps", "neighbours"), (("step_ms", "p50"), ("step_ms", "p99"))
    ),
}
"""By scenario."""

_OPTIONAL = (
    *("weight_dtype", "kernels", "model_impl", "tensor_parallel", "prefill_chunk"),
    "steps_per_launch",
)
"""Keys that earlier versions did not write. An absent `weight_dtype` is `dtype`, an absent
`tensor_parallel` is 1."""
_MIN_MS, _MAX_MS = 1e-9, 1e12
"""No step takes less than a picosecond, or more than thirty years."""


def confidence(old: int, new: int) -> float:
    """Return the least probability that bounds from so many repetitions hold."""
    return (1 - 2.0 ** (1 - old)) * (1 - 2.0 ** (1 - new))


def case_of(entry: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return what an entry is matched by; a device is its type, without a number.

    An optional key that the entry lacks is absent here as well. A budget that the scenario chose
    follows from the machine's speed, so it is `auto`.
    """
    case = {key: entry[key] for key in keys if key in entry}
    if "weight_dtype" in keys:
        case.setdefault("weight_dtype", entry["dtype"])
    if "tensor_parallel" in keys:
        case.setdefault("tensor_parallel", 1)
    case["device"] = entry["device"].partition(":")[0]
    if "max_itl_ms" in keys and entry.get("automatic_budget"):
        case["max_itl_ms"] = "auto"
    return case


def compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    scenario: str,
    old_name: str,
    new_name: str | None,
    fail_above: float | None,
) -> dict[str, Any]:
    """Return the `comparison` of the benchmark's JSON.

    Args:
        old: a document as `read_results` returns it.
        new: another, or that of this run.
        scenario: of both.
        old_name: the file that `old` was read from.
        new_name: the file that `new` was read from; None: this run.
        fail_above: the largest ratio that is no failure.
    """
    name, every_key, metrics = COMPARED[scenario]
    cases = [case_of(entry, every_key) for side in (old, new) for entry in side[name]]
    keys = [key for key in every_key if all(key in case for case in cases)]
    old_entries, new_entries = (
        [(case_of(entry, keys), entry) for entry in side[name]] for side in (old, new)
    )
    old_cases, new_cases = ([case for case, _ in side] for side in (old_entries, new_entries))
    return {
        "old": old_name,
        "new": new_name,
        "fail_above": fail_above,
        "entries": [
            entry
            for case, ours in new_entries
            for other, theirs in old_entries
            if case == other
            for metric in metrics
            if (entry := _entry(case, *metric, theirs, ours, fail_above)) is not None
        ],
        "only_old": [case for case in old_cases if case not in new_cases],
        "only_new": [case for case in new_cases if case not in old_cases],
        "not_matched_by": [key for key in every_key if key not in keys],
        "environment": [
            {"name": name, "old": theirs, "new": ours}
            for name in ENVIRONMENT
            for theirs, ours in [(old["environment"].get(name), new["environment"].get(name))]
            if theirs != ours
        ],
    }


def slower_than(comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a comparison that are above its limit."""
    return [entry for entry in comparison["entries"] if entry["above"]]


def _entry(
    case: dict[str, Any],
    metric: str,
    percentile: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    fail_above: float | None,
) -> dict[str, Any] | None:
    """Return the comparison of a case; None if one of the runs did not observe the metric."""
    if any(side[metric] is None or side[metric][percentile] is None for side in (old, new)):
        return None
    before, after = old[metric][percentile], new[metric][percentile]
    olds: Sequence[float] = ()
    news: Sequence[float] = ()
    if (metric, percentile) == ("step_ms", "p50"):  # of others, repetitions have no value
        olds, news = _repetitions(old), _repetitions(new)
    bounded = min(len(olds), len(news)) > 1
    return {
        "case": case,
        "metric": f"{metric}.{percentile}",
        "old": before,
        "new": after,
        "ratio": after / before,
        "low": min(after, *news) / max(before, *olds) if bounded else None,
        "high": max(after, *news) / min(before, *olds) if bounded else None,
        "confidence": confidence(len(olds), len(news)) if bounded else None,
        "repetitions_old": len(olds),
        "repetitions_new": len(news),
        "n_old": old[metric]["n"],
        "n_new": new[metric]["n"],
        "above": None if fail_above is None else after / before > fail_above,
    }


def _repetitions(case: Mapping[str, Any]) -> Sequence[float]:
    """Return the median step of each repetition.

    A file without them may have them in its samples, if every repetition has as many.
    """
    medians: Sequence[float] | None = case.get("repetition_ms")
    if medians is not None:
        return medians
    samples: Sequence[float] = (case.get("samples") or {}).get("step_ms") or ()
    each = case["output_len"] - 1
    if case.get("steps_per_launch", 1) != 1 or each < 1 or len(samples) % each:
        return ()
    return [
        statistics.median(samples[start : start + each]) for start in range(0, len(samples), each)
    ]


def read_results(path: Path, scenario: str | None) -> tuple[str, dict[str, Any]]:
    """Read a document that `--output-json` wrote; return its scenario and itself.

    Checks only what a comparison uses.

    Args:
        path: the file.
        scenario: what it must be of; None: any that can be compared.

    Raises:
        ResultsError: it cannot be read, is not JSON, has another schema version or scenario, no
            results, two of one case, or numbers that cannot be times.
    """
    try:
        return _check_document(path.read_text(encoding="utf-8"), scenario)
    except OSError as error:
        reason = error.strerror or str(error)
    except (RecursionError, UnicodeDecodeError):
        reason = "it is no JSON"
    except json.JSONDecodeError as error:
        reason = f"it is no JSON, or ends too early: {error}"
    except ValueError as error:
        reason = str(error)
    raise ResultsError(f"cannot compare with {path}: {reason}")


def _check_document(text: str, scenario: str | None) -> tuple[str, dict[str, Any]]:
    document = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ValueError("it is no result of bench.py: it has no schema_version")
    version = document["schema_version"]
    if version is True or version != SCHEMA_VERSION:
        raise ValueError(
            f"its schema_version is {version!r:.40}, and this bench.py reads {SCHEMA_VERSION}:"
            " measure it again"
        )
    if not isinstance(document.get("environment"), dict):
        raise ValueError("it has no environment, so the machine is unknown")
    names = [name for name, value in document.items() if isinstance(value, list) and value]
    if not names:
        raise ValueError("it has no cases")
    found = "steady" if "cases" in names else names[0]
    if scenario is not None and found != scenario:
        raise ValueError(f"it is of scenario {found}, and this run is of {scenario}")
    if found not in COMPARED:
        raise ValueError(f"it is of scenario {found}; {', '.join(COMPARED)} can be compared")
    compared = COMPARED[found]
    cases: list[dict[str, Any]] = []
    for number, entry in enumerate(document[compared.entries], start=1):
        name = f"entry {number} of {compared.entries}"
        _check_entry(entry, compared, name)
        case = case_of(entry, compared.keys)
        if case in cases:
            raise ValueError(f"{name} is of the same case as entry {1 + cases.index(case)}")
        cases.append(case)
    return found, document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it has {name} in the place of a number")


def _check_entry(entry: object, compared: Compared, name: str) -> None:
    """Raise `ValueError` unless an entry has the keys and times that are compared."""
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is no object")
    for key in compared.keys:
        if key in entry:
            _check_key(key, entry[key], name)
        elif key not in _OPTIONAL:
            raise ValueError(f"{name} has no {key}")
    times: dict[str, object] = {}
    for metric in dict.fromkeys(metric for metric, _ in compared.metrics):
        summary = entry.get(metric)
        if summary is None and metric in entry and metric != "step_ms":
            continue  # nothing was observed
        if not isinstance(summary, dict) or not _is_number(summary.get("n"), int, least=1):
            raise ValueError(f"{name}: {metric} is no distribution")
        p99 = summary.setdefault("p99", None)
        times[metric] = [summary.get("p50"), *([] if p99 is None else [p99])]
    samples = entry.get("samples") or {}
    if not isinstance(samples, dict):
        raise ValueError(f"{name}: samples is no object")
    times["repetition_ms"] = entry.get("repetition_ms")
    times["samples.step_ms"] = samples.get("step_ms")
    for what, listed in times.items():
        if not isinstance(listed, list | None):
            raise ValueError(f"{name}: {what} is no list")
        for value in listed or ():
            if not (_is_number(value, float) and _MIN_MS <= value <= _MAX_MS):
                raise ValueError(f"{name}: {what} has {value!r:.40}, which is no time in ms")


def _check_key(key: str, value: object, name: str) -> None:
    """Raise `ValueError` unless a key is text, a count, or for a budget a time or null."""
    if key in _ENGINE:
        valid, what = isinstance(value, str), "text"
    elif key == "max_itl_ms":
        valid, what = value is None or _is_number(value, float), "time in ms"
    else:
        valid, what = _is_number(value, int, least=int(key != "neighbours")), "count"
    if not valid:
        raise ValueError(f"{name}: {key} is {value!r:.40}, which is no {what}")


def _is_number(value: object, kind: type[int] | type[float], least: int = 0) -> TypeGuard[float]:
    """Whether a value of a JSON document is a number; an integer is a float too."""
    kinds = (int,) if kind is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and value >= least
