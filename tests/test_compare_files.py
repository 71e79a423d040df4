"""Files that `bench.py --compare` reads: those of the repository, and broken ones."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.bench.results.comparison_table import comparison_text
from stepgraph.runtime.bench.results.result_comparison import ResultsError, read_results
from stepgraph.runtime.bench.scenarios import registry as run_scenarios
from stepgraph.runtime.bench.scenarios import steady_run as run_steady

from .bench_rig import ROOT, run_bench
from .compare_rig import compared, document, gaps_case, steady_case

RESULTS = ROOT / "docs" / "results" / "cpu-2x-zen5"


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
