"""Two runs of the benchmark, case by case: ratios of their times, and how far noise carries them.

The repetitions of a case differ by more than the steps within one: what disturbs a machine lasts
longer than a step. So a repetition counts as one observation, its median, and the bounds of a ratio
come from the least and the greatest of them:

    low  = min(new) / max(old)        high = max(new) / min(old)

where `old` and `new` are the medians of the repetitions and the median of all steps, so that the
ratio of the latter lies between. The least and the greatest of k independent observations have the
true median between them with probability 1 - 2^(1 - k), whatever its distribution: all k lie on one
side of it with probability 2 * 2^-k (David and Nagaraja, "Order Statistics", 3rd edition, section
7.1). Where that is true of both runs the bounds have the true ratio between them, so they do with
at least (1 - 2^(1 - k_old)) * (1 - 2^(1 - k_new)), the `confidence`.

Standard library only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compared import COMPARED, Compared, case_of

__all__ = ["Observed", "compare", "confidence", "ratio_bounds", "slower_than"]

ENVIRONMENT = ("device", "driver", "cpu", "threads", "torch", "python", "system", "commit")
"""What is pointed out where it differs."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A time of one run, and what it was in each repetition."""

    value: float
    repetitions: tuple[float, ...]
    """None where repetitions cannot be told apart."""


def ratio_bounds(old: Observed, new: Observed) -> tuple[float, float] | None:
    """Return the bounds of new / old; None unless both runs have several repetitions."""
    if min(len(old.repetitions), len(new.repetitions)) < 2:
        return None
    olds, news = ((side.value, *side.repetitions) for side in (old, new))
    return min(news) / max(olds), max(news) / min(olds)


def confidence(old: int, new: int) -> float:
    """Return how probable it is at least that bounds from so many repetitions hold."""
    return (1 - 2.0 ** (1 - old)) * (1 - 2.0 ** (1 - new))


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
    compared = COMPARED[scenario]
    keys = _common_keys(compared, old, new)
    old_entries = [(case_of(entry, keys), entry) for entry in old[compared.entries]]
    new_entries = [(case_of(entry, keys), entry) for entry in new[compared.entries]]
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
            for metric in compared.metrics
            if (entry := _entry(case, *metric, theirs, ours, fail_above)) is not None
        ],
        "only_old": [case for case in old_cases if case not in new_cases],
        "only_new": [case for case in new_cases if case not in old_cases],
        "not_matched_by": [key for key in compared.keys if key not in keys],
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


def _common_keys(
    compared: Compared, old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the keys that every entry of both can be compared by."""
    cases = [case_of(e, compared.keys) for side in (old, new) for e in side[compared.entries]]
    return tuple(key for key in compared.keys if all(key in case for case in cases))


def _entry(
    case: dict[str, Any],
    metric: str,
    percentile: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    fail_above: float | None,
) -> dict[str, Any] | None:
    """Return how a case did in both runs; None where one of them did not observe it."""
    before, after = (_observed(entry, metric, percentile) for entry in (old, new))
    if before is None or after is None:
        return None
    ratio, bounds = after.value / before.value, ratio_bounds(before, after)
    low, high = bounds or (None, None)
    counts = len(before.repetitions), len(after.repetitions)
    return {
        "case": case,
        "metric": f"{metric}.{percentile}",
        "old": before.value,
        "new": after.value,
        "ratio": ratio,
        "low": low,
        "high": high,
        "confidence": None if bounds is None else confidence(*counts),
        "repetitions_old": counts[0],
        "repetitions_new": counts[1],
        "n_old": old[metric]["n"],
        "n_new": new[metric]["n"],
        "above": None if fail_above is None else ratio > fail_above,
    }


def _observed(entry: Mapping[str, Any], metric: str, percentile: str) -> Observed | None:
    summary = entry[metric]
    if summary is None or summary[percentile] is None:
        return None
    repeated = (metric, percentile) == ("step_ms", "p50")
    return Observed(summary[percentile], _repetitions(entry) if repeated else ())


def _repetitions(case: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the median step of each repetition.

    Of files that do not have them they follow from the samples, where each repetition has as many.
    """
    told: Sequence[float] | None = case.get("repetition_ms")
    if told is not None:
        return tuple(told)
    samples: Sequence[float] = case.get("samples", {}).get("step_ms", ())
    each = case["output_len"] - 1
    if case.get("steps_per_launch", 1) != 1 or each < 1 or len(samples) % each:
        return ()
    return tuple(
        statistics.median(samples[start : start + each]) for start in range(0, len(samples), each)
    )
