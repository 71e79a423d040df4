"""Modules for multi-token prediction, in the layouts of `mtp_layout.py`.

Such a module is a layer in the checkpoint of the target itself. It shares embedding and output
projection with the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...bounded_repr import bounded_repr
from ...errors import CheckpointError, ConfigError
from ...kernels.ops.layer_operations import Linear, Norm
from ...kernels.ops.layer_plan import ModelPlan
from ...kernels.ops.parameter import Parameter
from ..config import ModelConfig
from ..decoder_model import DecoderConfig
from ..families import FAMILIES, Json, read_field
from ..mtp_layout import MtpLayout
from ..plan import linear, model_plan, vector
from .drafter_config import MOST_DRAFTS, DrafterConfig

__all__ = ["MtpParts", "has_mtp", "is_unused_by_mtp", "mtp_config"]

_COUNT = "num_nextn_predict_layers"
_OTHER = "use another method of speculation, such as 'suffix'"
_HYBRID = "mtp."
"""What names of modules of hybrid models begin with (Qwen3-Next, Qwen3.5)."""


@dataclass(frozen=True)
class MtpParts:
    """The parameters of a module outside its layer."""

    embedding_norm: Norm
    hidden_norm: Norm
    fuse: Linear
    """Of both, joined, to the input of the layer."""
    layout: MtpLayout


def has_mtp(config: Json) -> bool:
    """Whether a `config.json` is that of a model with a module for multi-token prediction."""
    return read_field(config, _COUNT, int, 0) > 0


def is_unused_by_mtp(name: str, drafter: DrafterConfig) -> bool:
    """Whether a tensor of a checkpoint is none of the module's own."""
    assert isinstance(drafter.parts, MtpParts)
    layout = drafter.parts.layout
    prefix = layout.prefix(drafter.model.num_layers)
    return not name.startswith(prefix) or name.removeprefix(prefix) in layout.copies


def mtp_config(
    name: str, directory: Path, config: Json, names: Mapping[str, object], target: DecoderConfig
) -> DrafterConfig:
    """Read the module of a checkpoint. Of several it reads the first.

    Args:
        name: as given by the user.
        directory: the checkpoint.
        config: its `config.json`.
        names: of its tensors.
        target: the model that it drafts for, from the same checkpoint.

    Raises:
        CheckpointError: the checkpoint has no module.
        ConfigError: it is not that of the target.
    """
    layout = target.family.mtp if isinstance(target, ModelConfig) else None
    if layout is None:
        supported = ", ".join(name for name, family in FAMILIES.items() if family.mtp is not None)
        raise ConfigError(
            f"models of type {bounded_repr(target.model_type, 60)} have no modules for multi-token"
            f" prediction that are supported, those of type {supported} have: {_OTHER}"
        )
    assert isinstance(target, ModelConfig)
    if any(tensor.startswith(_HYBRID) for tensor in names):
        raise CheckpointError(
            f"the tensors {_HYBRID}* are a module for multi-token prediction of a hybrid model"
            f" (Qwen3-Next, Qwen3.5), which is not supported: {_OTHER}"
        )
    if not has_mtp(config):
        raise CheckpointError(
            f"{_COUNT} = {bounded_repr(config.get(_COUNT, 0))}: the checkpoint has no module for"
            f" multi-token prediction, {_OTHER}"
        )
    ours = ModelConfig.from_hf(config)
    sizes = ("model_type", "hidden_size", "vocab_size", "num_layers", "latent", "experts")
    differing = [field for field in sizes if getattr(ours, field) != getattr(target, field)]
    if differing:
        field = differing[0]
        raise ConfigError(
            f"{name} has {field} = {bounded_repr(getattr(ours, field), 60)}, the model"
            f" {bounded_repr(getattr(target, field), 60)}: a module for multi-token prediction"
            " drafts for the model of its own checkpoint"
        )
    prefix = layout.prefix(target.num_layers)
    if not any(tensor.startswith(prefix) for tensor in names):
        raise CheckpointError(
            f"{_COUNT} = {bounded_repr(config[_COUNT])}, but no tensor is named {prefix}*: the"
            " checkpoint was saved without its module for multi-token prediction. Use one that has"
            f" it, or {_OTHER}"
        )
    parts = _parts(target, layout)
    plan = model_plan(target.whole)
    final = vector("norm", layout.norm, target.hidden_size)
    layer = plan.layers[layout.layer]
    plan = replace(plan, layers=(layer,), norm=replace(plan.norm, weight=final))
    parameters = _parameters(plan, parts, prefix)
    return DrafterConfig(
        kind="mtp",
        name=name,
        directory=directory,
        model=target,
        plan=plan,
        parameters=tuple(parameter.stored_in(names) for parameter in parameters),
        taps=(target.num_layers if layout.normed else target.num_layers - 1,),
        most_drafts=MOST_DRAFTS,
        parts=parts,
    )


def _parts(target: ModelConfig, layout: MtpLayout) -> MtpParts:
    hidden, eps = target.hidden_size, target.rms_norm_eps
    embedding_norm = vector("enorm", layout.embedding_norm, hidden)
    hidden_norm = vector("hnorm", layout.hidden_norm, hidden)
    return MtpParts(
        Norm(name="embedding_norm", weight=embedding_norm, eps=eps),
        Norm(name="hidden_norm", weight=hidden_norm, eps=eps),
        linear("eh_proj", {layout.fuse: hidden}, 2 * hidden),
        layout,
    )


def _parameters(plan: ModelPlan, parts: MtpParts, prefix: str) -> Iterator[Parameter]:
    for operation in (parts.embedding_norm, parts.hidden_norm, parts.fuse):
        yield operation.weight.within("", prefix)
    for parameter in plan.layers[0].parameters:
        yield parameter.within("layers.0.", prefix)
    yield plan.norm.weight.within("", prefix)
