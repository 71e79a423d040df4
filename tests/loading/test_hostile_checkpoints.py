"""Checkpoints and machines as they should not be: typed errors that name the file, and soon."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.engine import startup as startup_module
from stepgraph.runtime.errors import CheckpointError, MemoryBudgetError
from stepgraph.runtime.loading import loader
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.loader import resolve_source

EAGER = EngineConfig(device="cpu", mode="eager", max_num_seqs=2)
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def checkpoint(tiny: Any, tmp_path: Path) -> Path:
    return shutil.copytree(tiny("text").directory, tmp_path / "checkpoint")


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "empty": Path.touch,
    "fifo": os.mkfifo,
    "symlink loop": lambda path: path.symlink_to(path),
    "dangling symlink": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json", "."])
def test_something_else_where_a_file_belongs(checkpoint: Path, name: str, obstacle: str) -> None:
    path = checkpoint / name
    if name == ".":
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if name == "model.safetensors.index.json":
        (checkpoint / "model.safetensors").unlink()
    OBSTACLES[obstacle](path)
    with pytest.raises(CheckpointError) as caught:
        Engine.from_pretrained(checkpoint, EAGER)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def with_header(tensors: Any, data: bytes = b"\0" * 64) -> bytes:
    raw = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LIES = {
    "beyond the file": {"a": entry("F32", [100], 0, 400)},
    "overlapping": {"a": entry("F32", [8], 0, 32), "b": entry("F32", [12], 16, 64)},
    "reversed": {"a": entry("F32", [16], 64, 0)},
    "unknown dtype": {"a": entry("F77" * 1000, [16], 0, 64)},
    "another shape": {"a": entry("F32", [17], 0, 64)},
    "negative": {"a": entry("F32", [-16], 0, 64)},
    "overflow": {"a": entry("F32", [2**62, 2**62], 0, 64)},
    "digits": {"a": entry("F32", [10**400], 0, 64)},
    "nested": b"[" * 100_000,
    "no UTF-8": b'{"\xff": 1}',
    "long name": {"x" * 100_000: entry("F32", [16], 0, 64)},
    "another layer": {f"model.layers.{'9' * 5000}.x": entry("F32", [16], 0, 64)},
}
DIMENSIONS = {"model.norm.weight": entry("F32", [1] * 100_000, 0, 4)}
CONTENTS: dict[str, bytes | int] = {
    **{name: with_header(tensors) for name, tensors in LIES.items()},
    **{f"length {n}": struct.pack("<Q", n) + b"{}" * 20 for n in (0, 2**24, 2**63, 2**64 - 1)},
    "many dimensions": with_header(DIMENSIONS, b"\0" * 4),
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    **{f"truncated to {n}": n for n in (0, 4, 100, -1, -2000)},
}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_is_no_safetensors(checkpoint: Path, content: str) -> None:
    path, new = checkpoint / "model.safetensors", CONTENTS[content]
    path.write_bytes(path.read_bytes()[:new] if isinstance(new, int) else new)
    message = "git lfs pull" if content == "git-lfs pointer" else str(checkpoint)
    with pytest.raises(CheckpointError, match=message) as caught:
        Engine.from_pretrained(checkpoint, EAGER)
    assert len(str(caught.value)) < 2000


NO_FILES = ["../a", "/etc/passwd", "a/b", "a\0b", "", ".", "..", "x" * 5000, 3, None]
MISSING_SHARDS = {f"t{i}": f"{i:04}{'x' * 150}.safetensors" for i in range(5000)}
INDICES = [
    *("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'),
    *(json.dumps({"weight_map": {"a": name}}) for name in [*NO_FILES, "shard.safetensors"]),
    json.dumps({"weight_map": MISSING_SHARDS}),
]


@pytest.mark.parametrize("content", INDICES, ids=range(len(INDICES)))
def test_an_index_without_the_tensors_it_names(checkpoint: Path, content: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "shard.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(checkpoint)
    assert str(checkpoint) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_weights_are_not_read_before_the_tokenizer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "iter_weights", lambda *_, **__: pytest.fail("were read"))
    (checkpoint / "tokenizer.json").write_text("{" * 100_000)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Engine.from_pretrained(checkpoint, EAGER)


@pytest.mark.parametrize("source", ["", None, 3, b"demo", "~nobody-of-that-name/x", "x" * 10_000])
def test_a_source_that_is_no_path(source: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_source(source)
    assert len(str(caught.value)) < 1000


def test_an_allocation_that_fails_is_a_matter_of_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(startup_module, "Arena", allocate)
    with pytest.raises(MemoryBudgetError):
        Engine.from_pretrained(checkpoint, EAGER)
