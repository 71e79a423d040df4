"""The Triton sampler with the drafts of verify steps and with token masks, against plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels.ops.batch import NON_FINITE, Feedback
from stepgraph.runtime.kernels.ops.token_masks import LaneMasks, mask_logits
from stepgraph.runtime.sampling.reference_sampler import sample_drafted, sample_full, sample_greedy
from stepgraph.runtime.sampling.samplers import SAMPLERS, triton_sampler
from stepgraph.runtime.sampling_params import SamplingParams

from ..rigs.engine_rig import Open
from ..rigs.sampling_cases import CASES, FIRST, assert_same, logits_of, params_for, state_of
from ..rigs.speculation_rig import guess
from ..speculation.test_speculation import run_mixed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.5},
    {"temperature": 0.7, "top_k": 20},
    CASES[-1],
]


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


def compare(
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
    own = () if masks is None else (masks,)
    output = triton_sampler.drafted(logits, states[1], rows, positions, inputs_BN, *own)
    assert_same(output, reference, plain)
    assert torch.equal(states[1].token_counts, states[0].token_counts)
    equal = reference.tokens.view(-1, n)[:, :-1] == inputs_BN[:, 1:]
    return int((equal & valid_BN[:, 1:].to(DEVICE)).cumprod(1).sum())


def rows_with(penalties: list[dict[str, Any]], count: int) -> list[SamplingParams]:
    return [SamplingParams(**penalties[i % len(penalties)], seed=i) for i in range(count)]


@pytest.mark.parametrize(
    ("n", "masked", "bad"),
    [
        (2, False, False),
        (5, True, True),
        (9, False, True),
        *(
            pytest.param(n, masked, bad, marks=pytest.mark.slow)
            for n in range(2, 17)
            for masked in (False, True)
            for bad in (False, True)
        ),
    ],
)
def test_drafts_count_where_they_precede(n: int, masked: bool, bad: bool) -> None:
    rows = 2 if n > 8 else 4
    accepted = compare(rows_with(PENALTIES, rows), n, 300, n, masked=masked, bad=bad)
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1, 20, 33, 1500, 5000, 32000])
@pytest.mark.parametrize("masked", [False, True])
def test_drafts_of_any_parameters(vocab_size: int, masked: bool) -> None:
    params = params_for(vocab_size)
    assert compare(params, 4, vocab_size, 3, right=0.9, masked=masked) >= 5
    assert compare(params, 3, vocab_size, 4, right=0.0, masked=masked) >= 0


def test_repeated_drafts_are_counted_each() -> None:
    """One token that penalties wear down until another is the best; all drafts are it."""
    params = [SamplingParams(temperature=0.0, frequency_penalty=1.0)]
    logits = torch.full((6, 40), -9.0, device=DEVICE)
    logits[:, 20], logits[:, 21] = 3.5, 0.0
    rows = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    inputs = torch.full((1, 6), 20, device=DEVICE)
    state = state_of(params, 40, DEVICE)
    before = state.token_counts[0].clone()
    output = triton_sampler.drafted(
        logits, state, rows, FIRST + torch.arange(6, device=DEVICE), inputs
    )
    assert output.tokens.tolist()[:5] == [20, 20, 20, 20, 21]
    added = state.token_counts[0] - before
    assert added.nonzero().flatten().tolist() == [20, 21]
    assert added[[20, 21]].tolist() == [4, 1]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (300, torch.float32),
        (1100, torch.bfloat16),
        *(
            pytest.param(vocab_size, dtype, marks=pytest.mark.slow)
            for vocab_size in (1, 7, 31, 32, 33, 130, 2049, 5000)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
        pytest.param(128256, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_masks_of_greedy_and_drawn_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    params = params_for(vocab_size)[:: 1 if dtype == torch.float16 else 7]
    lanes = len(params) + 1  # the last one is padding
    logits = logits_of(lanes, vocab_size, vocab_size, dtype).to(DEVICE)
    masks = random_masks(lanes, vocab_size, vocab_size)
    logits[1, -1], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    masked = mask_logits(logits, masks)
    expected = sample_greedy(masked)
    assert torch.equal(triton_sampler.greedy(logits, masks), expected)

    rows = torch.arange(lanes, device=DEVICE)
    positions = torch.full_like(rows, FIRST)
    states = [state_of(params, vocab_size, DEVICE) for _ in range(3)]
    reference = sample_full(masked, states[0], rows, positions)
    assert_same(triton_sampler.full(logits, states[1], rows, positions, masks), reference, masked)
    assert torch.equal(states[1].token_counts, states[0].token_counts)

    assert triton_sampler.full_step is not None
    assert triton_sampler.greedy_step is not None
    newest = torch.full((2, lanes), -7, device=DEVICE)
    feed = Feedback(rows, positions - 1, *newest)
    drawn = triton_sampler.full_step(logits, states[2], feed, masks).tokens
    assert torch.equal(drawn, reference.tokens)
    assert torch.equal(newest[0], drawn.clamp(min=0))
    assert torch.equal(triton_sampler.greedy_step(logits, feed, masks), expected)
    assert torch.equal(newest[0], expected.clamp(min=0))


def test_one_allowed_token_of_logits_that_are_not_finite_otherwise() -> None:
    """-inf of the only allowed token is no distribution, and neither is NaN of a forbidden one."""
    logits = logits_of(4, 300, 1, torch.float32).to(DEVICE)
    bits = torch.zeros(4, 10, dtype=torch.int32, device=DEVICE)
    bits[:, 7] = 1 << 3  # token 227
    logits[1, 227], logits[2, 9], logits[3, 9] = -math.inf, math.nan, -math.inf
    rows = torch.arange(4, device=DEVICE)
    masks = LaneMasks(bits, rows)
    state = state_of([SamplingParams(seed=lane, min_p=0.1) for lane in range(4)], 300, DEVICE)
    output = triton_sampler.full(logits, state, rows, rows + FIRST, masks)
    for tokens in (output.tokens, triton_sampler.greedy(logits, masks)):
        assert tokens.tolist() == [227, NON_FINITE, NON_FINITE, 227]
    assert output.logprob[0] == 0.0
    assert output.top_ids[0, 0] == 227
    assert bool((output.top_logprobs[0, 1:] == -math.inf).all())


@pytest.mark.parametrize(
    "structured",
    [pytest.param(None, marks=pytest.mark.slow), {"regex": "(?:ab|cd|[e-z]){9,}"}],
)
def test_an_engine_verifies_rows_with_penalties_and_grammars(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, structured: dict[str, str] | None
) -> None:
    """The steps of an engine, whose sampler is the one in plain torch and then the Triton one."""
    config: dict[str, Any] = {
        "kernels": "torch",
        "mode": "eager",
        "dtype": "float32",
        "max_num_seqs": 2,
    }
    config |= {"structured_output": structured is not None}
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
