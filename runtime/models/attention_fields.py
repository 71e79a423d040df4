"""Reads the keys of a `config.json` that describe its layers and their attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError
from .families import LAYER_TYPES, Family, Json, LayerType, read_field, read_optional
from .rope import Rope, RopeScaling, RopeType

__all__ = ["read_ropes", "read_windows", "refuse_experts"]


def read_windows(
    config: Json, family: Family, num_layers: int
) -> tuple[tuple[LayerType, ...], int | None]:
    """Return the type of each layer and the window of those that slide.

    Without types, all layers have full attention.
    """
    window = read_optional(config, "sliding_window", int)
    if family.window_switch and not read_field(config, "use_sliding_window", bool):
        window = None
    implied = tuple(LAYER_TYPES[family.is_sliding(config, i)] for i in range(num_layers))
    listed = config.get("layer_types")
    if listed is None:
        types = implied
    elif not isinstance(listed, list) or not all(name in LAYER_TYPES for name in listed):
        known = ", ".join(map(repr, LAYER_TYPES))
        raise CheckpointError(f"layer_types must be a list of {known}, not {bounded_repr(listed)}")
    elif len(listed) != num_layers:
        raise CheckpointError(
            f"layer_types lists {len(listed)} layers, num_hidden_layers = {num_layers}"
        )
    else:
        types = tuple(listed)
        if types != implied and not family.lists_layer_types:
            raise CheckpointError(
                f"layer_types = {bounded_repr(listed)} contradicts {family.architecture}, whose "
                f"layers are {bounded_repr(list(implied))}"
            )
    return (types, window) if "sliding_attention" in types else ((), None)


def read_ropes(config: Json, family: Family, max_positions: int) -> tuple[Rope, Rope | None]:
    """Return the rotation of the layers and, where a family has two, that of sliding layers.

    Reads `rope_parameters` (transformers 5) or `rope_scaling` with a separate base (4). Raises
    `CheckpointError` if both are present and contradict each other.
    """
    parameters = _rope_object(config, "rope_parameters")
    scaling = _rope_object(config, "rope_scaling")
    nested = {name: _rope_object(parameters, name) for name in LAYER_TYPES if name in parameters}
    if not family.two_ropes:
        if nested:
            raise CheckpointError(
                "rope_parameters must be the same for all layers of "
                f"{family.architecture}, not by layer type: " + bounded_repr(dict(parameters))
            )
        # transformers: outside the object it has priority over what is said inside.
        first = read_optional(config, "original_max_position_embeddings", int)
        return _full_rope(config, parameters, scaling, max_positions, first), None
    if parameters and not nested:
        raise CheckpointError(
            f"rope_parameters of {family.architecture} must be by layer type "
            f"({', '.join(LAYER_TYPES)}), not {bounded_repr(dict(parameters))}"
        )
    full, sliding = (nested.get(name, {}) for name in LAYER_TYPES)
    return (
        _full_rope(config, full, scaling, max_positions),
        _rope(config, sliding, "rope_local_base_freq", max_positions),
    )


def _full_rope(
    config: Json, parameters: Json, scaling: Json, max_positions: int, first: int | None = None
) -> Rope:
    """Read the rotation of full attention from the one object that is there, or from both."""
    rope = _rope(config, parameters or scaling, "rope_theta", max_positions, first)
    if parameters and scaling:
        # The base may stand in the newer one only.
        with_base = {"rope_theta": rope.theta, **scaling}
        if _rope(config, with_base, "rope_theta", max_positions, first) != rope:
            raise CheckpointError(
                f"rope_parameters = {bounded_repr(dict(parameters))} and rope_scaling = "
                f"{bounded_repr(dict(scaling))} contradict each other: the config must have one of "
                "them, or both alike"
            )
    return rope


def _rope_object(config: Json, name: str) -> Json:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{name} must be an object, not {bounded_repr(value)}")
    return value or {}


def _rope(
    config: Json, rope: Json, theta_key: str, max_positions: int, first: int | None = None
) -> Rope:
    """Read one rotation; its base may be outside the object, under `theta_key`.

    `first`: positions of the first training, whatever the object says.
    """
    holder = rope if "partial_rotary_factor" in rope else config
    if (partial := read_optional(holder, "partial_rotary_factor", float)) not in (None, 1.0):
        raise CheckpointError(
            f"partial_rotary_factor = {partial} is not supported; every element of a head must "
            "be rotated"
        )
    theta = read_optional(rope, "rope_theta", float)
    if theta is None:
        theta = read_field(config, theta_key, float, 10000.0)
    return Rope(theta, _rope_scaling(rope, max_positions, first))


def _rope_scaling(rope: Json, max_positions: int, first: int | None) -> RopeScaling:
    kind = cast(RopeType, rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ("linear", "llama3", "yarn"):
        return RopeScaling(type=kind)
    scaling: dict[str, Any] = {
        "factor": read_field(rope, "factor", float),
        "mscale_all_dim": read_optional(rope, "mscale_all_dim", float),
    }
    if kind != "linear":
        if first is None:
            first = read_field(rope, "original_max_position_embeddings", int, max_positions)
        scaling["original_max_position_embeddings"] = first
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            scaling[name] = read_field(rope, name, float)
    if kind == "yarn":
        scaling |= {
            "beta_fast": read_field(rope, "beta_fast", float, 32.0),
            "beta_slow": read_field(rope, "beta_slow", float, 1.0),
            "truncate": read_field(rope, "truncate", bool, True),
            "attention_factor": read_optional(rope, "attention_factor", float),
            "mscale": read_optional(rope, "mscale", float),
        }
    return RopeScaling(type=kind, **scaling)


def refuse_experts(config: Json, num_layers: int) -> None:
    """Raise `CheckpointError` if a layer of a DeepSeek config is a mixture of experts."""
    experts = read_optional(config, "n_routed_experts", int)
    dense = read_field(config, "first_k_dense_replace", int, 0)
    if experts and dense < num_layers:
        raise CheckpointError(
            f"n_routed_experts = {experts} with first_k_dense_replace = {dense} makes layers "
            f"{dense} to {num_layers - 1} mixtures of experts, which are not supported; only "
            f"dense layers are (first_k_dense_replace of at least {num_layers})"
        )
