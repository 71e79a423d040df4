"""Reads the keys of a `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError

Json = Mapping[str, Any]

T = TypeVar("T")

_MOST_INT = 2**63 - 1


def read_optional(config: Json, name: str, kind: type[T]) -> T | None:
    """Return a field checked for its type, None if it is absent or null.

    Integers must fit 64 bits, floating-point numbers must be finite.
    """
    value = config.get(name)
    if value is None:
        return None
    if kind is float and type(value) is int and abs(value) <= _MOST_INT:
        value = float(value)
    if type(value) is not kind:  # not isinstance: to Python, true is an int
        raise CheckpointError(f"{name} must be of type {kind.__name__}, not {bounded_repr(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{name} = {value} must be a finite number")
    if isinstance(value, int) and abs(value) > _MOST_INT:
        raise CheckpointError(f"{name} = {bounded_repr(value)} does not fit 64 bits")
    return value


def read_field(config: Json, name: str, kind: type[T], default: T | None = None) -> T:
    """Return a field checked for its type; absent and null mean the default, if there is one."""
    value = read_optional(config, name, kind)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no {name}")
    return value


def read_count(config: Json, name: str, default: int | None = None, least: int = 1) -> int:
    """As `read_field`, for an integer of at least `least`."""
    count = read_field(config, name, int, default)
    if count < least:
        raise CheckpointError(f"{name} = {count} must be at least {least}")
    return count


def read_layers(config: Json, name: str) -> frozenset[int]:
    """Return the layers that a list has; none if it is absent or null."""
    value = config.get(name)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise CheckpointError(f"{name} must be a list of layers, not {bounded_repr(value)}")
    return frozenset(value)
