"""The model in transformers is the same one, and only steps of its whole batch are counted."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from stepgraph.runtime.benchmarks import baseline as module
from stepgraph.runtime.benchmarks.baseline import (
    BaselineError,
    TransformersBaseline,
    hf_config,
    whole_batch_steps,
)
from stepgraph.runtime.benchmarks.steady_rows import BASELINE_COLUMNS
from stepgraph.runtime.benchmarks.tables import columns, rows
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.presets import PRESETS

from .bench_rig import run_bench
from .conftest import TinyModel

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_the_shapes_of_a_preset_survive_the_way_to_transformers(name: str) -> None:
    preset = PRESETS[name]
    there = hf_config(preset).to_dict() | {"dtype": preset.torch_dtype}
    assert ModelConfig.from_hf(there) == preset


def test_steps_of_the_whole_batch() -> None:
    one = [0.0, 1.0, 2.0, 3.0, 4.5, 5.5, 6.5]
    two = [2.1, 3.1, 4.6, 5.6]  # prefilled beside the first, which ends one step later
    assert whole_batch_steps([one]) == pytest.approx([1000, 1000, 1000, 1500, 1000, 1000])
    assert whole_batch_steps([one, two]) == pytest.approx([1000, 1500, 1000])
    ahead = [t - 0.2 for t in two]  # gets its tokens earlier in each step
    assert whole_batch_steps([ahead, two]) == pytest.approx([1000, 1500, 1000])
    stalled = [2.2, 3.2, 5.8]  # sat a step out
    assert whole_batch_steps([two, stalled]) == pytest.approx([1000])


def test_a_checkpoint_is_decoded(base: TinyModel) -> None:
    config = ModelConfig.from_hf(json.loads((base.directory / "config.json").read_text()))
    prompts = torch.randint(config.vocab_size, (3, 9)).tolist()
    with TransformersBaseline(
        config, base.directory, dtype=torch.float32, device=CPU, seed=0
    ) as baseline:
        case = baseline.prepare(prompts, steps=5, max_batch_tokens=16)
        assert case.step_ms == []
        case.run()
        case.run()
        assert len(case.step_ms) == 10
        document = case.to_json([2.0, 4.0, 3.0])
        baseline.prepare(prompts[:1], steps=2, max_batch_tokens=16).run()
    baseline.close()
    assert document["speedup"] == pytest.approx(document["step_ms"]["p50"] / 3.0)
    assert document["step_ms"]["n"] == 10
    assert document["version"] == transformers.__version__
    assert (document["cuda_graphs"], document["async"]) == (False, False)


def test_failures_are_errors_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = dataclasses.replace(
        PRESETS["smollm2-135m"], num_layers=1, hidden_size=18, num_heads=3, num_kv_heads=1,
        head_dim=6, intermediate_size=8, vocab_size=31,
    )  # fmt: skip
    with pytest.raises(BaselineError, match="cannot load the model"):
        TransformersBaseline(config, tmp_path, dtype=torch.float32, device=CPU, seed=0)
    with TransformersBaseline(config, None, dtype=torch.float32, device=CPU, seed=0) as baseline:
        case = baseline.prepare([[1, 2, 3]], steps=2, max_batch_tokens=16)
        monkeypatch.setattr(module, "whole_batch_steps", lambda times: [1.0])
        with pytest.raises(BaselineError, match="in 1 steps, not 2"):
            case.run()
        monkeypatch.setattr(baseline._model, "forward", None)
        with pytest.raises(BaselineError, match="transformers"):
            baseline.prepare([[1, 2, 3]], steps=2, max_batch_tokens=16)


def test_transformers_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.16.9")
    with pytest.raises(BaselineError, match=r"5\.17 is the oldest that will do"):
        hf_config(PRESETS["qwen3-0.6b"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BaselineError, match=r'pip install "stepgraph\[baseline\]"'):
        hf_config(PRESETS["qwen3-0.6b"])


def test_the_benchmark_takes_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = "--mode eager --batch-size 2 --input-len 24 --output-len 8 --num-iters 2"
    file = tmp_path / "a.json"
    assert run_bench(monkeypatch, f"{arguments} --baseline transformers --output-json {file}") == 0
    document = json.loads(file.read_text())
    (case,) = document["cases"]
    assert case["step_ms"]["n"] == case["baseline"]["step_ms"]["n"] == 14
    assert case["baseline"]["name"] == "transformers"
    assert columns(document)[-2:] == BASELINE_COLUMNS
    (cells,) = rows(document)
    assert cells[-1] == f"{case['baseline']['speedup']:.2f}"
    assert cells[-2].endswith("(14)")
