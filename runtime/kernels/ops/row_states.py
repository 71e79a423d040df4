"""Recurrent state at block boundaries, and the inputs of the tokens since.

A step reads the state of a row as the snapshot at the start of the block of its first token and the
inputs of that block's earlier tokens. It appends the inputs of its own tokens. Where a token begins
a new block, the snapshot of that block is computed from the previous one and the block's inputs,
and stored if the row's table has a place for it. Everything that a step reads it never writes, so
any part of it can be computed again, and the result for a token does not depend on how the
sequence was cut into steps.

Which rule connects state and inputs is the operation's: `Walk.replay`. Kernels do the same as
`walk` without its copies.

Shapes: T tokens, C tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....cache.spec import RowPlace
from .batch import RaggedBatch

_SCHEMA = (
    "Tensor(a!) snapshots, Tensor(b!) inputs, Tensor snapshot_tables, Tensor input_tables,"
    " Tensor stored, Tensor positions, Tensor token_rows, Tensor rows, Tensor? query_start_loc,"
    " SymInt? tokens_per_row, int block_size, int[] snapshot_places, int[] input_places"
)
"""The batch of an operator with recurrent state, taken apart: operators take no tuples."""


class StateBatch(NamedTuple):
    """The batch of an operator with recurrent state, in the order of `_SCHEMA`."""

    snapshots: Tensor
    inputs: Tensor
    snapshot_tables: Tensor
    input_tables: Tensor
    stored: Tensor
    positions: Tensor
    token_rows: Tensor
    rows: Tensor
    query_start_loc: Tensor | None
    tokens_per_row: int | None
    block_size: int
    snapshot_places: Sequence[int]
    input_places: Sequence[int]

    @classmethod
    def of(cls, batch: RaggedBatch, place: RowPlace) -> StateBatch:
        """Return the batch for an operation whose state lies at `place`."""
        assert batch.states is not None, "a model with recurrent state has memory for it"
        return cls(
            *batch.states,
            *(batch.positions, batch.token_rows, batch.rows),
            *(batch.query_start_loc, batch.tokens_per_row, batch.block_size),
            *(list(place.snapshot), [batch.block_size * at for at in place.inputs]),
        )


def define_state_operator(
    name: str,
    arguments: str,
    implementation: Callable[..., Tensor] | None = None,
    *,
    like: int,
    devices: Sequence[str] = ("CPU", "CUDA"),
) -> Callable[..., Tensor]:
    """Define `stepgraph::<name>`, which torch.compile does not look into.

    Return a function of the arguments, a `RaggedBatch` and a `RowPlace`.

    Args:
        name: of the operator.
        arguments: schema of the arguments before the batch.
        implementation: called with the arguments and the fields of `StateBatch`; None: in C++.
        like: position of the argument whose shape and dtype the result has.
        devices: for which this is the implementation.
    """
    torch.library.define(f"stepgraph::{name}", f"({arguments}, {_SCHEMA}) -> Tensor")
    for device in devices if implementation is not None else ():
        torch.library.impl(f"stepgraph::{name}", device, implementation)
    torch.library.register_fake(f"stepgraph::{name}", lambda *given: torch.empty_like(given[like]))
    operator = getattr(torch.ops.stepgraph, name).default

    def run(*given: Any) -> Tensor:
        *own, batch, place = given
        out: Tensor = operator(*own, *StateBatch.of(batch, place))
        return out

    return run


def part_of(memory: Tensor, entry: int, offset: int, shape: Sequence[int], of: Tensor) -> Tensor:
    """Return a part of a snapshot, or of a block of inputs, as a view with the dtype of `of`."""
    size = math.prod(shape) * of.element_size()
    return memory[entry, offset : offset + size].view(of.dtype).view(*shape)


class Walk(NamedTuple):
    """What `walk` needs of an operation. The state is a list of tensors, as are inputs."""

    state: Sequence[Tensor]
    """A tensor like each part of a snapshot, zero."""
    inputs: Sequence[Tensor]
    """A tensor like each part of the inputs of a block, `[C, ...]`."""
    replay: Callable[[Sequence[Tensor], Sequence[Tensor], int], list[Tensor]]
    """Returns the state after the first tokens of a block, from the state before the block, the
    inputs, and the number of tokens."""
    token: Callable[[int, int, Sequence[Tensor], Sequence[Tensor]], None]
    """Computes token t of the batch, the one at an offset in its block: takes the state before the
    block and the inputs of the block, whose entry at the offset it writes."""


class _Row:
    """The memory of one row of a batch."""

    def __init__(self, batch: StateBatch, row: int, rule: Walk) -> None:
        self._batch, self._rule = batch, rule
        self._snapshots: list[int] = batch.snapshot_tables[row].tolist()
        self._blocks: list[int] = batch.input_tables[row].tolist()

    def _snapshot(self, column: int) -> list[Tensor]:
        memory, places = self._batch.snapshots, self._batch.snapshot_places
        entry = self._snapshots[column]
        return [
            part_of(memory, entry, at, like.shape, like)
            for at, like in zip(places, self._rule.state, strict=True)
        ]

    def _inputs(self, column: int) -> list[Tensor]:
        memory, places = self._batch.inputs, self._batch.input_places
        entry = self._blocks[column]
        return [
            part_of(memory, entry, at, like.shape, like)
            for at, like in zip(places, self._rule.inputs, strict=True)
        ]

    def state(self, column: int) -> list[Tensor]:
        """Return a copy of the state before a block."""
        if column == 0:
            return [torch.zeros_like(part) for part in self._rule.state]
        return [part.clone() for part in self._snapshot(column)]

    def inputs(self, column: int) -> list[Tensor]:
        """Return a copy of the inputs of a block."""
        return [part.clone() for part in self._inputs(column)]

    def replayed(self, column: int, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Return the state before a block, from the block before it, and store it if it has a
        place."""
        state = self._rule.replay(state, inputs, self._batch.block_size)
        if self._snapshots[column]:
            for part, value in zip(self._snapshot(column), state, strict=True):
                part.copy_(value)
        return state

    def store_inputs(self, column: int, offset: int, inputs: Sequence[Tensor]) -> None:
        """Store the inputs of a token, if its block has a place."""
        if self._blocks[column]:
            for part, value in zip(self._inputs(column), inputs, strict=True):
                part[offset].copy_(value[offset])


