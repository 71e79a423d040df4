"""Warnings about results: wrong tokens, noise, modes that were not interleaved, throttling."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ....profiling.device_state import describe_throttling

__all__ = ["failed_checks", "warnings"]

SPREAD_LIMIT = 0.05
"""A case whose repetitions differ by more is warned about."""
_DTYPES = ("dtype", "weight_dtype", "kv_dtype")
_SIZES = ("batch_size", "input_len", "output_len")


def warnings(document: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind of warning, and for each case that was throttled."""
    return [
        *failed_checks(document),
        *_noise(document),
        *_not_interleaved(document["cases"]),
        *_throttling(document),
        *_late_generators(document),
    ]


def failed_checks(document: Mapping[str, Any]) -> list[str]:
    """Return a line for each case whose tokens differ from those of the reference."""
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


def _noise(document: Mapping[str, Any]) -> Iterator[str]:
    spreads = list(_spreads(document))
    noisy = [(name, spread) for name, spread in spreads if (spread or 0.0) > SPREAD_LIMIT]
    if noisy:
        named = ", ".join(f"{name} ({spread:.1%})" for name, spread in noisy)
        yield (
            f"Warning: the repetitions of {len(noisy)} of {len(spreads)} cases lie more than"
            f" {SPREAD_LIMIT:.0%} apart (spread): {named}"
        )


def _spreads(document: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the name and the spread of everything with repetitions."""
    for case in document["cases"]:
        yield _name(case), case["spread"]


def _not_interleaved(cases: list[dict[str, Any]]) -> Iterator[str]:
    # If the modes of a kind did not fit together, none of its cases were interleaved.
    kinds = {_kind(case): case["interleaved"] for case in cases}
    modes = {kind: {c["mode"] for c in cases if _kind(c) == kind} for kind in kinds}
    apart = [kind for kind, turns in kinds.items() if not turns and len(modes[kind]) > 1]
    if apart:
        named = ", ".join(" ".join(dict.fromkeys(kind)) for kind in apart)
        yield (
            "Warning: modes ran one after the other, as they do not fit into memory together, so"
            f" a disturbance of the machine may have affected only one of them: {named}"
        )


def _throttling(document: Mapping[str, Any]) -> Iterator[str]:
    lists = [value for value in document.values() if isinstance(value, list)]
    for entry in itertools.chain.from_iterable(lists):
        state = entry.get("device_state")
        held = state and describe_throttling(state["before"], state["after"])
        if held:
            yield f"Warning: {_name(entry)}: {held}"


def _late_generators(document: Mapping[str, Any]) -> Iterator[str]:
    late = [e for e in document.get("serve", ()) if e.get("generator_behind")]
    if late:
        named = ", ".join(
            f"{e['runtime']} {e['transport']} {e['arrivals']} at {e['fraction']:g}" for e in late
        )
        yield (
            "Warning: the load generator fell behind its schedule; latencies contain its own delay"
            f" (see lag): {named}"
        )


def _kind(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(entry[name] for name in ("model", *_DTYPES))


def _name(entry: dict[str, Any]) -> str:
    sizes = " x ".join(str(entry[name]) for name in _SIZES if name in entry)
    return f"{' '.join(dict.fromkeys(_kind(entry)))} {entry['mode']} {sizes}"
