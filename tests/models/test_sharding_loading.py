"""What a rank reads of a checkpoint, random weights, and other weights in their place."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.kernels.ops.parameter import HeadRows, Source
from stepgraph.runtime.loading.checkpoint import CheckpointReader, check_tensors
from stepgraph.runtime.loading.loader import random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import fused_layout, model_plan
from stepgraph.runtime.models.presets import PRESETS

from ..rigs.sharding_rig import (
    stored_weights,
    tiny_config,
    write_checkpoint,
)


def small(preset: str, **changes: Any) -> ModelConfig:
    sizes = {"num_layers": 1, "vocab_size": 64, "bos_token_id": 1, "eos_token_ids": (2,)}
    return dataclasses.replace(PRESETS[preset], **sizes | changes)


WIDE = small("llama-3.2-1b", vocab_size=4096, hidden_size=1024)
"""With tensors longer than the pool of random numbers, whose values repeat."""


def shards(config: ModelConfig, ranks: int) -> list[ModelConfig]:
    return [dataclasses.replace(config, shard=(rank, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("variant", ["base", "phi3", "glm4", "deepseek_v3", "mixtral", "gpt_oss"])
def test_parts_of_tensors_are_views_of_mapped_memory(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but reordered rows, which are copies of these rows alone."""
    config = tiny_config(variant, 4)
    write_checkpoint(config, tmp_path)
    read: list[tuple[Source, torch.Tensor]] = []
    reader_read = CheckpointReader.read

    def counted(reader: CheckpointReader, source: Source) -> torch.Tensor:
        part = reader_read(reader, source)
        read.append((source, part))
        return part

    monkeypatch.setattr(CheckpointReader, "read", counted)
    for shard in shards(config, 4):
        read.clear()
        plan = model_plan(shard)
        expected = sum(p.elements for p in plan.parameters() if any(s.name for s in p.sources))
        for _ in stored_weights(shard, tmp_path):
            pass
        assert sum(part.numel() for _, part in read) == expected
        for source, part in read:
            if not isinstance(source.selection, HeadRows):
                stored = math.prod(source.shape) * part.itemsize
                assert part.untyped_storage().nbytes() == stored


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "variant", ["biases", "phi3", "glm4", "olmo2", "mixtral", "gpt_oss", "wide"]
)
def test_random_weights_of_ranks_are_parts_of_those_of_the_model(variant: str, ranks: int) -> None:
    config = WIDE if variant == "wide" else tiny_config(variant, ranks)
    whole = dict(random_weights(config, torch.float32, seed=7))
    for shard in shards(config, ranks):
        layout = fused_layout(shard)
        for name, part in random_weights(shard, torch.float32, seed=7):
            cut, expected = layout[name].cut, whole[name]
            if cut is not None:
                stacked = expected.view(cut.whole)
                expected = torch.cat([stacked[r.start : r.stop] for r in cut.rows])
                if cut.columns is not None:
                    expected = expected[:, cut.columns.start : cut.columns.stop]
            elif not any(source.name for source in layout[name].sources):
                expected = torch.zeros_like(expected)
            assert torch.equal(part.flatten(), expected.flatten()), name


def test_a_rank_refuses_what_the_whole_model_refuses(tmp_path: Path) -> None:
    config = tiny_config("biases", 2)
    write_checkpoint(config, tmp_path)
    stray = dataclasses.replace(config, mlp_bias=False)
    for shard in shards(stray, 2):
        with (
            CheckpointReader(tmp_path) as reader,
            pytest.raises(CheckpointError, match=r"unexpected: model.layers.0.mlp.down_proj.bias"),
        ):
            check_tensors(reader, shard)


def test_names_shapes_and_distribution() -> None:
    config = small("smollm2-135m", num_layers=2, vocab_size=4096)
    layout = fused_layout(config)
    weights = dict(random_weights(config, torch.bfloat16, seed=3))
    assert list(weights) == list(layout)
    for name, tensor in weights.items():
        assert tensor.shape == layout[name].shape
        assert tensor.dtype == torch.bfloat16
        if name.endswith("norm.weight"):
            assert tensor.eq(1).all()
        else:
            assert abs(tensor.float().std().item() - 0.02) < 1e-4
            assert abs(tensor.float().mean().item()) < 2e-4
    embedding = weights["embed_tokens.weight"]
    assert len(embedding[:, :16].float().unique(dim=0)) == len(embedding), "two rows are equal"


def test_parts_that_no_checkpoint_has_are_zero() -> None:
    latent = small("mla-small", attention_bias=True)
    weights = dict(random_weights(latent, torch.float32))
    name = "layers.0.attention.q_kv.bias"
    parts = list(fused_layout(latent)[name].parts(weights[name]))
    expected = [(True, False), (False, True)]
    assert [(source.name is None, bool(part.any())) for source, part in parts] == expected


def test_depends_on_name_and_seed_only() -> None:
    config = small("smollm2-135m", num_layers=2, tie_word_embeddings=False)
    weights = dict(random_weights(config, torch.float32, seed=3))
    assert not torch.equal(weights["layers.0.down.weight"], weights["layers.1.down.weight"])
    shallow = dataclasses.replace(config, num_layers=1, tie_word_embeddings=True)
    for name, tensor in random_weights(shallow, torch.float32, seed=3):
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
    for name, tensor in random_weights(config, torch.float32, seed=4):
        assert name.endswith("norm.weight") or not torch.equal(tensor, weights[name])
