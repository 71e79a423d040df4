"""Modules for multi-token prediction against the layer of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.cache.arena import Storage
from stepgraph.runtime.errors import CheckpointError, ConfigError
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.loading.drafter_source import find_drafter
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from . import drafter_rig
from .drafter_rig import DrafterRig, load_target
from .head_references import best, random_matrix, random_norm
from .tiny_models import BASE, VARIANTS, TinyModel, randomize

LAYERS = BASE["num_hidden_layers"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model whose last layer became a module for multi-token prediction."""
    settings = BASE | VARIANTS["deepseek_v3_moe"] | {"num_hidden_layers": LAYERS + 1}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    randomize(model)
    directory = tmp_path_factory.mktemp("mtp")
    model.save_pretrained(directory)
    stored = json.loads((directory / "config.json").read_text())
    stored |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(stored))
    hidden, tensors = config.hidden_size, load_file(directory / "model.safetensors")
    prefix = f"model.layers.{LAYERS}."
    tensors |= {
        f"{prefix}enorm.weight": random_norm(hidden),
        f"{prefix}hnorm.weight": random_norm(hidden),
        f"{prefix}eh_proj.weight": random_matrix(hidden, 2 * hidden),
        f"{prefix}shared_head.norm.weight": 2 * random_norm(hidden),
        f"{prefix}shared_head.head.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory, model


def module(directory: Path, model: PreTrainedModel) -> drafter_rig.Reference:
    tensors = load_file(directory / "model.safetensors")
    own = {name: tensors[f"model.layers.{LAYERS}.{name}.weight"] for name in (
        "enorm", "hnorm", "eh_proj", "shared_head.norm"
    )}  # fmt: skip
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    layer = model.model.layers[LAYERS]

    def norm(name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * scale * own[name]

    @torch.no_grad()
    def drafts(
        known: list[int], features: Tensor, count: int
    ) -> tuple[list[int], list[float], list[float]]:
        hidden, tokens, found = features.float(), list(known[1:]), []
        for _ in range(count):
            embedded = embedding[torch.tensor(tokens)]
            joined = torch.cat((norm("enorm", embedded), norm("hnorm", hidden)), dim=-1)
            x = (joined @ own["eh_proj"].T)[None]
            n = len(tokens)
            mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
            at = torch.arange(n)[None]
            turned = model.model.rotary_emb(x, at)
            out = layer(x, attention_mask=mask, position_ids=at, position_embeddings=turned)
            out = (out[0] if isinstance(out, tuple) else out).view(n, -1)
            token, *rest = best((norm("shared_head.norm", out[-1:]) @ head.T)[0].double())
            found.append((token, *rest))
            tokens.append(token)
            hidden = torch.cat((hidden, out[-1:]))
        ids, probabilities, margins = zip(*found, strict=True)
        return list(ids), list(probabilities), list(margins)

    return drafts


@pytest.mark.parametrize(
    ("dtype", "storage", "mode", "tolerance"),
    [
        (torch.float32, "model", "compile", 1e-3),
        (torch.float32, "model", "eager", 1e-3),
        (torch.float32, "int8", "compile", 0.2),
        (torch.bfloat16, "model", "compile", 0.4),  # a rounding may choose other experts
    ],
)
def test_module(
    checkpoint: tuple[Path, PreTrainedModel],
    dtype: torch.dtype,
    storage: Storage,
    mode: str,
    tolerance: float,
) -> None:
    directory, model = checkpoint
    target, kernels = load_target(directory, dtype, mode)
    found = find_drafter(directory, target.config, target_directory=directory)
    assert (found.kind, found.taps) == ("mtp", (LAYERS,))
    rig = DrafterRig(found, target, kernels, storage=storage)
    assert rig.drafter.weight_bytes == found.weight_bytes(kernels, dtype)
    reference = module(directory, model)
    rig.prefill([[1], [2, 3], list(range(5, 22)), list(range(40, 70))], most=11)
    drafts = [rig.verify(per_row, count) for per_row, count in ((1, 3), (4, 4))]
    assert rig.check(drafts[-1], reference, tolerance) > (10 if tolerance < 0.1 else 0)
    for per_row, count in ((5, 1), (2, 5)):
        rig.check(rig.verify(per_row, count), reference, tolerance)


def test_target_ignores_the_module(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """The same checkpoint is a draft model for others, and a module for itself."""
    directory, _ = checkpoint
    target = read_config(directory)
    assert find_drafter(directory, target).kind == "draft_model"
    assert find_drafter(directory, target, "mtp").kind == "mtp"


def test_refuses_models_without_module(
    checkpoint: tuple[Path, PreTrainedModel], tiny: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    directory, _ = checkpoint
    base = tiny("base").directory
    with pytest.raises(ConfigError, match="models of type 'llama' have no modules"):
        find_drafter(base, read_config(base), "mtp")
    target = read_config(directory)

    def changed(config: dict[str, Any], without: str = "none") -> Path:
        stored = json.loads((directory / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(stored | config))
        tensors = load_file(directory / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if without not in name}
        save_file(kept, tmp_path / "model.safetensors")
        return tmp_path

    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 0 or missing"):
        find_drafter(changed({"num_nextn_predict_layers": 0}), target, "mtp")
    with pytest.raises(ConfigError, match="has num_layers = 2, the model 3: a module"):
        find_drafter(changed({"num_hidden_layers": 2}), target, "mtp")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3\.eh_proj\.weight"):
        find_drafter(changed({}, "eh_proj"), target, "mtp")