def walk(batch: StateBatch, rule: Walk) -> None:
    """Compute the tokens of a batch one after the other, in plain PyTorch; waits for the device.

    Tokens of padding, and drafts of a verify step beyond those of a row, are left out: tokens that
    do not follow the one before them in their row.
    """
    size, positions = batch.block_size, batch.positions.tolist()
    for number, first, stop in _lanes(batch):
        row, column = _Row(batch, number, rule), positions[first] // size
        if int(batch.stored[number]) < column:
            state = row.replayed(column, row.state(column - 1), row.inputs(column - 1))
        else:
            state = row.state(column)
        inputs = row.inputs(column)
        for t in range(first, stop):
            if t > first and positions[t] != positions[t - 1] + 1:
                break
            if positions[t] // size != column:
                column += 1
                state = row.replayed(column, state, inputs)
            offset = positions[t] % size
            rule.token(t, offset, state, inputs)
            row.store_inputs(column, offset, inputs)


def _lanes(batch: StateBatch) -> Iterator[tuple[int, int, int]]:
    """Yield row, first token and end of each row of a batch that has tokens."""
    rows = batch.rows.tolist()
    if batch.tokens_per_row is not None:
        starts = [index * batch.tokens_per_row for index in range(len(rows) + 1)]
    else:
        assert batch.query_start_loc is not None, "a ragged batch needs query_start_loc"
        starts = batch.query_start_loc.tolist()
    for row, first, stop in zip(rows, starts[:-1], starts[1:], strict=True):
        if first < stop:
            yield row, first, stop
