"""Engines open, close and fail: what they say then, and the memory that they give back."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from stepgraph.runtime import (
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineFailedError,
)

from ..rigs.engine_rig import Open, greedy, parts_of
from ..rigs.tiny_models import TinyModel

pytestmark = pytest.mark.native_kernels


def test_closed_engine_says_so(open_engine: Open) -> None:
    engine = open_engine("base")
    with engine as same:
        assert same is engine
        engine.add_request([1, 2], greedy())
        engine.step()
    engine.close()  # again
    uses: list[Callable[[], object]] = [
        lambda: engine.add_request([1]),
        lambda: engine.generate([[1]]),
        lambda: engine.score([1, 2]),
        lambda: engine.abort("request-1"),
        lambda: engine.memory_plan,
        lambda: engine.timeline(),
        lambda: engine.kv_bytes_read(1),
        lambda: engine.weight_bytes_read(1),
        engine.step,
        engine.has_unfinished,
        engine.stats,
        engine.check_integrity,
        engine.__enter__,
    ]
    for use in uses:
        with pytest.raises(EngineClosedError):
            use()


def test_close_gives_memory_back(base: TinyModel) -> None:
    """Each engine touches 48 MiB of cache; five of them may not leave half of one behind."""
    process = psutil.Process(os.getpid())
    config = EngineConfig(device="cpu", mode="eager", num_blocks=4096)

    def cycle() -> int:
        with Engine.from_pretrained(base.directory, config) as engine:
            assert engine.stats()["memory"]["cache"]["measured"] == 4096 * 12288
            parts_of(engine).arena.tensor.fill_(1.0)
            engine.generate([[1, 2, 3]], greedy(3))
            return int(process.memory_info().rss)

    def settled_rss() -> int:
        """What earlier tests left free in the heap may have held the cache: give it back first."""
        with suppress(AttributeError, OSError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        return int(process.memory_info().rss)

    open_rss = [cycle() for _ in range(2)][-1]
    baseline = settled_rss()
    assert open_rss - baseline > 40 << 20, "the cache is no part of what is measured"
    for _ in range(5):
        cycle()
    assert settled_rss() - baseline < 24 << 20


class Watch:
    """Knows which of an engine's tensors are still held by anybody."""

    def __init__(self, engine: Engine) -> None:
        parts = parts_of(engine)
        named = {
            "arena": parts.arena.tensor,
            "token_ids": parts.runner.state.token_ids,
            "decode_rows": parts.runner.inputs.device.decode_rows,
            **dict(parts.model.named_parameters()),
        }
        self._tensors = {name: weakref.ref(tensor) for name, tensor in named.items()}

    def held(self) -> list[str]:
        return [name for name, tensor in self._tensors.items() if tensor() is not None]


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
def test_closed_engine_holds_no_tensor(open_engine: Open, mode: str) -> None:
    """Without help from the collector: memory in a cycle is free only when Python thinks of it."""
    engine = open_engine("micro", mode=mode)
    engine.generate([[1, 2]], greedy(4))
    watch = Watch(engine)
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert watch.held() == []
    finally:
        gc.enable()


class BrokenDeviceError(Exception):
    pass


def break_launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise BrokenDeviceError("the device is gone")

    monkeypatch.setattr(parts_of(engine).runner, "launch", launch)


def test_failed_engine_says_so(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("base")
    engine.add_request([1, 2], greedy())
    engine.step()
    assert engine.stats()["healthy"] is True
    break_launches(engine, monkeypatch)
    with pytest.raises(EngineFailedError) as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, BrokenDeviceError)
    assert engine.stats()["healthy"] is False
    monkeypatch.undo()  # the state of the device stays unknown
    uses: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.add_request([1]),
        lambda: engine.generate([[1]]),
        lambda: engine.score([1, 2]),
    ]
    for use in uses:
        with pytest.raises(EngineFailedError) as caught:
            use()
        assert isinstance(caught.value.__cause__, BrokenDeviceError)
    engine.close()


def test_failed_engine_gives_memory_back(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that it keeps has a traceback, and that has frames, which hold everything."""
    engine = open_engine("base")
    watch = Watch(engine)
    break_launches(engine, monkeypatch)
    engine.add_request([1, 2], greedy())
    with suppress(EngineFailedError):
        engine.step()
    monkeypatch.undo()
    engine.close()
    gc.collect()
    assert watch.held() == []


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
