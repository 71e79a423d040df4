"""Models with recurrent layers of random sizes have the greedy tokens of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from ..rigs.engine_rig import greedy, opened
from ..rigs.hybrid_models import random_sizes
from ..rigs.tiny_models import BASE, TinyModel, random_model

LENGTHS = (1, 63, 64, 65, 130)
"""Of prompts: around a chunk of transformers, and across several."""
NEW_TOKENS = 20
MODEL_TYPES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid"),
    *("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "minimax", "jamba"),
)
CASES = [
    pytest.param(model_type, seed, marks=() if seed == 0 else pytest.mark.slow)
    for model_type in MODEL_TYPES
    for seed in range(3)
]


def saved(directory: Path, sizes: dict[str, Any]) -> TinyModel:
    model = random_model(BASE | sizes)
    model.generation_config = GenerationConfig()
    model.save_pretrained(directory)
    return TinyModel(directory, model)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize(("model_type", "seed"), CASES)
def test_greedy_tokens_at_random_sizes(tmp_path: Path, model_type: str, seed: int) -> None:
    model = saved(tmp_path, random_sizes(model_type, random.Random(seed)))
    prompts = model.prompts(*LENGTHS, seed=seed)
    expected = [model.greedy([prompt], NEW_TOKENS)[0] for prompt in prompts]
    for chunk, block_size in ((13, 4), (64, 16)):
        with opened(tmp_path, prefill_chunk=chunk, block_size=block_size) as engine:
            outputs = engine.generate(prompts, greedy(NEW_TOKENS))
            assert [output.token_ids for output in outputs] == expected
            # Again, from the snapshots at the ends of the prompts.
            outputs = engine.generate(prompts, greedy(NEW_TOKENS))
            assert [output.token_ids for output in outputs] == expected
            engine.check_integrity()
