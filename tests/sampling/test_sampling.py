"""The sampler draws from the distribution that transformers' processors define, row by row."""

import dataclasses
import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.kernels.ops.draws import (
    bisect_thresholds,
    draw,
    largest,
    uniform,
)
from stepgraph.runtime.sampling.reference_sampler import sample_full, sample_greedy
from stepgraph.runtime.sampling.sampling_state import SamplingState
from stepgraph.runtime.sampling_params import SamplingParams
from transformers.generation import logits_process as hf

from ..rigs.sampling_cases import (
    CASES,
    FIRST,
    OUTPUT,
    PROMPT,
    STOPS,
    poison,
    state_of,
    write,
)

CPU = torch.device("cpu")
V = 300


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def sample_many(params: SamplingParams, logits_V: torch.Tensor, count: int) -> torch.Tensor:
    """Draws of one request at `count` positions after its output."""
    state = state_of([params])
    positions = torch.arange(count) + FIRST
    rows = torch.zeros(count, dtype=torch.int64)
    return sample_full(logits_V.expand(count, -1), state, rows, positions).tokens


def sample_one(params: SamplingParams, logits_V: torch.Tensor, position: int = 9) -> int:
    state = state_of([params])
    output = sample_full(logits_V[None], state, torch.tensor([0]), torch.tensor([position]))
    return int(output.tokens)


def expected_probabilities(params: SamplingParams, logits_V: torch.Tensor) -> torch.Tensor:
    """The distribution after transformers' processors, and OpenAI's penalties in plain Python."""
    params = params.resolved()
    seen = torch.tensor([PROMPT + OUTPUT])
    scores = logits_V[None].clone()
    for token, bias in params.logit_bias.items():
        scores[0, token] += bias
    if params.min_tokens:
        minimum = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, STOPS, "cpu")
        scores = minimum(seen, scores)
    if params.repetition_penalty != 1.0:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, scores)
    for token in set(OUTPUT):
        scores[0, token] -= params.presence_penalty
        scores[0, token] -= params.frequency_penalty * OUTPUT.count(token)
    warpers: list[hf.LogitsProcessor] = [hf.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = warper(seen, scores)
    return scores[0].softmax(-1)


def assert_drawn_from(tokens: torch.Tensor, probabilities_V: torch.Tensor) -> None:
    """Pearson's chi-square test at about five standard deviations; nothing impossible is drawn."""
    counts = torch.bincount(tokens, minlength=probabilities_V.shape[0]).double()
    assert counts[probabilities_V == 0].sum() == 0
    expected = probabilities_V.double() * tokens.shape[0]
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = int(used.sum()) - 1
    assert statistic <= freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 5


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.get("temperature") != 0.0], ids=str
)
def test_draws_follow_the_distribution_of_transformers(case: dict[str, Any]) -> None:
    params = SamplingParams(seed=11, **case)
    logits = randn(V, seed=len(str(case)))
    # min_tokens holds for the one output that follows OUTPUT, so its positions cannot be spread.
    if params.min_tokens:
        state = state_of([dataclasses.replace(params, seed=seed) for seed in range(1500)])
        rows = torch.arange(1500)
        position = torch.full_like(rows, FIRST)
        tokens = sample_full(logits.expand(1500, -1), state, rows, position).tokens
    else:
        tokens = sample_many(params, logits, 3000)
    assert_drawn_from(tokens, expected_probabilities(params, logits))


def sorted_thresholds(
    weights_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor
) -> torch.Tensor:
    """As `bisect_thresholds`, by sorting."""
    vocab_size = weights_BV.shape[1]
    sorted_BV = weights_BV.sort(dim=-1, descending=True).values
    kth_B1 = sorted_BV.gather(1, top_k_B.clamp(max=vocab_size)[:, None] - 1)
    kth_B1 = torch.where(top_k_B[:, None] < vocab_size, kth_B1, 0.0)
    until_BV = torch.where(sorted_BV >= kth_B1, sorted_BV, 0.0).cumsum(-1, dtype=torch.float64)
    missing_BV = until_BV < top_p_B[:, None] * until_BV[:, -1:]
    last_B1 = sorted_BV.gather(1, missing_BV.sum(-1, keepdim=True).clamp(max=vocab_size - 1))
    return torch.where(top_p_B < 1.0, torch.maximum(last_B1, kth_B1)[:, 0], kth_B1[:, 0])


