"""The samplers: plain torch, C++ operators for CPUs, Triton kernels for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.choice import SamplerName
from ..kernels.cpu.sampling import fused_full, fused_greedy
from ..kernels.ops.batch import Feedback
from ..kernels.ops.token_masks import LaneMasks
from ..sampling_params import MAX_LOGPROBS
from .reference_sampler import sample_drafted, sample_full, sample_greedy
from .sample_output import SampleOutput
from .sampling_state import SamplingState

__all__ = ["SAMPLERS", "Sampler", "fused_sampler", "torch_sampler", "triton_sampler"]


def _sample_full_fused(
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    masks: LaneMasks | None = None,
    inputs_B: torch.Tensor | None = None,
) -> SampleOutput:
    """`sample_full`, or with the tokens that lanes follow `sample_drafted`, as one C++ operator."""
    return SampleOutput(
        *fused_full(
            logits_BV,
            state.reals,
            state.integers,
            state.token_counts,
            rows_B,
            positions_B,
            min(MAX_LOGPROBS, logits_BV.shape[1]),
            masks,
            inputs_B,
        )
    )


def _sample_drafted_fused(
    logits_TV: torch.Tensor,
    state: SamplingState,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    token_ids_BN: torch.Tensor,
    masks: LaneMasks | None = None,
) -> SampleOutput:
    return _sample_full_fused(logits_TV, state, rows_T, positions_T, masks, token_ids_BN.flatten())


def _triton_greedy(logits_BV: torch.Tensor, masks: LaneMasks | None = None) -> torch.Tensor:
    from ..kernels.triton.sampler import greedy_rows  # needs triton

    return greedy_rows(logits_BV, masks=masks)


def _triton_greedy_step(
    logits_BV: torch.Tensor, feed: Feedback, masks: LaneMasks | None = None
) -> torch.Tensor:
    from ..kernels.triton.sampler import greedy_rows  # needs triton

    return greedy_rows(logits_BV, feed, masks)


def _triton_full(
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    masks: LaneMasks | None = None,
    *,
    feed: Feedback | None = None,
    token_ids_BN: torch.Tensor | None = None,
) -> SampleOutput:
    """`sample_full`, or with the tokens of a verify step `sample_drafted`, as two kernels."""
    from ..kernels.triton.sampler import full_rows  # needs triton

    rows, vocab_size = logits_BV.shape
    tops = min(MAX_LOGPROBS, vocab_size)
    size = SampleOutput.packed_bytes(rows, tops)
    packed = torch.empty(size, dtype=torch.uint8, device=logits_BV.device)
    output = SampleOutput.unpack(packed, rows, tops)
    full_rows(
        logits_BV,
        state.reals,
        state.integers,
        state.token_counts,
        rows_B,
        positions_B,
        (output.tokens, output.logprob, output.top_ids, output.top_logprobs),
        feed,
        masks,
        token_ids_BN,
    )
    return output


def _triton_full_step(
    logits_BV: torch.Tensor,
    state: SamplingState,
    feed: Feedback,
    masks: LaneMasks | None = None,
) -> SampleOutput:
    return _triton_full(logits_BV, state, feed.rows, feed.positions, masks, feed=feed)


def _triton_drafted(
    logits_TV: torch.Tensor,
    state: SamplingState,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    token_ids_BN: torch.Tensor,
    masks: LaneMasks | None = None,
) -> SampleOutput:
    return _triton_full(logits_TV, state, rows_T, positions_T, masks, token_ids_BN=token_ids_BN)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Functions that choose the tokens of a step."""

    greedy: Callable[..., torch.Tensor]
    """Signature of `sample_greedy`; with `takes_masks`, `LaneMasks` may follow."""
    full: Callable[..., SampleOutput]
    """Signature of `sample_full`; with `takes_masks`, `LaneMasks` may follow."""
    drafted: Callable[..., SampleOutput]
    """Signature of `sample_drafted`; with `takes_masks`, `LaneMasks` may follow."""
    takes_masks: bool = False
    """Whether all functions apply token masks; others get logits from `mask_logits`."""
    greedy_step: Callable[..., torch.Tensor] | None = None
    """As `greedy`, with `Feedback` after the logits: tokens go to the rows' state, too; None if not
    available."""
    full_step: Callable[..., SampleOutput] | None = None
    """As `full`, with `Feedback` in the place of rows and positions, which it holds; None if not
    available."""


torch_sampler = Sampler(sample_greedy, sample_full, sample_drafted)
"""For every device; `torch.compile` fuses it."""

fused_sampler = Sampler(fused_greedy, _sample_full_fused, _sample_drafted_fused, takes_masks=True)
"""For CPUs, after `load_cpu_ops`."""

triton_sampler = Sampler(
    _triton_greedy,
    _triton_full,
    _triton_drafted,
    takes_masks=True,
    greedy_step=_triton_greedy_step,
    full_step=_triton_full_step,
)
"""For CUDA devices: two kernels for either, with token feedback. Needs triton."""

SAMPLERS: dict[SamplerName, Sampler] = {
    "torch": torch_sampler,
    "cpu": fused_sampler,
    "triton": triton_sampler,
}
"""The samplers by their name in `Kernels.sampler`."""
