"""Draft models: drafts of an engine's steps are the greedy tokens of the model itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.loading.drafter_loading import find_drafter

from ..rigs.drafter_rig import DrafterRig, Reference, load_target
from ..rigs.head_references import best
from ..rigs.tiny_models import Tiny, TinyModel


def greedy(model: TinyModel, dtype: torch.dtype) -> Reference:
    """Drafts of the model without cache."""
    reference = model.reload(dtype)

    @torch.no_grad()
    def drafts(
        known: list[int], features: torch.Tensor, count: int
    ) -> list[tuple[int, float, float]]:
        found: list[tuple[int, float, float]] = []
        for _ in range(count):
            tokens = [*known, *(token for token, _, _ in found)]
            found.append(best(reference(torch.tensor([tokens])).logits[0, -1].double()))
        return found

    return drafts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["compile", "eager"])
@pytest.mark.parametrize("variant", ["base", "qwen3", "gemma3", "deepseek_v3"])
def test_draft_model(tiny: Tiny, variant: str, mode: str) -> None:
    model = tiny(variant)
    target, kernels = load_target(tiny("base").directory, torch.float32, mode)
    config = find_drafter(model.directory, target.config)
    rig = DrafterRig(config, target, kernels)
    reference = greedy(model, torch.float32)
    assert rig.compare(model.prompts(1, 3, 17, 30), reference) > 60
    assert rig.drafter.aux_layers == ()


def test_windowed_target(base: TinyModel) -> None:
    """The layers of a drafter attend to no more than the target's group keeps."""
    target, kernels = load_target(base.directory, torch.float32)
    config = find_drafter(base.directory, target.config)
    rig, wide = (DrafterRig(config, target, kernels, window=window) for window in (12, None))
    prompts = base.prompts(40, 41, 42, 43)
    for each in (rig, wide):
        each.prefill(prompts)
    first = rig.tables[1, :4, 0].long()
    rig.arena[:, :, first] = torch.nan  # positions 0 to 7 left the window
    drafts, others = (each.verify(1, 3) for each in (rig, wide))
    assert drafts.probabilities.isfinite().all()
    assert not torch.equal(drafts.probabilities, others.probabilities)


def test_refuses_other_vocabularies(tiny: Tiny, base: TinyModel, tmp_path: Path) -> None:
    target = read_config(base.directory)
    with pytest.raises(ConfigError):
        find_drafter(tiny("micro").directory, target)
    model, other = tiny("text").directory, tmp_path / "other"
    shutil.copytree(model, other)
    target = read_config(model)
    if not (other / "tokenizer.json").exists():
        pytest.skip("the model has no tokenizer")
    assert find_drafter(other, target, "draft_model", model).kind == "draft_model"
    tokenizer: dict[str, Any] = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    names = [name for name in vocab if len(name) == 1][:2]
    vocab[names[0]], vocab[names[1]] = vocab[names[1]], vocab[names[0]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError):
        find_drafter(other, target, "draft_model", model)
