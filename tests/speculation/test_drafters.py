"""Drafters against plain versions of the published models; draft models against the model itself.

Heads (EAGLE-3), block-parallel drafters (DFlash), modules for multi-token prediction, and models.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime.errors import CheckpointError, ConfigError
from stepgraph.runtime.kernels.weights import INT8, MODEL, WeightStorage
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.loading.drafter_loading import find_drafter
from stepgraph.runtime.models.families import FAMILIES
from stepgraph.runtime.models.families.mtp import NEMOTRON_H_MTP, QWEN3_NEXT_MTP, MtpLayout
from torch import Tensor
from transformers import PreTrainedModel

from ..rigs.drafter_rig import DrafterRig, Reference, load_target
from ..rigs.head_references import BLOCK, LAYERS, best, dflash, eagle3, write_dflash, write_eagle3
from ..rigs.mtp_models import KINDS, module, write
from ..rigs.mtp_models import LAYERS as MTP_LAYERS
from ..rigs.tiny_models import Tiny, TinyModel, changed_checkpoint

# Heads and block-parallel drafters ----------------------------------------------------------------

EAGLE3_VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "speculators": {"speculators": True},
    "residual not normed": {"speculators": True, "norm_before_residual": False},
    "same vocabulary": {"mapped": False},
    "shared modules": {"mapped": False, "without": ("embed_tokens.weight", "lm_head.weight")},
    "other hidden size": {"hidden": 35, "target_hidden_size": 48},
    "qwen3 layer": {"model_type": "qwen3", "without": ("embed_tokens.weight",)},
}
DFLASH_VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "causal": {"is_causal": True},
    "windows": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * LAYERS,
    },
}
CASES = [
    *(("eagle3", variant) for variant in EAGLE3_VARIANTS.values()),
    *(("dflash", variant) for variant in DFLASH_VARIANTS.values()),
]


def rig_of(
    kind: str, base: TinyModel, directory: Path, variant: dict[str, Any], mode: str, rows: int = 4
) -> tuple[DrafterRig, Reference]:
    """A drafter that was written to a directory, and what it proposes."""
    target, kernels = load_target(base.directory, torch.float32, mode)
    write_it, reference = (write_eagle3, eagle3) if kind == "eagle3" else (write_dflash, dflash)
    path, config, weights = write_it(directory, **variant)
    found = find_drafter(path, target.config, kind)
    if kind == "eagle3":
        assert found.aux_layers == (0, 1, 2)
    else:
        assert (found.aux_layers, found.most_drafts) == ((0, 1), BLOCK - 1)
    rig = DrafterRig(found, target, kernels, rows)
    assert (getattr(rig.drafter, "stack", None) is not None) == (mode == "compile")
    return rig, reference(config, weights, base, torch.float32)


@pytest.mark.parametrize("mode", ["compile", "eager"])
@pytest.mark.parametrize(("kind", "variant"), CASES, ids=str)
def test_published_drafters(
    base: TinyModel, kind: str, variant: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    rig, reference = rig_of(kind, base, tmp_path, variant, mode)
    assert rig.compare(base.prompts(1, 2, 17, 30), reference) > 50


@pytest.mark.parametrize("rows", [1, 24])
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_one_row_and_many(base: TinyModel, kind: str, rows: int, tmp_path: Path) -> None:
    rig, reference = rig_of(kind, base, tmp_path, {}, "compile", rows)
    rig.prefill(base.prompts(*range(1, rows + 1)))
    assert sum(rig.check(rig.verify(3, 2), reference, 1e-3) for _ in range(2)) > 3 * rows


@pytest.mark.parametrize(
    ("storage", "weights", "tolerance"),
    [("model", MODEL, 0.1), ("int8", MODEL, 0.15), ("model", INT8, 0.2)],
)
def test_head_in_bfloat16(
    base: TinyModel, storage: Storage, weights: WeightStorage, tolerance: float, tmp_path: Path
) -> None:
    directory, config, tensors = write_eagle3(tmp_path / "head")
    target, kernels = load_target(base.directory, torch.bfloat16, weights=weights)
    rig = DrafterRig(find_drafter(directory, target.config), target, kernels, storage=storage)
    reference = eagle3(config, tensors, base, torch.bfloat16)
    rig.prefill(base.prompts(1, 2, 17, 30))
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
    directory, *_ = write_eagle3(tmp_path / "head", **changes)
    with pytest.raises(error):
        find_drafter(directory, read_config(base.directory))


# Draft models -------------------------------------------------------------------------------------


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


# Modules for multi-token prediction ---------------------------------------------------------------

Checkpoint = tuple[Path, str, PreTrainedModel]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """A directory, the kind of its model, and the model with the layer of the module."""
    directory = tmp_path_factory.mktemp("mtp")
    return directory, request.param, write(directory, request.param)


@pytest.mark.parametrize(
    ("dtype", "storage", "mode", "tolerance"),
    [
        (torch.float32, "model", "compile", 1e-3),
        (torch.float32, "model", "eager", 1e-3),
        # A rounding may choose other experts.
        (torch.float32, "int8", "compile", 0.4),
        (torch.bfloat16, "model", "compile", 0.4),
    ],
)
def test_module(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    storage: Storage,
    mode: str,
    tolerance: float,
) -> None:
    directory, kind, model = checkpoint
    target, kernels = load_target(directory, dtype, mode)
    found = find_drafter(directory, target.config, target_directory=directory)
    assert found.kind == "mtp"
    assert found.aux_layers == (MTP_LAYERS if KINDS[kind].normed else MTP_LAYERS - 1,)
    rig = DrafterRig(found, target, kernels, storage=storage)
    reference = module(directory, kind, model)
    rig.prefill([[1], [2, 3], list(range(5, 22)), list(range(40, 70))], most=11)
    drafts = [rig.verify(per_row, count) for per_row, count in ((1, 3), (4, 4))]
    assert rig.check(drafts[-1], reference, tolerance) > (10 if tolerance < 0.1 else 0)
    for per_row, count in ((5, 1), (2, 5)):
        rig.check(rig.verify(per_row, count), reference, tolerance)


@pytest.mark.parametrize(
    ("kind", "layout"), [("qwen3", QWEN3_NEXT_MTP), ("mixtral", NEMOTRON_H_MTP)]
)
def test_module_of_a_hybrid_layout(
    kind: str, layout: MtpLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms whose weights are stored without the one that is added to them."""
    offset = replace(FAMILIES[kind], mtp=layout, offset_norms=True)
    monkeypatch.setitem(FAMILIES, kind, offset)
    model = write(tmp_path, kind)
    reference = module(tmp_path, kind, model)

    def without_one(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor -= 1.0

    changed_checkpoint(tmp_path, tmp_path, without_one)
    target, kernels = load_target(tmp_path, torch.float32, "eager")
    rig = DrafterRig(find_drafter(tmp_path, target.config, "mtp"), target, kernels)
    assert rig.compare([[1], [2, 3], list(range(5, 22)), list(range(40, 70))], reference) > 20


def test_target_ignores_the_module(checkpoint: Checkpoint) -> None:
    """The same checkpoint is a draft model for others, and a module for itself."""
    directory, *_ = checkpoint
    target = read_config(directory)
    assert find_drafter(directory, target).kind == "draft_model"
    assert find_drafter(directory, target, "mtp").kind == "mtp"


def test_of_several_modules_the_first_one_drafts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, kind, _ = checkpoint
    (first,) = KINDS[kind].layers
    number = int(first.split(".")[-2])
    second = first.replace(str(number), str(number + 1))

    def add(tensors: dict[str, Tensor]) -> None:
        own = [name for name in tensors if first in name]
        tensors |= {name.replace(first, second): tensors[name].clone() for name in own}

    changed_checkpoint(directory, tmp_path, add, num_nextn_predict_layers=2)
    target = read_config(tmp_path)
    found = find_drafter(tmp_path, target, "mtp")
    sources = [source.name for parameter in found.parameters for source in parameter.sources]
    assert any(name and name.startswith(first) for name in sources)
    assert not any(name and name.startswith(second) for name in sources)
    load_target(tmp_path, torch.float32)
