"""Tensors of a checkpoint: the model has no use for some, and misses others."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime import CheckpointError
from stepgraph.runtime.loading.checkpoint import CheckpointReader, check_tensors
from torch import Tensor

from ..rigs.engine_rig import greedy, opened
from ..rigs.sharding_rig import tiny_config, write_checkpoint
from ..rigs.tiny_models import TinyModel, changed_checkpoint

FP8 = torch.float8_e4m3fn
UNUSED: dict[str, Tensor] = {
    "model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float64),
    "model.embeddings.position_ids": torch.arange(9),
    "model.layers.3.mlp.up_proj.weight": torch.ones(8, 8).to(FP8),
    "mtp.layers.0.mlp.up_proj.weight": torch.ones(8, 8).to(FP8),
    "mtp.packed": torch.ones(8, dtype=torch.uint8),
    "mtp.freqs_cis": torch.ones(8, dtype=torch.complex64),
    "model.visual.blocks.0.attn.qkv.weight": torch.ones(8, 8).to(FP8),
    "vision_tower.blocks.0.attn.qkv.weight": torch.ones(8, 8).bfloat16(),
}


def changed(directory: Path, base: TinyModel, changes: dict[str, Tensor]) -> Path:
    return changed_checkpoint(base.directory, directory, lambda tensors: tensors.update(changes))


SMALL = {"kernels": "torch", "dtype": "float32", "num_blocks": 16, "max_model_len": 64}


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_unused_tensors_change_nothing(
    base: TinyModel, model_impl: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (prompt,) = base.prompts(9)
    with (
        caplog.at_level(logging.WARNING, "stepgraph.runtime.loading"),
        opened(changed(tmp_path, base, UNUSED), model_impl=model_impl, **SMALL) as engine,
    ):
        (output,) = engine.generate([prompt], greedy(5))
    assert [list(output.token_ids)] == base.greedy([prompt], 5)
    if model_impl == "native":  # once, although headers are compared twice
        (record,) = [r for r in caplog.records if r.name.endswith("loading.checkpoint")]
        assert "vision_tower.blocks.0.attn.qkv.weight" in record.getMessage()


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("dtype", [FP8, torch.float64, torch.int8])
def test_unused_tensors_do_not_hide_the_dtype_of_a_parameter(
    base: TinyModel, model_impl: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    weight = load_file(base.directory / "model.safetensors")[name]
    directory = changed(tmp_path, base, {**UNUSED, name: weight.to(dtype)})
    with (
        pytest.raises(CheckpointError) as caught,
        opened(directory, model_impl=model_impl, **SMALL),
    ):
        pass
    assert name in str(caught.value)
    assert "mtp" not in str(caught.value)


def test_missing_experts_are_listed(tmp_path: Path) -> None:
    mixtral = tiny_config("mixtral", 1)
    assert mixtral.experts is not None
    config = replace(mixtral, experts=replace(mixtral.experts, num_experts=20))
    more = replace(mixtral, experts=replace(mixtral.experts, num_experts=2048))
    write_checkpoint(config, tmp_path)
    with CheckpointReader(tmp_path) as reader:
        check_tensors(reader, config)
        with pytest.raises(CheckpointError) as caught:
            check_tensors(reader, more)
    assert "experts 20, 21, 22" in str(caught.value)
    assert len(str(caught.value)) < 2000
    tensors = load_file(tmp_path / "model.safetensors")
    for expert in range(5, 20):
        del tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
    del tensors["model.layers.0.block_sparse_moe.experts.7.w1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader, pytest.raises(CheckpointError) as caught:
        check_tensors(reader, config)
    message = str(caught.value)
    assert "experts 7 in model.layers.0.block_sparse_moe.experts" in message
    assert "experts 5, 6, 7, 8, 9, 10, 11, 12 and 7 more in model.layers.1" in message
    assert len(message) < 600
