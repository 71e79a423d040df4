"""Block-parallel drafters against a plain version of the published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime.errors import CheckpointError, ConfigError
from stepgraph.runtime.kernels import WeightStorage
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.loading.drafter_source import find_drafter
from torch import Tensor

from ..rigs import drafter_rig
from ..rigs.drafter_rig import DrafterRig, load_target
from ..rigs.head_references import (
    Reference,
    best,
    random_layer,
    random_matrix,
    random_norm,
    write_head,
)
from ..rigs.tiny_models import TinyModel

LAYERS, MASK, BLOCK = 2, 96, 6
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 97,
    "block_size": BLOCK,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
}


def write(
    directory: Path, *, without: str = "none", more: dict[str, Tensor] | None = None, **changes: Any
) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Write a drafter with random weights."""
    torch.manual_seed(5)
    config = {**CONFIG, **changes}
    hidden = config["hidden_size"]
    layers = [random_layer(config, hidden, qk_norm=True) for _ in range(LAYERS)]
    weights = {
        **{f"layers.{i}.{name}": t for i, layer in enumerate(layers) for name, t in layer.items()},
        "fc.weight": random_matrix(hidden, 2 * hidden),
        "hidden_norm.weight": random_norm(hidden),
        "norm.weight": 4 * random_norm(hidden),
        **(more or {}),
    }
    weights = {name: tensor for name, tensor in weights.items() if without not in name}
    return write_head(directory, config, weights), config, weights


def dflash(
    config: dict[str, Any], weights: dict[str, Tensor], target: TinyModel, dtype: torch.dtype
) -> drafter_rig.Reference:
    """Drafts of a model: the published computation over the whole context."""
    model = target.reference
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    ref = Reference(config, {**weights, "embedding": embedding, "head.weight": head}, dtype)
    window = config.get("sliding_window") or 1000

    def drafts(
        known: list[int], features: Tensor, count: int
    ) -> tuple[list[int], list[float], list[float]]:
        context = ref.norm("hidden_norm", ref.linear("fc", features.double()))
        block = torch.tensor([known[-1], *[MASK] * count])
        x = ref.weights["embedding"][block]
        at = torch.arange(len(context) + len(block))
        own = at[len(context) :]
        seen = torch.ones(len(block), len(at), dtype=torch.bool)
        if config.get("is_causal") or window < 1000:
            seen = (at <= own[:, None]) & (at > own[:, None] - window)
        for i in range(LAYERS):
            normed = ref.norm(f"layers.{i}.input_layernorm", x)
            states = torch.cat((context, normed))
            x = x + ref.attend(f"layers.{i}.self_attn", normed, own, states, at, seen)
            x = x + ref.mlp(f"layers.{i}.mlp", ref.norm(f"layers.{i}.post_attention_layernorm", x))
        logits = ref.linear("head", ref.norm("norm", x[1:]))
        ids, probabilities, margins = zip(*map(best, logits), strict=True)
        return list(ids), list(probabilities), list(margins)

    return drafts


VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "causal": {"is_causal": True},
    "windows": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * LAYERS,
    },
}


@pytest.mark.parametrize("mode", ["compile", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafter(base: TinyModel, variant: str, mode: str, tmp_path: Path) -> None:
    directory, config, weights = write(tmp_path / "drafter", **VARIANTS[variant])
    target, kernels = load_target(base.directory, torch.float32, mode)
    found = find_drafter(directory, target.config, "dflash")
    assert (found.taps, found.most_drafts) == ((0, 1), BLOCK - 1)
    rig = DrafterRig(found, target, kernels)
    assert (getattr(rig.drafter, "stack", None) is not None) == (mode == "compile")
    assert rig.drafter.weight_bytes == found.weight_bytes(kernels, torch.float32)
    reference = dflash(config, weights, base, torch.float32)
    rig.prefill(base.prompts(1, 2, 17, 30), most=11)
    compared = 0
    for per_row, count in ((1, 3), (4, 4), (5, 1), (2, 5), (5, 4)):
        compared += rig.check(rig.verify(per_row, count), reference, 1e-3)
    assert compared > 50


def test_one_row(base: TinyModel, tmp_path: Path) -> None:
    directory, config, weights = write(tmp_path / "drafter")
    target, kernels = load_target(base.directory, torch.float32)
    rig = DrafterRig(find_drafter(directory, target.config), target, kernels, rows=1)
    reference = dflash(config, weights, base, torch.float32)
    rig.prefill(base.prompts(19))
    assert sum(rig.check(rig.verify(3, 2), reference, 1e-3) for _ in range(3)) > 3


@pytest.mark.parametrize(
    ("storage", "weights", "tolerance"),
    [("model", "model", 0.15), ("int8", "model", 0.15), ("model", "int8", 0.2)],
)
def test_drafter_in_bfloat16(
    base: TinyModel, storage: Storage, weights: WeightStorage, tolerance: float, tmp_path: Path
) -> None:
    directory, config, tensors = write(tmp_path / "drafter")
    target, kernels = load_target(base.directory, torch.bfloat16, weights=weights)
    rig = DrafterRig(find_drafter(directory, target.config), target, kernels, storage=storage)
    reference = dflash(config, tensors, base, torch.bfloat16)
    rig.prefill(base.prompts(1, 2, 17, 30))
    compared = sum(rig.check(rig.verify(4, 3), reference, tolerance) for _ in range(5))
    assert compared > 10


def test_last_layer_is_normed(base: TinyModel, tmp_path: Path) -> None:
    """The last layer of the target stands for its final hidden states, as in training."""
    settings = {"mask_token_id": MASK, "target_layer_ids": [1, 2]}
    directory, *_ = write(tmp_path / "drafter", dflash_config=settings)
    assert find_drafter(directory, read_config(base.directory)).taps == (1, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 96}, ConfigError, "vocab_size = 96.*97: use a drafter"),
        ({"hidden_size": 64}, ConfigError, "hidden_size = 64.*48: use a drafter"),
        ({"block_size": 1}, CheckpointError, "block_size = 1 must be at least 2"),
        ({"model_type": "llama"}, CheckpointError, "'llama'; supported is qwen3"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, CheckpointError, "no mask_token_id"),
        (
            {"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 1]}},
            ConfigError,
            "mask_token_id = 97 has no embedding",
        ),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 3]}},
            ConfigError,
            r"target_layer_ids = \[0, 3\] must be ascending layers of the model, 0 to 2",
        ),
        ({"output_multiplier": 2.0}, CheckpointError, "output_multiplier = 2.0 is not supported"),
        ({"without": "hidden_norm"}, CheckpointError, r"missing: hidden_norm\.weight \[48\]"),
        (
            {"more": {"candidate_selector.hidden_projection.weight": torch.ones(2, 2)}},
            CheckpointError,
            "DFlash 2, which is not supported",
        ),
        (
            {**VARIANTS["windows"], "is_causal": False},
            CheckpointError,
            "a block that is not causal",
        ),
    ],
)
def test_refuses_drafters_that_do_not_fit(
    base: TinyModel, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    directory, *_ = write(tmp_path / "drafter", **changes)
    with pytest.raises(error, match=message):
        find_drafter(directory, read_config(base.directory))
