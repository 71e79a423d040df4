"""Experts in mxfp4, against the decoder of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.kernels.weights import MXFP4
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ..rigs.engine_rig import opened
from ..rigs.tiny_models import TinyModel
from .test_awq import check_logits


def test_every_byte_with_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    decoded = MXFP4.decode(blocks, scales)
    assert decoded.dtype == torch.bfloat16
    assert decoded.shape == (1, 256, 512)
    theirs = convert_moe_packed_tensors(blocks.contiguous(), scales.contiguous())
    assert torch.equal(decoded, theirs.transpose(1, 2))


def save_as_mxfp4(model: TinyModel, directory: Path, *, drop: str = "") -> AutoModelForCausalLM:
    """Write the checkpoint with experts in mxfp4; return the model with what they decode to."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(model.directory / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(
        model.directory, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    state = reference.state_dict()
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(
            256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(121, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        state[name].copy_(convert_moe_packed_tensors(blocks, scales).float())
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    tensors = {name: t for name, t in tensors.items() if not (drop and name.endswith(drop))}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((model.directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (directory / "config.json").write_text(json.dumps(config))
    return reference


def test_an_engine_of_a_checkpoint(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny("gpt_oss_mxfp4")
    check_logits(tmp_path, model, save_as_mxfp4(model, tmp_path), 2e-4)


def test_blocks_without_scales(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    save_as_mxfp4(tiny("gpt_oss_mxfp4"), tmp_path, drop="down_proj_scales")
    with pytest.raises(CheckpointError, match="down_proj_blocks"), opened(tmp_path):
        pass
