"""The end of a greedy decode step: the best token of each row, made the row's newest.

Shapes: T rows of the step, V vocabulary, C chunks of neighbouring tokens, R rows of the state.

The head leaves the largest logit of each chunk and its token (`head.py`), so what is left to look
at is small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, let_dependents_start, wait_for_inputs

__all__ = ["pick_greedy", "reference_pick_greedy"]


def pick_greedy(
    maxima_TC: Tensor,
    ids_TC: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    token_ids_R: Tensor,
    positions_R: Tensor,
) -> Tensor:
    """Return the best token of each row, int64 `[T]`; of equal ones the lowest id.

    It becomes the row's newest token in the state, at the next position; the null row, the last one
    of the state, stays at position 0. A row of nothing but NaN gets some id of the vocabulary.

    Args:
        maxima_TC: float32, the largest logit of each chunk.
        ids_TC: int32, its token; chunks are in the order of the vocabulary.
        rows_T: int64, row of the state.
        positions_T: int64, position of each row's last input.
        token_ids_R: int64, written.
        positions_R: int64, written.
    """
    tokens_T = torch.empty_like(rows_T)
    chunks = maxima_TC.shape[1]
    launch(
        _pick_greedy,
        (rows_T.shape[0],),
        maxima_TC,
        ids_TC,
        rows_T,
        positions_T,
        token_ids_R,
        positions_R,
        tokens_T,
        chunks,
        token_ids_R.shape[0] - 1,
        BLOCK=min(1024, triton.next_power_of_2(chunks)),
    )
    return tokens_T


def reference_pick_greedy(
    maxima_TC: Tensor,
    ids_TC: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    token_ids_R: Tensor,
    positions_R: Tensor,
) -> Tensor:
    """What `pick_greedy` does, in plain torch."""
    tokens_T = ids_TC.gather(1, maxima_TC.argmax(-1, keepdim=True))[:, 0].to(torch.int64)
    null_row = token_ids_R.shape[0] - 1
    token_ids_R.index_put_((rows_T,), tokens_T)
    positions_R.index_put_((rows_T,), torch.where(rows_T == null_row, 0, positions_T + 1))
    return tokens_T


@triton.jit
def _pick_greedy(  # type: ignore[no-untyped-def]
    maxima_ptr,
    ids_ptr,
    rows_ptr,
    positions_ptr,
    token_ids_ptr,
    state_positions_ptr,
    tokens_ptr,
    chunks,
    null_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, chunks, BLOCK):
        at = start + lane
        inside = at < chunks
        value = tl.load(maxima_ptr + token * chunks + at, mask=inside, other=float("-inf"))
        better = value > best  # no later chunk replaces an equal one
        best = tl.where(better, value, best)
        best_at = tl.where(better, at, best_at)
    largest = tl.max(best, 0)
    chunk = tl.min(tl.where(best == largest, best_at, chunks - 1), 0)
    picked = tl.load(ids_ptr + token * chunks + chunk).to(tl.int64)
    row = tl.load(rows_ptr + token)
    position = tl.load(positions_ptr + token) + 1
    tl.store(tokens_ptr + token, picked)
    tl.store(token_ids_ptr + row, picked)
    tl.store(state_positions_ptr + row, tl.where(row == null_row, 0, position))
