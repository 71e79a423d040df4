"""The samplers: plain torch, C++ operators for CPUs, Triton kernels for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.choice import SamplerName
from ..kernels.cpu.sampling import fused_full, fused_greedy
from ..kernels.ops.feedback import Feedback
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


def _triton_greedy(logits_BV: torch.Tensor, feed: Feedback | None = None) -> torch.Tensor:
    from ..kernels.triton.sampler import greedy_rows  # needs triton

    return greedy_rows(logits_BV, feed)


def _triton_full(
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    feed: Feedback | None = None,
) -> SampleOutput:
    """`sample_full` as two Triton kernels."""
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
    )
    return output


def _triton_full_step(
    logits_BV: torch.Tensor, state: SamplingState, feed: Feedback
) -> SampleOutput:
    return _triton_full(logits_BV, state, feed.rows, feed.positions, feed)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Functions that choose the tokens of a step."""

    greedy: Callable[..., torch.Tensor]
    """Signature of `sample_greedy`; with `takes_masks`, `LaneMasks` may follow."""
    full: Callable[..., SampleOutput]
    """Signature of `sample_full`; with `takes_masks`, `LaneMasks` may follow."""
    takes_masks: bool = False
    """Whether these and `drafted` apply token masks; others get logits from `mask_logits`."""
    greedy_step: Callable[[torch.Tensor, Feedback], torch.Tensor] | None = None
    """As `greedy`, with token feedback into the rows' state; None if not available."""
    full_step: Callable[[torch.Tensor, SamplingState, Feedback], SampleOutput] | None = None
    """As `full`, with token feedback into the rows' state; None if not available."""
    drafted: Callable[..., SampleOutput] | None = None
    """Signature of `sample_drafted`; with `takes_masks`, `LaneMasks` may follow. None: rows with
    penalties verify nothing."""


torch_sampler = Sampler(sample_greedy, sample_full, drafted=sample_drafted)
"""For every device; `torch.compile` fuses it."""

fused_sampler = Sampler(
    fused_greedy, _sample_full_fused, takes_masks=True, drafted=_sample_drafted_fused
)
"""For CPUs, after `load_cpu_ops`."""

triton_sampler = Sampler(
    _triton_greedy, _triton_full, greedy_step=_triton_greedy, full_step=_triton_full_step
)
"""For CUDA devices: two kernels for either, with token feedback. Needs triton."""

SAMPLERS: dict[SamplerName, Sampler] = {
    "torch": torch_sampler,
    "cpu": fused_sampler,
    "triton": triton_sampler,
}
"""The samplers by their name in `Kernels.sampler`."""
