"""Engines on GGUF files compute what transformers computes with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..rigs.engine_rig import opened
from ..rigs.expert_models import YARN
from ..rigs.gguf_files import write_gguf
from ..rigs.tiny_models import BASE, VARIANTS, TinyModel, random_model

UNWINDOWED = {"use_sliding_window": False, "layer_types": None, "sliding_window": None}
LLAMA4 = {"floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4}
OLMO3_ROPES = {
    "full_attention": {"rope_theta": 5e4, "rope_type": "yarn", "factor": 8.0}
    | {"original_max_position_embeddings": 32},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
UNCHANGED = (
    *("base", "odd", "llama3_rope", "linear_rope", "mistral_full", "biases", "mixtral", "phi3"),
    *("qwen3_yarn", "phi3_longrope", "granite", "olmo2", "glm", "glm4", "cohere2", "lfm2"),
    *("deepseek_v2_moe", "deepseek_v3_moe", "deepseek_v3_scaled"),
)
CASES: dict[str, dict[str, Any]] = {
    **{variant: {} for variant in UNCHANGED},
    "qwen2": UNWINDOWED,
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "olmo3": {"rope_parameters": OLMO3_ROPES},
    "smollm3": UNWINDOWED | {"no_rope_layer_interval": 4},
    "gpt_oss": {"swiglu_limit": 7.0},
    "gpt_oss_odd": {"swiglu_alpha": 1.702, "layer_types": None},
    "deepseek_v2": {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}},
    "deepseek_v2_greedy": {"n_group": 1},
    "llama4": LLAMA4 | {"rope_parameters": None},
}
"""Variants of tiny models, with changes of what GGUF has no metadata for."""


def saved(directory: Path, variant: str, **changes: Any) -> TinyModel:
    settings = BASE | VARIANTS[variant] | changes
    for name in ("save_original_format", "max_shard_size"):
        settings.pop(name, None)
    model = random_model(settings)
    model.save_pretrained(directory)
    return TinyModel(directory, model)


def check_logits(path: Path, model: TinyModel, within: float = 2e-4) -> None:
    (token_ids,) = model.prompts(40)
    expected = model.logits(token_ids)[19:]
    with opened(path) as engine:
        torch.testing.assert_close(engine.score(token_ids, 20), expected, rtol=0, atol=within)


@pytest.mark.parametrize("variant", CASES)
def test_family_has_the_logits_of_its_checkpoint(tmp_path: Path, variant: str) -> None:
    model = saved(tmp_path / "checkpoint", variant, **CASES[variant])
    write_gguf(model, tmp_path / "model.gguf")
    check_logits(tmp_path / "model.gguf", model)
