"""What an operation keeps of each token, and which layers share a block table."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class PagedState:
    """Vectors that an operation stores of each token; the dtype is the cache's.

    Attributes:
        heads: heads of keys and values (after grouping of query heads).
        head_dim: elements of one stored vector.
        window: tokens that a token reads, itself included; None: all before it.
        sides: vectors of one head and token: 2, a key and a value. Multi-head latent attention
            (DeepSeek-V2, arXiv 2405.04434, section 2.1) has 1, which all query heads share: the
            compressed keys and values and the rotated part of the key.
    """

    heads: int
    head_dim: int
    window: int | None = None
    sides: int = 2

    @property
    def layout(self) -> PagedState:
        """The state without its window: states of one layout can share a tensor."""
        return replace(self, window=None)


class StatePart(NamedTuple):
    """One tensor of a row state."""

    shape: tuple[int, ...]
    dtype: Literal["model", "float32"] = "model"

    def nbytes(self, itemsize: int) -> int:
        """Return its bytes; `itemsize` is of the model's dtype."""
        return math.prod(self.shape) * (itemsize if self.dtype == "model" else 4)


@dataclass(frozen=True)
class RowState:
    """What an operation keeps of a sequence whatever its length: recurrent state.

    A snapshot is the state at a block boundary: what is left of all earlier tokens. It is written
    once and then only read, so sequences with the same prefix share it. The state after any later
    token follows from the snapshot and from the inputs of the tokens since, which are kept until
    the next snapshot is written. So rejected drafts need no undo: their inputs are overwritten.
    """

    snapshot: tuple[StatePart, ...]
    """The parts of a snapshot."""
    inputs: tuple[StatePart, ...]
    """What is kept of each token since the last snapshot."""


class RowPlace(NamedTuple):
    """Where the parts of a row state lie, in bytes from the start of a snapshot or input block."""

    snapshot: tuple[int, ...]
    """Of each part of a snapshot."""
    inputs: tuple[int, ...]
    """Of each part of the inputs, divided by the tokens of a block: a part has an entry for each of
    them."""


class RowLayout(NamedTuple):
    """The places of all row states of a model."""

    places: tuple[RowPlace, ...]
    snapshot_bytes: int
    """Of one snapshot of all states."""
    token_bytes: int
    """Of the inputs of one token."""


_ALIGNMENT = 64


def row_layout(states: Sequence[RowState], itemsize: int) -> RowLayout:
    """Lay out the row states of a model one after the other, each part at a cache line.

    `itemsize` is of the model's dtype.
    """
    places, ends = [], [0, 0]

    def place(kind: int, parts: Sequence[StatePart]) -> tuple[int, ...]:
        offsets = []
        for part in parts:
            offsets.append(ends[kind])
            ends[kind] += -(-part.nbytes(itemsize) // _ALIGNMENT) * _ALIGNMENT
        return tuple(offsets)

    for state in states:
        places.append(RowPlace(place(0, state.snapshot), place(1, state.inputs)))
    return RowLayout(tuple(places), *ends)


@dataclass(frozen=True)
class LayerGroup:
    """States of equal window that share one block table.

    Attributes:
        index: position among the groups of the model.
        layers: which of the model's states, ascending: the number of the layer where each layer
            has one state.
        states: what each of them stores.
    """

    index: int
    layers: tuple[int, ...]
    states: tuple[PagedState, ...]

    @property
    def window(self) -> int | None:
        """Tokens that a token reads, itself included; None: all before it."""
        return self.states[0].window

    def positions_read(self, context: int) -> int:
        """Tokens that the newest of `context` tokens reads."""
        return context if self.window is None else min(context, self.window)

    def first_column(self, position: int, block_size: int) -> int:
        """First column of a block table that the token at `position` reads, or writes."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """Maximum blocks that a request of `num_tokens` tokens holds at once in the group.

        `chunk` is the maximum number of its tokens that one step computes. With a window, the step
        reads and writes `window - 1 + chunk` consecutive tokens, which may begin inside a block.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        span = self.window - 1 + chunk
        return min(blocks, -(-(span - 1) // block_size) + 1)


def group_layers(states: Sequence[PagedState]) -> tuple[LayerGroup, ...]:
    """Group the states of a model's layers, given in order.

    Every group has the same number of layers: the greatest common divisor of the counts of each
    window. A window with more layers gets several groups: for windows `A B A B B B` the counts are
    2 and 4, and the groups are `A(0 2)`, `B(1 3)`, `B(4 5)`.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer, state in enumerate(states):
        layers_of.setdefault(state.window, []).append(layer)
    size = math.gcd(*(len(layers) for layers in layers_of.values()))
    chunks = [
        tuple(layers[start : start + size])
        for layers in layers_of.values()
        for start in range(0, len(layers), size)
    ]
    return tuple(
        LayerGroup(index, layers, tuple(states[layer] for layer in layers))
        for index, layers in enumerate(chunks)
    )


def layouts(groups: Sequence[LayerGroup]) -> dict[PagedState, int]:
    """Return the layouts of a model, and how many layers of each the cache has.

    A block belongs to any group, so it has room for as many as the group with most of them.
    """
    counts = (Counter(state.layout for state in group.states) for group in groups)
    return dict(reduce(operator.or_, counts))
