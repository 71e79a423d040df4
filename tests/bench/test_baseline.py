"""What transformers is compared by: both methods, their steps and tokens, and their failures."""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from stepgraph.runtime.bench.results.result_tables import table_of
from stepgraph.runtime.bench.runtimes import continuous_batching as continuous
from stepgraph.runtime.bench.runtimes import static_generate
from stepgraph.runtime.bench.runtimes.continuous_batching import (
    ContinuousBatching,
    whole_batch_steps,
)
from stepgraph.runtime.bench.runtimes.static_generate import StaticGenerate
from stepgraph.runtime.bench.runtimes.transformers_baseline import (
    BaselineCase,
    BaselineError,
    TransformersBaseline,
)
from stepgraph.runtime.bench.runtimes.transformers_config import import_transformers
from stepgraph.runtime.bench.runtimes.transformers_model import load_model
from stepgraph.runtime.loading.loader import read_config

from ..conftest import TinyModel
from ..rigs.bench_rig import run_bench

CPU = torch.device("cpu")
ARGUMENTS = "--mode eager --batch-size 2 --input-len 24 --output-len 8 --num-warmup 0"
ARGUMENTS += " --baseline transformers --num-iters"


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Each run and each end of transformers' batching collects garbage, twice."""
    gc.collect()
    gc.freeze()


def test_steps_of_the_whole_batch() -> None:
    one = [0.0, 1.0, 2.0, 3.0, 4.5, 5.5, 6.5]
    two = [2.1, 3.1, 4.6, 5.6]  # prefilled beside the first, which ends one step later
    assert whole_batch_steps([one]) == pytest.approx([1000, 1000, 1000, 1500, 1000, 1000])
    assert whole_batch_steps([one, two]) == pytest.approx([1000, 1500, 1000])
    ahead = [t - 0.2 for t in two]  # gets its tokens earlier in each step
    assert whole_batch_steps([ahead, two]) == pytest.approx([1000, 1500, 1000])
    stalled = [2.2, 3.2, 5.8]  # sat a step out
    assert whole_batch_steps([two, stalled]) == pytest.approx([1000])


def test_every_repetition_counts_as_many_steps(base: TinyModel) -> None:
    config = read_config(base.directory)
    prompts = base.prompts(9, 9, 9)
    baseline = TransformersBaseline(config, base.directory, dtype=torch.float32, device=CPU, seed=0)
    with closing(baseline):
        assert baseline.dtype == "float32"
        case = baseline.prepare(prompts, steps=5, max_batch_tokens=16)
        case.run()
        case.run()
        expected = base.greedy(prompts, 6)
        entries = case.to_json([2.0, 4.0, 3.0], expected)
        baseline.prepare(prompts[:1], steps=2, max_batch_tokens=16).run()
    baseline.close()
    assert [entry["method"] for entry in entries] == ["continuous", "static"]
    for entry in entries:
        assert entry["step_ms"]["n"] == 10
        assert entry["speedup"] == pytest.approx(entry["step_ms"]["p50"] / 3.0)
        assert entry["tokens_equal"] == 1.0
        assert entry["version"] == transformers.__version__
        assert entry["error"] is None
        assert (entry["compiled"], entry["cuda_graphs"], entry["async"]) == (False,) * 3


def test_what_a_checkpoint_asks_generate_for_is_left_out(base: TinyModel, tmp_path: Path) -> None:
    directory = shutil.copytree(base.directory, tmp_path / "penalty")
    prompts = base.prompts(9, 9)
    plain = base.greedy(prompts, 20)
    settings = {"repetition_penalty": 9.0, "eos_token_id": plain[0][2], "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    baseline = TransformersBaseline(
        read_config(directory), directory, dtype=torch.float32, device=CPU, seed=0
    )
    with closing(baseline):
        case = baseline.prepare(prompts, steps=19, max_batch_tokens=64)
        case.run()
        assert [entry["tokens_equal"] for entry in case.to_json([1.0], plain)] == [1.0, 1.0]


