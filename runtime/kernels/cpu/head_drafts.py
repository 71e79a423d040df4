"""All that a drafter of features computes in a step, as one operator of a CPU (`head_ops.h`).

Shapes: B rows of the step, R rows of the state, T tokens, F features, D hidden_size, E half of
head_dim, V tokens of the drafter, K drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.batch import RaggedBatch

__all__ = ["HeadWeights", "head_drafts"]

torch.library.define(
    "stepgraph::head_drafts",
    "(Tensor features, Tensor token_ids, Tensor next_ids, Tensor positions, Tensor slots,"
    " Tensor token_rows, Tensor rows, Tensor row_positions, Tensor first, Tensor stops,"
    " Tensor block_tables, int read_blocks, int block_size, Tensor(a!) arena, int count,"
    " Tensor fuse, Tensor? fuse_scales, Tensor? input_norm, float eps, int hidden_size,"
    " Tensor embedding, Tensor? embedding_scales, Tensor stack, Tensor frequencies,"
    " Tensor? amplitudes, Tensor head, Tensor? head_scales, Tensor? head_bias, int head_features,"
    " Tensor? target_ids) -> (Tensor, Tensor)",
)


class HeadWeights(NamedTuple):
    """What does not change between steps. Weights of linear layers are packed."""

    fuse: Tensor
    """Of features to the hidden size."""
    fuse_scales: Tensor | None
    """Of an int8 weight, as the other scales."""
    input_norm: Tensor | None
    """`[D]`: of hidden states before the layers."""
    eps: float
    """Of this norm."""
    hidden_size: int
    embedding: Tensor
    embedding_scales: Tensor | None
    stack: Tensor
    """Handle of the layers, which take hidden states and embeddings; see `ops/stack.py`."""
    frequencies: Tensor
    """float32 `[kinds, E]`: of its rotations."""
    amplitudes: Tensor | None
    """float32 `[kinds, 1, E]`: factors of its cosines and sines; None: 1."""
    head: Tensor
    """Output projection."""
    head_scales: Tensor | None
    head_bias: Tensor | None
    head_features: int
    """V."""
    target_ids: Tensor | None
    """int64 `[V]`: tokens of the target; None: the same."""


def head_drafts(
    features_TF: Tensor,
    token_ids_T: Tensor,
    next_ids_T: Tensor,
    batch: RaggedBatch,
    rows_B: Tensor,
    positions_R: Tensor,
    first_B: Tensor,
    stops_B: Tensor,
    arena: Tensor,
    count: int,
    weights: HeadWeights,
) -> tuple[Tensor, Tensor]:
    """Return `count` drafts of each row, int64 `[B, K]`, and their probabilities, float32 `[B, K]`.

    Tokens, rows, positions and stops are those of `newest_tokens` and `drafted_inputs`, the batch
    is that of the tokens. Keys and values of these, and of all drafts but the last, are stored.
    Runs on CPU after `load_cpu_ops`. Raises RuntimeError or IndexError for arguments that do not
    fit together.
    """
    drafts_BK, probabilities_BK = torch.ops.stepgraph.head_drafts.default(
        features_TF,
        token_ids_T,
        next_ids_T,
        batch.positions,
        batch.slots,
        batch.token_rows,
        rows_B,
        positions_R,
        first_B,
        stops_B,
        batch.block_tables,
        batch.read_blocks,
        batch.block_size,
        arena,
        count,
        *weights,
    )
    return drafts_BK, probabilities_BK
