"""The samplers of a GPU: two kernels for all sampling parameters, two for greedy sampling.

Shapes: B rows of the step, R rows of the state, V vocabulary. The references in plain torch are
`sample_full`, `sample_drafted` and `sample_greedy` in `runtime/sampling/reference_sampler.py`; with
masks, of logits after `mask_logits`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..ops.batch import Feedback
from ..ops.token_masks import MASK_BITS, LaneMasks
from .greedy import best_of_chunks, pick_greedy
from .kernel_calls import call_kernel
from .sampler_kernels import chunk_statistics, finish_rows

__all__ = ["full_rows", "greedy_rows"]

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


def _warps(chunks: int) -> int:
    """Return the warps of a program. 8 spill registers on sm_80 above 131,072 tokens."""
    return 8 if chunks <= 128 else 16


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
        reals: of a `SamplingState`, like the next two.
        integers: likewise.
        token_counts_RV: updated in place.
        rows_B: int64, row of each lane. Without `token_ids_BN`, a row with penalties may be named
            only once.
        positions_B: int64, position of the drawn token; with `feed`, the last input's.
        outputs: `tokens`, `logprob`, `top_ids` and `top_logprobs` of a `SampleOutput`, contiguous.
        feed: where the tokens go, too; its rows and positions are those above.
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
        num_warps=_warps(chunks),
        NUM_TOP=outputs[2].shape[1], BLOCK=block, SUB=run,
        CHUNKS=triton.next_power_of_2(chunks), ALL_RUNS=all_runs, CAP=capacity,
        LANES=max(_LEAST_LANES, triton.next_power_of_2(tokens_per_row)),
    )  # fmt: skip


def greedy_rows(
    logits_BV: Tensor, feed: Feedback | None = None, masks: LaneMasks | None = None
) -> Tensor:
    """Return the best token of each row, int64 `[B]`, of equal ones the lowest id; or `NON_FINITE`.

    With `masks`, of the tokens that they allow. With `feed` it becomes the row's newest.
    """
    maxima_BC, ids_BC = best_of_chunks(logits_BV.contiguous(), masks)
    return pick_greedy(maxima_BC, ids_BC, feed)
