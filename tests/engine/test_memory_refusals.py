"""Models that do not fit are refused first: before kernels, self-tests and weights."""

from __future__ import annotations

from typing import Any

import pytest
from stepgraph.runtime import Engine, EngineConfig, MemoryBudgetError
from stepgraph.runtime.engine import startup
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.models.transformers import loading

from ..rigs.engine_rig import Open
from ..rigs.tiny_models import TinyModel


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither kernels nor the data of a tensor are touched."""

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("the memory plan comes first")

    monkeypatch.setattr(startup, "checked_kernels", never)
    monkeypatch.setattr(loading, "load_model", never)
    monkeypatch.setattr(CheckpointReader, "tensor", never)


def refusal(source: Any, **config: Any) -> MemoryBudgetError:
    with pytest.raises(MemoryBudgetError) as caught:
        Engine.from_pretrained(source, EngineConfig(**{"device": "cpu"} | config))
    return caught.value


@pytest.mark.parametrize("mode", ["compile", "eager"])
@pytest.mark.parametrize(
    ("more", "field", "needed"),
    [
        ({}, "weight_dtype", 2_471_628_800),
        ({"weight_dtype": "int8"}, "tensor_parallel", 1_237_902_336),
    ],
)
def test_memory_of_weights_alone_is_refused_first(
    nothing_runs: None, mode: str, more: dict[str, Any], field: str, needed: int
) -> None:
    if mode == "eager":
        more |= {"kernels": "torch"}
    error = refusal("preset:llama-3.2-1b", mode=mode, memory_bytes=1 << 30, **more)
    assert (error.term, error.field, error.limit_bytes) == ("weights", field, 1 << 30)
    assert error.term_bytes == pytest.approx(needed, rel=1e-2)
    assert error.needed_bytes is not None
    assert error.needed_bytes > error.term_bytes
    assert "max_num_seqs" not in str(error)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_memory_of_a_checkpoint_is_refused_before_its_weights_are_read(
    nothing_runs: None, base: TinyModel, model_impl: str
) -> None:
    error = refusal(base.directory, model_impl=model_impl, memory_bytes=1 << 16, mode="eager")
    assert (error.term, error.field) == ("weights", "weight_dtype")


@pytest.mark.parametrize(
    ("config", "term", "field"),
    [
        ({"num_blocks": 10**9}, "cache", "num_blocks"),
        ({"memory_tokens": 10**9}, "cache", "num_blocks"),
        ({"max_num_seqs": 4096, "memory_bytes": 200 << 20}, "logits", "max_num_seqs"),
        ({"memory_bytes": 30 << 20}, "reserve", None),
    ],
)
def test_memory_terms_besides_weights(
    nothing_runs: None, config: dict[str, Any], term: str, field: str | None
) -> None:
    error = refusal("demo", mode="eager", **config)
    assert (error.term, error.field) == (term, field)
    assert error.needed_bytes is not None
    assert error.limit_bytes is not None
    assert error.term_bytes is not None
    assert error.needed_bytes > error.limit_bytes
    assert error.needed_bytes >= error.term_bytes


def test_memory_plans_before_and_after_kernels_agree(
    base: TinyModel, monkeypatch: pytest.MonkeyPatch, open_engine: Open
) -> None:
    """An engine that fits to the byte is not refused by the plan before its kernels exist."""
    needed = refusal(base.directory, mode="eager", memory_bytes=2 << 20).needed_bytes
    open_engine("base", mode="eager", memory_bytes=needed)
