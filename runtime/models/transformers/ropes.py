"""Rotations whose frequencies transformers changes with the length of the longest sequence.

Such a change would depend on the batch. Up to some length the frequencies are those that the module
was built with, so they are kept, and longer sequences are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

__all__ = ["LengthLimit", "freeze_rotations"]

_FROZEN = "default"
"""A rope type that `transformers.modeling_rope_utils.dynamic_rope_update` does not change."""


class LengthLimit(NamedTuple):
    """The longest sequence for which a rotation has the frequencies it was built with."""

    tokens: int
    rope_type: str
    """Name in `config.json`."""


def freeze_rotations(model: nn.Module) -> LengthLimit | None:
    """Keep the frequencies of all rotations; return the smallest limit that follows from it."""
    limits = [limit for module in model.modules() for limit in _freeze(module)]
    return min(limits, default=None)


def _freeze(module: Any) -> Iterator[LengthLimit]:
    types = getattr(module, "rope_type", None)
    if isinstance(types, str):
        if _changes(types):
            yield LengthLimit(_longest(module, None), types)
            module.rope_type = _FROZEN
    elif isinstance(types, dict):  # by type of layer
        for layer_type, rope_type in types.items():
            if isinstance(rope_type, str) and _changes(rope_type):
                yield LengthLimit(_longest(module, layer_type), rope_type)
                types[layer_type] = _FROZEN


def _changes(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _longest(module: Any, layer_type: str | None) -> int:
    parameters = module.config.rope_parameters
    own = parameters if layer_type is None else parameters[layer_type]
    original = own.get("original_max_position_embeddings")
    return int(original or module.config.max_position_embeddings)
