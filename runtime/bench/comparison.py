"""Two runs of steady, case by case: ratios of their times, and bounds from their noise.

What disturbs a machine lasts longer than a step, so a repetition counts as one observation, its
median. The bounds of a ratio are the least and the greatest ratio of these medians; how often they
hold is in docs/benchmarking.md (David and Nagaraja, "Order Statistics", 3rd edition, section 7.1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...profiling.command_line import aligned
from ..errors import StepgraphError

SCHEMA_VERSION = 1
"""Of the document."""
ENVIRONMENT = ("device", "driver", "cpu", "threads", "torch", "python", "system", "commit")
"""Fields of the environment whose differences are reported."""
MIN_REPETITIONS = 5
"""Of both runs: bounds from fewer hold with less than 88 %."""
_TEXT = ("model", "dtype", "weight_dtype", "kv_dtype", "mode", "kernels", "model_impl", "device")
_SIZES = ("batch_size", "input_len", "output_len")
_HIDDEN_IF_EQUAL = ("activation_dtype", "tensor_parallel", "prefill_chunk", "neighbours")
KEYS = (*_TEXT, *_SIZES, *_HIDDEN_IF_EQUAL)
"""Fields that two cases must share to be compared."""
_HEADS = {"weight_dtype": "weights", "kv_dtype": "KV", "tensor_parallel": "ranks"}
_HEADS |= {name: name.partition("_")[0] for name in _SIZES}
_COLUMNS = ("old ms", "new ms", "ratio", "bounds", "repetitions old, new", "n old, new", "")
_MIN_MS, _MAX_MS = 1e-9, 1e12
"""No step takes less than a picosecond, or more than thirty years."""

Entry = Mapping[str, Any]


class ResultsError(StepgraphError, ValueError):
    """A file has no results that can be compared: the message names it and the reason."""


def confidence(old: int, new: int) -> float:
    """Return the least probability that bounds from these numbers of repetitions hold.

    All k observations lie on one side of their true median with probability 2 * 2^-k.
    """
    return (1 - 2.0 ** (1 - old)) * (1 - 2.0 ** (1 - new))


def read_results(path: Path) -> dict[str, Any]:
    """Read a document that `--output-json` wrote. Checks what a comparison uses.

    Raises:
        ResultsError: it cannot be read, is not JSON, has another schema version, no results of
            steady, two of one case, or numbers that cannot be times.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"it has no schema_version {SCHEMA_VERSION}: measure it again")
        document["environment"].get("device")
        for case in document["cases"]:  # older files lack it
            case.setdefault("activation_dtype", case["dtype"])
        keys = [_key(case) for case in document["cases"]]
        for case in document["cases"]:
            times = [case["step_ms"]["p50"], *case["repetition_ms"]]
            in_range = case["step_ms"]["n"] >= 1 and all(_MIN_MS <= ms <= _MAX_MS for ms in times)
            if len(times) < 2 or not in_range:
                raise ValueError("it has no times of steps")
        if not keys:
            raise ValueError("it has no cases of --scenario steady")
        if any(key in keys[:number] for number, key in enumerate(keys)):
            raise ValueError("it has a case twice")
        return document
    except OSError as error:
        reason = error.strerror or str(error)
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        reason = "it is not JSON"
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"it has no valid results of --scenario steady: {error!r:.80}"
    except ValueError as error:
        reason = str(error)
    raise ResultsError(f"cannot use the results in {path}: {reason}")


