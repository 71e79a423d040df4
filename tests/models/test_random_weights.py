"""Random weights: their distribution, and what they depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from stepgraph.runtime.loading.loader import random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import fused_layout
from stepgraph.runtime.models.presets import PRESETS
from torch.utils._python_dispatch import TorchDispatchMode


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


class LargestOnCpu(TorchDispatchMode):
    """Keeps the elements of the largest CPU tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_made_on_the_device(ranks: int) -> None:
    config = small("llama-3.2-1b", vocab_size=4096, shard=(ranks - 1, ranks))
    layout = fused_layout(config)
    names = []
    with LargestOnCpu() as seen:
        for name, tensor in random_weights(config, torch.bfloat16, device="meta"):
            assert tensor.device.type == "meta"
            assert (tensor.shape, tensor.dtype) == (layout[name].shape, torch.bfloat16)
            names.append(name)
    assert names == list(layout)
    assert seen.elements == 262_147 < max(p.elements for p in layout.values())
