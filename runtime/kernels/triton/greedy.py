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

from ..ops.feedback import NON_FINITE, Feedback
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs

__all__ = ["pick_greedy", "reference_pick_greedy"]


def pick_greedy(maxima_TC: Tensor, ids_TC: Tensor, feed: Feedback | None = None) -> Tensor:
    """Return the best token of each row, int64 `[T]`; of equal ones the lowest id.

    `NON_FINITE` where a maximum is +inf or all of them are -inf.

    Args:
        maxima_TC: float32, the largest logit of each chunk, +inf if the chunk holds NaN.
        ids_TC: int32, its token; chunks are in the order of the vocabulary.
        feed: where the tokens go, too.
    """
    rows, chunks = maxima_TC.shape
    tokens_T = torch.empty(rows, dtype=torch.int64, device=maxima_TC.device)
    call_kernel(
        _pick_greedy,
        (rows,),
        maxima_TC,
        ids_TC,
        *((None,) * 4 if feed is None else feed),
        tokens_T,
        chunks,
        0 if feed is None else feed.token_ids.shape[0] - 1,
        BLOCK=min(1024, triton.next_power_of_2(chunks)),
    )
    return tokens_T


def reference_pick_greedy(
    maxima_TC: Tensor, ids_TC: Tensor, feed: Feedback | None = None
) -> Tensor:
    """What `pick_greedy` does, in plain torch."""
    best_T, chunks_T = maxima_TC.max(-1)
    ids_T = ids_TC.gather(1, chunks_T[:, None])[:, 0].to(torch.int64)
    tokens_T = torch.where(best_T.isfinite(), ids_T, NON_FINITE)
    if feed is not None:
        feed.store(tokens_T)
    return tokens_T


_NON_FINITE = tl.constexpr(NON_FINITE)


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
    sound = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(tokens_ptr + token, tl.where(sound, picked, _NON_FINITE))
    if rows_ptr is not None:
        row = tl.load(rows_ptr + token)
        position = tl.load(positions_ptr + token) + 1
        tl.store(token_ids_ptr + row, tl.where(sound, picked, 0))
        tl.store(state_positions_ptr + row, tl.where(row == null_row, 0, position))
