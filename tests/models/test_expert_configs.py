"""Configs of mixtures of experts: what is read, and what is refused before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.checkpoint import CheckpointReader, check_tensors, read_config
from stepgraph.runtime.models.config import ModelConfig
from transformers import AutoConfig

from ..rigs.tiny_models import changed_checkpoint
from .test_model_config import check_refused

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 100}
MINIMAL: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32},
    "qwen3_moe": {"num_experts": 8, "intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 32},
    "deepseek_v2": {"num_experts_per_tok": 6, "intermediate_size": 32},
    "deepseek_v3": {"intermediate_size": 32},
    "llama4_text": {"num_local_experts": 8, "intermediate_size": 32},
}


def read(model_type: str, **changes: Any) -> ModelConfig:
    config = {"model_type": model_type, "max_position_embeddings": 64} | SIZES
    return ModelConfig.from_hf(config | MINIMAL[model_type] | changes)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mixtral", {"num_experts": 4}),
        ("mixtral", {"num_local_experts": None}),
        ("deepseek_v3", {"n_group": 7}),
        ("deepseek_v3", {"n_group": 256, "topk_group": 8}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v2", {"num_experts_per_tok": None}),
        ("deepseek_v2", {"mlp_bias": True}),
        ("llama4_text", {"attention_chunk_size": None}),
        ("gpt_oss", {"swiglu_limit": None}),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}),
        ("gpt_oss", {"quantization_config": "mxfp4"}),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_refusals_name_the_key(model_type: str, changes: dict[str, Any]) -> None:
    check_refused(changes, lambda: read(model_type, **changes))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    """A checkpoint of zeros with 20 experts in each of two layers."""
    config = AutoConfig.for_model(
        "mixtral",
        num_local_experts=20,
        intermediate_size=8,
        num_key_value_heads=8,
        **SIZES | {"num_hidden_layers": 2},
    )
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path)
    d, f = 64, 8
    tensors = {
        "model.embed_tokens.weight": torch.zeros(100, d),
        "lm_head.weight": torch.zeros(100, d),
        "model.norm.weight": torch.zeros(d),
    }
    for layer in ("model.layers.0.", "model.layers.1."):
        for name in "qkvo":
            tensors[f"{layer}self_attn.{name}_proj.weight"] = torch.zeros(d, d)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = torch.zeros(d)
        tensors[f"{layer}block_sparse_moe.gate.weight"] = torch.zeros(20, d)
        for expert in range(20):
            for name, shape in (("w1", (f, d)), ("w2", (d, f)), ("w3", (f, d))):
                key = f"{layer}block_sparse_moe.experts.{expert}.{name}.weight"
                tensors[key] = torch.zeros(*shape)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def check(directory: Path) -> None:
    with CheckpointReader(directory) as reader:
        check_tensors(reader, read_config(directory))


def test_missing_experts_are_listed(mixtral: Path) -> None:
    check(mixtral)

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for expert in range(5, 20):
            del tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
        del tensors["model.layers.0.block_sparse_moe.experts.7.w1.weight"]

    changed_checkpoint(mixtral, mixtral, remove)
    with pytest.raises(CheckpointError) as raised:
        check(mixtral)
    message = str(raised.value)
    assert "experts 7 in model.layers.0.block_sparse_moe.experts" in message
    assert "experts 5, 6, 7, 8, 9, 10, 11, 12 and 7 more in model.layers.1" in message
    assert len(message) < 600


def test_a_config_with_more_experts_than_the_files(mixtral: Path) -> None:
    changed_checkpoint(mixtral, mixtral, num_local_experts=2048)
    with pytest.raises(CheckpointError) as raised:
        check(mixtral)
    assert "experts 20, 21, 22" in str(raised.value)
    assert len(str(raised.value)) < 1500
