"""Models of images and text: their text decodes as in transformers, from the published layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.models.config import ModelConfig

from ..rigs.engine_rig import opened

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2},
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12},
    **{"linear_value_head_dim": 10, "layer_types": ["linear_attention", "full_attention"]},
}
LATENT = {
    **{"model_type": "mistral4", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 16},
}
VISION = {
    **{"hidden_size": 32, "depth": 1, "num_hidden_layers": 1, "intermediate_size": 32},
    **{"num_heads": 2, "num_attention_heads": 2, "out_hidden_size": 64},
}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "qwen3_vl": ("Qwen3VL", {}, True),
    "qwen3_vl_moe": ("Qwen3VLMoe", EXPERTS, True),
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}, True),
    "qwen3_5": ("Qwen3_5", DELTA, True),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 24},
        True,
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, True),
    "ministral3": ("Mistral3", {"model_type": "ministral3"}, False),
    "mistral4": ("Mistral3", LATENT, False),
    "llama4": ("Llama4", {"num_local_experts": 2, "intermediate_size_mlp": 96}, True),
    "gemma3": ("Gemma3", {}, True),
    "gemma4": (
        "Gemma4",
        {
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
            **{"num_kv_shared_layers": 2, "global_head_dim": 24, "num_hidden_layers": 4},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        True,
    ),
    "gemma4_unified": ("Gemma4Unified", {"global_head_dim": 24}, True),
}
"""Name of the classes, the text's sizes beyond `SIZES`, and whether the family is native."""


def saved(name: str, directory: Path) -> Any:
    """Write a random model and return it."""
    prefix, own, _ = CASES[name]
    config = getattr(transformers, f"{prefix}Config")(text_config=SIZES | own)
    for key, value in VISION.items():
        if hasattr(config.vision_config, key):
            setattr(config.vision_config, key, value)
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")._from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, mean=float(parameter.dim() == 1))
    model.eval().save_pretrained(directory)
    return model


def transposed_experts(directory: Path) -> None:
    """Publish them as Qwen: with inputs before outputs, which transformers turns on loading."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})


def quantisation_of_text(directory: Path) -> None:
    """Name a method that transformers would apply, of weights which are decoded before."""
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        *((name, None) for name in CASES),
        ("qwen3_vl_moe", transposed_experts),
        ("ministral3", quantisation_of_text),
    ],
)
def test_text_decodes_as_in_transformers(
    tmp_path: Path, name: str, edit: Callable[[Path], None] | None
) -> None:
    model, native = saved(name, tmp_path), CASES[name][2]
    if edit is not None:
        edit(tmp_path)
    assert isinstance(read_config(tmp_path), ModelConfig) == native
    (prompt,) = torch.randint(3, 120, (1, 30), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        text = getattr(model, "language_model", model)  # of which Llama 4 runs alone only
        expected = text(input_ids=torch.tensor([prompt])).logits[0, 9:]
    assert expected.std() > 0.1
    with opened(tmp_path, prefill_chunk=16, block_size=4) as engine:
        found = engine.score(prompt, 10)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        (
            "gemma3",
            {
                **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
                **{"num_hidden_layers": 34, "sliding_window": 1024},
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        ),
        ("llava", {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5}),
        (
            "llava_next",
            {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": None},
        ),
    ],
)
def test_sizes_that_a_published_config_leaves_out(
    tmp_path: Path, model_type: str, text: dict[str, Any]
) -> None:
    """Published configs have what differs from the defaults of transformers."""
    config = {"model_type": model_type, "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert isinstance(found, ModelConfig)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps"):
        assert getattr(found, name) == getattr(theirs, name), name
    assert found.num_layers == theirs.num_hidden_layers
    assert found.num_heads == theirs.num_attention_heads
    assert found.num_kv_heads == theirs.num_key_value_heads
    assert found.max_position_embeddings == theirs.max_position_embeddings


@pytest.mark.parametrize(
    ("model_type", "inner"), [("kimi_k2", None), ("kimi_k25", "kimi_k2"), ("kimi_k25", None)]
)
def test_kimi_is_a_deepseek(tmp_path: Path, model_type: str, inner: str | None) -> None:
    text = json.loads(transformers.DeepseekV3Config(num_hidden_layers=2).to_json_string())
    text |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": inner or model_type}
    config = {"model_type": model_type, "architectures": ["KimiK25ForConditionalGeneration"]}
    config |= {"text_config": text} if model_type == "kimi_k25" else text
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert isinstance(found, ModelConfig)
    assert found.model_type == "deepseek_v3"


def test_gemma_3n_of_a_published_checkpoint(tmp_path: Path) -> None:
    """Layers that share keys and values are published with projections of their own; the vision
    tower needs a package, so only the text is written."""
    text = {
        **SIZES,
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "laurel_rank": 4},
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    torch.manual_seed(3)
    model = transformers.Gemma3nForCausalLM._from_config(transformers.Gemma3nTextConfig(**text))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, mean=float(parameter.dim() == 1))
    model.eval().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in stored.items()}
    for layer in (2, 3):
        for name in ("k_proj", "v_proj", "k_norm"):
            own = stored[f"model.layers.{layer - 2}.self_attn.{name}.weight"]
            tensors[f"model.language_model.layers.{layer}.self_attn.{name}.weight"] = own.clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    inner = json.loads((tmp_path / "config.json").read_text())
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": inner}))
    assert isinstance(read_config(tmp_path), ModelConfig)
    prompt = list(range(3, 40))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, 9:]
    with opened(tmp_path, prefill_chunk=16, block_size=4) as engine:
        found = engine.score(prompt, 10)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
