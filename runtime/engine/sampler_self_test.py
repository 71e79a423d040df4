"""The self-test of a native sampler: its draws against those of plain torch."""

from __future__ import annotations

import torch

from ..kernels.choice import SamplerName
from ..kernels.ops.feedback import Feedback
from ..kernels.ops.token_masks import MASK_BITS, LaneMasks, mask_logits
from ..kernels.result_check import (
    Fallback,
    brief,
    disagreement,
    require_usable_device,
    tolerance,
)
from ..resolved_config import ResolvedConfig
from ..sampling.sample_output import SampleOutput
from ..sampling.samplers import SAMPLERS, Sampler
from ..sampling.sampling_state import SamplingState
from ..sampling_params import SamplingParams

__all__ = ["sampler_failure"]

_EVERY_OTHER = 0x55555555
"""A word of a mask that allows the even tokens."""


def sampler_failure(
    name: SamplerName, vocab_size: int, config: ResolvedConfig, generator: torch.Generator
) -> Fallback | None:
    """Compare greedy and random draws of a few rows with those of the plain sampler.

    With speculation also those of a verify step, and with structured output those with token masks.

    Raises KernelSelfTestError where the sampler left the device unusable.
    """
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=20, logit_bias={3: 4.0}),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=1.3, repetition_penalty=1.2, presence_penalty=0.5),
    )
    title, device = {"cpu": "C++ sampler", "triton": "Triton sampler"}[name], config.device
    rows_B = torch.arange(len(params), device=device)
    positions_B = torch.randint(100, (len(params),), generator=generator).to(device)
    logits_BV = 3 * torch.randn(len(params), vocab_size, generator=generator)
    logits_BV = logits_BV.to(device, config.dtype)
    drawn = []
    for sampler in (SAMPLERS[name], SAMPLERS["torch"]):
        state = SamplingState.allocate(len(params), vocab_size, device)
        for row, wanted in enumerate(params):
            state.write_row(
                row, wanted, seed=row, prompt_ids=[1, 2], output_ids=[2], stop_token_ids=[]
            )
        try:
            drawn.append(_drawn(sampler, logits_BV, state, rows_B, positions_B, config))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as failure:  # a compiler and a device raise anything
            require_usable_device(f"{title} ({_sizes(logits_BV)})", device, failure)
            return Fallback(title, _sizes(logits_BV), brief(failure))
    error = None
    for (greedy, full, counts), (plain_greedy, plain, plain_counts) in zip(*drawn, strict=True):
        error = error or disagreement(greedy, plain_greedy, 0.0)
        # One draw may be so close to a boundary that the rounding of sums decides it.
        differ = int((full.tokens != plain.tokens).sum())
        if error is None and (differ > 1 or int((counts != plain_counts).sum()) > 2 * differ):
            error = "drawn tokens differ" if differ > 1 else "token counts differ"
        if error is None:
            error = disagreement(full.top_logprobs, plain.top_logprobs, tolerance(torch.float32))
    return None if error is None else Fallback(title, _sizes(logits_BV), error)


_Drawn = tuple[torch.Tensor, SampleOutput, torch.Tensor]
"""Greedy tokens, drawn ones, and the token counts of all rows afterwards."""


def _drawn(
    sampler: Sampler,
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    config: ResolvedConfig,
) -> list[_Drawn]:
    """Draw as steps do: with token feedback into row state if the sampler has it."""
    counts_RV, masks = state.token_counts.clone(), None
    drawn = [_drawn_tokens(sampler, logits_BV, state, rows_B, positions_B, None)]
    if config.structured_output:
        words = -(-logits_BV.shape[1] // MASK_BITS)
        bits_NW = torch.full((2, words), -1, dtype=torch.int32, device=rows_B.device)
        bits_NW[0] = _EVERY_OTHER
        masks = LaneMasks(bits_NW, rows_B % 2)
        state.token_counts.copy_(counts_RV)
        drawn.append(_drawn_tokens(sampler, logits_BV, state, rows_B, positions_B, masks))
    if config.speculation is not None:
        own = _for_sampler(sampler, logits_BV, masks)
        state.token_counts.copy_(counts_RV)
        # Two tokens of two rows, of which the last one has penalties. What follows a wrong draft is
        # arbitrary, so only the first of them are compared, and what the row counts.
        token_ids_BN = logits_BV[::2].argmax(-1, keepdim=True).expand(-1, 2).contiguous()
        rows_T = rows_B[2:].repeat_interleave(2)
        output = sampler.drafted(own[0], state, rows_T, positions_B, token_ids_BN, *own[1:])
        first = output.at(torch.arange(0, len(rows_T), 2, device=rows_T.device))
        drawn.append((sampler.greedy(*own), first, state.token_counts.clone()))
    return drawn


def _drawn_tokens(
    sampler: Sampler,
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    masks: LaneMasks | None,
) -> _Drawn:
    logits_BV, *own = _for_sampler(sampler, logits_BV, masks)
    if sampler.greedy_step is None or sampler.full_step is None:
        greedy = sampler.greedy(logits_BV, *own)
        full = sampler.full(logits_BV, state, rows_B, positions_B, *own)
        return greedy, full, state.token_counts.clone()
    newest_R, positions_R = torch.zeros(2, len(rows_B) + 1, dtype=torch.int64, device=rows_B.device)
    feed = Feedback(rows_B, positions_B - 1, newest_R, positions_R)
    greedy = sampler.greedy_step(logits_BV, feed, *own)
    full = sampler.full_step(logits_BV, state, feed, *own)
    return greedy, full, state.token_counts.clone()


def _for_sampler(
    sampler: Sampler, logits_BV: torch.Tensor, masks: LaneMasks | None
) -> tuple[torch.Tensor, *tuple[LaneMasks, ...]]:
    """Return the arguments of a sampler for masked logits: masks, if it applies them."""
    if masks is None:
        return (logits_BV,)
    return (logits_BV, masks) if sampler.takes_masks else (mask_logits(logits_BV, masks),)


def _sizes(logits_BV: torch.Tensor) -> str:
    return f"logits {list(logits_BV.shape)} {str(logits_BV.dtype).removeprefix('torch.')}"
