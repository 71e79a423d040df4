"""What a layer stores per token, and which layers share a block table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["LayerGroup", "LayerSpec", "group_layers"]


@dataclass(frozen=True)
class LayerSpec:
    """What one layer stores per token, for any kind of attention.

    Attributes:
        num_kv_heads: heads of keys and values (after grouping of query heads).
        head_dim: elements of one stored vector.
        element_bytes: bytes of one element as it is stored.
        scale_bytes: bytes of the scale that is stored with each vector; 0 for a cache in the
            model's dtype.
        window: tokens that a token attends to, itself included; None: all before it.
        sides: vectors of one head and token: 2, a key and a value. Multi-head latent attention
            (DeepSeek-V2, arXiv 2405.04434, section 2.1) has 1, which all query heads share: the
            compressed keys and values and the rotated part of the key.
    """

    num_kv_heads: int
    head_dim: int
    element_bytes: int
    scale_bytes: int = 0
    window: int | None = None
    sides: int = 2

    @property
    def slot_bytes(self) -> int:
        """Bytes that one layer stores per token."""
        vector = self.head_dim * self.element_bytes + self.scale_bytes
        return self.sides * self.num_kv_heads * vector

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` slots in one layer."""
        return block_size * self.slot_bytes

    def first_column(self, position: int, block_size: int) -> int:
        """First column of a block table that the token at `position` reads, or writes."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """Maximum blocks that a request of `num_tokens` tokens holds at once in one group.

        `chunk` is the maximum number of its tokens that one step computes. With a window, the step
        reads and writes `window - 1 + chunk` consecutive tokens, which may begin inside a block.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        span = self.window - 1 + chunk
        return min(blocks, -(-(span - 1) // block_size) + 1)


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

    def positions_read(self, context: int) -> int:
        """Tokens that the newest of `context` tokens attends to, summed over the layers."""
        window = self.spec.window
        return len(self.layers) * (context if window is None else min(context, window))

    def bytes_read(self, context: int) -> int:
        """Bytes of the cache that the newest of `context` tokens reads in these layers."""
        return self.positions_read(context) * self.spec.slot_bytes


def group_layers(specs: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Group the layers of a model, given the spec of each layer in order.

    A block has the same number of bytes in every group. So every group has the same number of
    layers: the greatest common divisor of the counts of each spec. A spec with more layers gets
    several groups: for specs `A B A B B B` the counts are 2 and 4, and the groups are `A(0 2)`,
    `B(1 3)`, `B(4 5)`.

    Raises:
        ValueError: there is no layer, or two layers differ in more than their windows.
    """
    if not specs:
        raise ValueError("a model needs at least one layer to have a cache, got no layer specs")
    layers_of: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if replace(spec, window=specs[0].window) != specs[0]:
            raise ValueError(
                f"layer {layer} stores {spec}, layer 0 stores {specs[0]}: layers may differ in "
                f"their window only, since a block has the same bytes in every group"
            )
        layers_of.setdefault(spec, []).append(layer)
    size = math.gcd(*(len(layers) for layers in layers_of.values()))
    chunks = [
        (spec, tuple(layers[start : start + size]))
        for spec, layers in layers_of.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(LayerGroup(index, spec, layers) for index, (spec, layers) in enumerate(chunks))
