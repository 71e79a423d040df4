"""The samplers of a GPU against their references in plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from stepgraph.runtime.kernels.ops.batch import NON_FINITE, Feedback
from stepgraph.runtime.kernels.triton import sampler as sampler_module
from stepgraph.runtime.sampling.reference_sampler import sample_full, sample_greedy
from stepgraph.runtime.sampling.sample_output import SampleOutput
from stepgraph.runtime.sampling.samplers import torch_sampler, triton_sampler
from stepgraph.runtime.sampling_params import SamplingParams

from ..rigs.sampling_cases import (
    BAD_LANES,
    CASES,
    FIRST,
    assert_same,
    check_bad_lanes_stay_alone,
    check_parameters_that_leave_no_distribution,
    logits_of,
    params_for,
    state_of,
    with_bad_lanes,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compare(
    params: list[SamplingParams], logits: torch.Tensor, positions: torch.Tensor | None = None
) -> SampleOutput:
    """Sample from the same states, padding at the end, and return what both drew."""
    vocab_size = logits.shape[1]
    states = [state_of(params, vocab_size, DEVICE) for _ in range(2)]
    rows = torch.arange(len(logits), device=DEVICE).clamp(max=len(params))
    if positions is None:
        positions = torch.full_like(rows, FIRST)
    reference = sample_full(logits, states[0], rows, positions)
    output = triton_sampler.full(logits, states[1], rows, positions)
    assert_same(output, reference, logits)
    for name in ("token_counts", "reals", "integers"):
        assert torch.equal(
            getattr(states[1], name).nan_to_num(), getattr(states[0], name).nan_to_num()
        )
    return output


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "part"),
    [
        (1, torch.float32, slice(0, None, 9)),
        (20, torch.float16, slice(1, None, 7)),
        (300, torch.float32, slice(0, None, 2)),
        (1100, torch.bfloat16, slice(1, None, 4)),
        *(
            pytest.param(vocab_size, dtype, slice(None), marks=pytest.mark.slow)
            for vocab_size in (7, 129, 5000)
            for dtype in DTYPES
        ),
        *(
            pytest.param(vocab_size, torch.bfloat16, slice(None), marks=pytest.mark.slow)
            for vocab_size in (32000, 128256, 262144)
        ),
    ],
)
def test_draws_what_the_reference_draws(vocab_size: int, dtype: torch.dtype, part: slice) -> None:
    params = params_for(vocab_size)[part]
    compare(params, logits_of(len(params) + 1, vocab_size, vocab_size, dtype).to(DEVICE))


@pytest.mark.parametrize("distinct", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_equal_tokens_are_kept_together(distinct: int) -> None:
    generator = torch.Generator().manual_seed(distinct)
    logits = torch.randint(distinct, (1, 400), generator=generator).to(DEVICE) * 0.75
    cases = [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.7}, {}] * 2
    params = [SamplingParams(**case, seed=seed) for seed, case in enumerate(cases)]
    output = compare(params, logits.expand(len(params), -1))
    assert len(output.tokens.unique()) > 3  # ties are not broken by their place


def test_greedy_is_the_lowest_of_the_largest() -> None:
    for vocab_size, dtype in zip((2, 130, 3000), DTYPES, strict=True):
        logits = logits_of(9, vocab_size, 3, dtype).round().to(DEVICE)  # many are equal
        assert torch.equal(triton_sampler.greedy(logits), logits.argmax(-1))
        bad = with_bad_lanes(logits)
        tokens = triton_sampler.greedy(bad)
        assert tokens[BAD_LANES].eq(NON_FINITE).all()
        assert torch.equal(tokens, sample_greedy(bad))


@settings(max_examples=500 if torch.cuda.is_available() else 8, deadline=None)
@given(
    data=st.data(),
    vocab_size=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    seed=st.integers(0, (1 << 63) - 1),
)
def test_any_parameters(data: st.DataObject, vocab_size: int, spread: float, seed: int) -> None:
    number = st.integers(0, vocab_size - 1)
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.5])),
            top_k=data.draw(st.integers(0, vocab_size + 1)),
            top_p=data.draw(st.sampled_from([1.0, 1e-9, 0.15, 0.55, 0.95, 0.9999])),
            min_p=data.draw(st.sampled_from([0.0, 0.0, 1e-30, 0.03, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.5])),
            presence_penalty=data.draw(st.sampled_from([0.0, -1.5, 0.7])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.25])),
            logit_bias=data.draw(st.dictionaries(number, st.integers(-100, 100), max_size=4)),
            min_tokens=data.draw(st.integers(0, 6)),
            seed=seed,
        )
    ]
    logits = logits_of(1, vocab_size, seed % 1000, torch.float32).to(DEVICE) * spread / 3
    compare(params, logits, torch.tensor([data.draw(st.integers(FIRST, FIRST + 9))], device=DEVICE))


@pytest.mark.parametrize("rounded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_more_weights_than_a_program_holds(monkeypatch: pytest.MonkeyPatch, rounded: bool) -> None:
    """Flat distributions, whose thresholds are searched in passes; and ties beyond the capacity."""
    monkeypatch.setattr(sampler_module, "_CAPACITY", 256)
    cases = [
        {"top_k": 1200},
        {"top_p": 0.8},
        {"top_k": 900, "top_p": 0.5},
        {"temperature": 50.0, "top_p": 0.99999},
        {"temperature": 100.0, "top_k": 700},
    ]
    params = [SamplingParams(**case, seed=seed) for seed, case in enumerate(cases)]
    logits = logits_of(len(params), 1500, 5, torch.float32).to(DEVICE) / 2
    compare(params, logits.round() if rounded else logits)


@pytest.mark.parametrize(
    "case", [CASES[15], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)]
)
def test_logits_that_are_not_a_distribution_stay_in_their_lane(case: dict[str, float]) -> None:
    for sampler in (triton_sampler, torch_sampler):
        check_bad_lanes_stay_alone(sampler.full, case, DEVICE)


def test_parameters_that_leave_no_distribution() -> None:
    for sampler in (triton_sampler, torch_sampler):
        check_parameters_that_leave_no_distribution(sampler.full, DEVICE)


def test_fewer_possible_tokens_than_top_tokens() -> None:
    logits = torch.full((2, 300), -math.inf, device=DEVICE)
    logits[0, [2, 250, 17]] = torch.tensor([1.0, 3.0, 2.0], device=DEVICE)
    logits[1, 217] = -4.0
    rows = torch.arange(2, device=DEVICE)
    state = state_of([SamplingParams(seed=1), SamplingParams(top_k=5)], 300, DEVICE)
    output = triton_sampler.full(logits, state, rows, rows + FIRST)
    assert output.top_ids[0, :3].tolist() == [250, 17, 2]
    assert int(output.tokens[1]) == 217
    for lane, possible in ((0, 3), (1, 1)):
        assert len(set(output.top_ids[lane].tolist())) == 20
        assert bool(output.top_logprobs[lane, :possible].isfinite().all())
        assert bool((output.top_logprobs[lane, possible:] == -math.inf).all())


@pytest.mark.parametrize("full", [False, True])
def test_tokens_are_fed_back(full: bool) -> None:
    params = [SamplingParams(seed=seed, top_p=0.9) for seed in range(4)]
    logits = logits_of(4, 300, 2, torch.float32).to(DEVICE)
    logits[1, 100] = math.nan  # of row 0
    rows = torch.tensor([3, 0, 4, 4], device=DEVICE)  # two of padding
    positions = torch.tensor([20, 11, 0, 0], device=DEVICE)
    token_ids, state_positions = (torch.arange(5, device=DEVICE) * 10 for _ in range(2))
    state_positions[4] = 0
    feed = Feedback(rows, positions, token_ids, state_positions)
    state = state_of(params, 300, DEVICE)
    assert triton_sampler.full_step is not None
    assert triton_sampler.greedy_step is not None
    if full:
        expected = sample_full(logits, state, rows, positions + 1).tokens
        tokens = triton_sampler.full_step(logits, state, feed).tokens
    else:
        expected, tokens = sample_greedy(logits), triton_sampler.greedy_step(logits, feed)
    assert torch.equal(tokens, expected)
    assert int(tokens[1]) == NON_FINITE
    assert token_ids[:4].tolist() == [0, 10, 20, int(tokens[0])]
    assert state_positions.tolist() == [12, 10, 20, 21, 0]


def test_logits_may_be_strided() -> None:
    params = params_for(300)[::8]
    compare(params, logits_of(len(params), 700, 9, torch.bfloat16).to(DEVICE)[:, :300])
