"""The samplers of a GPU: two kernels for all sampling parameters, two for greedy sampling.

Shapes: B rows of the step, R rows of the state, V vocabulary, C chunks of neighbouring tokens.
The references in plain torch are `sample_full`, `sample_drafted` and `sample_greedy` in
`runtime/sampling/reference_sampler.py`; with masks, of logits after `mask_logits`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...mask_words import MASK_BITS
from ..ops.batch import NON_FINITE, Feedback
from ..ops.token_masks import LaneMasks
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .sampler_kernels import chunk_statistics, finish_rows, masked_chunk

_CHUNK = 1024
"""Tokens of a program that reads logits: 126 programs for one row of a vocabulary of 128k."""

_MOST_RUN = 128
"""Tokens of a run, the unit that is read or skipped as a whole."""

_LEAST_RUNS = 128
"""Groups of runs in the search for the top tokens."""

_CAPACITY = 4096
"""Weights that a program holds while it searches a threshold."""

_LEAST_LANES = 16
"""Tokens of a row of a verify step: up to as many have the same kernels."""


def full_rows(
    logits_BV: Tensor,
    reals: Tensor,
    integers: Tensor,
    token_counts_RV: Tensor,
    rows_B: Tensor,
    positions_B: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    feed: Feedback | None = None,
    masks: LaneMasks | None = None,
    token_ids_BN: Tensor | None = None,
) -> None:
    """Draw a token for each row by its sampling parameters, and count it; as `sample_full`, or with
    the tokens of a verify step as `sample_drafted`.

    Args:
        logits_BV: of any floating dtype that Triton knows; the vocabulary is contiguous.
        reals: of a `SamplingState`, like the next two; counts are updated in place.
        integers: see `reals`.
        token_counts_RV: see `reals`.
        rows_B: int64, row of each lane. Without `token_ids_BN`, a row with penalties may be named
            only once.
        positions_B: int64, position of the drawn token; with `feed`, the last input's.
        outputs: `tokens`, `logprob`, `top_ids` and `top_logprobs` of a `SampleOutput`, contiguous.
        feed: where the tokens go, too; its rows and positions are `rows_B` and `positions_B`.
        masks: the tokens that each lane may sample.
        token_ids_BN: int64, contiguous: the tokens that the lanes follow, row by row.
    """
    lanes, vocab_size = logits_BV.shape
    assert logits_BV.stride(1) == 1 or vocab_size == 1
    block = min(_CHUNK, max(16, triton.next_power_of_2(vocab_size)))
    run = max(1, min(_MOST_RUN, triton.next_power_of_2(vocab_size) // _LEAST_RUNS))
    chunks = triton.cdiv(vocab_size, block)
    runs = chunks * block // run
    all_runs = max(_LEAST_RUNS, triton.next_power_of_2(runs))
    capacity = min(_CAPACITY, all_runs * run)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_BV.device)

    wanted = empty(lanes, chunks * block)
    raw_maxima, maxima, sums, masses = (empty(lanes, runs) for _ in range(4))
    raw_chunks, raw_totals, best_chunks = (empty(lanes, chunks) for _ in range(3))
    lists = empty(lanes, 2, runs, dtype=torch.int32)
    found = empty(lanes, capacity, dtype=torch.int32)
    inputs: tuple[Tensor | int | None, ...] = (None, None, 0)
    tokens_per_row = 0
    if token_ids_BN is not None:
        rows, tokens_per_row = token_ids_BN.shape
        assert token_ids_BN.is_contiguous()
        assert rows * tokens_per_row == lanes
        inputs = (token_ids_BN, empty(rows, dtype=torch.int32), tokens_per_row)
    own: tuple[Tensor | int | None, ...] = (None, None, 0, None)
    if masks is not None:
        assert masks.bits.stride(1) == 1 or vocab_size <= MASK_BITS
        restricted = empty(lanes, chunks, dtype=torch.int32)
        own = (*masks, masks.bits.stride(0), restricted)
    given = (logits_BV, reals, integers, token_counts_RV, rows_B, positions_B, wanted)
    statistics = (raw_maxima, maxima, sums, raw_chunks, raw_totals, best_chunks)
    advance = 0 if feed is None else 1
    call_kernel(
        chunk_statistics, (lanes, chunks),
        *given, *statistics, *inputs, *own, vocab_size, logits_BV.stride(0), advance,
        BLOCK=block, SUB=run,
    )  # fmt: skip
    call_kernel(
        finish_rows, (lanes, 2),
        *given, *statistics, *inputs, *own, lists, masses, found, *outputs,
        *((None, None) if feed is None else (feed.token_ids, feed.state_positions)),
        vocab_size, logits_BV.stride(0), advance, chunks, reals.shape[0] - 1,
        num_warps=8 if chunks <= 128 else 16,  # 8 spill registers on sm_80 above 131,072 tokens
        NUM_TOP=outputs[2].shape[1], BLOCK=block, SUB=run,
        CHUNKS=triton.next_power_of_2(chunks), ALL_RUNS=all_runs, CAP=capacity,
        LANES=max(_LEAST_LANES, triton.next_power_of_2(tokens_per_row)),
    )  # fmt: skip


# Greedy ------------------------------------------------------------------------------------------


def greedy_rows(
    logits_BV: Tensor, feed: Feedback | None = None, masks: LaneMasks | None = None
) -> Tensor:
    """Return the best token of each row, int64 `[B]`, of equal ones the lowest id; or `NON_FINITE`.

    With `masks`, of the tokens that they allow. With `feed` it becomes the row's newest.
    """
    logits_BV = logits_BV.contiguous()
    (rows, vocab_size), device = logits_BV.shape, logits_BV.device
    chunks = triton.cdiv(vocab_size, _CHUNK)
    maxima_BC = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    ids_BC = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    call_kernel(
        _best_of_chunks, (rows, chunks),
        logits_BV, maxima_BC, ids_BC,
        *((None, None, 0) if masks is None else (*masks, masks.bits.stride(0))), vocab_size,
        CHUNK=_CHUNK,
    )  # fmt: skip
    call_kernel(
        _pick_greedy, (rows,),
        maxima_BC, ids_BC, *((None,) * 4 if feed is None else feed), tokens_B, chunks,
        0 if feed is None else feed.token_ids.shape[0] - 1,
        BLOCK=min(1024, triton.next_power_of_2(chunks)),
    )  # fmt: skip
    return tokens_B


_NON_FINITE = tl.constexpr(NON_FINITE)


@triton.jit
def _best_of_chunks(  # type: ignore[no-untyped-def]
    logits_ptr, best_ptr, best_id_ptr, words_ptr, mask_rows_ptr, words_stride, V,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the largest logit that is allowed, +inf for NaN, of equal ones the
    first."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    pointers = logits_ptr + row.to(tl.int64) * V + token
    logits = tl.load(pointers, mask=token < V, other=0.0).to(tl.float32)
    if words_ptr is not None:
        words_ptr += tl.load(mask_rows_ptr + row) * words_stride
        logits, _ = masked_chunk(logits, words_ptr, chunk, token, V, CHUNK)
    logits = tl.where(logits == logits, logits, float("inf"))
    logits = tl.where(token < V, logits, float("-inf"))
    largest = tl.max(logits, axis=0, keep_dims=True)
    best_id = tl.min(tl.where((logits == largest) & (token < V), token, V - 1), axis=0)
    best = tl.max(logits, axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + place, best)
    tl.store(best_id_ptr + place, best_id)


@triton.jit
def _pick_greedy(  # type: ignore[no-untyped-def]
    maxima_ptr, ids_ptr, rows_ptr, positions_ptr, token_ids_ptr, state_positions_ptr, tokens_ptr,
    chunks, null_row, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the token of the largest maximum, fed back where there is a feed."""
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
