"""Which tensors of a checkpoint are read, and that they are checked before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.loader import CheckpointReader, iter_weights, read_config
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
