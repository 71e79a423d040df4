"""Engines open, close and fail: what they say then, and the memory that they give back."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import Engine, EngineClosedError, EngineConfig, EngineFailedError
from stepgraph.runtime.execution.outputs import LaunchedStep

from ..rigs.engine_rig import Open, greedy, parts_of
from ..rigs.tiny_models import TinyModel

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
