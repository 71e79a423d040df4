"""The samplers: plain torch, C++ operators for CPUs, Triton kernels for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.choice import SamplerName
from ..kernels.cpu.sampling import fused_greedy
from ..kernels.ops.batch import Feedback
from ..kernels.ops.token_masks import LaneMasks
from ..sampling_params import MAX_LOGPROBS
from .reference_sampler import (
    SampleOutput,
    sample_drafted,
    sample_full,
    sample_greedy,
    sample_lanes,
)
from .sampling_state import SamplingState


def _torch_greedy(logits_BV: torch.Tensor, masks: None = None) -> torch.Tensor:
    return sample_greedy(logits_BV)


def _torch_full(
    logits_TV: torch.Tensor,
    state: SamplingState,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    masks: None = None,
    token_ids: torch.Tensor | None = None,
    place_T: torch.Tensor | None = None,
) -> SampleOutput:
    """With `place_T`, the results of `drafted_lanes` are given, as compiled code needs."""
    lanes = logits_TV, state, rows_T, positions_T
    if token_ids is None:
        return sample_full(*lanes)
    if place_T is None:
        return sample_drafted(*lanes, token_ids)
    return sample_lanes(*lanes, token_ids, place_T)


def _fused_full(
    logits_TV: torch.Tensor,
    state: SamplingState,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    masks: LaneMasks | None = None,
    token_ids: torch.Tensor | None = None,
) -> SampleOutput:
    """One C++ operator. Raises RuntimeError or IndexError for what does not fit together."""
    return SampleOutput(
        *torch.ops.stepgraph.sample_full.default(
            *(logits_TV, state.reals, state.integers, state.token_counts, rows_T, positions_T),
            None if token_ids is None else token_ids.flatten(),
            min(MAX_LOGPROBS, logits_TV.shape[1]),
            *(masks or ()),
        )
    )


def _triton_greedy(
    logits_BV: torch.Tensor, masks: LaneMasks | None = None, feed: Feedback | None = None
) -> torch.Tensor:
    from ..kernels.triton.sampler import greedy_rows  # needs triton

    return greedy_rows(logits_BV, feed, masks)


def _triton_full(
    logits_TV: torch.Tensor,
    state: SamplingState,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    masks: LaneMasks | None = None,
    token_ids_BN: torch.Tensor | None = None,
    feed: Feedback | None = None,
) -> SampleOutput:
    """Two kernels."""
    from ..kernels.triton.sampler import full_rows  # needs triton

    rows, vocab_size = logits_TV.shape
    tops = min(MAX_LOGPROBS, vocab_size)
    size = SampleOutput.packed_bytes(rows, tops)
    packed = torch.empty(size, dtype=torch.uint8, device=logits_TV.device)
    output = SampleOutput.unpack(packed, rows, tops)
    full_rows(
        logits_TV,
        state.reals,
        state.integers,
        state.token_counts,
        rows_T,
        positions_T,
        (output.tokens, output.logprob, output.top_ids, output.top_logprobs),
        feed,
        masks,
        token_ids_BN,
    )
    return output


@dataclass(frozen=True, slots=True)
class Sampler:
    """Functions that choose the tokens of a step."""

    greedy: Callable[..., torch.Tensor]
    """`sample_greedy`; `LaneMasks` may follow, with `takes_masks`."""
    full: Callable[..., SampleOutput]
    """`sample_full`; `LaneMasks` may follow, with `takes_masks`, and then the tokens `[B, N]` of a
    verify step, to sample as `sample_drafted`."""
    takes_masks: bool = False
    """Whether both apply token masks; others get logits from `mask_logits`."""
    stores: bool = False
    """Whether both take `Feedback` as their last argument, and store tokens there. Positions of
    `full` are then those of the feedback."""


torch_sampler = Sampler(_torch_greedy, _torch_full)
"""For every device; `torch.compile` fuses it."""

fused_sampler = Sampler(fused_greedy, _fused_full, takes_masks=True)
"""For CPUs, after `load_cpu_ops`."""

triton_sampler = Sampler(_triton_greedy, _triton_full, takes_masks=True, stores=True)
"""For CUDA devices. Needs triton."""

SAMPLERS: dict[SamplerName, Sampler] = {
    "torch": torch_sampler,
    "cpu": fused_sampler,
    "triton": triton_sampler,
}
"""The samplers by their name in `Kernels.sampler`."""
