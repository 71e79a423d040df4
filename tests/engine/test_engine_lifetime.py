"""Engines open, close and fail: what they say then, and the memory that they take and give back."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stepgraph.runtime import (
    CheckpointError,
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineFailedError,
    MemoryBudgetError,
    RequestError,
    SamplingParams,
)
from stepgraph.runtime.engine import startup
from stepgraph.runtime.execution.outputs import LaunchedStep
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.models.transformers import loading

from ..rigs.engine_rig import Open, greedy, parts_of
from ..rigs.tiny_models import TinyModel, changed_checkpoint

pytestmark = pytest.mark.native_kernels

USES: list[Callable[[Engine], object]] = [
    lambda engine: engine.step(),
    lambda engine: engine.add_request([1]),
    lambda engine: engine.generate([[1]]),
    lambda engine: engine.score([1, 2]),
]
USES_OF_OPEN: list[Callable[[Engine], object]] = [
    lambda engine: engine.abort("request-1"),
    lambda engine: engine.memory_plan,
    lambda engine: engine.timeline(),
    lambda engine: engine.kv_bytes_read(1),
    lambda engine: engine.weight_bytes_read(1),
    lambda engine: engine.has_unfinished(),
    lambda engine: engine.stats(),
    lambda engine: engine.check_integrity(),
    lambda engine: engine.reset_prefix_cache(),
    lambda engine: engine.__enter__(),
]


def tensors_of(engine: Engine) -> dict[str, weakref.ref[Any]]:
    parts = parts_of(engine)
    named = {
        "arena": parts.runner.arena.tensor,
        "token_ids": parts.runner.state.token_ids,
        "decode_rows": parts.runner.inputs.device.decode_rows,
        **dict(parts.model.named_parameters()),
    }
    return {name: weakref.ref(tensor) for name, tensor in named.items()}


def break_device(*_: object) -> None:
    raise ZeroDivisionError("the device is gone")


def check_failed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(parts_of(engine).runner, "launch", break_device)
        for use in USES:  # the device may work again: its state stays unknown
            with pytest.raises(EngineFailedError) as caught:
                use(engine)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            patch.undo()
    assert engine.stats()["healthy"] is False


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fails", [False, True])
def test_engine_that_ended_says_so_and_holds_no_tensor(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, fails: bool, mode: str
) -> None:
    """Memory in a cycle is free only at a collection; only the traceback of a failure is one."""
    with open_engine("micro", mode=mode) as engine:
        engine.generate([[1, 2]], greedy(4))
        engine.add_request([1, 2], greedy())
        engine.step()
        assert engine.stats()["healthy"] is True
        tensors = tensors_of(engine)
        if fails:
            check_failed(engine, monkeypatch)
        gc.collect()
        gc.disable()
    try:
        if fails:
            gc.collect()
        assert [name for name, tensor in tensors.items() if tensor() is not None] == []
    finally:
        gc.enable()
    engine.close()  # again
    for use in USES + USES_OF_OPEN:
        with pytest.raises(EngineClosedError):
            use(engine)


def launched_steps() -> set[int]:
    return {id(each) for each in gc.get_objects() if isinstance(each, LaunchedStep)}


def test_step_is_released_once_it_is_read(open_engine: Open) -> None:
    """Its logits would take memory besides those of the next step, for which there is no plan."""
    before = launched_steps()
    with open_engine("micro") as engine:
        engine.generate([[1, 2]], greedy(4))
        assert launched_steps() <= before


def test_checkpoint_may_go_once_it_is_loaded(base: TinyModel, tmp_path: Path) -> None:
    """Nothing stays mapped: a file may be deleted or replaced under a running engine."""
    directory = shutil.copytree(base.directory, tmp_path / "checkpoint")
    (prompt,) = base.prompts(5, seed=96)
    config = EngineConfig(device="cpu", mode="eager")
    with Engine.from_pretrained(directory, config) as engine:
        path = directory / "model.safetensors"
        path.write_bytes(b"\0" * path.stat().st_size)
        (output,) = engine.generate([prompt], greedy())
        assert [output.token_ids] == base.greedy([prompt], 12)


def test_collector_is_left_alone_unless_asked_to(open_engine: Open) -> None:
    before = gc.get_freeze_count()
    for freeze in (False, True):
        open_engine("micro", freeze_gc=freeze).close()
        assert gc.isenabled()
        assert (gc.get_freeze_count() > before) == freeze
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as before this test


# Models that do not fit are refused before kernels, self-tests and weights ------------------------


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
