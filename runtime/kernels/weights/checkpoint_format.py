"""Formats in which checkpoints store a weight as codes and scales.

Shapes: N output features, K input features, G groups of a row, W words of 32 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.parameter import ExpertRows, Narrowed, Selection, Shape, Slice
from .grouped import GroupedWeight


class Header(NamedTuple):
    """What a file says of a tensor without its data."""

    dtype: str
    """Its safetensors name, for example `BF16`."""
    shape: Shape


class CheckpointFormat(ABC):
    """A format in which a checkpoint stores a weight as one or several tensors."""

    name: ClassVar[str]
    """For messages."""
    suffixes: ClassVar[tuple[str, ...]]
    """What the names of the tensors end with."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Of tensors that may be missing."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Of tensors that say nothing of the weight, such as scales of activations."""
    weight_suffix: ClassVar[str] = ".weight"
    """What the name of the weight ends with, in a layout."""

    @abstractmethod
    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        """Return the shape of the weight; None if its tensors are not of this format.

        Args:
            name: of the weight without the suffix.
            headers: of the tensors, by suffix.
            read: reads the tensor of a suffix, if headers do not suffice.
        """

    @abstractmethod
    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        """Return the codes and scales of a weight.

        Args:
            stored: its tensors, by suffix; on the device `meta` the result is there, too.
            shape: of the weight, as `shape` returned it.

        Raises:
            ValueError: their contents are not of this format; the message says why.
        """

    def read(
        self, stored: Mapping[str, Tensor], shape: Shape, selection: Selection | None
    ) -> GroupedWeight:
        """Return a part of a weight; of stacked experts only the one it is of is unpacked.

        Args:
            stored: its tensors, by suffix.
            shape: of the weight.
            selection: the part; None: all of it.

        Raises:
            ValueError: as `weight`, and for NaN or infinity in the scales.
        """
        rows, columns = rows_and_columns(selection)
        if rows and isinstance(rows[0], ExpertRows):
            expert = rows[0].expert
            stored = {suffix: tensor[expert : expert + 1] for suffix, tensor in stored.items()}
            shape, rows[0] = (1, *shape[1:]), replace(rows[0], expert=0)
        weight = self.weight(stored, shape)
        for part in rows:
            weight = weight.over(part.read)
        weight.check_scales()
        return weight if columns is None else weight.columns(columns.start, columns.count)


def rows_and_columns(selection: Selection | None) -> tuple[list[Selection], Slice | None]:
    """Return selections of rows, to be made one after the other, and the columns; None: all."""
    match selection:
        case None:
            return [], None
        case Slice(dim=1):
            return [], selection
        case Narrowed(of=of, part=part):
            rows, columns = rows_and_columns(of)
            if part.dim == 0:
                return [*rows, part], columns
            first = 0 if columns is None else columns.start
            return rows, Slice(1, first + part.start, part.count)
    return [selection], None


def unpacked(words: Tensor, shifts: Sequence[int], bits: int = 4) -> Tensor:
    """Return the unsigned numbers in integers `[..., W]`, as uint8 `[..., W * len(shifts)]`.

    Args:
        words: several numbers each.
        shifts: lowest bit of each number of a word.
        bits: of a number.
    """
    numbers = torch.empty(*words.shape, len(shifts), dtype=torch.uint8, device=words.device)
    for i, shift in enumerate(shifts):  # one after the other: int32 takes four times as much
        numbers[..., i] = words >> shift & (1 << bits) - 1
    return numbers.flatten(-2)


def group_of(k: int, groups: int, sizes: Sequence[int] = ()) -> int | None:
    """Return the inputs of each of some groups of `k`; None if they do not fit.

    Args:
        k: inputs of a row.
        groups: of a row.
        sizes: that the config names, of which the last group may be shorter; others divide `k`.
    """
    equal = [k // groups] if groups and k and not k % groups else []
    return next((min(size, k) for size in (*sizes, *equal) if -(-k // size) == groups), None)


def checked_groups(g_idx_K: Tensor, groups: int) -> Tensor:
    """Return the group of each input as int64; raise ValueError for one without scales."""
    if not g_idx_K.is_meta and not 0 <= int(g_idx_K.min()) <= int(g_idx_K.max()) < groups:
        raise ValueError(
            f"its g_idx names groups {int(g_idx_K.min())} to {int(g_idx_K.max())}, and there are"
            f" scales of {groups}"
        )
    return g_idx_K.long()
