"""The models that most people ran in November 2026, by rank: greedy tokens of transformers.

docs/models.md counts their rows. Each class is the one that published checkpoints name, with
encoders of images if they have them, and transformers writes tensors in the published layout.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.loading.checkpoint import read_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ..rigs.causal_models import save_small_model, small_config
from ..rigs.causal_sizes import EXPERT_FEATURES, HIDDEN
from ..rigs.engine_rig import greedy
from ..rigs.model_matrix import start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ROWS = 32
GEMMA4_EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2},
    "moe_intermediate_size": EXPERT_FEATURES,
}
LLAMA4_VISION = {"image_size": 28, "vision_output_dim": HIDDEN}
LLAMA4_VISION |= dict.fromkeys(("projector_input_dim", "projector_output_dim"), HIDDEN)


def nested(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a configuration within."""
    return {f"{name}.{key}": value for key, value in fields.items()}


NO_LAYER_EMBEDDINGS = nested("text_config", {"hidden_size_per_layer_input": 0})
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "1 Qwen3.6-35B-A3B": ("qwen3_5_moe", {}),
    "2 Qwen3.6-27B": ("qwen3_5", {}),
    "3 Qwen3": ("qwen3", {}),
    "4 Qwen3-VL": ("qwen3_vl", {}),
    "4 Qwen3-VL-30B-A3B": ("qwen3_vl_moe", {}),
    "5 Gemma 4 31B": ("gemma4", NO_LAYER_EMBEDDINGS),
    "5 Gemma 4 26B-A4B": ("gemma4", NO_LAYER_EMBEDDINGS | nested("text_config", GEMMA4_EXPERTS)),
    "6 Gemma 4 E4B": ("gemma4", {}),
    "6 Gemma 4 12B": ("gemma4_unified", {}),
    "7 gpt-oss": ("gpt_oss", {}),
    "8 Qwen3-Coder-30B-A3B": ("qwen3_moe", {}),
    "9 Qwen2.5": ("qwen2", {}),
    "10 Llama 3.x": ("llama", {}),
    "13 DeepSeek V3.1": ("deepseek_v3", {}),
    "14 Kimi K2.6": ("kimi_k25", {"tie_word_embeddings": False}),
    "15 Kimi-Linear-48B": ("kimi_linear", {}),
    "18 GLM-4.7": ("glm4_moe", {}),
    "18 GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "19 MiniMax M2.7": ("minimax_m2", {}),
    "20 Qwen3-Coder-Next": ("qwen3_next", {}),
    "22 Nemotron 3 Nano": ("nemotron_h", {}),
    "23 Ministral 3": ("mistral3", {"text_config": "ministral3"}),
    "23 Mistral Small 3.2": ("mistral3", {}),
    "23 Mistral Small 4": ("mistral3", {"text_config": "mistral4"}),
    "24 Gemma 3 1B": ("gemma3_text", {}),
    "24 Gemma 3 27B": ("gemma3", {}),
    "25 Phi-4": ("phi3", {}),
    "26 Hy3": ("hy_v3", {}),
    "27 MiMo-V2-Flash": ("mimo_v2_flash", {}),
    "28 LFM2.5": ("lfm2", {}),
    "28 LFM2.5-8B-A1B": ("lfm2_moe", {}),
    "29 Granite 4 H": ("granitemoehybrid", {}),
    "29 Granite 4": ("granite", {}),
    "30 SmolLM2": ("llama", {"tie_word_embeddings": True}),
    "30 SmolLM3": ("smollm3", {}),
    "30 OLMo 3": ("olmo3", {}),
    "31 Falcon-H1": ("falcon_h1", {}),
    "31 OLMo Hybrid": ("olmo_hybrid", {}),
    "32 Laguna": ("laguna", {}),
    "32 Llama 4": ("llama4", nested("vision_config", LLAMA4_VISION)),
}
"""Row and model -> model type, and what differs from the sizes of `causal_sizes`."""
SPARSE, HYPER = "sparse attention", "hyper-connections"
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "11 DeepSeek V4": ("deepseek_v4", {}, (SPARSE, HYPER)),
    "12 DeepSeek V3.2": ("deepseek_v32", {}, (SPARSE,)),
    "16 GLM-5.2": ("glm_moe_dsa", {}, (SPARSE,)),
    "17 GLM-5.3-Flash": (
        "glm5_next",
        nested("text_config", {"index_kpool": 4, "qk_rope_head_dim": 0}),
        (SPARSE, HYPER),
    ),
    "19 MiniMax M3": (
        "minimax_m3_vl",
        nested("text_config", {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2]}),
        (SPARSE,),
    ),
    "21 Qwen3.8-Flash-Next": ("qwen4_exp", {}, (SPARSE, HYPER)),
}
"""The same, and what the message names."""
NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def without_bars() -> None:
    transformers.utils.logging.disable_progress_bar()


def published_layers(directory: Path) -> None:
    """Undo a renaming of layers of the encoder that transformers 5.24 applies to the decoder of
    Kimi K2.5 when it saves one."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    renamed = {name.replace("model.blocks.", "model.layers."): t for name, t in tensors.items()}
    save_file(renamed, path, {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_ranked_model_has_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = RUNS[name]
    with_encoders = "text_config" in small_config(model_type, changes).to_dict()
    auto_class = AutoModelForImageTextToText if with_encoders else AutoModelForCausalLM
    model = save_small_model(model_type, tmp_path, changes, auto_class=auto_class)
    published_layers(tmp_path)
    prompts = model.prompts(17, 65)
    expected = [model.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    with start(tmp_path, "auto") as engine:
        found = engine.generate(prompts, greedy(NEW_TOKENS))
    assert [output.token_ids for output in found] == expected


@pytest.mark.parametrize("name", REFUSED)
def test_ranked_model_is_refused_by_what_it_needs(name: str, tmp_path: Path) -> None:
    model_type, changes, needs = REFUSED[name]
    config = small_config(model_type, changes)
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    for feature in (SPARSE, HYPER):
        assert (feature in str(caught.value)) == (feature in needs)


def test_unknown_model_type_is_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert "kimi_k3" in str(caught.value)


def test_the_page_counts_the_rows() -> None:
    rows = {int(name.split()[0]) for name in RUNS}
    assert f"{len(rows)} of {ROWS} rows" in re.sub(r"\s+", " ", PAGE.read_text())
