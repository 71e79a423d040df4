"""Two runs compared: ratios, their bounds, files that cannot be read, and the exit status."""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.profiling.stats import Summary
from stepgraph.runtime.bench.comparison import KEYS, compare, comparison_text, confidence

from ..rigs.bench_rig import run_bench

ENVIRONMENT = {"device": "a card", "torch": "2.13.0", "threads": 2, "commit": "abc"}


def steady_case(repeated: list[list[float]], **changes: Any) -> dict[str, Any]:
    samples = [sample for repetition in repeated for sample in repetition]
    text = dict.fromkeys(KEYS[:8], "x") | {"model": "demo", "device": "cpu"}
    return {
        **text,
        **dict.fromkeys(KEYS[8:], 8),
        "step_ms": Summary.of(samples).to_json(),
        "repetition_ms": [statistics.median(repetition) for repetition in repeated],
        **changes,
    }


def document(*cases: dict[str, Any], **environment: Any) -> dict[str, Any]:
    return {"schema_version": 1, "environment": ENVIRONMENT | environment, "cases": list(cases)}


def write(path: Path, *cases: dict[str, Any], **environment: Any) -> Path:
    path.write_text(json.dumps(document(*cases, **environment)))
    return path


times = st.floats(1e-3, 1e4)
repetitions = st.lists(st.lists(times, min_size=1, max_size=7), min_size=1, max_size=6)


@given(repetitions, repetitions)
def test_bounds_hold_the_ratio(old, new):
    (ratio,) = compare(document(steady_case(old)), document(steady_case(new)))
    (back,) = compare(document(steady_case(new)), document(steady_case(old)))
    assert ratio.value == pytest.approx(1 / back.value)
    assert ratio.repetitions == (len(old), len(new))
    low, high = ratio.bounds
    assert low <= ratio.value <= high
    assert low == pytest.approx(1 / back.bounds[1])
    # No pairing of repetitions gives a ratio beyond them.
    for one in map(statistics.median, new):
        for other in map(statistics.median, old):
            assert low <= one / other <= high


def test_confidence_is_what_chance_gives():
    """Of every way in which repetitions can fall on either side of their true medians."""
    for old, new in ((1, 3), (2, 2), (3, 5), (6, 6)):
        held = sum(
            0 < low < old and 0 < high < new
            for low in (i.bit_count() for i in range(2**old))
            for high in (i.bit_count() for i in range(2**new))
        )
        assert confidence(old, new) == held / 2 ** (old + new)


def test_cases_that_differ_are_not_compared():
    """The number of a device is not a difference."""
    case = steady_case([[1.0]], device="cuda:0")
    for key in KEYS:
        other = case | {key: "another" if isinstance(case[key], str) else 7}
        assert compare(document(case), document(other)) == []
    (ratio,) = compare(document(case), document(case | {"device": "cuda:1"}))
    assert ratio.case["device"] == "cuda"


def test_instruction_sets_are_compared_where_both_files_name_them():
    case = steady_case([[1.0]])
    old, new = (
        document(case | {"instruction_sets": {"weights": name}}) for name in ("avx2", "avx512f")
    )
    text = comparison_text(old, new, ["a", "b"], None)
    assert "weights avx2 before, weights avx512f now" in text
    for same in (old, document(case)):
        assert "instruction sets" not in comparison_text(old, same, ["a", "b"], None)


@pytest.mark.parametrize(("limit", "status"), [(None, 0), (1.05, 1), (1.1, 0)])
def test_two_files_are_compared(tmp_path, monkeypatch, capsys, limit, status):
    old = write(tmp_path / "old.json", steady_case([[10.0], [10.5], *[[10.0]] * 3]), commit=None)
    others = [steady_case([[1.0]], mode="other"), steady_case([[1.0]] * 4, batch_size=9)]
    new = write(tmp_path / "new.json", steady_case([*[[11.0]] * 4, [12.0]]), *others)
    flags = "" if limit is None else f" --fail-above {limit}"
    assert run_bench(monkeypatch, f"--compare {old} {new}{flags}") == status
    captured = capsys.readouterr()
    assert bool(captured.err) == bool(status)
    cells = [cell.strip() for cell in captured.out.splitlines()[4].split("|")]
    assert cells[12:18] == ["10.000", "11.000", "1.100", "1.048 - 1.200", "5, 5", "5, 5"]
    assert cells[18].partition(";")[0] == "slower"
    assert ("above" in cells[18]) == bool(status)
    *_, first, second, third = captured.out.splitlines()
    assert f"Only in {new}: demo x other" in first
    assert "batch 9" in second
    assert third == "- Different commit: - before, abc now"


def test_limit_without_a_common_case_fails(tmp_path, monkeypatch):
    old = write(tmp_path / "old.json", steady_case([[1.0]]))
    new = write(tmp_path / "new.json", steady_case([[1.0]], batch_size=9))
    assert run_bench(monkeypatch, f"--compare {old} {new}") == 0
    assert run_bench(monkeypatch, f"--compare {old} {new} --fail-above 1.05") == 1


GOOD = document(steady_case([[1.0], [2.0]]))


def changed(path: str, value: Any) -> str:
    """The text of a document in which something is another value, or (`...`) is missing."""
    made = copy.deepcopy(GOOD)
    *way, last = path.split("/")
    at: Any = made
    for key in way:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(made)


BAD = [
    *("", "[" * 100_000, '{"cases": []}', json.dumps(GOOD).replace('"p50": 1.5', '"p50": 1e999')),
    json.dumps(GOOD).replace('"p50": 1.5', f'"p50": {"1" * 5000}'),
    *(changed("schema_version", value) for value in (2, ...)),
    *(changed("environment", value) for value in (3, ...)),
    *(changed("cases", value) for value in ([], [3], GOOD["cases"] * 2)),
    *(changed(f"cases/0/{key}", ...) for key in (KEYS[0], KEYS[-2], "step_ms", "repetition_ms")),
    *(changed("cases/0/step_ms/p50", value) for value in (0, float("nan"), "1", None)),
    *(changed("cases/0/repetition_ms", value) for value in ([], [None], [0])),
    *(b"\xff{}", None),
]


def test_file_that_cannot_be_compared_is_one_line(tmp_path, monkeypatch, capsys):
    good = write(tmp_path / "good.json", steady_case([[1.0]]))
    for number, content in enumerate(BAD):
        path = tmp_path / f"{number}.json"
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert run_bench(monkeypatch, f"--compare {path} {good}") == 1, content
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert str(path) in line
