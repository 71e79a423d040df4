"""Where a checkpoint comes from, which of its tensors are read, and which are refused before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.loader import (
    CheckpointReader,
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


@pytest.mark.parametrize("kind", [str, Path])
def test_directory(saved: Path, kind: type) -> None:
    source = resolve_source(kind(saved))
    assert (source.name, source.directory) == (str(saved), saved)
    assert source.config == read_config(saved)


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
        assert asked == [names, ["*.json", "*.jinja", "*.safetensors"]]

    def test_not_in_the_cache(self) -> None:
        with pytest.raises(CheckpointError):
            resolve_source("some-org/some-model")
