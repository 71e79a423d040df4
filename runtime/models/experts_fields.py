"""Reads the keys of a `config.json` that describe mixtures of experts."""

from __future__ import annotations

from ..errors import CheckpointError
from .experts_config import ExpertsConfig, ExpertTraits
from .family import Json, read_field, read_optional

__all__ = ["read_experts"]

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys that transformers treats as one."""


def read_experts(config: Json, traits: ExpertTraits) -> ExpertsConfig | None:
    """Return the mixtures of a config; None if no layer has one.

    Raises:
        CheckpointError: a key is missing, of another type, or describes an unsupported variant.
        ConfigError: the numbers contradict each other.
    """
    layers = read_field(config, "num_hidden_layers", int)
    dense = traits.dense_layers(config, layers)
    count = _expert_count(config)
    if len(dense) == layers or (traits.optional and not count):
        return None
    if count is None:
        raise CheckpointError(f"the config has no {traits.keys.get('num_experts', 'num_experts')}")
    width = traits.keys.get("moe_intermediate_size", "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=count,
        num_experts_per_tok=read_field(config, "num_experts_per_tok", int),
        moe_intermediate_size=read_field(config, width, int),
        dense_layers=dense,
        **traits.routing(config),
    )


def _expert_count(config: Json) -> int | None:
    counts = {
        key: value for key in _COUNTS if (value := read_optional(config, key, int)) is not None
    }
    if len(set(counts.values())) > 1:
        raise CheckpointError(f"the config has different numbers of experts: {counts}")
    return next(iter(counts.values()), None)
