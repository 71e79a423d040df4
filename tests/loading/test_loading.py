"""Where a checkpoint comes from, which of its tensors are read, and typed errors for wrong ones."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.engine import startup as startup_module
from stepgraph.runtime.errors import CheckpointError, MemoryBudgetError
from stepgraph.runtime.loading import loader
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.loader import (
    iter_weights,
    read_config,
    resolve_source,
)
from stepgraph.runtime.tools.memory_report import explain_memory
from torch import Tensor

from ..rigs.tiny_models import TinyModel, changed_checkpoint


def load_all(directory: Path) -> dict[str, Tensor]:
    with CheckpointReader(directory) as reader:
        return dict(iter_weights(reader, read_config(directory), torch.float32))


def test_the_index_decides_between_duplicates(
    tiny: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny("sharded").directory, tmp_path / "sharded")
    expected = load_all(directory)
    path = directory / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    for shard in set(weight_map.values()) - {weight_map["model.norm.weight"]}:
        tensors = load_file(directory / shard)
        tensors["model.norm.weight"] = torch.full((48,), torch.nan)
        save_file(tensors, directory / shard)
    torch.testing.assert_close(load_all(directory), expected, rtol=0, atol=0)


def refusal(directory: Path) -> list[str]:
    """The lines of the message; it must come before any tensor is read."""
    with CheckpointReader(directory) as reader, pytest.raises(CheckpointError) as caught:
        iter_weights(reader, read_config(directory), torch.float32)
    assert str(directory) in str(caught.value)
    return [line.strip() for line in str(caught.value).splitlines()]


def test_all_contradictions_are_in_one_message(base: TinyModel, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.norm.weight"] = torch.randn(49)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.randn(80, 48)
        tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(16).bfloat16()
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.randn(48, 80).double()

    lines = refusal(changed_checkpoint(base.directory, tmp_path, edit))
    assert "missing: model.layers.1.self_attn.k_proj.weight [32, 48]" in lines
    assert "shape: model.norm.weight expected [48], found [49]" in lines
    assert "unexpected: model.layers.7.mlp.up_proj.weight [80, 48]" in lines
    assert "unexpected: model.layers.1.self_attn.q_norm.weight [16]" in lines
    assert any("down_proj.weight in model.safetensors is F64" in line for line in lines)
    assert len(lines) == 6


def test_long_lists_of_contradictions_are_cut(base: TinyModel, tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    lines = refusal(changed_checkpoint(base.directory, tmp_path, **biases))
    assert lines[-1] == "... and 11 more", "21 biases, the first ten by name"
    assert len(lines) == 1 + 10 + 1


@pytest.fixture
def saved(tiny: Callable[[str], TinyModel]) -> Path:
    return tiny("micro").directory


class TestHub:
    """The hub without a network: what is in the local cache, laid out as huggingface_hub does."""

    @pytest.fixture(autouse=True)
    def _offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def cache(self, tmp_path: Path, checkpoint: Path) -> Path:
        repository = tmp_path / "cache" / "models--some-org--some-model"
        revision = "0" * 39 + "1"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(revision)
        return shutil.copytree(checkpoint, repository / "snapshots" / revision)

    @pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
    def test_incomplete_in_the_cache(
        self, tmp_path: Path, saved: Path, lost: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot = self.cache(tmp_path, saved)
        (snapshot / lost).unlink()
        find = huggingface_hub.snapshot_download

        def download(repository: str, *, local_files_only: bool = False, **settings: Any) -> str:
            if not local_files_only:
                shutil.copy(saved / lost, snapshot)
            return find(repository, local_files_only=True, **settings)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve_source("some-org/some-model").directory == snapshot

    def test_only_the_config_is_downloaded_where_that_is_enough(
        self, tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = huggingface_hub.snapshot_download
        asked: list[list[str]] = []

        def download(
            repository: str, *, allow_patterns: list[str], local_files_only: bool = False
        ) -> str:
            if not local_files_only:
                asked.append(allow_patterns)
                shutil.rmtree(tmp_path / "cache", ignore_errors=True)
                for file in self.cache(tmp_path, saved).iterdir():
                    if not any(map(file.match, allow_patterns)):
                        file.unlink()
            return find(repository, allow_patterns=allow_patterns, local_files_only=True)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        for _ in range(2):  # the second time it is in the cache
            source = resolve_source("some-org/some-model", config_only=True)
            assert source.config == read_config(saved)
        names = ["config.json", "generation_config.json"]
        assert asked == [names]
        assert source.directory is not None
        assert sorted(file.name for file in source.directory.iterdir()) == names
        assert "some-org/some-model in" in explain_memory(
            "some-org/some-model", EngineConfig(mode="eager", max_num_seqs=1), 1 << 30
        )
        assert asked == [names]
        # What was enough for the config is not taken for a whole checkpoint.
        resolve_source("some-org/some-model")
        assert asked == [names, ["*.json", "*.jinja", "*.model", "*.safetensors"]]

    def test_not_in_the_cache(self) -> None:
        with pytest.raises(CheckpointError):
            resolve_source("some-org/some-model")


# Checkpoints and machines as they should not be: errors name the file, and come soon --------------


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
    "unknown dtype": {"a": entry("F77" * 1000, [16], 0, 64)},
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


def test_an_index_of_many_tensors_is_checked_in_linear_time(tmp_path: Path) -> None:
    """As of mixtures of hundreds of experts; checking each against all took minutes."""
    tensors = {f"t{i}": torch.zeros(1) for i in range(20_000)}
    save_file(tensors, tmp_path / "part.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    began = time.thread_time()
    CheckpointReader(tmp_path).close()
    assert time.thread_time() - began < 8.0
