"""What distinguishes the steps of an engine, and what each returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..models.drafters.drafter import Drafts
from ..sampling.sample_output import SampleOutput

__all__ = ["Phase", "StepKey", "StepOutput", "StepPart"]

Phase = Literal["decode", "prefill"]
StepPart = Literal["whole", "forward", "sample"]
"""On devices that run asynchronously, steps with token masks have two parts."""


@dataclass(frozen=True, slots=True)
class StepKey:
    """All host scalars that are constant in a captured step."""

    phase: Phase
    size: int
    """Bucket: rows of a decode step, tokens of a prefill step."""
    read_blocks: int
    """Columns of the block tables that attention may read."""
    full_sampler: bool
    """Whether any request in the step needs more than the greedy token."""
    steps: int = 1
    """Decode steps per launch, run in sequence; 1 for a prefill step."""
    tokens_per_row: int = 1
    """Tokens of each row of a decode step; 1 + k makes it a verify step of k drafts."""
    drafts: int = 0
    """Drafts of each row that the drafter proposes at the end of the step. In a prefill step it
    proposes for rows that sample."""
    masked: bool = False
    """Whether tokens are sampled with the masks of their rows."""
    part: StepPart = "whole"
    """`forward`: up to the logits, which it stores. `sample`: the rest; its size is the rows of a
    decode step, or the lanes of a prefill step."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Outputs of a step on the device. B: rows of a decode step, or chunks of a prefill step.

    For a launch of several decode steps, tokens and details are `[steps, B]` instead of `[B]`. For
    a verify step they are `[1 + k, B]`, and logits `[1 + k, B, vocab_size]`; or, without padding
    between rows, `[T, vocab_size]` row by row.
    """

    tokens: torch.Tensor
    """int64 `[B]`: sampled tokens; undefined for padded lanes, and after a forward part."""
    logits: torch.Tensor
    """`[B, vocab_size]` in the model's dtype: logits of the (last) step, before sampling. After a
    greedy step of a rank of a tensor-parallel group, those of its own tokens."""
    details: SampleOutput | None
    """Log-probabilities; only the full sampler returns them."""
    drafts: Drafts | None = None
    """What the drafter proposes to follow the newest token of each row."""
