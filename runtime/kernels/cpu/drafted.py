"""The tokens of verify steps and of drafters, as operators of a CPU (`draft_ops.h`).

Shapes: B rows of the step, R rows of the state, T tokens, G layer groups, K drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DraftedInputs",
    "VerifyInputs",
    "accept_drafts",
    "drafted_inputs",
    "verify_inputs",
]


# All that an EAGLE-3 head computes in a step: `count` drafts of each row, int64 `[B, count]`, and
# their probabilities, float32 `[B, count]`.
#
# `next_ids` has the token after each token of the step, or `NON_FINITE`. The tokens of a row begin
# at `first`; `row_positions` `[R]` has the position of its newest one; `stops` as in
# `drafted_inputs`. Keys and values of these, and of all drafts but the last, are stored. Weights of
# linear layers are packed; `stack` is the handle of the layers.

torch.library.define(
    "stepgraph::head_drafts",
    "(Tensor features, Tensor next_ids, Tensor positions, Tensor slots,"
    " Tensor token_rows, Tensor rows, Tensor row_positions, Tensor first, Tensor stops,"
    " Tensor block_tables, int read_blocks, int block_size, Tensor(a!) arena, int count,"
    " Tensor fuse, Tensor? fuse_scales, Tensor? input_norm, float eps, int hidden_size,"
    " Tensor embedding, Tensor? embedding_scales, Tensor stack, Tensor frequencies,"
    " Tensor? amplitudes, Tensor head, Tensor? head_scales, Tensor? head_bias, int head_features,"
    " Tensor? target_ids) -> (Tensor, Tensor)",
)


# Inputs of decode and verify steps, and acceptance of drafts, as CPU operators (`draft_ops.h`).
#
# Rows have as many tokens as drafts they verify, and one more: there is no padding between them.
#
#     row                    4               1        counts 4 and 1, drafts (x y z) and none
#     tokens                 e  x  y  z      m
#     positions              4  5  6  7      8
#     query_start_loc        0               4   5
#     lanes by position      0  1  2  3      4        [tokens per row, rows]; a row that has fewer
#                                            4 4 4    tokens repeats its last one

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


torch.library.define(
    "stepgraph::drafted_inputs",
    "(Tensor rows, Tensor positions, Tensor stops, Tensor block_tables, int block_size, int first,"
    " int count) -> (Tensor, Tensor, Tensor)",
)


class DraftedInputs(NamedTuple):
    """The same number of tokens of each row."""

    positions: Tensor
    """int64 `[T]`; those without a slot have the last position with one."""
    slots: Tensor
    """int64 `[G, T]`: the write index; the null block for tokens without a slot."""
    token_rows: Tensor
    """int64 `[T]`: the row of each token."""


def drafted_inputs(
    rows_B: Tensor,
    positions_R: Tensor,
    stops_B: Tensor,
    block_tables: Tensor,
    block_size: int,
    first: int,
    count: int,
) -> DraftedInputs:
    """Return `count` tokens of each row, the first of them `first` after the row's position.

    `stops_B`: the first position of each row that has no slot. Runs on CPU after `load_cpu_ops`.
    Raises RuntimeError or IndexError for arguments that do not fit together.
    """
    return DraftedInputs(
        *torch.ops.stepgraph.drafted_inputs.default(
            rows_B, positions_R, stops_B, block_tables, block_size, first, count
        )
    )
