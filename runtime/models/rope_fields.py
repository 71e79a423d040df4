"""Reads the keys of a `config.json` that describe rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError
from .family import LAYER_TYPES, Family, Json, read_field, read_optional
from .rope import Rope, RopeScaling, RopeType

__all__ = ["read_ropes"]


def read_ropes(config: Json, family: Family) -> tuple[Rope, Rope | None]:
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
        return _full_rope(config, family, parameters, scaling, first), None
    if parameters and not nested:
        raise CheckpointError(
            f"rope_parameters of {family.architecture} must be by layer type "
            f"({', '.join(LAYER_TYPES)}), not {bounded_repr(dict(parameters))}"
        )
    full, sliding = (nested.get(name, {}) for name in LAYER_TYPES)
    return (
        _full_rope(config, family, full, scaling),
        _rope(config, family, sliding, "rope_local_base_freq"),
    )


def _full_rope(
    config: Json, family: Family, parameters: Json, scaling: Json, first: int | None = None
) -> Rope:
    """Read the rotation of full attention, which either object or both may describe."""
    rope = _rope(config, family, parameters or scaling, "rope_theta", first)
    if parameters and scaling:
        # The base may stand in the newer one only.
        with_base = {"rope_theta": rope.theta, **scaling}
        if _rope(config, family, with_base, "rope_theta", first) != rope:
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
    config: Json, family: Family, rope: Json, theta_key: str, first: int | None = None
) -> Rope:
    """Read one rotation; its base may be outside the object, under `theta_key`.

    `first`: positions of the first training, whatever the object says.
    """
    holder = rope if rope.get("partial_rotary_factor") is not None else config
    partial = read_field(holder, "partial_rotary_factor", float, 1.0)
    if partial != 1.0 and not family.partial_rotation:
        raise CheckpointError(
            f"partial_rotary_factor = {partial} is not supported for {family.architecture}, whose "
            "heads are rotated as a whole"
        )
    theta = read_optional(rope, "rope_theta", float)
    if theta is None:
        theta = read_field(config, theta_key, float, 10000.0)
    return Rope(theta, _rope_scaling(config, rope, first), partial)


def _rope_scaling(config: Json, rope: Json, first: int | None) -> RopeScaling:
    kind = cast(RopeType, rope.get("rope_type") or rope.get("type") or "default")
    if kind not in get_args(RopeType) or kind == "default":
        return RopeScaling(type=kind)
    max_positions = read_field(config, "max_position_embeddings", int)
    if first is None:
        first = read_field(rope, "original_max_position_embeddings", int, max_positions)
    # Without a factor: as many times the first training's context as the model has positions.
    default = max(1.0, max_positions / max(first, 1)) if kind == "longrope" else None
    scaling: dict[str, Any] = {
        "factor": read_field(rope, "factor", float, default),
        "mscale_all_dim": read_optional(rope, "mscale_all_dim", float),
    }
    if kind == "dynamic":
        scaling["original_max_position_embeddings"] = max_positions
    elif kind != "linear":
        scaling["original_max_position_embeddings"] = first
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            scaling[name] = read_field(rope, name, float)
    if kind == "yarn":
        scaling |= {
            "beta_fast": read_field(rope, "beta_fast", float, 32.0),
            "beta_slow": read_field(rope, "beta_slow", float, 1.0),
            "truncate": read_field(rope, "truncate", bool, True),
            "mscale": read_optional(rope, "mscale", float),
        }
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            scaling[name] = _read_factors(rope, name)
    if kind in ("yarn", "longrope"):
        scaling["attention_factor"] = read_optional(rope, "attention_factor", float)
    return RopeScaling(type=kind, **scaling)


def _read_factors(rope: Json, name: str) -> tuple[float, ...]:
    """Read a list of numbers, one for each rotated pair."""
    values = rope.get(name)
    if not isinstance(values, list):
        raise CheckpointError(f"rope {name} must be a list of numbers, not {bounded_repr(values)}")
    return tuple(read_field({name: value}, name, float) for value in values)
