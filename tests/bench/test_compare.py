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
from stepgraph.runtime.bench.comparison import (
    KEYS,
    compare,
    comparison_text,
    confidence,
)
from stepgraph.runtime.bench.scenarios import steady
from stepgraph.runtime.bench.scenarios.steady import SteadyRun

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
    return {
        "schema_version": 1,
        "environment": ENVIRONMENT | environment,
        "cases": list(cases),
    }


def compared(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return compare(old, new, old_name="old.json", new_name=None, fail_above=None)


def write(path: Path, *cases: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document(*cases)))
    return path


times = st.floats(1e-3, 1e4)
repetitions = st.lists(st.lists(times, min_size=1, max_size=7), min_size=1, max_size=6)


@given(repetitions, repetitions)
def test_bounds_hold_the_ratio(old, new):
    (entry,) = compared(document(steady_case(old)), document(steady_case(new)))["entries"]
    (back,) = compared(document(steady_case(new)), document(steady_case(old)))["entries"]
    assert entry["ratio"] == entry["new"] / entry["old"] == pytest.approx(1 / back["ratio"])
    assert (entry["repetitions_old"], entry["repetitions_new"]) == (len(old), len(new))
    if min(len(old), len(new)) < 2:
        assert entry["low"] is entry["high"] is entry["confidence"] is None
    else:
        assert entry["low"] <= entry["ratio"] <= entry["high"]
        assert 0.25 <= entry["confidence"] == back["confidence"] < 1
        assert entry["low"] == pytest.approx(1 / back["high"])
        # No pairing of repetitions gives a ratio beyond them.
        for one in map(statistics.median, new):
            for other in map(statistics.median, old):
                assert entry["low"] <= one / other <= entry["high"]


def test_confidence_is_what_chance_gives():
    """Of every way in which repetitions can fall on either side of their true medians."""
    for old, new in ((2, 2), (3, 3), (3, 5), (6, 6)):
        held = sum(
            0 < low < old and 0 < high < new
            for low in (i.bit_count() for i in range(2**old))
            for high in (i.bit_count() for i in range(2**new))
        )
        assert confidence(old, new) == held / 2 ** (old + new)
    assert confidence(1, 9) == 0.0


@pytest.mark.parametrize("key", KEYS)
def test_cases_that_differ_are_not_compared(key):
    case = steady_case([[1.0]])
    other = case | {key: "another" if isinstance(case[key], str) else 7}
    result = compared(document(case), document(other))
    assert result["entries"] == []
    assert (len(result["only_old"]), len(result["only_new"])) == (1, 1)
    assert comparison_text(result)


def test_differences_between_the_machines_are_listed():
    """The number of a device is not a difference."""
    old = document(steady_case([[1.0]], device="cuda:0"), torch="2.11.0", commit=None)
    result = compared(old, document(steady_case([[1.0]], device="cuda:1")))
    assert result["entries"][0]["case"]["device"] == "cuda"
    assert result["environment"] == [
        {"name": "torch", "old": "2.11.0", "new": "2.13.0"},
        {"name": "commit", "old": None, "new": "abc"},
    ]


@pytest.mark.parametrize(("limit", "status"), [(None, 0), (1.05, 1), (1.1, 0), (2.0, 0)])
def test_two_files_are_compared(tmp_path, monkeypatch, capsys, limit, status):
    old = write(tmp_path / "old.json", steady_case([[10.0], [10.5], *[[10.0]] * 3]))
    new = write(
        tmp_path / "new.json", steady_case([*[[11.0]] * 4, [12.0]]), steady_case([[1.0]], mode="y")
    )
    flags = "" if limit is None else f"--fail-above {limit}"
    files = f"--output-json {tmp_path}/both.json"
    assert run_bench(monkeypatch, f"--compare {old} {new} {flags} {files}") == status
    captured = capsys.readouterr()
    assert bool(captured.err) == bool(status)
    cells = [cell.strip() for cell in captured.out.splitlines()[4].split("|")]
    assert cells[12:16] == ["10.000", "11.000", "1.100", "1.048 - 1.200"]
    both = json.loads((tmp_path / "both.json").read_text())
    (entry,) = both["comparison"]["entries"]
    assert entry["above"] == (None if limit is None else bool(status))
    assert [case["mode"] for case in both["comparison"]["only_new"]] == ["y"]
    assert both["cases"] == json.loads(new.read_text())["cases"]


def test_limit_without_a_common_case_fails(tmp_path, monkeypatch, capsys):
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
    *(changed(f"cases/0/{key}", ...) for key in (KEYS[0], KEYS[-1], "step_ms", "repetition_ms")),
    *(changed("cases/0/step_ms/p50", value) for value in (0, float("nan"), "1", None)),
    *(changed("cases/0/repetition_ms", value) for value in ([], [None], [0])),
]


@pytest.mark.parametrize("text", BAD)
def test_file_that_cannot_be_compared_is_one_line(tmp_path, monkeypatch, capsys, text):
    path, good = tmp_path / "old.json", write(tmp_path / "good.json", steady_case([[1.0]]))
    path.write_text(text)
    assert run_bench(monkeypatch, f"--compare {path} {good}") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert str(path) in line


@pytest.mark.parametrize(
    "make", [lambda _: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff{}")]
)
def test_old_file_is_read_before_anything_is_measured(tmp_path, monkeypatch, capsys, make):
    monkeypatch.setattr(SteadyRun, "__init__", lambda *_: pytest.fail("something was measured"))
    path = tmp_path / "old.json"
    make(path)
    assert run_bench(monkeypatch, f"--compare {path} --output-json {tmp_path}/new.json") == 1
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A real run, as a file."""
    path = tmp_path_factory.mktemp("compare") / "old.json"
    patch = pytest.MonkeyPatch()
    assert run_bench(patch, f"{SMALL} --num-iters 2 --output-json {path}") == 0
    patch.undo()
    return path


SMALL = "--mode eager --batch-size 1 2 --input-len 24 --output-len 6 --num-warmup 0"


def test_a_run_is_compared_with_an_earlier_one(measured, tmp_path, monkeypatch, capsys):
    capsys.readouterr()

    def run(*arguments: Any, **how: Any) -> Any:
        outputs, durations = real(*arguments, **how)
        return outputs, [1e6 * duration for duration in durations]

    real = steady.decode_together
    monkeypatch.setattr(steady, "decode_together", run)
    files = f"--output-json {tmp_path}/new.json"
    arguments = SMALL.replace("1 2", "2 3")
    arguments = f"{arguments} --num-iters 2 --compare {measured} {files}"
    assert run_bench(monkeypatch, arguments) == 0
    captured = capsys.readouterr()
    comparison = json.loads((tmp_path / "new.json").read_text())["comparison"]
    (entry,) = comparison["entries"]
    assert entry["case"]["batch_size"] == 2
    assert entry["low"] > 1
    assert entry["above"] is None
    assert [case["batch_size"] for case in comparison["only_old"]] == [1]
    assert [case["batch_size"] for case in comparison["only_new"]] == [3]
    assert "- batch " in captured.out
    assert comparison_text(comparison) in captured.out
    assert run_bench(monkeypatch, f"{arguments} --fail-above 1.05") == 1
    assert "1 of 1 ratios are above 1.05" in capsys.readouterr().err.splitlines()[-1]
    assert json.loads((tmp_path / "new.json").read_text())["comparison"]["entries"][0]["above"]
