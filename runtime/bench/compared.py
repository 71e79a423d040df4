"""Results of the benchmark as they are compared: which scenarios, by what, and read with care.

Standard library only, but for the errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..errors import StepgraphError

__all__ = ["COMPARED", "SCHEMA_VERSION", "Compared", "ResultsError", "case_of", "read_results"]

SCHEMA_VERSION = 1
"""Of the document."""


class ResultsError(StepgraphError, ValueError):
    """A file holds no results that can be compared: the message names it and says why."""


class Compared(NamedTuple):
    """What is compared of a scenario."""

    entries: str
    """The list in the document."""
    keys: tuple[str, ...]
    """What two entries have in common that are compared."""
    metrics: tuple[tuple[str, str], ...]
    """Distributions in milliseconds, and which of their values."""


_ENGINE = ("model", "dtype", "weight_dtype", "kv_dtype", "mode", "kernels", "device")
_GAPS = (("itl_ms", "p50"), ("itl_ms", "p99"))

COMPARED = {
    "steady": Compared(
        "cases",
        (
            *(*_ENGINE, "batch_size", "input_len", "output_len", "prefill_chunk"),
            "steps_per_launch",
        ),
        (("step_ms", "p50"),),
    ),
    "interference": Compared(
        "interference",
        (*_ENGINE, "batch_size", "input_len", "steps", "prefill_chunk", "max_itl_ms"),
        _GAPS,
    ),
    "churn": Compared(
        "churn",
        (
            *(*_ENGINE, "batch_size", "input_len", "output_len", "steps", "prefill_chunk"),
            "max_itl_ms",
        ),
        _GAPS,
    ),
    "prefix": Compared(
        "prefix",
        (*_ENGINE, "batch_size", "input_len", "output_len", "prefill_chunk"),
        (("ttft_ms", "p50"), ("step_ms", "p50")),
    ),
    "neighbours": Compared(
        "neighbours",
        (*_ENGINE, "batch_size", "input_len", "steps", "prefill_chunk", "neighbours"),
        (("step_ms", "p50"), ("step_ms", "p99")),
    ),
}
"""By scenario."""

_ABSENT_MEANS_DTYPE = "weight_dtype"
"""Written since weights can be stored in another dtype than that of the activations."""
_MAY_BE_ABSENT = ("kernels", "prefill_chunk", "steps_per_launch")
"""Written since some version; what an earlier run had in their place is not known."""

_LEAST_MS, _MOST_MS = 1e-9, 1e12
"""No step takes less than a picosecond, or more than thirty years."""


def case_of(entry: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return what an entry is compared by; a device is its kind, without a number.

    A key of `_MAY_BE_ABSENT` that the entry lacks is absent here as well. A budget that the
    scenario chose itself follows from the machine's speed, so it is `auto`.
    """
    case: dict[str, Any] = {}
    for key in keys:
        if key in entry:
            case[key] = entry[key]
        elif key == _ABSENT_MEANS_DTYPE:
            case[key] = entry["dtype"]
    case["device"] = str(case["device"]).partition(":")[0]
    if "max_itl_ms" in keys and entry.get("automatic_budget"):
        case["max_itl_ms"] = "auto"
    return case


