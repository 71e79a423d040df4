"""Loads the drafters that `find_drafter` found."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from ...cache.spec import LayerGroup
from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError, ConfigError
from ..kernels import Kernels
from ..models.config import ModelConfig
from ..models.config_keys import Json
from ..models.decoder import Decoder
from ..models.drafters.block_drafter import BlockDrafter, block_config, is_block_drafter
from ..models.drafters.drafter import (
    Drafter,
    DrafterConfig,
    DrafterKind,
    DraftModel,
    ReadDrafter,
    check_fits,
)
from ..models.drafters.feature_head import (
    Eagle3,
    MultiTokenPrediction,
    eagle3_config,
    has_module,
    is_eagle3,
    is_unused_by_mtp,
    mtp_config,
)
from ..models.plan import model_plan
from .checkpoint import CheckpointReader, check_layout
from .checkpoint_files import CONFIG_BYTES, has_file, no_checkpoint, read_json_object
from .gguf_file import GGUFFile, is_gguf, open_gguf
from .loader import (
    PRESET_PREFIX,
    Source,
    find_directory,
    open_source,
    planned_codes,
    read_parameters,
    resolve_source,
)
from .tokenizer import read_tokenizer

# Finds the checkpoint of a drafter and checks that it fits its target.

_Head = Eagle3 | MultiTokenPrediction | BlockDrafter
_HEADS: dict[DrafterKind, tuple[ReadDrafter, type[_Head]]] = {
    "eagle3": (eagle3_config, Eagle3),
    "mtp": (mtp_config, MultiTokenPrediction),
    "dflash": (block_config, BlockDrafter),
}
"""Drafters that share modules with the target, by `DrafterConfig.kind`: what reads `config.json`,
and the module."""


def find_drafter(
    path: str | Path,
    target: ModelConfig,
    method: str | None = None,
    target_directory: Path | None = None,
) -> DrafterConfig:
    """Find a drafter, and check its config and the headers of its files.

    Args:
        path: a directory in the Hugging Face layout, a GGUF file, a hub id, `demo` or
            `preset:NAME`, as the name of a model. That of the target for its own module for
            multi-token prediction.
        target: the config of the model that it drafts for.
        method: the kind that it must be; None: any. A checkpoint with a module for multi-token
            prediction is a draft model, unless it is the target's own.
        target_directory: the checkpoint of the target. If both have a tokenizer, they must
            have the same vocabulary.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged or of an unknown layout.
        ConfigError: it does not fit the target, or is of another kind than `method`.
    """
    kinds = get_args(DrafterKind)
    if method is not None and method not in kinds:
        raise ConfigError(f"unknown kind of drafter {bounded_repr(method)}: use {', '.join(kinds)}")
    is_preset = isinstance(path, str) and path.startswith(PRESET_PREFIX)
    directory = None if is_preset else find_directory(path)
    kind: DrafterKind = "draft_model"
    if directory is not None and not is_gguf(directory):
        config_path = directory / "config.json"
        if not has_file(config_path):
            raise no_checkpoint(directory)
        config = read_json_object(config_path, CONFIG_BYTES)
        own = target_directory is not None and directory.resolve() == target_directory.resolve()
        kind = "mtp" if method == "mtp" or (own and not method) else _kind(config)
    if method is not None and method != kind:
        raise ConfigError(
            f"{bounded_text(str(path))} is a drafter of kind {kind}, not {method}: use"
            f" method={kind!r}, or another drafter"
        )
    if directory is None or kind == "draft_model":
        return _draft_model(path, target, target_directory)
    with CheckpointReader(directory) as reader:
        try:
            name = bounded_text(str(path))
            names = {tensor: header.shape for tensor, header in reader.headers().items()}
            read = _HEADS[kind][0]
            drafter = replace(read(name, config, names, target), directory=directory)
        except CheckpointError as error:
            raise CheckpointError(f"{config_path}: {error}") from error
        layout = {parameter.name: parameter for parameter in drafter.parameters}
        try:
            check_layout(reader, layout, lambda name: _is_unused(name, drafter))
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nUse a complete checkpoint of the drafter {name}, or another method of"
                " speculation, such as 'suffix'"
            ) from error
        read_target_ids(reader, drafter)
    return drafter


def has_mtp(found: Source) -> bool:
    """Whether the checkpoint of a model has a module for multi-token prediction that is supported.

    Raises `CheckpointError` for a damaged file.
    """
    model = found.config
    if not isinstance(model, ModelConfig) or found.directory is None or found.file is not None:
        return False
    with CheckpointReader(found.directory) as reader:
        return has_module(reader.headers(), model)


def read_target_ids(reader: CheckpointReader, drafter: DrafterConfig) -> torch.Tensor | None:
    """Return the target's token for each token of a head, int64 `[V]`; None: the same.

    Raises `CheckpointError` if the tensor has another shape or dtype, or a token is outside of the
    vocabulary.
    """
    if drafter.target_ids is None:
        return None
    distances = reader.tensor(drafter.target_ids)
    size, vocab = drafter.plan.head.out_features, drafter.model.vocab_size
    if distances.dtype != torch.int64 or tuple(distances.shape) != (size,):
        raise CheckpointError(
            f"{reader.directory}: {drafter.target_ids} must be int64 of shape [{size}], not"
            f" {distances.dtype} of shape {list(distances.shape)}"
        )
    ids = torch.arange(size) + distances
    outside = ids[(ids < 0) | (ids >= vocab)]
    if len(outside):
        raise CheckpointError(
            f"{reader.directory}: {drafter.target_ids} maps to token {int(outside[0])}, which must"
            f" be from 0 to {vocab - 1}"
        )
    return ids


def _is_unused(name: str, drafter: DrafterConfig) -> bool:
    """Whether a tensor is none of a drafter's own: `d2t` is read by itself, `t2d` its inverse."""
    return is_unused_by_mtp(name, drafter) if drafter.kind == "mtp" else name in ("d2t", "t2d")


