"""Rows, parameters and logits that samplers are compared on."""

from __future__ import annotations

import math
from math import nan
from typing import Any

import torch
from stepgraph.runtime.sampling.sample_output import SampleOutput
from stepgraph.runtime.sampling.sampling_state import SamplingState
from stepgraph.runtime.sampling_params import SamplingParams

PROMPT, OUTPUT = [3, 5, 7, 7, 250], [5, 9, 9, 9]
FIRST = len(PROMPT) + len(OUTPUT)
CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 1.0, "min_tokens": 6},
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"temperature": 1e-7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400},
    {"top_p": 1e-9},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "presence_penalty": 2.0},
    {"logit_bias": {0: 6.0, 9: -100.0}},
    {"logit_bias": {11: 50.0, 12: 40.0}, "min_tokens": 6},
    {
        "temperature": 1.3,
        "top_k": 60,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.4,
        "logit_bias": {9: 3.0, 2: 2.0},
        "min_tokens": 5,
    },
]


def logits_of(lanes: int, vocab_size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(lanes, vocab_size, generator=generator) * 3).to(dtype)


def state_of(params: list[SamplingParams], vocab_size: int, device: str = "cpu") -> SamplingState:
    """Rows whose last owner left NaN and garbage."""
    state = SamplingState.allocate(len(params), vocab_size, torch.device(device))
    for row, own in enumerate(params):
        state.reals[row] = math.nan
        state.integers[row] = -(1 << 62)
        state.token_counts[row].random_(generator=torch.Generator(device).manual_seed(row))
        state.write_row(
            row,
            own,
            seed=own.seed or 0,
            prompt_ids=[token % vocab_size for token in PROMPT],
            output_ids=[token % vocab_size for token in OUTPUT],
            stop_token_ids=[token % vocab_size for token in (11, 12)],
        )
    return state


def params_for(vocab_size: int) -> list[SamplingParams]:
    return [
        SamplingParams(**case, seed=7919 * seed)
        for seed, case in enumerate(CASES)
        if vocab_size > max(case.get("logit_bias", {0: 0}))
    ]


BAD_LANES = [1, 3, 4, 6, 8]


def with_bad_lanes(logits: torch.Tensor) -> torch.Tensor:
    """Logits of at least 9 lanes, of which `BAD_LANES` are not distributions."""
    bad = logits.clone()
    bad[1, 17 % bad.shape[1]], bad[3], bad[4], bad[6, -1] = nan, nan, -math.inf, math.inf
    bad[8, 0], bad[8, -1] = math.inf, -nan
    bad[5, 1::2] = -math.inf  # some tokens are impossible: still a distribution
    return bad


def assert_same(ours: SampleOutput, reference: SampleOutput, logits: torch.Tensor) -> None:
    assert torch.equal(ours.tokens, reference.tokens)
    sound = ours.tokens >= 0
    torch.testing.assert_close(ours.logprob[sound], reference.logprob[sound])
    torch.testing.assert_close(ours.top_logprobs[sound], reference.top_logprobs[sound])
    # Of equal logits either may be named, but none twice.
    ours_ids, logits = ours.top_ids[sound], logits[sound]
    assert torch.equal(logits.gather(1, ours_ids), logits.gather(1, reference.top_ids[sound]))
    assert all(len(set(ids)) == len(ids) for ids in ours_ids.tolist())