class Ratio(NamedTuple):
    """A case of two runs."""

    case: dict[str, Any]
    """What it was matched by."""
    old: Entry
    new: Entry

    @property
    def value(self) -> float:
        """The ratio of the median steps, below 1 if the new one is faster."""
        return float(self.new["step_ms"]["p50"] / self.old["step_ms"]["p50"])

    @property
    def repetitions(self) -> tuple[int, int]:
        """Of the old and the new run."""
        return len(self.old["repetition_ms"]), len(self.new["repetition_ms"])

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest ratio of medians."""
        old, new = ([side["step_ms"]["p50"], *side["repetition_ms"]] for side in self[1:])
        return min(new) / max(old), max(new) / min(old)


def compare(old: Entry, new: Entry) -> list[Ratio]:
    """Return the cases that both documents have, in the order of the new one."""
    before = {str(_key(case)): case for case in old["cases"]}
    keyed = [(_key(case), case) for case in new["cases"]]
    return [Ratio(key, before[str(key)], case) for key, case in keyed if str(key) in before]


def instruction_sets_text(entries: Iterable[Entry]) -> str:
    """Return the instruction set of each kind of product, empty where no entry names any.

    Entries of older files name none.
    """
    found = (entry.get("instruction_sets", {}).items() for entry in entries)
    texts = (", ".join(f"{kind} {name}" for kind, name in items) for items in found)
    return "; ".join(dict.fromkeys(filter(None, texts)))


def comparison_text(old: Entry, new: Entry, names: Sequence[object], limit: float | None) -> str:
    """Return the comparison as Markdown that reads as plain text too.

    Args:
        old: a document as `read_results` returns it.
        new: another.
        names: of the two.
        limit: the largest ratio that passes.
    """
    ratios = compare(old, new)
    lines = [f"{names[1]} against {names[0]}: ratios of times, below 1 is faster", ""]
    notes = [] if ratios else ["No case is in both."]
    if ratios:
        hidden = {k for k in _HIDDEN_IF_EQUAL if len({ratio.case[k] for ratio in ratios}) == 1}
        keys = [key for key in KEYS if key not in hidden]
        cells = [[*(str(r.case[key]) for key in keys), *_cells(r, limit)] for r in ratios]
        head = [*(_HEADS.get(key, key) for key in keys), *_COLUMNS]
        lines += [*aligned(head, cells, len(_TEXT)), ""]
    counts = [ratio.repetitions for ratio in ratios]
    known = [confidence(*pair) for pair in counts if min(pair) >= MIN_REPETITIONS]
    if known:
        notes.append(
            f"Bounds: the extreme medians of the repetitions; they hold with {min(known):.0%} or"
            " more for noise that varies between the repetitions of one run."
        )
    if len(known) < len(ratios):
        notes.append(
            f"Too few to compare: fewer than {MIN_REPETITIONS} repetitions on one side"
            f" (--num-iters {MIN_REPETITIONS} or more)."
        )
    common = [ratio.case for ratio in ratios]
    for name, document in zip(names, (old, new), strict=True):
        alone = [key for key in map(_key, document["cases"]) if key not in common]
        notes += [f"Only in {name}: {_describe(case)}" for case in alone]
    for field in ENVIRONMENT:
        was, now = (document["environment"].get(field) for document in (old, new))
        if was != now:
            notes.append(f"Different {field}: {was or '-'} before, {now or '-'} now")
    was, now = (instruction_sets_text(document["cases"]) for document in (old, new))
    if was and now and was != now:
        notes.append(f"Different instruction sets: {was} before, {now} now")
    return "\n".join([*lines, *(f"- {note}" for note in notes)])


def failure(ratios: Sequence[Ratio], limit: float) -> str | None:
    """Return why a comparison fails its limit; None if it does not."""
    if not ratios:
        return "no case is in both files: nothing was compared"
    slower = [ratio for ratio in ratios if ratio.value > limit]
    if not slower:
        return None
    worst = max(slower, key=lambda ratio: ratio.value)
    return (
        f"{len(slower)} of {len(ratios)} ratios are above {limit:g}, the largest is"
        f" {worst.value:.3f}: {_describe(worst.case)}"
    )


def _key(case: Entry) -> dict[str, Any]:
    """Return what a case is matched by; a device is its type, without a number."""
    # Files from before have neither.
    case = {"neighbours": 0, "activation_dtype": case["dtype"], **case}
    return {**{key: case[key] for key in KEYS}, "device": case["device"].partition(":")[0]}


def _cells(ratio: Ratio, limit: float | None) -> tuple[str, ...]:
    bounds, verdict = "-", "too few to compare"
    if min(ratio.repetitions) >= MIN_REPETITIONS:
        low, high = ratio.bounds
        bounds = f"{low:.3f} - {high:.3f}"
        verdict = "slower" if low > 1 else "faster" if high < 1 else "within noise"
    above = limit is not None and ratio.value > limit
    return (
        *(f"{side['step_ms']['p50']:.3f}" for side in (ratio.old, ratio.new)),
        *(f"{ratio.value:.3f}", bounds),
        "{}, {}".format(*ratio.repetitions),
        f"{ratio.old['step_ms']['n']}, {ratio.new['step_ms']['n']}",
        verdict + ("; above the limit" if above else ""),
    )


def _describe(case: Mapping[str, Any]) -> str:
    dtypes = dict.fromkeys(case[key] for key in ("dtype", "weight_dtype", "kv_dtype"))
    sizes = [f"{_HEADS.get(k, k)} {case[k]}" for k in KEYS if k not in _TEXT]
    return f"{case['model']} {' '.join(dtypes)} {case['mode']} {case['device']}, {', '.join(sizes)}"
