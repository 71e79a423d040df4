"""Weights of a checkpoint: fused, equal to those of transformers, and checked before reading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.loader import (
    CheckpointReader,
    fused_layout,
    iter_weights,
    read_config,
)

if TYPE_CHECKING:
    from conftest import TinyModel


def load_all(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    with CheckpointReader(directory) as reader:
        return dict(iter_weights(reader, read_config(directory), dtype))


def reference(model: Any) -> dict[str, torch.Tensor]:
    """The fused weights, assembled from the modules of transformers' model."""
    fused = {"embed_tokens.weight": model.model.embed_tokens.weight}
    for i, layer in enumerate(model.model.layers):
        attention, mlp, ours = layer.self_attn, layer.mlp, f"layers.{i}"
        fused[f"{ours}.input_norm.weight"] = layer.input_layernorm.weight
        fused[f"{ours}.mlp_norm.weight"] = layer.post_attention_layernorm.weight
        parts = {
            "attention.qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
            "attention.output": (attention.o_proj,),
            "gate_up": (mlp.gate_proj, mlp.up_proj),
            "down": (mlp.down_proj,),
        }
        for name, modules in parts.items():
            fused[f"{ours}.{name}.weight"] = torch.cat([m.weight for m in modules])
            if modules[0].bias is not None:
                fused[f"{ours}.{name}.bias"] = torch.cat([m.bias for m in modules])
    fused["norm.weight"] = model.model.norm.weight
    if not model.config.tie_word_embeddings:
        fused["lm_head.weight"] = model.lm_head.weight
    return {name: tensor.detach() for name, tensor in fused.items()}


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
    @pytest.mark.parametrize("variant", ["base", "one_kv_head", "biases", "odd", "sharded"])
    def test_equal_to_the_modules_of_transformers(
        self, tiny: Callable[[str], TinyModel], variant: str
    ) -> None:
        model = tiny(variant)
        files = list(model.directory.glob("*.safetensors"))
        assert (len(files) > 1) == (variant in ("odd", "sharded"))
        loaded = load_all(model.directory)
        expected = reference(model.reference)
        layout = fused_layout(read_config(model.directory))
        assert list(loaded) == list(layout)
        assert loaded.keys() == expected.keys()
        for name, tensor in loaded.items():
            assert tensor.shape == layout[name].shape
            assert tensor.is_contiguous()
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)

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