def read_results(path: Path, scenario: str | None) -> tuple[str, dict[str, Any]]:
    """Read a document that `--output-json` wrote; return its scenario and itself.

    Checks what a comparison reads of it, and no more.

    Args:
        path: the file.
        scenario: what it must be of; None: any that can be compared.

    Raises:
        ResultsError: it is not there, no JSON, of another schema version or another scenario, has
            no results, two of one case, or numbers that no time can be.
    """

    def refuse(reason: str) -> NoReturn:
        raise ResultsError(f"cannot compare with {path}: {reason}")

    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        refuse(error.strerror or str(error))
    except json.JSONDecodeError as error:
        refuse(f"it is no JSON, or ends too early: {error}")
    except (UnicodeDecodeError, RecursionError):
        refuse("it is no JSON")
    except ValueError as error:  # a constant, or an integer of thousands of digits
        refuse(str(error))
    if not isinstance(document, dict) or "schema_version" not in document:
        refuse("it is no result of bench.py: it has no schema_version")
    version = document["schema_version"]
    if version is True or version != SCHEMA_VERSION:
        refuse(
            f"its schema_version is {version!r:.40}, and this bench.py reads {SCHEMA_VERSION}:"
            " measure it again"
        )
    if not isinstance(document.get("environment"), dict):
        refuse("it does not say what it was measured on: it has no environment")
    found = _scenario(document)
    if found is None:
        refuse("it has no cases")
    if scenario is not None and found != scenario:
        refuse(f"it is of scenario {found}, and this run is of {scenario}")
    if found not in COMPARED:
        refuse(f"it is of scenario {found}; {', '.join(COMPARED)} can be compared")
    try:
        _check_entries(document, COMPARED[found])
    except ValueError as error:
        refuse(str(error))
    return found, document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it has {name} in the place of a number")


def _scenario(document: dict[str, Any]) -> str | None:
    """Return the scenario of a document by the list that has entries."""
    names = [name for name, value in document.items() if isinstance(value, list) and value]
    if "cases" in names:
        return "steady"
    return names[0].removesuffix("_operations") if names else None


def _check_entries(document: dict[str, Any], compared: Compared) -> None:
    """Raise `ValueError`, naming the entry, unless each has what is compared, and each is one."""
    cases: list[dict[str, Any]] = []
    for number, entry in enumerate(document[compared.entries], start=1):
        name = f"entry {number} of {compared.entries}"
        if not isinstance(entry, dict):
            raise ValueError(f"{name} is no object")
        for key in compared.keys:
            if key not in entry and key not in (_ABSENT_MEANS_DTYPE, *_MAY_BE_ABSENT):
                raise ValueError(f"{name} has no {key}")
            if key in entry:
                _check_key(key, entry[key], f"{name}: {key}")
        for metric, _ in compared.metrics:
            _check_summary(entry, metric, f"{name}: {metric}")
        _check_times(entry.get("repetition_ms"), f"{name}: repetition_ms")
        samples = entry.get("samples")
        if samples is not None and not isinstance(samples, dict):
            raise ValueError(f"{name}: samples is no object")
        _check_times((samples or {}).get("step_ms"), f"{name}: samples.step_ms")
        case = case_of(entry, compared.keys)
        if case in cases:
            raise ValueError(f"{name} is of the same case as entry {1 + cases.index(case)}")
        cases.append(case)


def _check_key(key: str, value: object, name: str) -> None:
    """Raise `ValueError` unless it is text, a count, or in the place of a budget a time or none."""
    if key in _ENGINE:
        if not isinstance(value, str):
            raise ValueError(f"{name} is {value!r:.40}, which is no text")
    elif key == "max_itl_ms":
        if value is not None:
            _check_time(value, name)
    elif isinstance(value, bool) or not isinstance(value, int) or value < (key != "neighbours"):
        raise ValueError(f"{name} is {value!r:.40}, which is no count")


def _check_summary(entry: dict[str, Any], metric: str, name: str) -> None:
    """Raise `ValueError` unless it is a distribution; `null` is one of nothing, but for steps."""
    summary = entry.get(metric)
    if summary is None and metric in entry and metric != "step_ms":
        return
    if not isinstance(summary, dict):
        raise ValueError(f"{name} is no distribution")
    n = summary.get("n")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{name}.n is {n!r:.40}, which is no number of samples")
    _check_time(summary.get("p50"), f"{name}.p50")
    if summary.get("p99") is not None:
        _check_time(summary["p99"], f"{name}.p99")


def _check_times(values: object, name: str) -> None:
    if values is None:
        return
    if not isinstance(values, list):
        raise ValueError(f"{name} is no list")
    for value in values:
        _check_time(value, name)


def _check_time(value: object, name: str) -> None:
    # NaN compares false.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not _LEAST_MS <= value <= _MOST_MS
    ):
        raise ValueError(f"{name} is {value!r:.40}, which is no time in milliseconds")
