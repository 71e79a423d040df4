"""The tokens that a drafter computes next, as an operator of a CPU (`draft_ops.h`).

Shapes: B rows of the step, R rows of the state, T = B * count tokens, G layer groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DraftedInputs", "drafted_inputs"]

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
