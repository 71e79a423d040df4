"""transformers as a baseline: the same weights and tokens, its steps, and its failures."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime.bench.baseline import TransformersBaseline
from stepgraph.runtime.bench.peers import PeerError
from stepgraph.runtime.bench.results import table_rows
from stepgraph.runtime.bench.saved_preset import save_random_weights
from stepgraph.runtime.loading.checkpoint import CheckpointReader, read_config
from stepgraph.runtime.loading.loader import iter_weights, random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.presets import PRESETS

from ..rigs.bench_rig import measured, run_bench
from ..rigs.engine_rig import greedy, opened
from ..rigs.tiny_models import TinyModel

CPU = torch.device("cpu")
ARGUMENTS = "--mode eager --batch-size 2 --input-len 24 --output-len 8 --num-warmup 0"
ARGUMENTS += " --baseline transformers --num-iters"
SAVED = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen3-moe-7b-a1b")


def load(directory: Path) -> TransformersBaseline:
    return TransformersBaseline(directory, dtype=torch.float32, device=CPU)


def shrunk(name: str) -> ModelConfig:
    """A preset of a tiny size."""
    preset = PRESETS[name]
    sizes: dict[str, Any] = {
        **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_layers": 2},
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
        **{"torch_dtype": "float32", "bos_token_id": 1, "eos_token_ids": (2,)},
    }
    if preset.experts is not None:
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        sizes["experts"] = dataclasses.replace(preset.experts, **experts)
    return dataclasses.replace(preset, **sizes)


@pytest.mark.parametrize("name", SAVED)
def test_preset_is_saved_with_its_weights_and_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = shrunk(name)
    save_random_weights(config, tmp_path, torch.float32, seed=5)
    found = read_config(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        read = dict(iter_weights(reader, found, torch.float32))
    for key, tensor in random_weights(config, torch.float32, 5):
        assert torch.equal(read[key], tensor), key
    monkeypatch.setitem(PRESETS, "tiny", config)
    prompts = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1)).tolist()
    with opened("preset:tiny", seed=5) as engine:
        ours = [output.token_ids for output in engine.generate(prompts, greedy(9))]
    with closing(load(tmp_path)) as theirs:
        theirs.prepare(prompts, steps=8)
        theirs.run()
        assert theirs.to_json([1.0], ours)["tokens_equal"] == 1.0


@pytest.mark.parametrize("variant", ["base", "gemma2"])
def test_checkpoint_has_the_same_tokens(
    variant: str, tiny: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """The generation settings of the checkpoint are left out."""
    model = tiny(variant)
    prompts = model.prompts(24, 24)
    ours = model.greedy(prompts, 6)
    directory = shutil.copytree(model.directory, tmp_path / "penalty")
    settings = {"repetition_penalty": 9.0, "eos_token_id": ours[0][2], "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    with closing(load(directory)) as theirs:
        theirs.prepare(prompts, steps=5)
        theirs.run()
        theirs.run()
        entry = theirs.to_json([2.0, 4.0, 3.0], ours)
        assert entry["step_ms"]["n"] == 10
        assert entry["speedup"] == pytest.approx(entry["step_ms"]["p50"] / 3.0)
        assert entry["tokens_equal"] == 1.0
        assert entry["compiled"] is False
        theirs.prepare(prompts[:1], steps=2)
        theirs.run()
        theirs.close()


@pytest.mark.parametrize("version", [None, "5.16.9"])
def test_without_transformers_nothing_is_measured(
    version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    file = tmp_path / "a.json"
    assert run_bench(monkeypatch, f"{ARGUMENTS} 1 --output-json {file}") == 1
    assert not file.exists()


def test_benchmark_takes_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = measured(monkeypatch, tmp_path, f"{ARGUMENTS} 2 --dtype float32")
    (case,) = document["cases"]
    (entry,) = case["baselines"]
    assert entry["tokens_equal"] == 1.0
    assert case["step_ms"]["n"] == entry["step_ms"]["n"] == 14
    assert (entry["name"], entry["dtype"]) == ("transformers", "float32")
    _, (row,) = table_rows(document)
    assert row["times faster"] == f"{entry['speedup']:.2f}"
    assert row["= transformers"] == "100%"


def test_our_cases_are_kept_without_the_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PeerError("no memory")

    def interrupt(*_: Any) -> None:
        (case,) = json.loads(file.read_text())["cases"]  # before transformers prepares it
        assert (case["step_ms"]["n"], case["baselines"]) == (7, [])
        raise KeyboardInterrupt

    file = tmp_path / "a.json"
    monkeypatch.setattr(TransformersBaseline, "prepare", interrupt)
    assert len(measured(monkeypatch, tmp_path, f"{ARGUMENTS} 1", 130)["cases"]) == 1
    arguments = f"{ARGUMENTS} 1".replace("--batch-size 2", "--batch-size 1 2")
    for name in ("prepare", "__init__"):
        monkeypatch.setattr(TransformersBaseline, name, fail)
        document = measured(monkeypatch, tmp_path, arguments, 1)
        assert capsys.readouterr().err.endswith("error: no memory\n")
        assert [(c["batch_size"], c["baselines"]) for c in document["cases"]] == [(1, []), (2, [])]
