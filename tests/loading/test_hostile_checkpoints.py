"""Checkpoints and machines as they should not be: typed errors that name the file, and soon."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
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
from stepgraph.runtime.loading.tokenizer import load_tokenizer

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


def read_all(directory: Path) -> None:
    resolve_source(directory)
    load_tokenizer(directory)
    CheckpointReader(directory).close()


@pytest.mark.parametrize("name", [*FILES, "."])
def test_what_this_user_may_not_read(tiny: Any, name: str) -> None:
    with tempfile.TemporaryDirectory() as outside:  # pytest's folders are closed for other users
        Path(outside).chmod(0o755)
        directory = shutil.copytree(tiny("text").directory, Path(outside) / "checkpoint")
        for path in (directory, *directory.iterdir()):
            path.chmod(0o755)
        (directory / name).chmod(0)
        root = os.geteuid() == 0
        if root:
            os.seteuid(54321)  # root may read everything
        try:
            with pytest.raises(CheckpointError) as caught:
                read_all(directory)
        finally:
            if root:
                os.seteuid(0)
            directory.chmod(0o755)
    assert str(directory / name) in str(caught.value)


LIMITED = """
import json, resource, sys
from stepgraph.cache.memory.device_memory import _status_bytes
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.errors import MemoryBudgetError

def outcome(**choices):
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=2, **choices)
    try:
        with Engine.from_pretrained(sys.argv[1], config) as engine:
            engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    except MemoryBudgetError as error:
        return len(str(error)) < 3000
    return "works"

results = [outcome()]  # threads and code are there now
for room, choices in json.loads(sys.argv[2]):
    limit = _status_bytes("VmSize") + (room << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    results.append(outcome(**choices))
print(json.dumps(results))
"""
CASES: list[tuple[int, dict[str, Any], object]] = [
    (400, {}, "works"),
    (40, {"memory_bytes": 1 << 30}, True),
    (100, {"num_blocks": 1 << 18}, True),
    (0, {}, True),
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_limits_of_the_address_space(tiny: Any) -> None:
    """In a process of its own, for what it holds is known."""
    cases = json.dumps([(room, choices) for room, choices, _ in CASES])
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tiny("text").directory), cases],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == ["works", *(expected for *_, expected in CASES)]


def test_an_allocation_that_fails_is_a_matter_of_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(startup_module, "Arena", allocate)
    with pytest.raises(MemoryBudgetError):
        Engine.from_pretrained(checkpoint, EAGER)
