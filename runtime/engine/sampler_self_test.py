"""The self-test of a native sampler: its draws against those of plain torch."""

from __future__ import annotations

import torch

from ..kernels.choice import SamplerName
from ..kernels.ops.feedback import Feedback
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


def sampler_failure(
    name: SamplerName, vocab_size: int, config: ResolvedConfig, generator: torch.Generator
) -> Fallback | None:
    """Compare greedy and random draws of a few rows with those of the plain sampler.

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
            drawn.append(_drawn(sampler, logits_BV, state, rows_B, positions_B))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as failure:  # a compiler and a device raise anything
            require_usable_device(f"{title} ({_sizes(logits_BV)})", device, failure)
            return Fallback(title, _sizes(logits_BV), brief(failure))
    (greedy, full), (plain_greedy, plain) = drawn
    error = disagreement(greedy, plain_greedy, 0.0)
    # One draw may be so close to a boundary that the rounding of sums decides it.
    if error is None and int((full.tokens != plain.tokens).sum()) > 1:
        error = "drawn tokens differ"
    if error is None:
        error = disagreement(full.top_logprobs, plain.top_logprobs, tolerance(torch.float32))
    return None if error is None else Fallback(title, _sizes(logits_BV), error)


def _drawn(
    sampler: Sampler,
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
) -> tuple[torch.Tensor, SampleOutput]:
    """Draw as steps do: with token feedback into row state if the sampler has it."""
    if sampler.greedy_step is None or sampler.full_step is None:
        return sampler.greedy(logits_BV), sampler.full(logits_BV, state, rows_B, positions_B)
    newest_R, positions_R = torch.zeros(2, len(rows_B) + 1, dtype=torch.int64, device=rows_B.device)
    feed = Feedback(rows_B, positions_B - 1, newest_R, positions_R)
    return sampler.greedy_step(logits_BV, feed), sampler.full_step(logits_BV, state, feed)


def _sizes(logits_BV: torch.Tensor) -> str:
    return f"logits {list(logits_BV.shape)} {str(logits_BV.dtype).removeprefix('torch.')}"
