"""EAGLE-3 heads against a plain version of the published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime.errors import CheckpointError, ConfigError
from stepgraph.runtime.kernels.weights import INT8, MODEL, WeightStorage
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.loading.drafter_loading import find_drafter
from torch import Tensor

from ..rigs import drafter_rig
from ..rigs.drafter_rig import DrafterRig, load_target
from ..rigs.head_references import (
    LAYER_CONFIG,
    Reference,
    best,
    causal,
    random_layer,
    random_matrix,
    random_norm,
    write_head,
)
from ..rigs.tiny_models import TinyModel

DRAFT_VOCAB = 61
CONFIG: dict[str, Any] = {
    **LAYER_CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


def write(
    directory: Path, *, speculators: bool = False, hidden: int = 48, mapped: bool = True,
    without: tuple[str, ...] = (), seed: int = 7, **changes: Any,
) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """Write a head with random weights: directory, config of its layer and tensors as published."""
    torch.manual_seed(seed)
    config = {**CONFIG, "hidden_size": hidden, **changes}
    vocab = config["vocab_size"]
    if not mapped:
        config["draft_vocab_size"] = vocab
    draft_vocab = config["draft_vocab_size"]
    prefix = "layers.0." if speculators else "midlayer."
    layer = random_layer(config, 2 * hidden, qk_norm=config["model_type"] == "qwen3")
    weights = {
        **{prefix + name: tensor for name, tensor in layer.items()},
        f"{prefix}hidden_norm.weight": random_norm(hidden),
        "fc.weight": random_matrix(hidden, 3 * 48),
        "norm.weight": 3 * random_norm(hidden),
        "lm_head.weight": random_matrix(draft_vocab, hidden),
        "embed_tokens.weight": torch.randn(vocab, hidden),
    }
    if mapped:
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        weights["d2t"] = chosen - torch.arange(len(chosen))
        weights["t2d"] = torch.isin(torch.arange(vocab), chosen)
    weights = {name: tensor for name, tensor in weights.items() if name not in without}
    stored = config
    if speculators:
        stored = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "draft_vocab_size": config.pop("draft_vocab_size"),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "norm_before_residual": config.pop("norm_before_residual", True),
            "transformer_layer_config": config,
        }
        config["norm_before_residual"] = stored["norm_before_residual"]
    return write_head(directory, stored, weights), config, weights


def eagle3(
    config: dict[str, Any], weights: dict[str, Tensor], target: TinyModel, dtype: torch.dtype
) -> drafter_rig.Reference:
    """Drafts of a head: the published computation over whole sequences."""
    layer = "layers.0" if "layers.0.hidden_norm.weight" in weights else "midlayer"
    model = target.reference
    shared = {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach(),
        "lm_head.weight": model.get_output_embeddings().weight.detach(),
    }
    ref = Reference(config, {**shared, **weights}, dtype)

    def drafts(known: list[int], features: Tensor, count: int) -> list[tuple[int, float, float]]:
        hidden = ref.linear("fc", features.double())
        tokens, found = list(known[1:]), []
        for _ in range(count):
            embedded = ref.weights["embed_tokens.weight"][torch.tensor(tokens)]
            normed = ref.norm(f"{layer}.hidden_norm", hidden)
            residual = normed if config.get("norm_before_residual") else hidden
            x = torch.cat((ref.norm(f"{layer}.input_layernorm", embedded), normed), dim=-1)
            at = torch.arange(len(tokens))
            x = residual + ref.attend(f"{layer}.self_attn", x, at, x, at, causal(len(tokens)))
            x = x + ref.mlp(f"{layer}.mlp", ref.norm(f"{layer}.post_attention_layernorm", x))
            logits = ref.linear("lm_head", ref.norm("norm", x[-1:]))[0]
            token, *rest = best(logits)
            token += int(weights["d2t"][token]) if "d2t" in weights else 0
            found.append((token, *rest))
            tokens.append(token)
            hidden = torch.cat((hidden, x[-1:]))
        return found

    return drafts


VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "speculators": {"speculators": True},
    "residual not normed": {"speculators": True, "norm_before_residual": False},
    "same vocabulary": {"mapped": False},
    "shared modules": {"mapped": False, "without": ("embed_tokens.weight", "lm_head.weight")},
    "other hidden size": {"hidden": 35, "target_hidden_size": 48},
    "qwen3 layer": {"model_type": "qwen3", "without": ("embed_tokens.weight",)},
}


def rows_of(base: TinyModel) -> list[list[int]]:
    return base.prompts(1, 2, 17, 30)


@pytest.mark.parametrize("mode", ["compile", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_head(base: TinyModel, variant: str, mode: str, tmp_path: Path) -> None:
    directory, config, weights = write(tmp_path / "head", **VARIANTS[variant])
    target, kernels = load_target(base.directory, torch.float32, mode)
    found = find_drafter(directory, target.config, "eagle3")
    assert found.aux_layers == (0, 1, 2)
    rig = DrafterRig(found, target, kernels)
    assert (getattr(rig.drafter, "stack", None) is not None) == (mode == "compile")
    reference = eagle3(config, weights, base, torch.float32)
    assert rig.compare(rows_of(base), reference) > 50


@pytest.mark.parametrize("rows", [1, 24])
def test_one_row_and_many(base: TinyModel, rows: int, tmp_path: Path) -> None:
    directory, config, weights = write(tmp_path / "head")
    target, kernels = load_target(base.directory, torch.float32)
    rig = DrafterRig(find_drafter(directory, target.config), target, kernels, rows=rows)
    reference = eagle3(config, weights, base, torch.float32)
    rig.prefill(base.prompts(*range(1, rows + 1)))
    assert sum(rig.check(rig.verify(3, 2), reference, 1e-3) for _ in range(2)) > 3 * rows


@pytest.mark.parametrize(
    ("storage", "weights", "tolerance"),
    [("model", MODEL, 0.1), ("int8", MODEL, 0.15), ("model", INT8, 0.2)],
)
def test_head_in_bfloat16(
    base: TinyModel, storage: Storage, weights: WeightStorage, tolerance: float, tmp_path: Path
) -> None:
    directory, config, tensors = write(tmp_path / "head")
    target, kernels = load_target(base.directory, torch.bfloat16, weights=weights)
    rig = DrafterRig(find_drafter(directory, target.config), target, kernels, storage=storage)
    reference = eagle3(config, tensors, base, torch.bfloat16)
    rig.prefill(rows_of(base))
    compared = sum(rig.check(rig.verify(4, 3), reference, tolerance) for _ in range(5))
    assert compared > 10


OTHER_LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"vocab_size": 96}, ConfigError),
        ({"draft_vocab_size": 98}, CheckpointError),
        ({"target_hidden_size": 64}, ConfigError),
        ({"model_type": "gemma2"}, CheckpointError),
        ({"norm_before_fc": True}, CheckpointError),
        ({"eagle_config": None}, ConfigError),
        ({"eagle_config": OTHER_LAYERS}, ConfigError),
        ({"num_hidden_layers": 2}, CheckpointError),
        ({"without": ("d2t",)}, CheckpointError),
        ({"without": ("lm_head.weight",)}, CheckpointError),
        ({"without": ("fc.weight",)}, CheckpointError),
        ({"hidden": 40, "without": ("embed_tokens.weight",)}, ConfigError),
    ],
    ids=str,
)
def test_refuses_heads_that_do_not_fit(
    base: TinyModel, changes: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    directory, *_ = write(tmp_path / "head", **changes)
    with pytest.raises(error):
        find_drafter(directory, read_config(base.directory))
