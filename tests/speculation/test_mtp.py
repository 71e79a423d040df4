"""Modules for multi-token prediction against the layer of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.loading.drafter_loading import find_drafter
from torch import Tensor
from transformers import PreTrainedModel

from ..rigs.drafter_rig import DrafterRig, load_target
from ..rigs.mtp_models import KINDS, LAYERS, module, write
from ..rigs.tiny_models import changed_checkpoint

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
    assert (found.kind, found.aux_layers) == (
        "mtp",
        (LAYERS if kind == "deepseek_v3" else LAYERS - 1,),
    )
    rig = DrafterRig(found, target, kernels, storage=storage)
    reference = module(directory, kind, model)
    rig.prefill([[1], [2, 3], list(range(5, 22)), list(range(40, 70))], most=11)
    drafts = [rig.verify(per_row, count) for per_row, count in ((1, 3), (4, 4))]
    assert rig.check(drafts[-1], reference, tolerance) > (10 if tolerance < 0.1 else 0)
    for per_row, count in ((5, 1), (2, 5)):
        rig.check(rig.verify(per_row, count), reference, tolerance)


def test_target_ignores_the_module(checkpoint: Checkpoint) -> None:
    """The same checkpoint is a draft model for others, and a module for itself."""
    directory, *_ = checkpoint
    target = read_config(directory)
    assert find_drafter(directory, target).kind == "draft_model"
    assert find_drafter(directory, target, "mtp").kind == "mtp"


def test_of_several_modules_the_first_one_drafts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, kind, _ = checkpoint
    first = KINDS[kind].module
    number = int(first.split(".")[2])
    second = first.replace(str(number), str(number + 1))

    def add(tensors: dict[str, Tensor]) -> None:
        own = [name for name in tensors if first in name]
        tensors |= {name.replace(first, second): tensors[name].clone() for name in own}

    changed_checkpoint(directory, tmp_path, add, num_nextn_predict_layers=2)
    target = read_config(tmp_path)
    found = find_drafter(tmp_path, target, "mtp")
    sources = [source.name for parameter in found.parameters for source in parameter.sources]
    assert all(name is None or name.startswith(first) for name in sources)
    load_target(tmp_path, torch.float32)
