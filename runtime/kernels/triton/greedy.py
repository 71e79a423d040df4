"""Greedy sampling: the best token of each chunk of the vocabulary, and of each row.

Token masks are applied where logits are read, as `mask_logits` in `runtime/kernels/ops/` does: bit
i % 32 of word i // 32 of a mask is set if token i may be sampled.

Shapes: T rows of the step, V vocabulary, C chunks of neighbouring tokens, of a program each, R rows
of the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.batch import NON_FINITE, Feedback
from ..ops.token_masks import LaneMasks
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear_tiles import largest_of

__all__ = [
    "best_of_chunks",
    "forbid",
    "masked_chunk",
    "pick_greedy",
]


@triton.jit
def forbid(logits, words, token):  # type: ignore[no-untyped-def]
    """The logits of tokens, -inf for those whose bit is not set. NaN and +inf of these become NaN,
    so that they are still detected. `words` holds the word of each token."""
    return tl.where(((words >> (token & 31)) & 1) != 0, logits, logits + float("-inf"))


@triton.jit
def masked_chunk(logits, words_ptr, chunk, token, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of the BLOCK tokens of a chunk after `forbid`, and whether the mask forbids any.

    Chunks of at least 32 tokens, or the only one. Where all bits are set, as in lanes without a
    grammar, the words are all that is read.
    """
    WORDS: tl.constexpr = (BLOCK + 31) // 32
    word = chunk * WORDS + tl.arange(0, WORDS)
    words = tl.load(words_ptr + word, mask=word < (V + 31) // 32, other=-1)
    restricted = tl.max((words != -1).to(tl.int32), 0)
    if restricted != 0:
        own = tl.load(words_ptr + (token >> 5), mask=token < V, other=-1)
        logits = forbid(logits, own, token)
    return logits, restricted


CHUNK = 1024
"""Tokens of a program."""


def best_of_chunks(logits_TV: Tensor, masks: LaneMasks | None = None) -> tuple[Tensor, Tensor]:
    """Return the largest of each chunk of 1024 contiguous logits and its token, `[T, C]`.

    Maxima are float32 (+inf if the chunk holds NaN), tokens int32, of equal logits the lowest. With
    `masks`, the largest of those that the mask of the lane allows.
    """
    tokens, vocab_size = logits_TV.shape
    assert logits_TV.is_contiguous()
    chunks = triton.cdiv(vocab_size, CHUNK)
    maxima_TC = torch.empty(tokens, chunks, dtype=torch.float32, device=logits_TV.device)
    ids_TC = torch.empty(tokens, chunks, dtype=torch.int32, device=logits_TV.device)
    call_kernel(
        _best_of_chunks,
        (tokens, chunks),
        logits_TV,
        maxima_TC,
        ids_TC,
        *((None, None, 0) if masks is None else (*masks, masks.bits.stride(0))),
        vocab_size,
        CHUNK=CHUNK,
    )
    return maxima_TC, ids_TC


@triton.jit
def _best_of_chunks(  # type: ignore[no-untyped-def]
    logits_ptr, best_ptr, best_id_ptr, words_ptr, mask_rows_ptr, words_stride, V,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): finds the largest logit that is allowed."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    pointers = logits_ptr + row.to(tl.int64) * V + token
    logits = tl.load(pointers, mask=token < V, other=0.0).to(tl.float32)
    if words_ptr is not None:
        words_ptr += tl.load(mask_rows_ptr + row) * words_stride
        logits, _ = masked_chunk(logits, words_ptr, chunk, token, V, CHUNK)
    best, best_id = largest_of(logits, token, V, axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + place, best)
    tl.store(best_id_ptr + place, best_id)


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
