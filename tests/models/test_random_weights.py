"""Random weights: their distribution, and what they depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from stepgraph.runtime.loading.loader import random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import fused_layout
from stepgraph.runtime.models.presets import PRESETS


def small(preset: str, **changes: Any) -> ModelConfig:
    sizes = {"num_layers": 1, "vocab_size": 64, "bos_token_id": 1, "eos_token_ids": (2,)}
    return dataclasses.replace(PRESETS[preset], **sizes | changes)


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
