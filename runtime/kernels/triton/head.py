"""The head of a decode step: final norm, logits, and the best token of each chunk and of each row.

Token masks are applied where logits are read, as `mask_logits` in `runtime/kernels/ops/` does: bit
i % 32 of word i // 32 of a mask is set if token i may be sampled.

Shapes: T rows of the step, D hidden size, V vocabulary, C chunks of neighbouring tokens, of a
program each, R rows of the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.batch import NON_FINITE, Feedback
from ..ops.token_masks import LaneMasks
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import FEW_ROWS, GpuLinear, GpuNorm, LinearConfig, Pending
from .linear_kernels import dispatch_linear, reference_norm_linear
from .linear_tiles import capped, largest_of, scaled
from .matmul import library_linear
from .rowwise import norm_rows
from .tuning import best_config

__all__ = [
    "best_of_chunks",
    "forbid",
    "head",
    "masked_chunk",
    "pick_greedy",
    "reference_head",
    "reference_softcap",
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
"""Tokens of a program where the library makes the logits."""


def head(
    x_TD: Tensor,
    norm: GpuNorm,
    linear: GpuLinear,
    softcap: float = 0.0,
    pending: Pending | None = None,
    config: LinearConfig | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits `[T, V]`, and of each chunk the largest and its token, `[T, C]`.

    Logits are in the model's dtype, times `scale`, then with `softcap` (0: none) as softcap *
    tanh(l / softcap); maxima are float32 (+inf if the chunk holds NaN), tokens int32, of equal
    logits the lowest. More than four rows use the library's product with a kernel before and one
    after it.
    """
    tokens, (vocab_size, hidden_size) = x_TD.shape[0], linear.weight.shape
    logits_TV = x_TD.new_empty(tokens, vocab_size)
    if tokens <= FEW_ROWS:
        if config is None:
            shape = (vocab_size, hidden_size, x_TD.dtype, linear.weight.dtype, x_TD.device)
            config = best_config("head", tokens, *shape, pending=pending is not None)
        chunks = triton.cdiv(vocab_size, config.block_n)
        best = _best(tokens, chunks, x_TD.device)
        dispatch_linear(
            "head",
            x_TD,
            linear,
            logits_TV,
            config,
            norm=norm,
            pending=pending,
            scale=scale,
            softcap=softcap,
            best=best,
        )
        return logits_TV, *best
    normed_TD = torch.empty_like(x_TD)
    norm_rows(x_TD, norm, normed_TD, pending)
    library_linear(normed_TD, linear, logits_TV)
    return logits_TV, *best_of_chunks(logits_TV, softcap, scale=scale)


def best_of_chunks(
    logits_TV: Tensor,
    softcap: float = 0.0,
    *,
    scale: float = 1.0,
    masks: LaneMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each chunk of 1024 and its token, as `head` does.

    With `scale` or `softcap` contiguous logits are scaled and capped in place first. With `masks`,
    the largest of those that the mask of the lane allows.
    """
    tokens, vocab_size = logits_TV.shape
    assert logits_TV.is_contiguous()
    chunks = triton.cdiv(vocab_size, CHUNK)
    maxima_TC, ids_TC = _best(tokens, chunks, logits_TV.device)
    call_kernel(
        _best_of_chunks,
        (tokens, chunks),
        logits_TV,
        maxima_TC,
        ids_TC,
        *((None, None, 0) if masks is None else (*masks, masks.bits.stride(0))),
        vocab_size,
        CHUNK=CHUNK,
        SCALE=scale,
        SOFTCAP=softcap,
    )
    return maxima_TC, ids_TC


def _best(tokens: int, chunks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the best of each chunk."""
    maxima_TC = torch.empty(tokens, chunks, dtype=torch.float32, device=device)
    return maxima_TC, torch.empty(tokens, chunks, dtype=torch.int32, device=device)


@triton.jit
def _best_of_chunks(  # type: ignore[no-untyped-def]
    logits_ptr, best_ptr, best_id_ptr, words_ptr, mask_rows_ptr, words_stride, V,
    CHUNK: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): scales and caps the logits in place, and finds the largest allowed."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    pointers = logits_ptr + row.to(tl.int64) * V + token
    logits = tl.load(pointers, mask=token < V, other=0.0).to(tl.float32)
    logits = scaled(logits, SCALE, dtype)
    if SOFTCAP > 0.0:
        logits = capped(logits, SOFTCAP, dtype)
    if SOFTCAP > 0.0 or SCALE != 1.0:
        logits = logits.to(dtype)
        tl.store(pointers, logits, mask=token < V)
        logits = logits.to(tl.float32)
    if words_ptr is not None:
        words_ptr += tl.load(mask_rows_ptr + row) * words_stride
        logits, _ = masked_chunk(logits, words_ptr, chunk, token, V, CHUNK)
    best, best_id = largest_of(logits, token, V, axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + place, best)
    tl.store(best_id_ptr + place, best_id)


def reference_head(
    x_TD: Tensor,
    norm: GpuNorm,
    linear: GpuLinear,
    softcap: float = 0.0,
    pending: Pending | None = None,
    chunk: int = 128,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `head` does, in plain torch, with chunks of `chunk` tokens."""
    logits_TV = reference_norm_linear(x_TD, norm, linear, pending) * scale
    if softcap:
        logits_TV = reference_softcap(logits_TV, softcap)
    parts = logits_TV.float().split(chunk, dim=1)
    best = [part.max(-1) for part in parts]
    maxima_TC = torch.stack([values for values, _ in best], dim=1)
    maxima_TC = maxima_TC.masked_fill(maxima_TC.isnan(), torch.inf)
    ids = [indices + i * chunk for i, (_, indices) in enumerate(best)]
    return logits_TV, maxima_TC, torch.stack(ids, dim=1).to(torch.int32)


def reference_softcap(logits: Tensor, softcap: float) -> Tensor:
    """Return softcap * tanh(logits / softcap) in plain torch, rounded once."""
    return (torch.tanh(logits.float() / softcap) * softcap).to(logits.dtype)


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
