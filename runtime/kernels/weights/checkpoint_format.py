"""Formats in which checkpoints store a weight as several tensors.

Shapes: N output features, K input features, G groups of consecutive inputs, E elements of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ...bounded_repr import bounded_repr
from ..ops.parameter import Narrowed, Selection, Shape, Slice
from .grouped import GroupedWeight


class CheckpointFormat(ABC):
    """A format in which a checkpoint stores a weight as several tensors."""

    name: ClassVar[str]
    """As `quant_method` of a `config.json` names it."""
    suffixes: ClassVar[tuple[str, ...]]
    """What the names of the tensors end with."""
    weight_suffix: ClassVar[str]
    """What the name of the weight ends with, in a layout."""
    required: ClassVar[Mapping[str, object]] = {}
    """Keys of a `quantization_config`, with their only supported values, which absent keys have."""

    def obstacle(self, options: Mapping[str, Any]) -> str | None:
        """Return why weights with this `quantization_config` cannot be read, or None."""
        for key, only in self.required.items():
            if (value := options.get(key, only)) != only:
                return f"{key} = {bounded_repr(value, 60)}, and only {only!r} is supported"
        return None

    @abstractmethod
    def shape(self, headers: Mapping[str, tuple[str, Shape]]) -> Shape | None:
        """Return the shape of the weight; None if its tensors are not of this format.

        Args:
            headers: the safetensors name of the dtype and the shape of each tensor, by suffix.
        """

    @abstractmethod
    def grouped(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Convert the tensors of a file to tensors `[..., N, G, ...]` of a weight `[..., N, K]`.

        Raises:
            ValueError: their contents are not of this format; the message says why.
        """

    @abstractmethod
    def weight(self, *grouped: Tensor) -> GroupedWeight:
        """Return the codes `[..., N, G * E]` and scales of such tensors."""

    def read(self, stored: Mapping[str, Tensor], selection: Selection | None) -> GroupedWeight:
        """Return a part of the weight; only groups that it has elements of are unpacked.

        A part that begins or ends within a group has groups of one element.

        Args:
            stored: the tensors of the file, by suffix.
            selection: the part; None: all of it.
        """
        grouped = self.grouped(stored)
        rows, columns = _rows_and_columns(selection)
        for part in rows:
            grouped = tuple(map(part.read, grouped))
        if columns is None:
            return self.weight(*grouped)
        elements = self.weight(*(tensor[:1, :1] for tensor in grouped)).group
        first, stop = columns.start // elements, -(-(columns.start + columns.count) // elements)
        weight = self.weight(*(tensor[:, first:stop] for tensor in grouped))
        return weight.columns(columns.start - first * elements, columns.count)


def _rows_and_columns(selection: Selection | None) -> tuple[list[Selection], Slice | None]:
    """Return selections of rows, to be made one after the other, and the columns; None: all."""
    match selection:
        case None:
            return [], None
        case Slice(dim=1):
            return [], selection
        case Narrowed(of=of, part=part):
            rows, columns = _rows_and_columns(of)
            if part.dim == 0:
                return [*rows, part], columns
            first = 0 if columns is None else columns.start
            return rows, Slice(1, first + part.start, part.count)
    return [selection], None
