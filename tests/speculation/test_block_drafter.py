"""Block-parallel drafters against a plain version of the published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime.loading.drafter_loading import find_drafter
from torch import Tensor

from ..rigs import drafter_rig
from ..rigs.drafter_rig import DrafterRig, load_target
from ..rigs.head_references import (
    LAYER_CONFIG,
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
    **LAYER_CONFIG,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": LAYERS,
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

    def drafts(known: list[int], features: Tensor, count: int) -> list[tuple[int, float, float]]:
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
        return [best(row) for row in logits]

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
    assert (found.aux_layers, found.most_drafts) == ((0, 1), BLOCK - 1)
    rig = DrafterRig(found, target, kernels)
    assert (getattr(rig.drafter, "stack", None) is not None) == (mode == "compile")
    reference = dflash(config, weights, base, torch.float32)
    assert rig.compare(base.prompts(1, 2, 17, 30), reference) > 50
    alone = DrafterRig(found, target, kernels, rows=1)
    assert alone.compare(base.prompts(19), reference) > 10
