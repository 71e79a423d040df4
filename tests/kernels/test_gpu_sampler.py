"""The samplers of a GPU against their references in plain torch: with drafts and with masks too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from stepgraph.runtime.kernels.ops.batch import NON_FINITE, Feedback
from stepgraph.runtime.kernels.ops.token_masks import LaneMasks, mask_logits
from stepgraph.runtime.kernels.triton import sampler as sampler_module
from stepgraph.runtime.sampling.reference_sampler import (
    SampleOutput,
    sample_drafted,
    sample_full,
    sample_greedy,
)
from stepgraph.runtime.sampling.samplers import SAMPLERS, torch_sampler, triton_sampler
from stepgraph.runtime.sampling_params import SamplingParams

from ..rigs.engine_rig import Open
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
from ..rigs.speculation_rig import guess
from ..speculation.test_speculation import run_mixed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOW = pytest.mark.slow


def compare(
    params: list[SamplingParams],
    logits: Tensor,
    positions: Tensor | None = None,
    masks: LaneMasks | None = None,
) -> SampleOutput:
    """Sample from the same states, padding at the end, and return what both drew."""
    vocab_size = logits.shape[1]
    states = [state_of(params, vocab_size, DEVICE) for _ in range(2)]
    rows = torch.arange(len(logits), device=DEVICE).clamp(max=len(params))
    if positions is None:
        positions = torch.full_like(rows, FIRST)
    plain, own = (logits, ()) if masks is None else (mask_logits(logits, masks), (masks,))
    reference = sample_full(plain, states[0], rows, positions)
    output = triton_sampler.full(logits, states[1], rows, positions, *own)
    assert_same(output, reference, plain)
    for name in ("token_counts", "reals", "integers"):
        found, expected = (getattr(state, name).nan_to_num() for state in reversed(states))
        assert torch.equal(found, expected)
    return output


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "part"),
    [
        (1, torch.float32, slice(0, None, 9)),
        (20, torch.float16, slice(1, None, 7)),
        (300, torch.float32, slice(0, None, 3)),
        (1100, torch.bfloat16, slice(1, None, 5)),
        *(pytest.param(size, dtype, slice(None), marks=SLOW)
          for size in (7, 129, 5000) for dtype in DTYPES),
        *(pytest.param(size, torch.bfloat16, slice(None), marks=SLOW)
          for size in (32000, 128256, 262144)),
    ],
)  # fmt: skip
def test_draws_what_the_reference_draws(vocab_size: int, dtype: torch.dtype, part: slice) -> None:
    params = params_for(vocab_size)[part]
    compare(params, logits_of(len(params) + 1, vocab_size, vocab_size, dtype).to(DEVICE))


@settings(max_examples=500 if torch.cuda.is_available() else 6, deadline=None)
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
    # Rows of a longer tensor: logits may be strided.
    logits = logits_of(1, vocab_size + 3, seed % 1000, torch.float32).to(DEVICE) * spread / 3
    positions = torch.tensor([data.draw(st.integers(FIRST, FIRST + 9))], device=DEVICE)
    compare(params, logits[:, :vocab_size], positions)


@pytest.mark.parametrize("distinct", [pytest.param(1, marks=SLOW), 5])
def test_equal_tokens_are_kept_together(distinct: int) -> None:
    generator = torch.Generator().manual_seed(distinct)
    logits = torch.randint(distinct, (1, 400), generator=generator).to(DEVICE) * 0.75
    cases = [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.7}, {}] * 2
    params = [SamplingParams(**case, seed=seed) for seed, case in enumerate(cases)]
    output = compare(params, logits.expand(len(params), -1))
    assert len(output.tokens.unique()) > 3  # ties are not broken by their place


@pytest.mark.parametrize("rounded", [False, pytest.param(True, marks=SLOW)])
def test_more_weights_than_a_program_holds(monkeypatch: pytest.MonkeyPatch, rounded: bool) -> None:
    """Flat distributions, whose thresholds are searched in passes; and ties beyond the capacity."""
    monkeypatch.setattr(sampler_module, "_CAPACITY", 256)
    cases = [
        {"top_k": 1200},
        {"top_k": 900, "top_p": 0.5},
        {"temperature": 50.0, "top_p": 0.99999},
    ]
    params = [SamplingParams(**case, seed=seed) for seed, case in enumerate(cases)]
    logits = logits_of(len(params), 1500, 5, torch.float32).to(DEVICE) / 2
    compare(params, logits.round() if rounded else logits)


# What is not a distribution ----------------------------------------------------------------------


def test_greedy_is_the_lowest_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    for vocab_size, dtype in zip((2, 130, 3000), DTYPES, strict=True):
        logits = logits_of(9, vocab_size, 3, dtype).round().to(DEVICE)  # many are equal
        assert torch.equal(triton_sampler.greedy(logits), logits.argmax(-1))
        bad = with_bad_lanes(logits)
        tokens = triton_sampler.greedy(bad)
        assert tokens[BAD_LANES].eq(NON_FINITE).all()
        assert torch.equal(tokens, sample_greedy(bad))
    monkeypatch.setattr(sampler_module, "_CHUNK", 32)  # more chunks than are compared at a time
    logits = logits_of(1, 40_000, 3, torch.float32).round().to(DEVICE)
    assert torch.equal(triton_sampler.greedy(logits), logits.argmax(-1))


@pytest.mark.parametrize("case", [CASES[15], *(pytest.param(case, marks=SLOW) for case in CASES)])
def test_logits_that_are_not_a_distribution_stay_in_their_lane(case: dict[str, float]) -> None:
    for sampler in (triton_sampler, torch_sampler):
        check_bad_lanes_stay_alone(sampler.full, case, DEVICE)


def test_parameters_that_leave_no_distribution() -> None:
    for sampler in (triton_sampler, torch_sampler):
        check_parameters_that_leave_no_distribution(sampler.full, DEVICE)


# Masks and feedback ------------------------------------------------------------------------------


def random_masks(lanes: int, vocab_size: int, seed: int) -> LaneMasks:
    """A mask for each lane: of any tokens, of few, of one, of all, or of one allowed token."""
    draw = torch.Generator().manual_seed(seed)
    masks, words = lanes + 2, -(-vocab_size // 32)
    allowed = (
        torch.rand(masks, 32 * words, generator=draw)
        < torch.tensor([0.5, 0.03] * masks)[:masks, None]
    )
    for mask in range(0, masks, 4):  # a grammar that has one way to go on
        allowed[mask] = False
        allowed[mask, int(torch.randint(vocab_size, (), generator=draw))] = True
    bits = (allowed.unflatten(1, (words, 32)).long() << torch.arange(32)).sum(-1)
    bits[1::3] = -1  # rows without a grammar
    rows = torch.randperm(masks, generator=draw)[:lanes]
    return LaneMasks(bits.to(torch.int32).to(DEVICE), rows.to(DEVICE))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (300, torch.float32),
        (1100, torch.bfloat16),
        *(pytest.param(size, dtype, marks=SLOW)
          for size in (1, 7, 31, 32, 33, 130, 2049, 5000) for dtype in DTYPES),
        pytest.param(128256, torch.bfloat16, marks=SLOW),
    ],
)  # fmt: skip
def test_masks_of_greedy_and_drawn_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    """The tokens become the newest of their rows."""
    params = params_for(vocab_size)[:: 1 if dtype == torch.float16 else 9]
    lanes = len(params) + 1  # the last one is padding
    logits = logits_of(lanes, vocab_size, vocab_size, dtype).to(DEVICE)
    masks = random_masks(lanes, vocab_size, vocab_size)
    logits[1, -1], logits[2, 0], logits[lanes - 1] = math.nan, math.inf, -math.inf
    output = compare(params, logits, masks=masks)
    greedy = sample_greedy(mask_logits(logits, masks))
    assert torch.equal(triton_sampler.greedy(logits, masks), greedy)

    rows = torch.tensor([*range(lanes - 2, -1, -1), lanes - 1], device=DEVICE)
    for expected in (output.tokens, greedy):
        newest, newest_positions = torch.full((2, lanes), -7, device=DEVICE)
        feed = Feedback(rows, torch.full_like(rows, FIRST - 1), newest, newest_positions)
        if expected is greedy:
            tokens = triton_sampler.greedy(logits, masks, feed)
        else:
            state = state_of(params[::-1], vocab_size, DEVICE)
            sampled = logits, state, rows, feed.positions
            tokens = triton_sampler.full(*sampled, masks, None, feed).tokens
        assert torch.equal(tokens, expected)
        assert torch.equal(newest[rows], expected.clamp(min=0))
        assert newest_positions.tolist() == [*[FIRST] * (lanes - 1), 0]  # of the null row


# Drafts ------------------------------------------------------------------------------------------

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.5},
    {"temperature": 0.7, "top_k": 20},
    CASES[-1],
]


def compare_drafted(
    params: list[SamplingParams],
    n: int,
    vocab_size: int,
    seed: int,
    *,
    right: float = 0.7,
    masked: bool = False,
    bad: bool = False,
) -> int:
    """Draw verify steps of `n` tokens a row from the same states; return the accepted drafts.

    Rows have any number of valid tokens, and the last one is padding. Each draft is the token that
    is drawn in its place with the probability `right`.
    """
    draw = torch.Generator().manual_seed(seed)
    rows_B = torch.arange(len(params) + 1)
    counts_B = torch.randint(1, n + 1, rows_B.shape, generator=draw)
    counts_B[0] = n
    step_N = torch.arange(n)
    valid_BN = step_N < counts_B[:, None]
    rows = torch.where(valid_BN, rows_B[:, None], len(params)).flatten()
    positions = (FIRST + torch.minimum(step_N, counts_B[:, None] - 1)).flatten()
    logits = logits_of(len(rows), vocab_size, seed, torch.float32)
    logits[: n * 2].copy_(logits[:1].expand(n * 2, -1))  # so that counts decide
    if bad:
        logits[1, 5 % vocab_size], logits[n + 1], logits[2 * n, 0] = math.nan, -math.inf, math.inf
    logits, rows, positions = (tensor.to(DEVICE) for tensor in (logits, rows, positions))
    masks = random_masks(len(rows), vocab_size, seed) if masked else None
    plain = logits if masks is None else mask_logits(logits, masks)

    inputs_BN = torch.randint(vocab_size, valid_BN.shape, generator=draw).to(DEVICE)
    # The token of a place depends on the drafts before: find right ones from left to right.
    copied = torch.rand(valid_BN.shape, generator=draw).to(DEVICE) < right
    copied[0] |= right > 0  # so that some draft is accepted
    for number in range(1, n):
        drawn = sample_drafted(
            plain, state_of(params, vocab_size, DEVICE), rows, positions, inputs_BN
        )
        drawn_B = drawn.tokens.view(-1, n)[:, number - 1]
        inputs_BN[:, number] = torch.where(
            copied[:, number] & (drawn_B >= 0), drawn_B, inputs_BN[:, number]
        )

    states = [state_of(params, vocab_size, DEVICE) for _ in range(2)]
    reference = sample_drafted(plain, states[0], rows, positions, inputs_BN)
    output = triton_sampler.full(logits, states[1], rows, positions, masks, inputs_BN)
    assert_same(output, reference, plain)
    assert torch.equal(states[1].token_counts, states[0].token_counts)
    equal = reference.tokens.view(-1, n)[:, :-1] == inputs_BN[:, 1:]
    return int((equal & valid_BN[:, 1:].to(DEVICE)).cumprod(1).sum())


@pytest.mark.parametrize(
    ("n", "masked", "bad", "rows"),
    [
        (2, False, False, 2),
        (5, True, True, 2),
        *(pytest.param(n, masked, bad, 2 if n > 8 else 4, marks=SLOW)
          for n in range(2, 17) for masked in (False, True) for bad in (False, True)),
    ],
)  # fmt: skip
def test_drafts_count_where_they_precede(n: int, masked: bool, bad: bool, rows: int) -> None:
    params = [SamplingParams(**PENALTIES[i % len(PENALTIES)], seed=i) for i in range(rows)]
    assert compare_drafted(params, n, 300, n, masked=masked, bad=bad) > 0


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1, 20, 33, 1500, 5000, 32000])
@pytest.mark.parametrize("masked", [False, True])
def test_drafts_of_any_parameters(vocab_size: int, masked: bool) -> None:
    params = params_for(vocab_size)
    assert compare_drafted(params, 4, vocab_size, 3, right=0.9, masked=masked) >= 5
    assert compare_drafted(params, 3, vocab_size, 4, right=0.0, masked=masked) >= 0


def test_repeated_drafts_are_counted_each() -> None:
    """One token that penalties wear down until another is the best; all drafts are it."""
    params = [SamplingParams(temperature=0.0, frequency_penalty=1.0)]
    logits = torch.full((6, 40), -9.0, device=DEVICE)
    logits[:, 20], logits[:, 21] = 3.5, 0.0
    rows = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    inputs = torch.full((1, 6), 20, device=DEVICE)
    state = state_of(params, 40, DEVICE)
    before = state.token_counts[0].clone()
    positions = FIRST + torch.arange(6, device=DEVICE)
    output = triton_sampler.full(logits, state, rows, positions, None, inputs)
    assert output.tokens.tolist()[:5] == [20, 20, 20, 20, 21]
    added = state.token_counts[0] - before
    assert added.nonzero().flatten().tolist() == [20, 21]
    assert added[[20, 21]].tolist() == [4, 1]


@pytest.mark.parametrize(
    "structured", [pytest.param(None, marks=SLOW), {"regex": "(?:ab|cd|[e-z]){9,}"}]
)
def test_an_engine_verifies_rows_with_penalties_and_grammars(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, structured: dict[str, str] | None
) -> None:
    """The steps of an engine, whose sampler is the one in plain torch and then the Triton one."""
    config: dict[str, Any] = {
        **{"kernels": "torch", "mode": "eager", "dtype": "float32", "max_num_seqs": 2},
        "structured_output": structured is not None,
    }
    params = [
        SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(max_tokens=5, seed=2, frequency_penalty=0.4, structured=structured),
    ]
    prompts = [[7, 30, 41], [5, 5, 90, 12]]
    expected = run_mixed(open_engine("text", **config), prompts, params)
    monkeypatch.setitem(SAMPLERS, "torch", triton_sampler)
    engine = open_engine("text", **config, speculation={"num_speculative_tokens": 2})
    guesses = guess(engine, {name: own[0] for name, own in expected.items()}, 0.8)
    assert run_mixed(engine, prompts, params) == expected
    assert guesses.accepted > 2
