"""Token counts of rows with penalties in a verify step: `sample_drafted` in `runtime/sampling/`.

Lane b of a verify step follows the token `inputs[b]`; N lanes belong to a row, the first of which
follows its newest token and the others its drafts. Lanes of padding come last, with another row.

While lanes are drawn, the counts of a row are those of the tokens before the step: each lane adds
the drafts that precede it to what it reads. In the end the last lane of the row counts what was
accepted.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_drafts", "count_accepted"]


@triton.jit
def add_drafts(  # type: ignore[no-untyped-def]
    counts, token, start, inputs_ptr, lane, N, BLOCK: tl.constexpr
):  # fmt: skip
    """The counts of the BLOCK tokens from `start` on, with the drafts that precede a lane."""
    step = lane % N
    for number in range(1, step + 1):
        draft = tl.load(inputs_ptr + lane - step + number).to(tl.int32)
        if (draft >= start) & (draft < start + BLOCK):
            counts += (token == draft).to(tl.int32)
    return counts


@triton.jit
def count_accepted(  # type: ignore[no-untyped-def]
    lane, row, tokens_ptr, rows_ptr, inputs_ptr, counts_ptr, arrived_ptr, N, LANES: tl.constexpr
):  # fmt: skip
    """Count the token of this lane as drawn; the last lane of the row adds the accepted tokens, and
    the one after them, to its counts. At `arrived_ptr` there is a 0 for each row; LANES >= N.

    What a lane stored is visible to the last one: the barrier puts the stores of its threads before
    the count, which releases them and acquires those of the lanes that were counted before (PTX
    ISA, "Memory Consistency Model"); the second barrier holds back the other threads. Their tokens
    are not loaded by L1, which other processors do not write to.
    """
    first = lane - lane % N
    i = tl.arange(0, LANES)
    of_row = tl.load(rows_ptr + first + i, mask=i < N, other=-1) == row
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + lane // N, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if before == tl.sum(of_row.to(tl.int32), 0) - 1:
        tokens = tl.load(tokens_ptr + first + i, mask=of_row, other=-1, cache_modifier=".cg")
        drafts = tl.load(inputs_ptr + first + i + 1, mask=of_row & (i + 1 < N), other=-1)
        right = of_row & (tokens == drafts) & (tokens >= 0)
        wrong = tl.min(tl.where(right, LANES, i), 0)
        kept = of_row & (i <= wrong) & (tokens >= 0)
        tl.atomic_add(counts_ptr + tokens, 1, mask=kept, sem="relaxed")
