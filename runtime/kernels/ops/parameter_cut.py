"""Parts of parameters, for the ranks of a tensor-parallel group.

A cut keeps some rows of a parameter, as it is stacked from its sources, and some columns. The
sources of the part select what it needs of each tensor of the checkpoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from .expert_selections import ExpertRows, Slice
from .parameter import Cut, HeadRows, Parameter, Selection, Shape, Source

__all__ = ["Narrowed", "cut", "zeros"]


@dataclass(frozen=True)
class Narrowed:
    """Consecutive rows or columns of another selection."""

    of: Selection
    part: Slice

    def shape(self, stored: Shape) -> Shape:
        return self.part.shape(self.of.shape(stored))

    def read(self, stored: Tensor) -> Tensor:
        return self.part.read(self.of.read(stored))

    def write(self, stored: Tensor, part: Tensor) -> None:
        whole = self.of.read(stored)  # a view or a copy
        self.part.write(whole, part)
        self.of.write(stored, whole)


def cut(parameter: Parameter, rows: Sequence[range], columns: range | None = None) -> Parameter:
    """Return the part of a parameter with these rows and columns.

    Args:
        parameter: whole, as a plan describes it.
        rows: consecutive rows of the stacked tensor each, in the order of the part.
        columns: of a matrix; None: all.
    """
    stacked = parameter.stacked_shape
    kept = sum(map(len, rows))
    viewed = parameter.viewed_as
    if viewed is not None:
        first = viewed[0] * kept // stacked[0]
        assert columns is None or len(viewed) == 2, "columns of a matrix"
        viewed = (first, *viewed[1:]) if columns is None else (first, len(columns))
    return parameter._replace(
        sources=_cut_sources(parameter.sources, rows, columns),
        viewed_as=viewed,
        alternatives=tuple(_cut_sources(s, rows, columns) for s in parameter.alternatives),
        cut=Cut(stacked, tuple(rows), columns),
    )


def zeros(parameter: Parameter) -> Parameter:
    """Return a parameter of the same shape without tensors of the checkpoint."""
    return parameter._replace(sources=(Source(None, parameter.stacked_shape),), alternatives=())


def _cut_sources(
    sources: Sequence[Source], rows: Sequence[range], columns: range | None
) -> tuple[Source, ...]:
    """Return the sources of the part, in its order."""
    starts = list(accumulate((source.part_shape[0] for source in sources), initial=0))
    parts: list[Source] = []
    for wanted in rows:
        index = bisect_right(starts, wanted.start) - 1
        while index < len(sources) and starts[index] < wanted.stop:
            begin, end = starts[index : index + 2]
            held = range(max(begin, wanted.start) - begin, min(end, wanted.stop) - begin)
            if held:
                parts.append(_cut_source(sources[index], held, columns))
            index += 1
    return tuple(parts)


def _cut_source(source: Source, rows: range, columns: range | None) -> Source:
    shape = source.part_shape
    if source.name is None:
        return Source(
            None, (len(rows), *shape[1:]) if columns is None else (len(rows), len(columns))
        )
    selection = source.selection
    if len(rows) < shape[0]:
        selection = _narrow_rows(selection, rows)
    if columns is not None and len(columns) < shape[1]:
        selection = _narrow(selection, Slice(1, columns.start, len(columns)))
    return source._replace(selection=selection)


def _narrow_rows(selection: Selection | None, rows: range) -> Selection:
    """Return a selection of these rows that reads no others of the tensor, if there is one."""
    start, count = rows.start, len(rows)
    match selection:
        case Slice(dim=0):
            return replace(selection, start=selection.start + start, count=count)
        case ExpertRows():
            first = selection.start + start * selection.step
            return replace(selection, start=first, count=count)
        case HeadRows() if not start % selection.head_dim and not count % selection.head_dim:
            heads = count // selection.head_dim
            return replace(selection, start=selection.start + start, heads=heads)
    return _narrow(selection, Slice(0, start, count))


def _narrow(selection: Selection | None, part: Slice) -> Selection:
    return part if selection is None else Narrowed(selection, part)
