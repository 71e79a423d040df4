"""Ranges of the numbers that describe a model: wide enough for any real one, and finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..bounded_repr import bounded_repr
from ..errors import ConfigError
from .rope import Rope

__all__ = ["MOST_SIZE", "check_rope", "require_layers", "require_numbers", "require_sizes"]

_MOST_LAYERS = 4096
MOST_SIZE = 2**31 - 1
"""Of any other dimension, and of positions: a product of two fits 64 bits."""
_LEAST_NUMBER, _MOST_NUMBER = 1e-18, 1e18
"""Of scales and caps: float32 holds their squares."""


def require_layers(num_layers: int) -> None:
    """Raise `ConfigError` for a number of layers that no model has."""
    if not 1 <= num_layers <= _MOST_LAYERS:
        bound = "at least 1" if num_layers < 1 else f"at most {_MOST_LAYERS}"
        raise ConfigError(f"num_layers = {bounded_repr(num_layers)} must be {bound}")


def require_sizes(config: object, names: Iterable[str]) -> None:
    """Raise `ConfigError` for a field of a model's config that cannot be a dimension."""
    for name in names:
        value = getattr(config, name)
        if not 1 <= value <= MOST_SIZE:
            bound = "at least 1" if value < 1 else f"at most {MOST_SIZE}"
            raise ConfigError(f"{name} = {bounded_repr(value)} must be {bound}")


def require_numbers(config: object, names: Iterable[str]) -> None:
    """Raise `ConfigError` for a scale or cap, where the config has one, that is out of range."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise ConfigError(
                f"{name} = {value} must be a number from {_LEAST_NUMBER} to {_MOST_NUMBER}"
            )


def check_rope(rope: Rope, head_dim: int) -> None:
    """Raise `ConfigError` for a rotation of heads of `head_dim` elements that cannot be computed.

    A base below 1 has frequencies that overflow float32.
    """
    scaling, dim = rope.scaling, rope.dim(head_dim)
    yarn = scaling.type == "yarn"
    if not (1 <= rope.theta < math.inf) or (yarn and rope.theta == 1):
        bound = "above 1 for yarn scaling" if yarn else "a number of at least 1"
        raise ConfigError(f"rope_theta = {rope.theta} must be {bound}")
    if not 0 < rope.partial <= 1 or dim == 0:
        raise ConfigError(
            f"partial_rotary_factor = {rope.partial} must be above 0 and at most 1, and rotate at "
            f"least one of head_dim = {head_dim} elements"
        )
    if scaling.type == "dynamic" and dim <= 2:
        raise ConfigError(
            f"dynamic rope scaling needs more than 2 rotated elements of a head, not {dim}"
        )
    if scaling.type == "longrope":
        pairs = (dim + 1) // 2
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            if len(factors) != pairs:
                raise ConfigError(
                    f"rope {name} lists {len(factors)} factors, but {pairs} pairs of elements of a "
                    "head are rotated"
                )
