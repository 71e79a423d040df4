"""The ranks of every family together compute what the whole model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..rigs.sharding_rig import tiny_config, write_checkpoint
from ..rigs.sharding_steps import sharded_runs, whole_run
from ..rigs.tiny_models import VARIANTS

REPEATED = (  # of parts that others have
    *("micro", "one_kv_head", "sharded", "text", "llama3_rope", "linear_rope", "qwen3_yarn"),
    *("mistral_full", "smollm3_listed", "phi3_quarter", "granite4_nope", "glm", "glm4_dynamic"),
    *("llama_longrope", "llama_dynamic", "phi3_longrope", "olmo3_lengths", "mixtral_all"),
    *("qwen3_moe_sliding", "gpt_oss_odd", "deepseek_v2_greedy", "deepseek_v3_scaled"),
)
SPLIT = [variant for variant in VARIANTS if variant != "lfm2"]  # convolutions are not
QUICK = [variant for variant in SPLIT if variant not in REPEATED]
CASES = [  # quick: two or four ranks by turns
    (variant, ranks)
    if variant in QUICK and QUICK.index(variant) % 2 == (ranks == 4)
    else pytest.param(variant, ranks, marks=pytest.mark.slow)
    for variant in SPLIT
    for ranks in (2, 4)
]


@pytest.mark.parametrize(("variant", "ranks"), CASES)
def test_ranks_compute_what_the_whole_model_computes(
    variant: str, ranks: int, tmp_path: Path
) -> None:
    """Prompts and decode steps, from the checkpoint of which each rank loads its part."""
    config = tiny_config(variant, ranks)
    write_checkpoint(config, tmp_path)
    expected = whole_run(config, tmp_path)
    runs = sharded_runs(config, tmp_path, ranks)
    for run in runs:
        for logits, wanted in zip(run.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
        assert torch.equal(run.tokens, expected.tokens)
        assert all(torch.equal(a, b) for a, b in zip(run.logits, runs[0].logits, strict=True))
    assert len(set(expected.tokens.flatten().tolist())) > 4, "a model that repeats itself"
