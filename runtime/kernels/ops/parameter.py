"""Parameters of a model, and the tensors of a checkpoint that each is made of."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Selection(Protocol):
    """A part of a tensor of a checkpoint, in the order in which the model stores it.

    Instances are immutable and compare by value.
    """

    def shape(self, stored: Shape) -> Shape:
        """Shape of the part of a tensor of shape `stored`."""

    def read(self, stored: Tensor) -> Tensor:
        """Return the part; it may be a view."""


@dataclass(frozen=True)
class HeadRows:
    """Rows of some heads, `head_dim` each, reordered for rotation.

    Kernels rotate elements i and i + head_dim / 2 of a head together. Models that rotate neighbours
    (2i, 2i + 1), or only the first `rotary_dim` elements, have the same attention scores if the
    elements of queries and keys are reordered alike. Elements that are not rotated become pairs
    after those that are; their frequency is zero.

        head_dim 8, rotary_dim 4                pairs (0, 2), (1, 3) -> rows 0 1 4 5 2 3 6 7
        the same, interleaved                   pairs (0, 1), (2, 3) -> rows 0 2 4 5 1 3 6 7

    With rotary_dim 0 they are not reordered.
    """

    start: int
    """First row."""
    heads: int
    head_dim: int
    rotary_dim: int
    """Elements of a head that are rotated; even."""
    interleaved: bool = False
    """Whether the elements of a rotated pair are neighbours."""
    stride: int = 0
    """Rows from one head to the next, where other rows lie between them; 0: `head_dim`."""

    def shape(self, stored: Shape) -> Shape:
        return (self.heads * self.head_dim, *stored[1:])

    def read(self, stored: Tensor) -> Tensor:
        return stored[self._rows()]

    def _rows(self) -> Tensor:
        """Row of the stored tensor for each row of the part, int64."""
        half = self.rotary_dim // 2
        order = torch.arange(self.head_dim)
        if half:
            rotated, plain = order[: self.rotary_dim], order[self.rotary_dim :]
            pairs = rotated.view(half, 2).T if self.interleaved else rotated.view(2, half)
            order = torch.cat((pairs, plain.view(2, -1)), dim=1).flatten()
        heads = torch.arange(self.heads)[:, None] * (self.stride or self.head_dim)
        return (self.start + heads + order).flatten()


class Source(NamedTuple):
    """A tensor of a checkpoint as rows of a parameter."""

    name: str | None
    """Name in the checkpoint, in a layer plan relative to the layer; None: zeros."""
    shape: Shape
    """Shape in the checkpoint."""
    selection: Selection | None = None
    """The part of the tensor; None: all of it, as it is stored."""

    @property
    def part_shape(self) -> Shape:
        """Shape of the rows."""
        return self.shape if self.selection is None else self.selection.shape(self.shape)

    def rows(self, first: int, stop: int) -> Source:
        """Return the source of some of the rows."""
        return _cut_source(self, range(first, stop), None)

    def read(self, stored: Tensor) -> Tensor:
        """Return the rows from the tensor of the checkpoint; they may be a view of it."""
        return stored if self.selection is None else self.selection.read(stored)

    def write(self, stored: Tensor, part: Tensor) -> None:
        """Write the rows to their place in the tensor of the checkpoint: the inverse of `read`."""
        place = self.read(stored)
        place.copy_(part)
        if place.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():  # a copy
            index = self.read(torch.arange(stored.numel()).view(stored.shape))
            stored.view(-1)[index.flatten()] = place.flatten()


class Cut(NamedTuple):
    """The part of a parameter that one rank of a tensor-parallel group holds."""

    whole: Shape
    """Shape of the stacked tensor that it is a part of."""
    rows: tuple[range, ...]
    """Its rows of that tensor, in their order."""
    columns: range | None
    """Its columns; None: all."""

    def part_of(self, stacked: Tensor) -> Tensor:
        """Return the part of a tensor of the shape `whole`."""
        part = torch.cat([stacked[rows.start : rows.stop] for rows in self.rows])
        if self.columns is not None:
            part = part[:, self.columns.start : self.columns.stop]
        return part.contiguous()


class Parameter(NamedTuple):
    """A parameter of the model: tensors of a checkpoint stacked along the first dimension.

    Parameters with two dimensions that are not `exact` are weights of linear layers, which kernels
    may quantise and pack. Others are stored unchanged.
    """

    name: str
    """Name of the parameter, in a layer plan relative to the layer."""
    sources: tuple[Source, ...]
    viewed_as: Shape | None = None
    """Shape to which the stacked tensor is reshaped; None: not reshaped."""
    exact: bool = False
    """Whether a matrix keeps the model's dtype where others are quantised: routers."""
    dtype: torch.dtype | None = None
    """Of a parameter that is stored in its own dtype; None: the model's."""
    matrices: int = 1
    """Matrices of equal shape that are stacked in it, each of which kernels pack: gates and ups of
    experts, or their downs."""
    alternatives: tuple[tuple[Source, ...], ...] = ()
    """Other sources, of checkpoints that store it in another way."""
    cut: Cut | None = None
    """The part of a larger parameter that it is; None: it is whole."""

    def __hash__(self) -> int:  # not of all sources: experts have thousands
        return hash((self.name, self.viewed_as, len(self.sources), self.sources[:1]))

    @property
    def stacked_shape(self) -> Shape:
        """The shape of the stack."""
        shapes = [source.part_shape for source in self.sources]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        return self.viewed_as or self.stacked_shape

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a linear layer, in the format of the kernels."""
        return len(self.shape) == 2 and not self.exact

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names in the checkpoint, without duplicates."""
        return tuple(dict.fromkeys(s.name for s in self.sources if s.name is not None))

    def parts(self, parameter: Tensor) -> Iterator[tuple[Source, Tensor]]:
        """Yield each source and its view of `parameter`, which has this shape."""
        sizes = [source.part_shape[0] for source in self.sources]
        yield from zip(self.sources, parameter.view(self.stacked_shape).split(sizes), strict=True)

    def stored_in(self, shapes: Mapping[str, Shape]) -> Parameter:
        """Return the parameter with the layout of which most tensors are in a checkpoint, with the
        right shapes if several are."""
        if not self.alternatives:
            return self

        def present(sources: tuple[Source, ...]) -> tuple[float, int]:
            found = [shapes[s.name] == s.shape for s in sources if s.name and s.name in shapes]
            return len(found) / len(sources), sum(found)

        best = max((self.sources, *self.alternatives), key=present)
        return self._replace(sources=best, alternatives=())

    def renamed(self, names: Mapping[str, str]) -> Parameter:
        """Return the parameter with other names of its tensors; alternatives keep theirs."""
        sources = (s._replace(name=s.name and names.get(s.name, s.name)) for s in self.sources)
        return self._replace(sources=tuple(sources)) if names else self

    def within(self, ours: str, theirs: str) -> Parameter:
        """Return the parameter with prefixed name and sources."""

        def prefixed(sources: tuple[Source, ...]) -> tuple[Source, ...]:
            return tuple(
                source if name is None else Source(theirs + name, shape, selection)
                for source in sources
                for name, shape, selection in (source,)
            )

        return self._replace(
            name=ours + self.name,
            sources=prefixed(self.sources),
            alternatives=tuple(map(prefixed, self.alternatives)),
        )