class FakeMethod:
    """Steps of one millisecond, until it fails."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        self.name = name
        self.fails_at = fails_at
        self.calls = 0
        self.released = False

    def prepare(self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int) -> None:
        self._call()

    def run(self) -> tuple[list[float], list[list[int]]]:
        self._call()
        return [1.0, 1.0], [[7, 8, self.calls]]

    def describe(self) -> dict[str, Any]:
        return {"compiled": True, "cuda_graphs": True, "async": False}

    def release(self) -> None:
        self.released = True

    def _call(self) -> None:
        if self.calls == self.fails_at:
            raise BaselineError("no such layer\nTraceback of many lines")
        self.calls += 1


def test_one_that_fails_stops_not_the_other() -> None:
    said: list[str] = []
    good, bad = FakeMethod("good"), FakeMethod("bad", fails_at=2)
    case = BaselineCase((bad, good), {"name": "x"}, said.append)
    case.prepare([[1]], 2, 16)
    case.run()
    assert [entry["error"] for entry in case.to_json([2.0], [[7, 8]])] == [None, None]
    case.run()
    case.run()
    failed, went_on = case.to_json([2.0], [[7, 8, 2, 5]])
    assert {key: value for key, value in failed.items() if value is not None} == {
        "method": "bad",
        "name": "x",
        "error": "no such layer",
    }
    assert failed.keys() == went_on.keys()
    assert bad.released
    assert said == ["bad is left out: no such layer"]
    assert went_on["step_ms"]["n"] == 6
    assert (went_on["speedup"], went_on["tokens_equal"]) == (0.5, 0.75)  # of the first run


def test_failures_of_transformers_are_errors_of_ours(
    monkeypatch: pytest.MonkeyPatch, base: TinyModel
) -> None:
    model = load_model(
        read_config(base.directory), base.directory, dtype=torch.float32, device=CPU, seed=0
    )
    methods = (ContinuousBatching(model, CPU), StaticGenerate(model, CPU))
    for method in methods:
        method.prepare([[1, 2, 3]], 2, 16)
    with monkeypatch.context() as patch:
        patch.setattr(continuous, "whole_batch_steps", lambda times: [1.0])
        patch.setattr(static_generate._TokenTimes, "put", lambda self, token_ids: None)
        with pytest.raises(BaselineError, match="in 1 steps, not 2"):
            methods[0].run()
        with pytest.raises(BaselineError, match="decoded -1 steps, not 2"):
            methods[1].run()
    methods[0].release()
    monkeypatch.setattr(model, "forward", None)
    for method in methods:
        with pytest.raises(BaselineError, match="transformers"):
            method.prepare([[1, 2, 3]], 2, 16)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r'pip install "stepgraph\[baseline\]"'),
        ("5.16.9", r"5\.17 or newer, 5\.16\.9 is installed.*stepgraph\[baseline\]"),
        ("unknown", "unknown is installed"),
    ],
)
def test_without_transformers_nothing_is_measured(
    version: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    file = tmp_path / "a.json"
    assert run_bench(monkeypatch, f"{ARGUMENTS} 1 --output-json {file}") == 1
    captured = capsys.readouterr()
    assert re.fullmatch(f"bench.py: error: .*{message}.*\n", captured.err), captured.err
    assert captured.out == ""
    assert not file.exists()
    for accepted in ("5.17.0.dev0", "6.0rc1", "5.100"):
        monkeypatch.setitem(sys.modules, "transformers", transformers)
        monkeypatch.setattr(transformers, "__version__", accepted)
        assert import_transformers().__version__ == accepted


def test_the_benchmark_takes_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    arguments = f"{ARGUMENTS} 2 --dtype float32 --output-json {file}"
    assert run_bench(monkeypatch, arguments) == 0
    document = json.loads(file.read_text())
    (case,) = document["cases"]
    assert [entry["tokens_equal"] for entry in case["baselines"]] == [1.0, 1.0]
    for entry in case["baselines"]:
        assert case["step_ms"]["n"] == entry["step_ms"]["n"] == 14
        assert (entry["name"], entry["dtype"]) == ("transformers", "float32")
    _, (row,) = table_of(document)
    assert row["times faster than static"] == f"{case['baselines'][1]['speedup']:.2f}"
    assert row["= static"] == row["= continuous"] == "100%"
    assert row["transformers static step ms p50 (n)"].endswith("(14)")
    assert "weights and cache in float32" in " ".join(capsys.readouterr().err.split())


def test_a_failing_method_is_a_dash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise BaselineError("of no such kind")

    monkeypatch.setattr(ContinuousBatching, "prepare", fail)
    file = tmp_path / "a.json"
    assert run_bench(monkeypatch, f"{ARGUMENTS} 1 --output-json {file}") == 0
    captured = capsys.readouterr()
    assert "continuous is left out: of no such kind" in captured.err
    document = json.loads(file.read_text())
    failed, static = document["cases"][0]["baselines"]
    assert (failed["error"], static["error"]) == ("of no such kind", None)
    _, (row,) = table_of(document)
    assert row["times faster than continuous"] == row["= continuous"] == "-"
    assert row["times faster than static"] != "-"


def test_our_cases_are_kept_without_the_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BaselineError("no memory")

    def interrupt(*_: Any) -> None:
        (case,) = json.loads(file.read_text())["cases"]  # before transformers prepares it
        assert (case["step_ms"]["n"], case["baselines"]) == (7, [])
        raise KeyboardInterrupt

    file = tmp_path / "a.json"
    arguments = f"{ARGUMENTS} 1 --output-json {file}"
    monkeypatch.setattr(TransformersBaseline, "prepare", interrupt)
    assert run_bench(monkeypatch, arguments) == 130
    assert len(json.loads(file.read_text())["cases"]) == 1
    arguments = arguments.replace("--batch-size 2", "--batch-size 1 2")
    for name in ("prepare", "__init__"):
        monkeypatch.setattr(TransformersBaseline, name, fail)
        assert run_bench(monkeypatch, arguments) == 1
        assert capsys.readouterr().err.endswith("error: no memory\n")
        document = json.loads(file.read_text())
        assert [(c["batch_size"], c["baselines"]) for c in document["cases"]] == [(1, []), (2, [])]
