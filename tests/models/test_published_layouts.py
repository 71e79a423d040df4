"""Quantised checkpoints of classes that are published so: logits of the dequantised model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ..loading.test_weight_formats import LAYOUTS, SIZES
from ..rigs.engine_rig import opened

TEXT: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160},
    **{"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
EXPERTS = {
    **{"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1},
}
LATENT = {
    **{"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    **{"v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 16},
}
DELTA_RULE = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
    **{"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    "shared_expert_intermediate_size": 64,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_expand": 1}
LAYER_EMBEDDINGS = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 160}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3ForCausalLM": ("fp8_blocks", {}),
    "Qwen2ForCausalLM": ("gptq", {}),
    "LlamaForCausalLM": ("int_quantized", {}),
    "Llama4ForCausalLM": ("pack_quantized", EXPERTS | {"intermediate_size_mlp": 192}),
    "Gemma3ForCausalLM": ("pack_quantized", {}),
    "MistralForCausalLM": ("fp8_static", {}),
    "Phi3ForCausalLM": ("float_quantized", {}),
    "SmolLM3ForCausalLM": ("awq", {}),
    "Olmo3ForCausalLM": ("float_quantized", {}),
    "GraniteForCausalLM": ("float_quantized", {}),
    "Glm4MoeForCausalLM": ("fp8_blocks", EXPERTS),
    "Glm4MoeLiteForCausalLM": ("pack_quantized", EXPERTS | LATENT),
    "MiniMaxM2ForCausalLM": ("fp8_blocks", EXPERTS | {"intermediate_size": 64}),
    "Ministral3ForCausalLM": ("fp8_static", {}),
    "HYV3ForCausalLM": ("fp8_blocks", EXPERTS),
    "MiMoV2FlashForCausalLM": ("fp8_blocks", EXPERTS | {"v_head_dim": 16}),
    "LagunaForCausalLM": ("fp8_blocks", EXPERTS),
    "Gemma4ForCausalLM": ("modelopt_nvfp4", LAYER_EMBEDDINGS | {"global_head_dim": 32}),
    "DeepseekV3ForCausalLM": ("fp8_blocks", EXPERTS | LATENT),
    "Qwen3MoeForCausalLM": ("awq", EXPERTS),
    "Qwen3NextForCausalLM": ("fp8_blocks", EXPERTS | DELTA_RULE),
    "Qwen3_5ForCausalLM": ("gptq", DELTA_RULE),
    "Qwen3_5MoeForCausalLM": ("fp8_blocks", EXPERTS | DELTA_RULE),
    "KimiLinearForCausalLM": (
        "awq",
        EXPERTS | LATENT | DELTA_RULE | {"linear_num_heads": 2, "linear_head_dim": 32},
    ),
    "GraniteMoeHybridForCausalLM": (
        "float_quantized",
        MAMBA | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0},
    ),
    "FalconH1ForCausalLM": ("gptq", MAMBA | {"mamba_d_ssm": 128}),
    "BambaForCausalLM": ("float_quantized", MAMBA | {"attn_layer_indices": [1]}),
    "NemotronHForCausalLM": (
        "modelopt_nvfp4",
        {
            **EXPERTS | {"moe_shared_expert_intermediate_size": 96, "conv_kernel": 4},
            **{"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32},
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "moe_latent_size": 64,
        },
    ),
    "Lfm2ForCausalLM": (
        "mlx",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "Lfm2MoeForCausalLM": (
        "mlx",
        EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
}
"""How each class is stored, and its sizes beyond `TEXT`."""
WEIGHTS = (
    "_linear.weight",
    *("proj.weight", "w1.weight", "w2.weight", "w3.weight"),
    *("proj_qkvz.weight", "proj_qkv.weight", "proj_z.weight"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_class_has_the_logits_of_the_dequantised_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)  # takes a minute
    layout, sizes = PUBLISHED[name]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class._from_config(model_class.config_class(**TEXT | sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, mean=float(parameter.dim() == 1))
    model.save_pretrained(tmp_path)
    path, (write, settings) = tmp_path / "model.safetensors", LAYOUTS[layout]
    rng = np.random.default_rng(1)
    exact, stored = dict(load_file(path)), {}
    for weight, tensor in list(exact.items()):
        if not weight.endswith(WEIGHTS) or any(size % 32 for size in tensor.shape):
            stored[weight] = tensor
            continue
        tensors, numbers = write(rng, *tensor.shape, SIZES.get(layout, 32))
        exact[weight] = numbers.float().contiguous()
        prefix = weight.removesuffix(".weight")
        stored |= {prefix + suffix: part.contiguous() for suffix, part in tensors.items()}
    assert len(stored) > len(exact)
    save_file(exact, path, {"format": "pt"})
    reference = model_class.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    prompt = list(range(3, 40))
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, 9:]
    save_file(stored, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = settings | {"group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with opened(tmp_path, mode="compile") as engine:  # with kernels that multiply by codes
        found = engine.score(prompt, 10)
        assert engine.weight_bytes_read(1) < 3 * reference.num_parameters()
    # With the delta rule, transformers' own logits differ as much between prefill and decode.
    within = 1e-3 if sizes.keys() >= DELTA_RULE.keys() else 1e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=within)
