"""What a layer stores of a token, and which layers share a block table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["FullAttentionSpec", "LayerGroup", "LayerSpec", "group_layers"]


@dataclass(frozen=True)
class FullAttentionSpec:
    """A layer that keeps the keys and values of every token of the context.

    Attributes:
        num_kv_heads: heads of keys and values (after grouping of query heads).
        head_dim: elements of one head.
        element_bytes: bytes of one element as it is stored.

    Raises:
        ValueError: a field is not positive.
    """

    num_kv_heads: int
    head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def slot_bytes(self) -> int:
        """Bytes of the key and the value of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` slots in one layer."""
        return block_size * self.slot_bytes


LayerSpec: TypeAlias = FullAttentionSpec
"""Any spec: a hashable value that knows its `slot_bytes` and `block_bytes(block_size)`."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal spec that share one block table.

    Attributes:
        index: position among the groups of the model.
        spec: what each of the layers stores.
        layers: the model's layer numbers, ascending; position in this tuple is the first
            coordinate of the arena.
    """

    index: int
    spec: LayerSpec
    layers: tuple[int, ...]


def group_layers(specs: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Group the layers of a model, given the spec of each layer in order.

    A block id stands for the same bytes whichever group holds it, so every group must have the
    same number of layers: the greatest common divisor of how often each spec occurs. A spec with
    more layers than that is split into several groups: for specs `A B A B B B` the counts are 2
    and 4, and the groups are `A(0 2)`, `B(1 3)`, `B(4 5)`.

    Raises:
        ValueError: there is no layer.
    """
    if not specs:
        raise ValueError("a model needs at least one layer to have a cache, got no layer specs")
    layers_of: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    size = math.gcd(*(len(layers) for layers in layers_of.values()))
    chunks = [
        (spec, tuple(layers[start : start + size]))
        for spec, layers in layers_of.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(LayerGroup(index, spec, layers) for index, (spec, layers) in enumerate(chunks))
