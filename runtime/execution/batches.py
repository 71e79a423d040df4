"""Where the tokens of a step read and write, from the state of their rows."""

from __future__ import annotations

import torch

from ..kernels import RaggedBatch
from ..operation_scopes import operation
from .row_state import RowState

__all__ = ["batch_of_slots", "ragged_batch"]


def ragged_batch(
    state: RowState,
    block_size: int,
    positions_T: torch.Tensor,
    token_rows_T: torch.Tensor,
    rows_R: torch.Tensor,
    read_blocks: int,
    *,
    tokens_per_row: int | None = None,
    query_start_loc: torch.Tensor | None = None,
    valid_T: torch.Tensor | None = None,
) -> RaggedBatch:
    """Return the batch of these tokens, with its write index; see `RaggedBatch` for the shapes.

    Token at position 37 of row 2, blocks of 16: it is written to slot
    `block_tables[group, 2, 37 // 16] * 16 + 37 % 16` in each layer group. Tokens that are not
    `valid_T` write to the null block.
    """
    block_tables = state.block_tables
    with operation("begin"):
        blocks_GT = block_tables[:, token_rows_T, positions_T // block_size]
        slots_GT = blocks_GT.to(torch.int64) * block_size + positions_T % block_size
        if valid_T is not None:
            slots_GT = torch.where(valid_T, slots_GT, 0)
        return batch_of_slots(
            *(state, block_size, positions_T, slots_GT, token_rows_T, rows_R, read_blocks),
            tokens_per_row=tokens_per_row,
            query_start_loc=query_start_loc,
        )


def batch_of_slots(
    state: RowState,
    block_size: int,
    positions_T: torch.Tensor,
    slots_GT: torch.Tensor,
    token_rows_T: torch.Tensor,
    rows_R: torch.Tensor,
    read_blocks: int,
    *,
    tokens_per_row: int | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> RaggedBatch:
    """Return the batch of tokens whose write index is known; see `RaggedBatch` for the shapes."""
    rope_lengths_T = None
    if state.rope_lengths is not None:
        rope_lengths_T = torch.maximum(positions_T + 1, state.rope_lengths[token_rows_T])
    return RaggedBatch(
        positions=positions_T,
        slots=slots_GT,
        token_rows=token_rows_T,
        rows=rows_R,
        block_tables=state.block_tables,
        read_blocks=read_blocks,
        block_size=block_size,
        tokens_per_row=tokens_per_row,
        query_start_loc=query_start_loc,
        rope_lengths=rope_lengths_T,
    )