def _kind(config: Json) -> DrafterKind:
    """Return the kind of drafter that a `config.json` describes."""
    if is_eagle3(config):
        return "eagle3"
    if is_block_drafter(config):
        return "dflash"
    for key in ("speculators_model_type", "speculators_config"):
        if key in config:
            raise CheckpointError(
                f"{key} = {bounded_repr(config[key], 100)} is an unknown kind of drafter;"
                " supported are models of a native family, EAGLE-3 heads and DFlash models"
            )
    return "draft_model"


def _draft_model(
    path: str | Path, target: ModelConfig, target_directory: Path | None
) -> DrafterConfig:
    found = resolve_source(path, model_impl="native")
    model = found.native
    name = bounded_text(found.name)
    check_fits(name, {"vocab_size": (model.vocab_size, target.vocab_size)})
    if found.directory is not None and target_directory is not None:
        _check_tokenizer(name, found.directory, target_directory)
    with ExitStack() as open_files:
        open_source(found, open_files).check_head()
    plan = model_plan(model)
    return DrafterConfig(
        kind="draft_model",
        name=name,
        directory=found.directory,
        model=model,
        plan=plan,
        parameters=tuple(plan.parameters()),
        aux_layers=(),
    )


def _check_tokenizer(name: str, ours: Path, theirs: Path) -> None:
    """Refuse a draft model whose tokenizer differs from the target's, if both have one."""
    vocabularies = _vocabulary(ours), _vocabulary(theirs)
    if vocabularies[0] is None or vocabularies[1] is None:
        return
    differing = {token for token, _ in vocabularies[0].items() ^ vocabularies[1].items()}
    if differing:
        raise ConfigError(
            f"the draft model {name} has another tokenizer than the model that it drafts for:"
            f" {bounded_repr(min(differing))} has not the same id in {ours} and {theirs}. Use a"
            " draft model with the same tokenizer"
        )


def _vocabulary(checkpoint: Path) -> dict[str, int] | None:
    """Return the token ids of a checkpoint's tokenizer; None if it has none."""
    if is_gguf(checkpoint):
        tokens = GGUFFile(checkpoint).get("tokenizer.ggml.tokens", list)
        return None if tokens is None else {token: i for i, token in enumerate(tokens)}
    found = read_tokenizer(checkpoint)
    return None if found is None else found[1].get_vocab()


def keep_codes(config: DrafterConfig, kernels: Kernels, dtype: torch.dtype) -> DrafterConfig:
    """Return a drafter with the weights that it keeps as codes, for the kernels of its target."""
    if config.kind != "draft_model":
        return config
    own = planned_codes(_source(config), config.kernels(kernels), dtype)
    return replace(config, codes=own.codes)


def _source(config: DrafterConfig) -> Source:
    place = config.directory
    file = open_gguf(place) if place is not None and is_gguf(place) else None
    return Source(config.name, config.model, place, file)


def load_drafter(
    config: DrafterConfig,
    target: Decoder,
    kernels: Kernels,
    group: LayerGroup,
    *,
    seed: int = 0,
    progress: bool = False,
) -> Drafter:
    """Load the weights of a drafter that `find_drafter` found, in the dtype and on the device of
    its target, which has weights that they may share.

    Of a rank of a tensor-parallel group the target is the rank's part; the drafter is whole on each
    rank. `group` has its layers in its arena (`DrafterConfig.layer_group`): `index` is the one of
    the target's layer group whose block table it uses. `seed` is of the random weights of a preset.
    Raises `CheckpointError` for a damaged file or a weight that cannot be quantised.
    """
    drafter = new_drafter(config, target, kernels, group)
    if isinstance(drafter, DraftModel):
        with ExitStack() as open_files:
            opened = open_source(_source(config), open_files)
            sizes, device = (target.dtype, drafter.kernels), target.device
            drafter.store(opened.weights(*sizes, seed=seed, device=device, progress=progress))
        return drafter
    assert config.directory is not None
    with CheckpointReader(config.directory) as reader:
        drafter.store(read_parameters(reader, config.parameters, target.dtype))
        if isinstance(drafter, Eagle3):
            target_ids = read_target_ids(reader, config)
            drafter.target_ids = None if target_ids is None else target_ids.to(target.device)
    return drafter


def new_drafter(
    config: DrafterConfig, target: Decoder, kernels: Kernels, group: LayerGroup
) -> DraftModel | _Head:
    """Return a drafter whose weights are not stored yet; arguments as of `load_drafter`."""
    assert len(group.layers) == len(config.plan.states), "all its layers are in one group"
    kind = DraftModel if config.kind == "draft_model" else _HEADS[config.kind][1]
    return kind(config, target, config.kernels(kernels), group).eval()
