"""Which tensors of a checkpoint are read, and that they are checked before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.loader import (
    CheckpointReader,
    iter_weights,
    read_config,
)

from ..rigs.tiny_models import TinyModel


def load_all(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    with CheckpointReader(directory) as reader:
        return dict(iter_weights(reader, read_config(directory), dtype))


@pytest.fixture
def single(base: TinyModel, tmp_path: Path) -> Path:
    """A copy of a one-file checkpoint, to be changed."""
    return shutil.copytree(base.directory, tmp_path / "single")


def rewrite(path: Path, tensors: dict[str, torch.Tensor], *drop: str) -> None:
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    save_file(kept | tensors, path)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestWeights:
    def test_the_index_decides_between_duplicates(
        self, tiny: Callable[[str], TinyModel], tmp_path: Path
    ) -> None:
        directory = shutil.copytree(tiny("sharded").directory, tmp_path / "sharded")
        expected = load_all(directory)
        path = directory / "model.safetensors.index.json"
        weight_map = json.loads(path.read_text())["weight_map"]
        for shard in set(weight_map.values()) - {weight_map["model.norm.weight"]}:
            rewrite(directory / shard, {"model.norm.weight": torch.full((48,), torch.nan)})
        torch.testing.assert_close(load_all(directory), expected, rtol=0, atol=0)

    def test_harmless_extra_tensors(self, single: Path) -> None:
        expected = load_all(single)
        extra = {
            "lm_head.weight": torch.randn(97, 48),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4).double(),
        }
        rewrite(single / "model.safetensors", extra)
        loaded = load_all(single)
        assert loaded.keys() == expected.keys()
        torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


class TestContradictions:
    def refusal(self, directory: Path) -> str:
        """The message; it must come before any tensor is read."""
        with CheckpointReader(directory) as reader, pytest.raises(CheckpointError) as caught:
            iter_weights(reader, read_config(directory), torch.float32)
        assert str(directory) in str(caught.value)
        return str(caught.value)

    def test_all_kinds_in_one_message(self, single: Path) -> None:
        rewrite(
            single / "model.safetensors",
            {
                "model.norm.weight": torch.randn(49),
                "model.layers.7.mlp.up_proj.weight": torch.randn(80, 48),
                "model.layers.0.mlp.down_proj.weight": torch.randn(48, 80).double(),
            },
            "model.layers.1.self_attn.k_proj.weight",
        )
        lines = [line.strip() for line in self.refusal(single).splitlines()]
        assert "missing: model.layers.1.self_attn.k_proj.weight [32, 48]" in lines
        assert "shape: model.norm.weight expected [48], found [49]" in lines
        assert "unexpected: model.layers.7.mlp.up_proj.weight [80, 48]" in lines
        assert any("down_proj.weight in model.safetensors is F64" in line for line in lines)
        assert len(lines) == 5

    def test_long_lists_are_cut(self, single: Path) -> None:
        edit_json(single / "config.json", attention_bias=True, mlp_bias=True)
        lines = self.refusal(single).splitlines()
        assert lines[-1].strip() == "... and 11 more", "21 biases, the first ten by name"
        assert len(lines) == 1 + 10 + 1
