"""Two runs compared: ratios, their bounds, what is read of a file, and the exit status."""

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
from stepgraph.runtime.bench.results.comparison_table import comparison_text
from stepgraph.runtime.bench.results.result_comparison import (
    COMPARED,
    ResultsError,
    case_of,
    compare,
    confidence,
    read_results,
)
from stepgraph.runtime.bench.scenarios import registry as run_scenarios
from stepgraph.runtime.bench.scenarios import steady
from stepgraph.runtime.bench.scenarios import steady_run as run_steady

from .bench_rig import ROOT, run_bench

RESULTS = ROOT / "docs" / "results" / "cpu-2x-zen5"
ENVIRONMENT = {"device": "a card", "torch": "2.13.0", "threads": 2, "commit": "abc"}

times = st.floats(1e-3, 1e4)
repetitions = st.lists(st.lists(times, min_size=1, max_size=7), min_size=1, max_size=6)


def steady_case(repeated: list[list[float]], **changes: Any) -> dict[str, Any]:
    samples = [sample for repetition in repeated for sample in repetition]
    return {
        "model": "demo",
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "kv_dtype": "int8",
        "mode": "eager",
        "kernels": "torch",
        "device": "cpu",
        "batch_size": 1,
        "input_len": 128,
        "output_len": 64,
        "prefill_chunk": 512,
        "steps_per_launch": 1,
        "step_ms": Summary.of(samples).to_json(),
        "repetition_ms": [statistics.median(repetition) for repetition in repeated],
        "samples": {"step_ms": samples},
        **changes,
    }


def gaps_case(scenario: str, itl: list[float], **changes: Any) -> dict[str, Any]:
    case = steady_case([[1.0]], itl_ms=Summary.of(itl).to_json(), steps=200, max_itl_ms=None)
    entry = {k: case[k] for k in (*COMPARED[scenario].keys, "itl_ms")}
    return {**entry, "automatic_budget": False, **changes}


def document(*cases: dict[str, Any], name: str = "cases", **environment: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"schema_version": 1, "environment": ENVIRONMENT | environment}
    return {**made, "cases": [], name: list(cases)}


def compared(
    old: dict[str, Any],
    new: dict[str, Any],
    scenario: str = "steady",
    fail_above: float | None = None,
) -> dict[str, Any]:
    return compare(
        old, new, scenario=scenario, old_name="old.json", new_name=None, fail_above=fail_above
    )


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


@pytest.mark.parametrize(
    "name",
    ["demo", "smollm2-135m", "churn", "prefix", *(f"interference{n}" for n in ("", 2, 3, 4, 5))],
)
def test_results_of_the_repository_can_be_compared(name):
    scenario, read = read_results(RESULTS / f"{name}.json", None)
    result = compared(read, read, scenario)
    assert {entry["ratio"] for entry in result["entries"]} == {1.0}


GOOD = document(steady_case([[1.0], [2.0]]))
GAPS = document(gaps_case("churn", [1.0]), name="churn")


def changed(path: str, value: Any, base: dict[str, Any] = GOOD) -> str:
    """The text of a document in which something is another value, or (`...`) is not there."""
    made = copy.deepcopy(base)
    *way, last = path.split("/")
    at: Any = made
    for key in way:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(made)


BAD = {
    "empty": ("", "it is no JSON, or ends too early"),
    "deep": ("[" * 100_000, "it is no JSON"),
    "foreign": ('{"cases": []}', "it is no result of bench.py: it has no schema_version"),
    "version": (changed("schema_version", 2), "schema_version is 2, and this bench.py reads 1"),
    "true": (changed("schema_version", True), "its schema_version is True"),
    "environment": (changed("environment", ...), "it has no environment"),
    "no cases": (changed("cases", []), "it has no cases"),
    "case": (changed("cases", [3]), "entry 1 of cases is no object"),
    "twice": (changed("cases", GOOD["cases"] * 2), "entry 2 of cases is of the same case as"),
    "key": (changed("cases/0/batch_size", ...), "entry 1 of cases has no batch_size"),
    "key of text": (changed("cases/0/model", 3), "model is 3, which is no text"),
    "key of numbers": (changed("cases/0/input_len", "8"), "input_len is '8', which is no count"),
    "budget": (changed("churn/0/max_itl_ms", -1, GAPS), "max_itl_ms is -1, which is no time"),
    "no step": (changed("cases/0/step_ms", None), "step_ms is no distribution"),
    "nan": (changed("cases/0/step_ms/p50", float("nan")), "it has NaN in the place of a number"),
    "overflow": (
        json.dumps(GOOD).replace('"p50": 1.5', '"p50": 1e999'),
        "step_ms has inf, which is no time",
    ),
    "digits": (json.dumps(GOOD).replace('"p50": 1.5', f'"p50": {"1" * 5000}'), "integer string"),
    "zero": (changed("cases/0/step_ms/p50", 0), "step_ms has 0, which is no time"),
    "p99": (changed("churn/0/itl_ms/p99", "x", GAPS), "itl_ms has 'x', which is no time"),
    "repetitions": (changed("cases/0/repetition_ms", "x"), "repetition_ms is no list"),
    "sample": (changed("cases/0/samples/step_ms", [None]), "samples.step_ms has None, which is no"),
    "scenario": (changed("host", [1], document()), "it is of scenario host; steady, interference"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_compared_is_one_clear_line(tmp_path, monkeypatch, capsys, name):
    text, reason = BAD[name]
    path = tmp_path / "old.json"
    path.write_text(text)
    assert run_bench(monkeypatch, f"--compare {path} {RESULTS}/demo.json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"bench.py: error: cannot compare with {path}: ")
    assert reason in line


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(
        [
            *(f"cases/0/{key}" for key in GOOD["cases"][0]),
            *(f"cases/0/step_ms/{key}" for key in GOOD["cases"][0]["step_ms"]),
            *("cases", "environment", "schema_version", "churn", "cases/0/samples/step_ms"),
        ]
    ),
    json_values,
)
def test_no_value_makes_a_comparison_fail_in_another_way(tmp_path_factory, path, value):
    file = tmp_path_factory.getbasetemp() / "value.json"
    file.write_text(changed(path, value))
    try:
        scenario, read = read_results(file, None)
    except ResultsError:
        return
    result = compared(read, read, scenario)
    assert {entry["ratio"] for entry in result["entries"]} == {1.0}
    assert comparison_text(result)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "it is no JSON"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, capsys, make, reason):
    path = tmp_path / "old.json"
    make(path)
    assert run_bench(monkeypatch, f"--mode eager --compare {path}") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"bench.py: error: cannot compare with {path}: {reason}\n"


@pytest.mark.parametrize("scenario", ["steady", "interference", "churn"])
def test_the_old_file_is_checked_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, scenario
):
    def measure(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(run_steady.SteadyRun, "__init__", measure)
    monkeypatch.setattr(run_scenarios.ScenarioRun, "__init__", measure)
    other = document(gaps_case("interference", [1.0]), name="interference")
    made = {"steady": GAPS, "interference": GOOD, "churn": other}[scenario]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(made))
    arguments = f"--scenario {scenario} --compare {path} --output-json {tmp_path}/new.json"
    assert run_bench(monkeypatch, arguments) == 1
    error = capsys.readouterr().err
    assert f"and this run is of {scenario}" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "new.json").exists()


def write(path: Path, *cases: dict[str, Any], **environment: Any) -> Path:
    path.write_text(json.dumps(document(*cases, **environment)))
    return path


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
