"""docs/benchmark.schema.json: what the benchmark writes is as it says, and nothing more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.cache.memory.memory_plan import TERMS
from stepgraph.runtime.bench.results.result_comparison import COMPARED, ENVIRONMENT, SCHEMA_VERSION
from stepgraph.runtime.bench.results.result_document import describe_environment
from stepgraph.runtime.bench.scenarios import cache_bookkeeping as cache_benchmark
from stepgraph.runtime.bench.scenarios import engine_start as start
from stepgraph.runtime.bench.scenarios import host_overhead as host
from stepgraph.runtime.bench.validate_args import SCENARIO_FLAGS

from .bench_rig import ROOT, run_bench, schema_errors

SCHEMA = json.loads((ROOT / "docs" / "benchmark.schema.json").read_text())
RESULTS = sorted((ROOT / "docs" / "results").glob("*/*.json"))
SMALL = "--mode eager --batch-size 2 --input-len 24 --output-len 6 --num-warmup 0 --num-iters 2"

RUNS = {
    "steady": SMALL,
    "one repetition": f"{SMALL} --num-iters 1",
    "launches": f"{SMALL} --steps-per-launch 2 --kv-dtype int8 --weight-dtype int8",
    "interference": "--scenario interference --mode eager --batch-size 1 --input-len 24"
    " --num-steps 30",
    "churn": "--scenario churn --mode eager --batch-size 1 --input-len 8 --output-len 4"
    " --num-steps 30 --max-itl-ms 50 500",
    "prefix": "--scenario prefix --mode eager --batch-size 2 --input-len 64 --output-len 4"
    " --num-warmup 0 --num-iters 2",
    "memory": "--scenario memory --mode eager --batch-size 2 --input-len 24 --output-len 6"
    " --num-steps 30 --num-warmup 0 --num-iters 2",
    "neighbours": "--scenario neighbours --mode eager --batch-size 1 --input-len 8 --num-steps 30"
    " --num-warmup 0 --num-iters 2 --neighbours 0 1",
    "serve": "--scenario serve --mode eager --batch-size 2 --input-len 8 --output-len 4 --rates 0.5"
    " --duration 1 --no-http --streams 1 2 --num-steps 30 --num-iters 1",
    "start": "--scenario start --mode eager --kernels torch --batch-size 1",
    "host": "--scenario host --num-steps 40",
    "cache": "--scenario cache",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("schema")


def measure_less(patch: pytest.MonkeyPatch) -> None:
    """Pools are small, rows few, and a second start is taken to be as the first."""
    cache, costs, start_one = cache_benchmark.measure_cache, host.measure_host, start._start
    first: list[dict[str, Any]] = []

    def measure_cache(**how: Any) -> Any:
        return cache((1000, 2000), rounds=2, **how)

    def measure_host(**how: Any) -> Any:
        return costs((1,), (1, 9), (999, 2000), **how)

    def start_once(*how: Any) -> dict[str, Any]:
        if not first:
            first.append(start_one(*how))
        return first[0]

    patch.setattr(cache_benchmark, "measure_cache", measure_cache)
    patch.setattr(host, "measure_host", measure_host)
    patch.setattr(start, "_start", start_once)


def output(folder: Path, name: str) -> dict[str, Any]:
    """What a real run writes, measured once; what it prints lies beside that."""
    path = folder / f"{name.replace(' ', '-')}.json"
    if not path.exists():
        with pytest.MonkeyPatch.context() as patch:
            measure_less(patch)
            files = f"--output-json {path} --output-md {path.with_suffix('.md')}"
            with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as told:
                assert run_bench(patch, f"{RUNS[name]} {files}") == 0
        path.with_suffix(".out").write_text(printed.getvalue())
        path.with_suffix(".err").write_text(told.getvalue())
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def objects(schema: Any, way: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if "properties" in schema and isinstance(schema["properties"], dict):
            yield way, schema
        for key, value in schema.items():
            yield from objects(value, f"{way}/{key}")
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value, way)


def test_the_schema_describes_every_key():
    assert SCHEMA["properties"]["schema_version"] == {"const": SCHEMA_VERSION}
    pytest.importorskip("jsonschema").Draft202012Validator.check_schema(SCHEMA)
    for way, schema in objects(SCHEMA):
        assert schema["additionalProperties"] is False, way
        assert set(schema["required"]) <= set(schema["properties"]), way


def test_lists_of_names_are_those_of_the_code():
    definitions = SCHEMA["$defs"]
    assert tuple(definitions["memory_terms"]["properties"]) == TERMS
    keys = {key for compared in COMPARED.values() for key in compared.keys}
    assert set(definitions["compared_case"]["properties"]) == keys
    metrics = {".".join(metric) for compared in COMPARED.values() for metric in compared.metrics}
    entry = definitions["comparison"]["properties"]["entries"]["items"]["properties"]
    assert set(entry["metric"]["enum"]) == metrics
    environment = definitions["environment"]["properties"]
    assert set(describe_environment(torch.device("cpu"), 1e9)) == set(environment)
    assert set(ENVIRONMENT) <= set(environment)
    lists = {"steady": "cases", "cache": "cache_operations"}
    for scenario in SCENARIO_FLAGS:
        assert lists.get(scenario, scenario) in SCHEMA["properties"]


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_writes(folder, name):
    """The document is valid, stdout is the table, and progress is on stderr."""
    document = output(folder, name)
    assert schema_errors(document) == []
    (entries,) = [v for v in document.values() if isinstance(v, list) and v]
    assert entries
    path = folder / name.replace(" ", "-")
    printed, table, progress = (
        path.with_suffix(f".{suffix}").read_text() for suffix in ("out", "md", "err")
    )
    assert printed == table
    assert "\n| --" in table
    assert "\x1b" not in printed + progress
    assert progress
    assert "| --" not in progress


def test_every_scenario_that_runs_on_a_cpu_is_run():
    assert {"steady", *RUNS} >= set(SCENARIO_FLAGS) - {"kernels"}


def test_a_case_has_all_that_is_new(folder):
    """Keys that the schema lets older files do without."""
    for name in ("steady", "one repetition", "launches"):
        (case,) = output(folder, name)["cases"]
        new = ("weight_dtype", "prefill_chunk", "steps_per_launch", "repetition_ms", "start")
        assert {*new, "spread", "interleaved"} <= set(case)
        assert (case["spread"] is None) == (name == "one repetition")


def test_budgets_are_those_given_or_eight_decode_steps(folder):
    plain, budgeted = output(folder, "interference")["interference"]
    assert plain["max_itl_ms"] is plain["step_budget"] is None
    expected = round(8 * plain["decode_step_ms"]["p50"], 2)
    assert budgeted["max_itl_ms"] == budgeted["step_budget"]["max_itl_ms"] == expected
    assert (plain["automatic_budget"], budgeted["automatic_budget"]) == (False, True)
    budgets = [entry["step_budget"]["max_itl_ms"] for entry in output(folder, "churn")["churn"]]
    assert budgets == [50, 500]


@pytest.mark.parametrize("name", COMPARED)
def test_what_a_comparison_writes(folder, monkeypatch, tmp_path, name):
    output(folder, name)
    path = folder / f"{name}.json"
    arguments = f"--compare {path} {path} --fail-above 1.05 --output-json {tmp_path}/a.json"
    assert run_bench(monkeypatch, arguments) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["comparison"]["entries"]
    assert schema_errors(document) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_results_in_the_repository(path):
    assert schema_errors(json.loads(path.read_text())) == []
