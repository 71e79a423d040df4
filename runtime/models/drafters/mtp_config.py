"""Modules for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Such a module is a layer after the last one, in the checkpoint of the target itself. It shares
embedding and output projection with the target.
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
from ..family import Json, read_field
from ..plan import model_plan
from ..plan_operations import linear, vector
from .drafter_config import MOST_DRAFTS, DrafterConfig

__all__ = ["MtpParts", "has_mtp", "is_unused_by_mtp", "mtp_config"]

_COUNT = "num_nextn_predict_layers"
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of what the target has."""


@dataclass(frozen=True)
class MtpParts:
    """The parameters of a module outside its layer."""

    embedding_norm: Norm
    hidden_norm: Norm
    fuse: Linear
    """Of both, joined, to the input of the layer."""


def has_mtp(config: Json) -> bool:
    """Whether a `config.json` is that of a model with a module for multi-token prediction."""
    return read_field(config, _COUNT, int, 0) > 0


def is_unused_by_mtp(name: str, layers: int) -> bool:
    """Whether a tensor of a checkpoint with so many layers is none of the module's own."""
    prefix = f"model.layers.{layers}."
    return not name.startswith(prefix) or name.removeprefix(prefix) in _SHARED


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
    if not isinstance(target, ModelConfig) or not target.family.draft_layers:
        raise ConfigError(
            f"models of type {bounded_repr(target.model_type, 60)} have no modules for multi-token"
            " prediction that are supported, deepseek_v3 has: use another method of speculation"
        )
    if not has_mtp(config):
        raise CheckpointError(
            f"{_COUNT} is 0 or missing: the checkpoint has no module for multi-token prediction,"
            " use another method of speculation"
        )
    ours = ModelConfig.from_hf(config)
    sizes = ("hidden_size", "vocab_size", "num_layers", "latent", "experts")
    differing = [field for field in sizes if getattr(ours, field) != getattr(target, field)]
    if differing:
        field = differing[0]
        raise ConfigError(
            f"{name} has {field} = {bounded_repr(getattr(ours, field), 60)}, the model"
            f" {bounded_repr(getattr(target, field), 60)}: a module for multi-token prediction"
            " drafts for the model of its own checkpoint"
        )
    hidden, eps = target.hidden_size, target.rms_norm_eps
    parts = MtpParts(
        Norm(name="embedding_norm", weight=vector("enorm", "enorm", hidden), eps=eps),
        Norm(name="hidden_norm", weight=vector("hnorm", "hnorm", hidden), eps=eps),
        linear("eh_proj", {"eh_proj": hidden}, 2 * hidden),
    )
    plan = model_plan(target.whole)
    final = vector("norm", "shared_head.norm", hidden)
    plan = replace(plan, layers=plan.layers[-1:], norm=replace(plan.norm, weight=final))
    parameters = _parameters(plan, parts, f"model.layers.{target.num_layers}.")
    return DrafterConfig(
        kind="mtp",
        name=name,
        directory=directory,
        model=target,
        plan=plan,
        parameters=tuple(parameter.stored_in(names) for parameter in parameters),
        taps=(target.num_layers,),
        most_drafts=MOST_DRAFTS,
        parts=parts,
    )


def _parameters(plan: ModelPlan, parts: MtpParts, prefix: str) -> Iterator[Parameter]:
    for operation in (parts.embedding_norm, parts.hidden_norm, parts.fuse):
        yield operation.weight.within("", prefix)
    for parameter in plan.layers[0].parameters:
        yield parameter.within("layers.0.", prefix)
    yield plan.norm.weight.within("", prefix)
