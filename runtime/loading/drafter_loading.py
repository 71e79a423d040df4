"""Loads the drafters that `find_drafter` found."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch

from ...cache.arena import Storage
from ...cache.spec import LayerGroup
from ..kernels import Kernels
from ..models.decoder import Decoder
from ..models.decoder_model import DecoderModel
from ..models.drafters.block_drafter import BlockDrafter
from ..models.drafters.draft_model import DraftModel
from ..models.drafters.drafter import Drafter
from ..models.drafters.drafter_config import DrafterConfig, DrafterKind
from ..models.drafters.eagle3 import Eagle3
from ..models.drafters.mtp import MultiTokenPrediction
from ..models.drafters.reach import within_window
from .checkpoint import CheckpointReader
from .drafter_source import read_target_ids
from .loader import Source, read_parameters
from .opened_source import open_source

__all__ = ["load_drafter", "new_drafter"]

_Head = Eagle3 | MultiTokenPrediction | BlockDrafter
_HEADS: dict[DrafterKind, type[_Head]] = {
    "eagle3": Eagle3,
    "mtp": MultiTokenPrediction,
    "dflash": BlockDrafter,
}
"""Drafters that share modules with the target, by `DrafterConfig.kind`."""


def load_drafter(
    config: DrafterConfig,
    target: DecoderModel,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    group: LayerGroup,
    storage: Storage = "model",
    *,
    seed: int = 0,
    progress: bool = False,
) -> Drafter:
    """Load the weights of a drafter.

    Args:
        config: as `find_drafter` returned it.
        target: the model that it drafts for, with weights; they may share some. Of a rank of a
            tensor-parallel group it is the rank's part; the drafter is whole on each rank.
        kernels: of its operations.
        dtype: of weights and activations.
        device: where it runs, that of the target.
        group: its layers in its arena; `index` is that of the layer group of the target whose block
            table it uses, `spec` is `DrafterConfig.layer_spec`.
        storage: how its arena stores keys and values.
        seed: of the random weights of a preset.
        progress: draw a bar on stderr.

    Raises:
        CheckpointError: a file is damaged, or a weight cannot be quantised.
    """
    drafter = new_drafter(config, target, kernels, dtype, device, group, storage)
    if isinstance(drafter, DraftModel):
        with ExitStack() as open_files:
            source = Source(config.name, config.model, config.directory)
            opened = open_source(source, open_files)
            weights = opened.weights(dtype, seed=seed, device=device, progress=progress)
            drafter.decoder.store(weights)
        return drafter
    assert config.directory is not None
    with CheckpointReader(config.directory) as reader:
        drafter.store(read_parameters(reader, config.parameters, dtype))
        if isinstance(drafter, Eagle3):
            drafter.map_to_target(read_target_ids(reader, config))
    return drafter


def new_drafter(
    config: DrafterConfig,
    target: DecoderModel,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    group: LayerGroup,
    storage: Storage = "model",
) -> DraftModel | _Head:
    """Return a drafter whose weights are not stored yet; arguments as of `load_drafter`."""
    assert group.layers == tuple(range(len(config.layers))), "all its layers are in one group"
    kernels = replace(kernels, collectives=None)  # it has no sums over ranks
    if config.parts is None:
        plan = within_window(config.plan, group.spec.window_tokens)
        decoder = Decoder(config.model, kernels, dtype, device, [group], storage, plan=plan)
        return DraftModel(decoder.eval(), config.most_drafts)
    assert isinstance(target, Decoder), "others are refused"
    return _HEADS[config.kind](config, target, kernels, dtype, device, group, storage).eval()
