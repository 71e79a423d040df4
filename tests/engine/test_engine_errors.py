"""Models that do not fit are refused first: before kernels, self-tests and weights. And others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stepgraph.runtime import (
    CheckpointError,
    Engine,
    EngineConfig,
    MemoryBudgetError,
    RequestError,
    SamplingParams,
)
from stepgraph.runtime.engine import startup
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.models.transformers import loading

from ..rigs.engine_rig import Open
from ..rigs.tiny_models import TinyModel, changed_checkpoint


def refusal(source: Any, **config: Any) -> MemoryBudgetError:
    with pytest.raises(MemoryBudgetError) as caught:
        Engine.from_pretrained(source, EngineConfig(**{"device": "cpu", "mode": "eager"} | config))
    return caught.value


LLAMA = "preset:llama-3.2-1b"
OF_TERMS: list[tuple[str, dict[str, Any], str, str | None, int]] = [
    (LLAMA, {"memory_bytes": 1 << 30, "mode": "compile"}, "weights", "weight_dtype", 2_471_628_800),
    (LLAMA, {"memory_bytes": 1 << 30, "kernels": "torch"}, "weights", "weight_dtype", 2471628800),
    (
        LLAMA,
        {"memory_bytes": 1 << 30, "mode": "compile", "weight_dtype": "int8"},
        *("weights", "tensor_parallel", 1_237_902_336),
    ),
    ("base", {"memory_bytes": 1 << 16}, "weights", "weight_dtype", 0),
    ("base", {"memory_bytes": 1 << 16, "model_impl": "transformers"}, "weights", "weight_dtype", 0),
    ("demo", {"num_blocks": 10**9}, "cache", "num_blocks", 0),
    ("demo", {"memory_tokens": 10**9}, "cache", "num_blocks", 0),
    ("demo", {"max_num_seqs": 4096, "memory_bytes": 200 << 20}, "logits", "max_num_seqs", 0),
    ("demo", {"memory_bytes": 30 << 20}, "reserve", None, 0),
]


@pytest.mark.parametrize(("source", "config", "term", "field", "of_term"), OF_TERMS)
def test_memory_is_refused_before_kernels_and_weights_are_touched(
    monkeypatch: pytest.MonkeyPatch,
    base: TinyModel,
    source: str,
    config: dict[str, Any],
    term: str,
    field: str | None,
    of_term: int,
) -> None:
    def never(*_: object, **__: object) -> Any:
        raise AssertionError("the memory plan comes first")

    monkeypatch.setattr(startup, "checked_kernels", never)
    monkeypatch.setattr(loading, "load_model", never)
    monkeypatch.setattr(CheckpointReader, "tensor", never)
    error = refusal(base.directory if source == "base" else source, **config)
    assert (error.term, error.field) == (term, field)
    assert error.needed_bytes is not None
    assert error.limit_bytes == config.get("memory_bytes", error.limit_bytes)
    assert error.term_bytes is not None
    if of_term:
        assert error.term_bytes == pytest.approx(of_term, rel=1e-2)
    assert error.needed_bytes > (error.limit_bytes or 0)
    assert error.needed_bytes >= error.term_bytes


def test_memory_that_is_said_to_be_needed_is_enough(open_engine: Open, base: TinyModel) -> None:
    needed = refusal(base.directory, memory_bytes=2 << 20).needed_bytes
    assert needed is not None
    assert refusal(base.directory, memory_bytes=needed - 1).needed_bytes == needed
    engine = open_engine("base", memory_bytes=needed)
    assert engine.stats()["blocks"]["usable"] >= 1
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert len(output.token_ids) == 6


def test_prompt_larger_than_the_cache(open_engine: Open) -> None:
    engine = open_engine("base", num_blocks=6, block_size=4, max_num_seqs=2)
    assert engine.max_model_len == 20
    with pytest.raises(RequestError, check=lambda e: e.code == "context_length_exceeded"):
        engine.add_request([1] * 20)
    # The longest one that fits is served, to the last slot of the cache.
    (output,) = engine.generate([[1] * 19], SamplingParams(max_tokens=9))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_tied_head_that_differs(open_engine: Open, base: TinyModel, tmp_path: Path) -> None:
    """Both ways out give the model that they name."""
    checkpoint = shutil.copytree(base.directory, tmp_path / "checkpoint")
    ids = base.prompts(9, seed=5)[0]
    tied = base.logits(ids)[-1:]
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]

    def write_head(head: torch.Tensor) -> None:
        changed_checkpoint(checkpoint, checkpoint, lambda t: t.update({"lm_head.weight": head}))

    def check(choice: bool | None, expected: torch.Tensor) -> None:
        engine = open_engine(checkpoint, dtype="float32", tie_word_embeddings=choice)
        torch.testing.assert_close(engine.score(ids, 9), expected, rtol=1e-4, atol=1e-4)

    write_head(embedding.clone())
    check(None, tied)
    write_head(embedding * 2)
    with pytest.raises(CheckpointError):
        open_engine(checkpoint)
    check(True, tied)
    check(False, 2 * tied)
