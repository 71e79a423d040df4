"""Sampling at several positions of a row in one step, each given the drafts before it."""

from __future__ import annotations

import torch

from .sample_output import SampleOutput
from .samplers import Sampler
from .sampling_state import SamplingState

__all__ = ["sample_drafts"]


def sample_drafts(
    sampler: Sampler,
    logits_NBV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_BN: torch.Tensor,
    drafts_BK: torch.Tensor,
) -> SampleOutput:
    """Draw the token that follows each position, as `sampler.full` draws it one by one.

    At position j a row's penalties have counted its first j drafts. Counts are the row's own again
    at the end: `SamplingState.count` adds the tokens that are accepted. N = 1 + K.

    Args:
        sampler: draws.
        logits_NBV: of each position of each row.
        state: parameters and counts of all rows.
        rows_B: int64, row of each lane.
        positions_BN: int64, position of each token of a row.
        drafts_BK: int64, the tokens after the first one.

    Returns:
        Fields with a dimension of positions before all others, `[N, B, ...]`.
    """
    outputs: list[SampleOutput] = []
    drafts = drafts_BK.unbind(1)
    for index, (logits_BV, positions_B) in enumerate(
        zip(logits_NBV, positions_BN.unbind(1), strict=True)
    ):
        if index:
            state.count(rows_B, drafts[index - 1], 1)
        output = sampler.full(logits_BV.contiguous(), state, rows_B, positions_B + 1)
        state.count(rows_B, output.tokens, -1)
        outputs.append(output)
    for drafts_B in drafts:
        state.count(rows_B, drafts_B, -1)
    return SampleOutput.stack(outputs)
