"""Sizes of the products of experts, by default and as tuned."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels import Experts
from stepgraph.runtime.kernels.triton import tuning
from stepgraph.runtime.kernels.triton.expert_tiles import (
    ExpertSizes,
    candidate_tiles,
    default_tiles,
    expert_tiles,
)
from stepgraph.runtime.kernels.triton.linear import EXPERT_PRODUCTS, LinearConfig
from stepgraph.runtime.kernels.triton.tuning import Tuned
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import PRESETS

from ..rigs.expert_cases import make_mixture
from .test_gpu_experts import TOP_2

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
META = torch.device("meta")
GATE_UP, DOWN = EXPERT_PRODUCTS
MIXTURES = {
    name: op
    for name, config in PRESETS.items()
    for op in model_plan(config).operations
    if isinstance(op, Experts)
}


def sizes_of(op: Experts, tokens: int, weight: torch.dtype, device: torch.device) -> ExpertSizes:
    scales = torch.empty(0, 0) if weight == torch.float8_e4m3fn else None
    stored = torch.empty(0, dtype=weight, device=device)
    return ExpertSizes.of(op, tokens, torch.bfloat16, stored, scales)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("op", MIXTURES.values(), ids=MIXTURES)
def test_sizes_can_run(op: Experts, weight: torch.dtype) -> None:
    for tokens, kernel in itertools.product((1, 2, 4, 8, 32, 256), EXPERT_PRODUCTS):
        sizes = sizes_of(op, tokens, weight, META)
        assert tokens <= 4 or not sizes.by_pair
        configs = candidate_tiles(kernel, sizes)
        assert configs[0] == default_tiles(kernel, sizes)
        assert len(set(configs)) == len(configs) > 4
        kinds = {config.kind for config in configs}
        assert kinds == ({"pairs", "blocks"} if tokens <= 4 else {"blocks"})
        for config in configs:
            assert config.block_n >= 2  # a row of gate and one of up
            assert config.kind == "pairs" or min(config.block_k, config.block_n) >= 32
            assert not sizes.scale_blocks or config.block_k <= 128


def test_tuned_sizes_are_of_one_kind() -> None:
    op = make_mixture(TOP_2).op
    sizes = sizes_of(op, 3, torch.bfloat16, DEVICE)
    assert [config.kind for config in expert_tiles(sizes)] == ["pairs", "pairs"]
    tall, blocks = LinearConfig(32, 64, 8, "pairs", 3), LinearConfig(64, 32, 4, "blocks", 2)

    def store(**configs: LinearConfig) -> None:
        found = {sizes.key(kernel): Tuned(config, 1.0, 2.0) for kernel, config in configs.items()}
        tuning.store(found)
        tuning.reload()

    store(expert_down=tall)
    assert expert_tiles(sizes) == (default_tiles(GATE_UP, sizes, "pairs"), tall)
    store(expert_gate_up=blocks)
    assert expert_tiles(sizes) == (blocks, default_tiles(DOWN, sizes, "blocks"))
    assert expert_tiles(dataclasses.replace(sizes, tokens=4)) == expert_tiles(sizes)
    assert expert_tiles(dataclasses.replace(sizes, tokens=2))[0].kind == "pairs"
