"""Warnings about a benchmark's results: wrong tokens, noise, missing turns, throttling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...profiling.device_state import describe_throttling
from .turns import SPREAD_LIMIT

__all__ = ["failed_checks", "warnings"]

_WITH_DEVICE_STATE = ("cases", "interference", "churn", "prefix", "memory", "neighbours")
"""Lists of a document whose entries tell the state of the device."""
_DTYPES = ("dtype", "weight_dtype", "kv_dtype")
_SIZES = ("batch_size", "input_len", "output_len")


def warnings(document: dict[str, Any]) -> list[str]:
    """Return a line for each kind of warning, and for each case that was held back."""
    return [
        *failed_checks(document),
        *_noise(document),
        *_missing_turns(document["cases"]),
        *_throttling(document),
    ]


def failed_checks(document: dict[str, Any]) -> list[str]:
    """Return a line for each case whose tokens are not those of the reference."""
    lines = []
    for case in document["cases"]:
        check = case.get("check")
        if check is not None and not check["passed"]:
            gap = "not finite" if check["worst_gap"] is None else f"{check['worst_gap']:.2g}"
            why = check["error"] or (
                f"a token's reference logit lies {gap} standard deviations below the largest,"
                f" {check['tolerance']:g} are allowed; {check['equal']} of {check['tokens']} tokens"
                " equal the reference's"
            )
            lines.append(f"FAILED: {_name(case)}: its times do not count: {why}")
    return lines


def _noise(document: dict[str, Any]) -> Iterator[str]:
    spreads = list(_spreads(document))
    noisy = [(name, spread) for name, spread in spreads if (spread or 0.0) > SPREAD_LIMIT]
    if noisy:
        named = ", ".join(f"{name} ({spread:.1%})" for name, spread in noisy)
        yield (
            f"Warning: the repetitions of {len(noisy)} of {len(spreads)} cases lie more than"
            f" {SPREAD_LIMIT:.0%} apart (spread): {named}"
        )


def _spreads(document: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the name and the spread of everything that is repeated."""
    for case in document["cases"]:
        yield _name(case), case["spread"]
    for entry in document.get("prefix", ()):
        yield f"{_name(entry)} off", entry["unshared"]["spread"]
        yield f"{_name(entry)} on", entry["spread"]
    for entry in document.get("memory", ()):
        for run in entry["scarcity"]:
            yield f"{_name(entry | run)} {run['preemption']}", run["spread"]


def _missing_turns(cases: list[dict[str, Any]]) -> Iterator[str]:
    # Where the modes of a kind did not fit together, none of its cases took turns.
    kinds = {_kind(case): case["interleaved"] for case in cases}
    modes = {kind: {c["mode"] for c in cases if _kind(c) == kind} for kind in kinds}
    apart = [kind for kind, turns in kinds.items() if not turns and len(modes[kind]) > 1]
    if apart:
        named = ", ".join(" ".join(dict.fromkeys(kind)) for kind in apart)
        yield (
            "Warning: modes ran one after the other, as they do not fit into memory together, so"
            f" what disturbed the machine may have met one of them alone: {named}"
        )


def _throttling(document: dict[str, Any]) -> Iterator[str]:
    for entry in (entry for name in _WITH_DEVICE_STATE for entry in document.get(name, ())):
        state = entry["device_state"]
        held = state and describe_throttling(state["before"], state["after"])
        if held:
            yield f"Warning: {_name(entry)}: {held}"


def _kind(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(entry[name] for name in ("model", *_DTYPES))


def _name(entry: dict[str, Any]) -> str:
    sizes = " x ".join(str(entry[name]) for name in _SIZES if name in entry)
    return f"{' '.join(dict.fromkeys(_kind(entry)))} {entry['mode']} {sizes}"