# Parts of checkpoint tensors that make up the stacked weights of experts.


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one expert of a stacked tensor `[experts, rows, ...]`.

    If `transposed`, the tensor is `[experts, columns, rows]`.
    """

    expert: int
    start: int
    """First row."""
    count: int
    step: int = 1
    """Distance between rows: 2 where rows of gate and up alternate."""
    transposed: bool = False

    def shape(self, stored: Shape) -> Shape:
        return (self.count, stored[1]) if self.transposed else (self.count, *stored[2:])

    def read(self, stored: Tensor) -> Tensor:
        rows = slice(self.start, self.start + self.count * self.step, self.step)
        if self.transposed:
            return stored[self.expert, :, rows].T
        return stored[self.expert, rows]


@dataclass(frozen=True)
class Slice:
    """Consecutive rows (`dim` 0) or columns (1) of a tensor."""

    dim: int
    start: int
    count: int

    def shape(self, stored: Shape) -> Shape:
        return (*stored[: self.dim], self.count, *stored[self.dim + 1 :])

    def read(self, stored: Tensor) -> Tensor:
        return stored.narrow(self.dim, self.start, self.count)


# Parts of parameters, for the ranks of a tensor-parallel group.
#
# A cut keeps some rows of a parameter, as it is stacked from its sources, and some columns. The
# sources of the part select what it needs of each tensor of the checkpoint.


@dataclass(frozen=True)
class Narrowed:
    """Consecutive rows or columns of another selection."""

    of: Selection
    part: Slice

    def shape(self, stored: Shape) -> Shape:
        return self.part.shape(self.of.shape(stored))

    def read(self, stored: Tensor) -> Tensor:
        return self.part.read(self.of.read(stored))


def cut(parameter: Parameter, rows: Sequence[range], columns: range | None = None) -> Parameter:
    """Return the part of a whole parameter with these rows of the stacked tensor, in this order,
    and these columns; None: all."""
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


def cut_heads(parameter: Parameter, heads: range, total: int) -> Parameter:
    """Return the rows of some of `total` heads."""
    rows = parameter.stacked_shape[0] // total
    return cut(parameter, [range(heads.start * rows, heads.stop * rows)])


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
        width = shape[1:] if columns is None else (len(columns),)
        return Source(None, (len(rows), *width))
    selection = source.selection
    if len(rows) < shape[0]:
        selection = _narrow(selection, Slice(0, rows.start, len(rows)))
    if columns is not None and len(columns) < shape[1]:
        selection = _narrow(selection, Slice(1, columns.start, len(columns)))
    return source._replace(selection=selection)


def _narrow(selection: Selection | None, part: Slice) -> Selection:
    """Return a selection of a part; of whole heads one that reads no others of the tensor."""
    if isinstance(selection, HeadRows) and part.dim == 0:
        heads, left = divmod(part.count, selection.head_dim)
        if not left and not part.start % selection.head_dim:
            first = part.start // selection.head_dim * (selection.stride or selection.head_dim)
            return replace(selection, start=selection.start + first, heads=heads)
    return part if selection is None else Narrowed(selection, part)
