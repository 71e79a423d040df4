"""Inputs of decode and verify steps, and acceptance of drafts, as CPU operators (`verify_ops.h`).

Rows have as many tokens as drafts they verify, and one more: there is no padding between them.

    row                    4               1        counts 4 and 1, drafts (x y z) and none
    tokens                 e  x  y  z      m
    positions              4  5  6  7      8
    query_start_loc        0               4   5
    lanes by position      0  1  2  3      4        [tokens per row, rows]; a row that has fewer
                                           4 4 4    tokens repeats its last one

Shapes: B rows of the step, R rows of the state, K drafts, T tokens, G layer groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["VerifyInputs", "accept_drafts", "verify_inputs"]

torch.library.define(
    "stepgraph::row_inputs",
    "(Tensor rows, Tensor drafts, Tensor counts, Tensor token_ids, Tensor positions, "
    "Tensor block_tables, int block_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "stepgraph::advance_rows",
    "(Tensor tokens, Tensor rows, Tensor drafts, Tensor counts, Tensor(a!) token_ids, "
    "Tensor(b!) positions) -> Tensor",
)


class VerifyInputs(NamedTuple):
    """The tokens of a verify step, row by row."""

    token_ids: Tensor
    """int64 `[T]`: the newest token of each row, and its drafts."""
    positions: Tensor
    """int64 `[T]`."""
    slots: Tensor
    """int64 `[G, T]`: the write index."""
    token_rows: Tensor
    """int64 `[T]`: the row of each token."""
    query_start_loc: Tensor
    """int64 `[B + 1]`: the first token of each row."""


def verify_inputs(
    rows_B: Tensor,
    drafts_BK: Tensor,
    counts_B: Tensor,
    token_ids_R: Tensor,
    positions_R: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> VerifyInputs:
    """Return the tokens of rows with `counts_B` tokens each. Runs on CPU after `load_cpu_ops`.

    Raises RuntimeError or IndexError for arguments that do not fit together.
    """
    return VerifyInputs(
        *torch.ops.stepgraph.row_inputs.default(
            rows_B, drafts_BK, counts_B, token_ids_R, positions_R, block_tables, block_size
        )
    )


def accept_drafts(
    tokens_T: Tensor,
    rows_B: Tensor,
    drafts_BK: Tensor,
    counts_B: Tensor,
    token_ids_R: Tensor,
    positions_R: Tensor,
) -> Tensor:
    """Advance each row by its accepted drafts and the token after them; see `Feedback`.

    Returns the lanes by position, int64 `[1 + K, B]`. Runs on CPU after `load_cpu_ops`. Raises
    RuntimeError or IndexError for arguments that do not fit together.
    """
    lanes: Tensor = torch.ops.stepgraph.advance_rows.default(
        tokens_T, rows_B, drafts_BK, counts_B, token_ids_R, positions_R
    )
    return lanes