@given(
    lanes=st.lists(
        st.tuples(
            st.lists(st.integers(0, 64), min_size=8, max_size=8),
            st.integers(1, 9),
            st.integers(0, 16),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_bisection_is_exact(lanes: list[tuple[list[int], int, int]]) -> None:
    # Sums of these weights and their products with these top_p have no rounding; most have ties.
    weights = torch.tensor([[64, *values] for values, _, _ in lanes]) / 64
    top_k = torch.tensor([top_k for _, top_k, _ in lanes])
    top_p = torch.tensor([top_p for _, _, top_p in lanes]) / 16
    lowest = bisect_thresholds(weights, top_k, top_p)
    assert torch.equal(lowest, sorted_thresholds(weights, top_k, top_p))


def splitmix64(state: int, count: int) -> list[int]:
    mask = (1 << 64) - 1
    numbers = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(z ^ (z >> 31))
    return numbers


def test_splitmix64_reproduces_its_published_numbers() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(1234567, 3) == published


@given(seed=st.integers(0, (1 << 63) - 1), first=st.integers(1, 1 << 20))
def test_uniform_is_a_splitmix64_stream(seed: int, first: int) -> None:
    start = splitmix64(seed, 1)[0] + (first - 1) * 0x9E3779B97F4A7C15
    expected = [number >> 11 for number in splitmix64(start, 5)]
    numbers = uniform(torch.full((5,), seed), torch.arange(first, first + 5))
    assert (numbers * 2**53).long().tolist() == expected


def test_a_stream_depends_on_seed_and_position_only() -> None:
    logits = randn(6, V)
    params = [SamplingParams(seed=100 + i, top_p=0.95) for i in range(6)]
    positions = torch.tensor([4, 5, 6, 7, 8, 9])
    together = sample_full(logits, state_of(params), torch.arange(6), positions).tokens
    backwards = sample_full(
        logits.flip(0), state_of(params[::-1]), torch.arange(6), positions.flip(0)
    ).tokens
    assert torch.equal(backwards.flip(0), together)
    for lane, request in enumerate(params):
        assert sample_one(request, logits[lane], int(positions[lane])) == together[lane]
    assert len({sample_one(SamplingParams(seed=7), logits[0], at) for at in range(30)}) > 3
    assert len({sample_one(SamplingParams(seed=seed), logits[0]) for seed in range(30)}) > 3


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab_size", [1, 5, 128, 129, 1000])
def test_a_drawn_token_has_weight(vocab_size: int, u: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(200, vocab_size, generator=generator)
    weights *= torch.rand(200, vocab_size, generator=generator) < 0.05
    weights[weights.sum(-1) == 0, vocab_size // 2] = 1e-38
    tokens = draw(weights, torch.full((200,), u, dtype=torch.float64))
    assert (weights.gather(1, tokens[:, None]) > 0).all()
    ids = torch.arange(vocab_size).expand(200, -1)
    if u == 0.0:
        assert torch.equal(tokens, torch.where(weights > 0, ids, vocab_size).amin(-1))
    if u > 0.9:
        assert torch.equal(tokens, torch.where(weights > 0, ids, -1).amax(-1))


@pytest.mark.parametrize("vocab_size", [1, 7, 20, 128, 130, 5000])
def test_largest_is_topk(vocab_size: int) -> None:
    values = randn(5, vocab_size)
    count = min(20, vocab_size)
    top, ids = largest(values, count)
    assert torch.equal(top, values.topk(count).values)
    assert torch.equal(values.gather(1, ids), top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equal_tokens(dtype: torch.dtype) -> None:
    logits = randn(8, V).to(dtype)
    logits[:, [250, 40, 41]] = 50.0
    assert sample_greedy(logits).tolist() == [40] * 8
    state = state_of([SamplingParams(temperature=0.0)] * 8)
    rows = torch.arange(8)
    assert sample_full(logits, state, rows, rows).tokens.tolist() == [40] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    logits = randn(3, V).to(dtype)
    params = SamplingParams(temperature=2.0, top_k=3, logit_bias={1: 50.0}, presence_penalty=1.0)
    output = sample_full(logits, state_of([params] * 3), torch.arange(3), torch.arange(3) + 9)
    expected = logits.float().log_softmax(-1)
    top = expected.topk(20)
    torch.testing.assert_close(output.top_logprobs, top.values)
    torch.testing.assert_close(expected.gather(1, output.top_ids), top.values)
    torch.testing.assert_close(output.logprob, expected.gather(1, output.tokens[:, None])[:, 0])


BEST = int(randn(V).argmax())


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1e-300},
        {"temperature": 1e-44},
        {"temperature": 1e-7},
        {"top_k": 1},
        {"top_p": 1e-300},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 100.0, "top_k": 1},
    ],
)
def test_extreme_parameters_leave_the_best_token(fields: dict[str, float]) -> None:
    params = SamplingParams(**fields)
    assert sample_many(params, randn(V), 50).unique().tolist() == [BEST]


def test_too_many_stop_ids_and_unknown_tokens_are_refused() -> None:
    state = state_of([SamplingParams()])
    params = SamplingParams(min_tokens=1, presence_penalty=1.0)
    arguments = {"seed": 1, "prompt_ids": [1], "output_ids": [2]}
    with pytest.raises(RequestError) as stop_ids:
        state.row_parameters(params, stop_token_ids=range(33), **arguments)
    biased = dataclasses.replace(params, logit_bias={V: 1.0})
    with pytest.raises(RequestError) as bias:
        state.row_parameters(biased, stop_token_ids=[1], **arguments)
    assert (stop_ids.value.field, bias.value.field) == ("stop_token_ids", "logit_bias")


def test_a_row_samples_as_one_written_to_a_fresh_state() -> None:
    """Whatever happened to it before: requests come, are preempted and resumed, and sample."""
    random, num_rows = Random(0), 3
    state, pristine = (SamplingState.allocate(rows, V, CPU) for rows in (num_rows, 1))
    owners: dict[int, tuple[SamplingParams, list[int]]] = {}
    for number in range(200):
        row, action = random.randrange(num_rows), random.randrange(3)
        if action == 0:
            params = SamplingParams(**random.choice(CASES), seed=random.getrandbits(63))
            owners[row] = params, random.choices(range(V), k=random.randrange(7))
            write(state, row, *owners[row])
        elif action == 1 and row in owners:
            poison(state, row)
            write(state, row, *owners[row])
        else:
            fresh = SamplingState.allocate(num_rows, V, CPU)
            for own, of_row in owners.items():
                write(fresh, own, *of_row)
            logits = randn(len(owners) + 1, V, seed=number)
            rows = torch.tensor([*owners, num_rows])
            lengths = [len(PROMPT) + len(outputs) for _, outputs in owners.values()]
            positions = torch.tensor([*lengths, 0])
            tokens = sample_full(logits, state, rows, positions).tokens
            assert torch.equal(tokens, sample_full(logits, fresh, rows, positions).tokens)
            for own, token in zip(owners, tokens.tolist(), strict=False):
                owners[own][1].append(token)
        for name in ("reals", "integers", "token_counts"):  # of the null row
            assert torch.equal(getattr(state, name)[-1], getattr(pristine, name)[-1])
        for own, (params, outputs) in owners.items():
            if params.uses_penalties:
                counts = state.token_counts[own] & ((1 << 30) - 1)
                expected = torch.bincount(torch.tensor(outputs, dtype=torch.int64), minlength=V)
                assert torch.equal(counts.long(), expected)
