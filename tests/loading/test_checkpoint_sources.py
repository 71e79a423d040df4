"""Where a checkpoint comes from: a directory, a preset, or the hub's local cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.loader import read_config, resolve_source
from stepgraph.runtime.tools.memory_report import explain_memory

from ..rigs.tiny_models import TinyModel


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
