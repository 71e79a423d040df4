"""What kernels of recurrent state share: where a lane begins, and where its state is kept.

`ops/row_states.py` says what is kept, and when. A lane is the tokens of one row in a step. The host
reads nothing: lanes, their positions and the places in memory are read from the tensors of the
batch by the kernels, so steps can be captured.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..ops.row_states import StateBatch


def state_arguments(batch: StateBatch, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the batch as kernels take it, for parts that are all of one dtype.

    Tensors first: snapshots and inputs as elements of the dtype, both tables, the last stored
    column, positions, rows and first tokens of lanes (None: uniform). Then numbers, in elements:
    the strides of the tables, snapshots and inputs, and the place of each part.
    """
    snapshots, inputs = batch.snapshots.view(dtype), batch.inputs.view(dtype)
    columns = batch.snapshot_tables.stride(0)
    assert columns == batch.input_tables.stride(0), "both tables have one shape"
    places = (*batch.snapshot_places, *batch.input_places)
    return (
        *(snapshots, inputs, batch.snapshot_tables, batch.input_tables, batch.stored),
        *(batch.positions, batch.rows, batch.query_start_loc),
        *(columns, snapshots.stride(0), inputs.stride(0)),
        *(place // dtype.itemsize for place in places),
    )


@triton.jit
def lane_of(positions_ptr, starts_ptr, lane, lanes, T, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First token of a lane, how many of its tokens follow one another, and its end.

    Lane `lanes` of a ragged batch (TOKENS 0) is the padding after all others, which has none.
    """
    if TOKENS:
        first = lane * TOKENS
        end = first + TOKENS
        i = tl.arange(0, triton.next_power_of_2(TOKENS))
        start = tl.load(positions_ptr + first)
        position = tl.load(positions_ptr + first + i, mask=i < TOKENS, other=-1)
        count = tl.sum((position == start + i).to(tl.int32), axis=0)
    else:
        first = tl.load(starts_ptr + lane).to(tl.int32)
        end = tl.load(starts_ptr + lane + 1, mask=lane < lanes, other=T).to(tl.int32)
        count = tl.where(lane < lanes, end - first, 0)
    return first, count, end


@triton.jit
def first_column(row, position, stored_ptr, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Column of the snapshot that a lane begins with: of the block of its first token, which is at
    `position`, or of the block before where that one is not stored yet."""
    column = position // BLOCK_SIZE
    stored = tl.load(stored_ptr + row).to(tl.int32)
    return tl.where(stored < column, column - 1, column)


@triton.jit
def entry_of(tables_ptr, row, columns, column, there):  # type: ignore[no-untyped-def]
    """Entry of a row's table, int64; 0, at which nothing is kept, unless it is `there`."""
    return tl.load(tables_ptr + row * columns + column, mask=there, other=0).to(tl.int64)
