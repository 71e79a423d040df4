"""Two runs compared: ratios, their bounds, the table and the exit status."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.bench.results.comparison_table import comparison_text
from stepgraph.runtime.bench.results.result_comparison import (
    COMPARED,
    case_of,
    confidence,
)
from stepgraph.runtime.bench.scenarios import steady

from .bench_rig import run_bench
from .compare_rig import compared, document, gaps_case, steady_case, write

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


@pytest.mark.parametrize("key", COMPARED["steady"].keys)
def test_cases_that_differ_are_not_compared(key):
    case = steady_case([[1.0]])
    other = case | {key: "another" if isinstance(case[key], str) else 7}
    result = compared(document(case), document(other))
    assert result["entries"] == []
    assert (len(result["only_old"]), len(result["only_new"])) == (1, 1)
    text = comparison_text(result)
    assert "No case is in both." in text
    assert "Only in old.json: demo bfloat16 int8 eager cpu, batch 1, input 128" in text
    assert "Only in this run: " in text


def test_differences_between_the_machines_are_listed():
    """The number of a device is no difference."""
    old = document(steady_case([[1.0]], device="cuda:0"), torch="2.11.0", commit=None)
    result = compared(old, document(steady_case([[1.0]], device="cuda:1")))
    assert result["entries"][0]["case"]["device"] == "cuda"
    assert result["environment"] == [
        {"name": "torch", "old": "2.11.0", "new": "2.13.0"},
        {"name": "commit", "old": None, "new": "abc"},
    ]
    text = comparison_text(result)
    assert "- Different torch: 2.11.0 before, 2.13.0 now" in text
    assert "- Different commit: - before, abc now" in text


def test_what_earlier_files_do_not_tell():
    """Repetitions follow from the samples where each has as many; keys are left out of matching."""
    old = steady_case([[1.0, 2.0, 3.0], [5.0, 5.0, 6.0]], output_len=4, weight_dtype="bfloat16")
    new = steady_case([[1.0], [2.0]], output_len=4)
    for key in ("prefill_chunk", "steps_per_launch", "repetition_ms", "weight_dtype"):
        del old[key]
    result = compared(document(old), document(new))
    (entry,) = result["entries"]
    assert (entry["low"], entry["high"]) == (1 / 5, 2 / 2)
    assert entry["repetitions_old"] == 2
    assert result["not_matched_by"] == ["prefill_chunk", "steps_per_launch"]
    assert "Matched without prefill_chunk, steps_per_launch" in comparison_text(result)
    old["samples"]["step_ms"].pop()
    (entry,) = compared(document(old), document(new))["entries"]
    assert (entry["low"], entry["repetitions_old"]) == (None, 0)
    assert "too few to compare" in comparison_text(result | {"entries": [entry]})
    for samples in (None, {"step_ms": None}):
        old["samples"] = samples
        (entry,) = compared(document(old), document(new))["entries"]
        assert entry["repetitions_old"] == 0


@pytest.mark.parametrize("scenario", ["interference", "churn"])
def test_gaps_of_scenarios_are_compared(scenario):
    slow, fast = [float(i) for i in range(1, 201)], [i / 2 for i in range(1, 101)]
    old = document(gaps_case(scenario, slow), name=scenario)
    new = document(gaps_case(scenario, fast), name=scenario)
    p50, p99 = compared(old, new, scenario, 1.05)["entries"]
    assert (p50["metric"], p99["metric"]) == ("itl_ms.p50", "itl_ms.p99")
    assert p50["ratio"] == pytest.approx(25.25 / 100.5)
    assert p50["low"] is p50["high"] is p99["confidence"] is None
    assert (p50["n_old"], p50["n_new"], p50["above"]) == (200, 100, False)
    few = document(gaps_case(scenario, fast[:99]), name=scenario)
    assert [e["metric"] for e in compared(old, few, scenario)["entries"]] == ["itl_ms.p50"]
    none = document(gaps_case(scenario, fast) | {"itl_ms": None}, name=scenario)
    assert compared(old, none, scenario)["entries"] == []


def test_budgets_that_follow_from_the_machine_are_one():
    def run(budget: float) -> dict[str, Any]:
        cases = [(None, False), (budget, True)]
        return document(
            *(
                gaps_case("interference", [1.0], max_itl_ms=ms, automatic_budget=automatic)
                for ms, automatic in cases
            ),
            name="interference",
        )

    result = compared(run(79.5), run(81.25), "interference")
    assert [e["case"]["max_itl_ms"] for e in result["entries"]] == [None, "auto"]
    given = gaps_case("interference", [1.0], max_itl_ms=79.5)
    assert case_of(given, COMPARED["interference"].keys)["max_itl_ms"] == 79.5


@pytest.mark.parametrize(("limit", "status"), [(None, 0), (1.05, 1), (1.1, 0), (2.0, 0)])
def test_two_files_are_compared(tmp_path, monkeypatch, capsys, limit, status):
    old = write(
        tmp_path / "old.json", steady_case([[10.0], [10.5], *[[10.0]] * 3]), commit="before"
    )
    new = write(
        tmp_path / "new.json",
        steady_case([*[[11.0]] * 4, [12.0]]),
        steady_case([[1.0]], mode="compile"),
    )
    flags = "" if limit is None else f"--fail-above {limit}"
    files = f"--output-json {tmp_path}/both.json --output-md {tmp_path}/both.md"
    assert run_bench(monkeypatch, f"--compare {old} {new} {flags} {files}") == status
    captured = capsys.readouterr()
    assert captured.out == (tmp_path / "both.md").read_text()
    lines = captured.out.splitlines()
    assert lines[0] == f"{new} against {old}: ratios of times, below 1 is faster"
    cells = [cell.strip() for cell in lines[4].split("|")[10:-1]]
    assert cells[:7] == ["step p50", "10.000", "11.000", "1.100", "1.048 - 1.200", "5, 5", "5, 5"]
    assert cells[7] == ("slower; above the limit" if status else "slower")
    assert "they hold with 88% or more" in captured.out
    assert f"Only in {new}: demo bfloat16 int8 compile cpu" in captured.out
    assert "Different commit: before before, abc now" in captured.out
    both = json.loads((tmp_path / "both.json").read_text())
    assert both["comparison"]["fail_above"] == limit
    assert {k: both[k] for k in ("cases", "environment")} == {
        k: v for k, v in json.loads(new.read_text()).items() if k in ("cases", "environment")
    }
    if status:
        (line,) = captured.err.splitlines()
        assert line.startswith("bench.py: error: 1 of 1 ratios are above 1.05, the largest is 1.1")
    else:
        assert captured.err == ""


@pytest.mark.parametrize("sides", [(4, 9), (9, 4), (1, 1), (3, 3)])
def test_few_repetitions_say_nothing(sides):
    old, new = ([[float(at)]] * count for at, count in zip((10, 20), sides, strict=True))
    text = comparison_text(compared(document(steady_case(old)), document(steady_case(new))))
    assert "| too few to compare |" in text
    assert "fewer than 5 repetitions" in text
    assert not any(word in text for word in ("slower", "faster |", "noise", "2.000 -", "%"))


def test_a_gate_that_compares_nothing_does_not_open(tmp_path, monkeypatch, capsys):
    old = write(tmp_path / "old.json", steady_case([[1.0]]))
    new = write(tmp_path / "new.json", steady_case([[1.0]], batch_size=9))
    assert run_bench(monkeypatch, f"--compare {old} {new}") == 0
    assert capsys.readouterr().err == ""
    assert run_bench(monkeypatch, f"--compare {old} {new} --fail-above 1.05") == 1
    assert "nothing was compared" in capsys.readouterr().err


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
        outputs, durations, counted = real(*arguments, **how)
        return outputs, [1e6 * duration for duration in durations], counted

    real = steady._run
    monkeypatch.setattr(steady, "_run", run)
    files = f"--output-json {tmp_path}/new.json --output-md {tmp_path}/new.md"
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
    assert captured.out == (tmp_path / "new.md").read_text()
    assert captured.out.startswith("| model")
    assert comparison_text(comparison) in captured.out
    assert run_bench(monkeypatch, f"{arguments} --fail-above 1.05") == 1
    assert "1 of 1 ratios are above 1.05" in capsys.readouterr().err.splitlines()[-1]
    assert json.loads((tmp_path / "new.json").read_text())["comparison"]["entries"][0]["above"]


def test_a_failed_run_is_not_compared(measured, tmp_path, monkeypatch, capsys):
    def repeat(run: steady.CaseRun) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steady.CaseRun, "repeat", repeat)
    arguments = f"{SMALL} --compare {measured} --output-json {tmp_path}/new.json"
    assert run_bench(monkeypatch, arguments) == 130
    assert "against" not in capsys.readouterr().out
