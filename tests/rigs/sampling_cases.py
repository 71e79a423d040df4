"""Rows, parameters and logits that samplers are compared on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import torch
from stepgraph.runtime.kernels.ops.batch import NON_FINITE
from stepgraph.runtime.sampling.reference_sampler import SampleOutput, sample_full
from stepgraph.runtime.sampling.sampling_state import SamplingState
from stepgraph.runtime.sampling_params import SamplingParams

Sampler = Callable[[torch.Tensor, SamplingState, torch.Tensor, torch.Tensor], SampleOutput]

PROMPT, OUTPUT = [3, 5, 7, 7, 250], [5, 9, 9, 9]
STOPS = [11, 12]
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


def poison(state: SamplingState, row: int) -> None:
    """Write NaN and garbage to a row, as a former owner may have."""
    state.reals[row] = math.nan
    state.integers[row] = -(1 << 62)
    generator = torch.Generator(state.reals.device).manual_seed(row)
    state.token_counts[row].random_(-(1 << 31), (1 << 31) - 1, generator=generator)


def write(
    state: SamplingState, row: int, own: SamplingParams, output_ids: Sequence[int] = OUTPUT
) -> None:
    vocab_size = state.token_counts.shape[1]
    parameters = state.row_parameters(
        own,
        seed=own.seed or 0,
        prompt_ids=[token % vocab_size for token in PROMPT],
        output_ids=[token % vocab_size for token in output_ids],
        stop_token_ids=[token % vocab_size for token in STOPS],
    )
    state.store_row(row, parameters)


def state_of(
    params: Sequence[SamplingParams], vocab_size: int = 300, device: str = "cpu"
) -> SamplingState:
    """Rows that were poisoned before they were written."""
    state = SamplingState.allocate(len(params), vocab_size, torch.device(device))
    for row, own in enumerate(params):
        poison(state, row)
        write(state, row, own)
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
    # Of equal logits either may be named, but none twice. Where fewer tokens are possible than are
    # listed, the reference names any ids in the remaining places, which have -inf.
    ours_ids, logits = ours.top_ids[sound], logits[sound]
    possible = reference.top_logprobs[sound] > -math.inf
    named, expected = (logits.gather(1, ids) for ids in (ours_ids, reference.top_ids[sound]))
    assert torch.equal(named[possible], expected[possible])
    assert all(len(set(ids)) == len(ids) for ids in ours_ids.tolist())


def check_bad_lanes_stay_alone(full: Sampler, case: dict[str, Any], device: str = "cpu") -> None:
    """Lanes that are not distributions get no token, and others what they draw by themselves."""
    params = [SamplingParams(**case, seed=seed) for seed in range(9)]
    logits = with_bad_lanes(logits_of(9, 300, 3, torch.bfloat16)).to(device)
    good = [lane for lane in range(9) if lane not in BAD_LANES]
    rows = torch.arange(9, device=device)
    positions = torch.full_like(rows, FIRST)
    reference, state = (state_of(params, 300, device) for _ in range(2))
    counts = reference.token_counts.clone()
    alone = sample_full(logits[good], reference, rows[good], positions[good])
    output = full(logits, state, rows, positions)
    assert output.tokens[BAD_LANES].eq(NON_FINITE).all()
    assert torch.equal(output.tokens[good], alone.tokens)
    torch.testing.assert_close(output.logprob[good], alone.logprob)
    torch.testing.assert_close(output.top_logprobs[good], alone.top_logprobs)
    assert ((output.top_ids >= 0) & (output.top_ids < 300)).all()
    assert torch.equal(state.token_counts[good], reference.token_counts[good])
    assert torch.equal(state.token_counts[BAD_LANES], counts[BAD_LANES])


def check_parameters_that_leave_no_distribution(full: Sampler, device: str = "cpu") -> None:
    """Stop ids are held back and no other token is possible; a penalty overflows."""
    logits = logits_of(3, 300, 2, torch.float32).to(device)
    logits[0] = -math.inf
    logits[0, [11, 12]] = 1.0
    logits[1, 7] = 1e30
    for case in ({"temperature": 0.0}, {"top_p": 0.9}, {"logprobs": 2}):
        params = [
            SamplingParams(**case, min_tokens=8),
            SamplingParams(**case, repetition_penalty=1e-20),
            SamplingParams(**case),
        ]
        state, rows = state_of(params, 300, device), torch.arange(3, device=device)
        tokens = full(logits, state, rows, torch.full_like(rows, FIRST)).tokens.tolist()
        assert tokens[:2] == [NON_FINITE, NON_FINITE]
        assert tokens[2] >= 0
