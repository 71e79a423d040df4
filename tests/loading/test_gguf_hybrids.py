"""GGUF files of models with recurrent layers or convolutions, as `gguf_writer` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stepgraph.runtime.bench.gguf_writer import write_gguf
from stepgraph.runtime.loading.gguf_file import open_gguf
from stepgraph.runtime.loading.gguf_tensors import GGUFTensors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..rigs.engine_rig import opened

SIZES = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
DELTA_RULE = {
    **{"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4},
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "shared_expert_intermediate_size": 48,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
ATTENTION_THIRD = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
NEMOTRON = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16},
    **{"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": None},
    **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48},
}
GRANITE = MAMBA | {
    **{"layer_types": ATTENTION_THIRD, "shared_intermediate_size": 48, "num_experts_per_tok": 2},
    **{"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "attention_multiplier": 0.1,
}
FALCON = {
    **{"mamba_d_ssm": 128, "head_dim": 16},
    **{"mamba_rms_norm": True, "mamba_norm_before_gate": False},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", DELTA_RULE | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_RULE | EXPERTS),
    "qwen3_next": ("qwen3_next", DELTA_RULE | EXPERTS),
    "lfm2": ("lfm2", CONVOLUTIONS),
    "lfm2_moe": ("lfm2_moe", CONVOLUTIONS | EXPERTS | {"num_dense_layers": 2}),
    "granite": ("granitemoehybrid", GRANITE | {"num_local_experts": 0, "intermediate_size": 48}),
    "granite_rope": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 4, "position_embedding_type": "rope"},
    ),
    "nemotron": (
        "nemotron_h",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_moe": (
        "nemotron_h",
        NEMOTRON | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    "falcon_h1": ("falcon_h1", MAMBA | FALCON),
}
"""Model type and keys of its config."""
NATIVE = CASES.keys() - {"nemotron", "nemotron_moe"}
"""Cases of families that this package has."""


def saved(case: str, directory: Path) -> PreTrainedModel:
    """Save a tiny random model, whose vectors differ from ones and zeros too."""
    model_type, changes = CASES[case]
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim == 1:
                tensor += 0.1 * torch.randn_like(tensor)
            elif "norm" not in name:
                tensor *= 3.0
    model.save_pretrained(directory)
    return model


def llama_cpp_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """The logits `[tokens, vocabulary]` that llama.cpp has for a file, with a float32 cache."""
    api = pytest.importorskip("llama_cpp")
    model = api.llama_model_load_from_file(bytes(path), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.type_k, params.type_v, params.flash_attn_type = 64, 0, 0, 0
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_init(64, 0, 1)
    batch.n_tokens = len(token_ids)
    for i, token in enumerate(token_ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert api.llama_decode(context, batch) == 0
    shape = (len(token_ids), api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
    logits = np.ctypeslib.as_array(api.llama_get_logits(context), shape).copy()
    api.llama_free(context)
    api.llama_model_free(model)
    return torch.from_numpy(logits)


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_has_the_logits_of_the_checkpoint(tmp_path: Path, case: str) -> None:
    model = saved(case, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    token_ids = torch.randint(96, (40,)).tolist()
    found = llama_cpp_logits(tmp_path / "model.gguf", token_ids)
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_reader_has_the_tensors_of_the_checkpoint(tmp_path: Path, case: str) -> None:
    saved(case, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    file = open_gguf(tmp_path / "model.gguf")
    tensors, used = GGUFTensors(file, 4), set()
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        found = tensors.find(name)
        assert found is not None, name
        assert found.shape == expected.shape
        torch.testing.assert_close(found.numbers(), expected, rtol=0, atol=1e-6)
        used |= {tensor.name for tensor in found.tensors}
    assert used == set(file.tensors)


@pytest.mark.parametrize("case", sorted(NATIVE))
def test_engine_has_the_logits_of_the_checkpoint(tmp_path: Path, case: str) -> None:
    model = saved(case, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    token_ids = torch.randint(96, (40,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    with opened(tmp_path / "model.gguf") as engine:
        torch.testing.assert_close(engine.score(token_ids, 20), expected[19:], rtol=0, atol=2e-4)
