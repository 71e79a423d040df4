"""The tokens of verify steps and of drafters, as operators of a CPU (`draft_ops.h`).

Shapes: B rows of the step, R rows of the state, T tokens, G layer groups, K drafts.
"""

from __future__ import annotations

import torch

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
    " Tensor fuse, Tensor? input_norm, float eps, int hidden_size, Tensor embedding, Tensor stack,"
    " Tensor frequencies, Tensor? amplitudes, Tensor head, Tensor? head_bias, int head_features,"
    " Tensor? target_ids) -> (Tensor, Tensor)",
)


# Inputs of decode and verify steps, acceptance of drafts, and inputs of drafters (`draft_ops.h`).
#
# Rows have as many tokens as drafts they verify, and one more: there is no padding between them.
#
#     row                    4               1        counts 4 and 1, drafts (x y z) and none
#     tokens                 e  x  y  z      m
#     positions              4  5  6  7      8
#     query_start_loc        0               4   5
#     lanes by position      0  1  2  3      4        [1 + K, B]; a row that has fewer tokens
#                                            4 4 4    repeats its last one
#
# `row_inputs` returns tokens, positions, write index `[G, T]`, the row of each token and
# `query_start_loc`. `advance_rows` advances each row by its accepted drafts and the token after
# them, as `Feedback`, and returns the lanes by position. In `stored`, of models with recurrent
# state, it notes the block of each row's first token, whose snapshot the step has stored.
#
# `drafted_inputs` returns the positions, write index and rows of `count` tokens of each row, the
# first of them `first` after the row's position. Tokens at `stops` or later have no slot: they have
# the last position with one, and are written to the null block.
#
# The operators raise RuntimeError or IndexError for arguments that do not fit together. Shapes: B
# rows of the step, K drafts, T tokens, G layer groups.

torch.library.define(
    "stepgraph::row_inputs",
    "(Tensor rows, Tensor drafts, Tensor counts, Tensor token_ids, Tensor positions, "
    "Tensor block_tables, int block_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)

torch.library.define(
    "stepgraph::advance_rows",
    "(Tensor tokens, Tensor rows, Tensor drafts, Tensor counts, Tensor(a!) token_ids, "
    "Tensor(b!) positions, Tensor(c!)? stored, int block_size) -> Tensor",
)

torch.library.define(
    "stepgraph::drafted_inputs",
    "(Tensor rows, Tensor positions, Tensor stops, Tensor block_tables, int block_size, int first,"
    " int count) -> (Tensor, Tensor, Tensor)",
)
