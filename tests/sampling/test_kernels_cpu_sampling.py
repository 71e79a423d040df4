"""The samplers as operators of a CPU draw the tokens that their torch references draw."""

import pytest
import torch
from stepgraph.runtime.kernels.cpu.sampling import fused_most_likely
from stepgraph.runtime.kernels.ops.batch import NON_FINITE
from stepgraph.runtime.kernels.ops.token_masks import LaneMasks, mask_logits
from stepgraph.runtime.sampling.reference_sampler import sample_full, sample_greedy
from stepgraph.runtime.sampling.samplers import Sampler, fused_sampler, torch_sampler
from stepgraph.runtime.sampling_params import SamplingParams

from ..rigs.packed_weights import packed
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

pytestmark = pytest.mark.usefixtures("cpu_ops")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_masks(vocab_size: int, rows: torch.Tensor) -> LaneMasks:
    """Seven masks, of which lanes use those of `rows`."""
    generator = torch.Generator().manual_seed(vocab_size)
    words = torch.randint(-(2**31), 2**31, (7, -(-vocab_size // 32)), generator=generator)
    return LaneMasks(words.to(torch.int32), rows)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 20, 127, 128, 129, 300, 5000])
def test_draws_what_the_reference_draws(vocab_size: int, dtype: torch.dtype) -> None:
    params = params_for(vocab_size)
    states = [state_of(params, vocab_size) for _ in range(2)]
    rows = torch.tensor([*range(len(params)), len(params), len(params)])  # padding at the end
    for step in range(4):
        logits = logits_of(len(rows), vocab_size, step, dtype)
        positions = torch.full_like(rows, FIRST + step)
        reference = sample_full(logits, states[0], rows, positions)
        assert_same(fused_sampler.full(logits, states[1], rows, positions), reference, logits)
        assert torch.equal(states[1].token_counts, states[0].token_counts)
        for name in ("reals", "integers"):
            assert torch.equal(getattr(states[1], name), getattr(states[0], name))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sampler", [torch_sampler, fused_sampler], ids=["torch", "fused"])
def test_drafts_are_drawn_as_if_one_by_one(sampler: Sampler, masked: bool) -> None:
    """Rows with and without penalties, drafts that are right up to each place."""
    params, n = params_for(300), 4
    lanes, rows = len(params) * n, torch.arange(len(params))
    rows_BN = rows[:, None].expand(-1, n).contiguous()
    positions_BN = FIRST + torch.arange(n).expand(len(params), -1)
    logits_BNV = logits_of(lanes, 300, 1, torch.float32).view(len(params), n, 300)
    logits_BNV[:, 1:] = logits_BNV[:, :1]  # so that counts decide
    logits = allowed = logits_BNV.flatten(0, 1)
    masks: LaneMasks | None = None
    if masked:
        masks = random_masks(300, torch.arange(lanes) % 7)
        allowed = mask_logits(logits, masks)
        if not sampler.takes_masks:
            logits, masks = allowed, None
    for right in range(n):
        states = [state_of(params) for _ in range(2)]
        expected = torch.stack(
            [
                sample_full(allowed[j::n], states[0], rows, positions_BN[:, j]).tokens
                for j in range(right + 1)
            ],
            dim=1,
        )
        inputs_BN = torch.zeros(len(params), n, dtype=torch.int64)
        inputs_BN[:, 1 : 1 + right] = expected[:, : n - 1][:, :right]
        if right < n - 1:
            inputs_BN[:, 1 + right] = (expected[:, right] + 1) % 300
        lanes = logits, states[1], rows_BN.flatten(), positions_BN.flatten()
        found = sampler.full(*lanes, masks, inputs_BN)
        assert torch.equal(found.tokens.view(-1, n)[:, : right + 1], expected)
        assert torch.equal(states[1].token_counts, states[0].token_counts)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.7}, {}])
@pytest.mark.parametrize("distinct", [1, 2, 5])
def test_equal_tokens_are_kept_together(distinct: int, case: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(distinct)
    logits = torch.randint(distinct, (1, 400), generator=generator) * 0.75
    states = [state_of([SamplingParams(**case, seed=5)], 400) for _ in range(2)]
    rows, positions = torch.zeros(300, dtype=torch.int64), torch.arange(300)
    reference = sample_full(logits.expand(300, -1), states[0], rows, positions)
    output = fused_sampler.full(logits.expand(300, -1), states[1], rows, positions)
    assert torch.equal(output.tokens, reference.tokens)
    assert len(output.tokens.unique()) > 50  # ties are not broken by their place


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 5, 128, 130, 9000])
def test_greedy_is_the_lowest_of_the_largest(vocab_size: int, dtype: torch.dtype) -> None:
    for seed in range(4):
        logits = logits_of(9, vocab_size, seed, dtype).round()  # many are equal
        assert torch.equal(fused_sampler.greedy(logits), sample_greedy(logits))
    bad = with_bad_lanes(logits)
    if vocab_size == 1:
        bad[5] = 0.5
    for sampler in (fused_sampler, torch_sampler):
        tokens = sampler.greedy(bad)
        assert tokens[BAD_LANES].eq(NON_FINITE).all()
        good = [lane for lane in range(9) if lane not in BAD_LANES]
        assert torch.equal(tokens[good], bad[good].argmax(-1))
    strided = logits_of(4, 2 * vocab_size, 9, dtype)[:, :vocab_size]
    assert torch.equal(fused_sampler.greedy(strided), sample_greedy(strided))


def test_a_lane_does_not_see_its_batch() -> None:
    params = params_for(300)
    logits = logits_of(len(params), 300, 1, torch.bfloat16)
    rows, positions = torch.arange(len(params)), torch.full((len(params),), FIRST)
    together = fused_sampler.full(logits, state_of(params, 300), rows, positions)
    state = state_of(params, 300)
    for lane in range(len(params)):
        one = slice(lane, lane + 1)
        alone = fused_sampler.full(logits[one], state, rows[one], positions[one])
        assert torch.equal(alone.tokens, together.tokens[one])
        assert torch.equal(alone.logprob, together.logprob[one])
        assert torch.equal(alone.top_logprobs, together.top_logprobs[one])


@pytest.mark.parametrize("sampler", [fused_sampler, torch_sampler], ids=["fused", "torch"])
def test_logits_that_are_not_a_distribution_stay_in_their_lane(sampler: Sampler) -> None:
    for case in CASES:
        check_bad_lanes_stay_alone(sampler.full, case)
    check_parameters_that_leave_no_distribution(sampler.full)


def test_what_does_not_fit_is_refused() -> None:
    """Rows, logits, and last a token outside the vocabulary."""
    state = state_of([SamplingParams(), SamplingParams()], 30)
    logits, rows = torch.zeros(2, 30), torch.arange(2)
    for own, of, error in (
        (logits, torch.tensor([0, 9]), IndexError),
        (logits, torch.tensor([0]), RuntimeError),
        (logits, torch.tensor([0.0, 1.0]), RuntimeError),
        (torch.zeros(2, 31), rows, RuntimeError),
        (logits.double(), rows, RuntimeError),
    ):
        with pytest.raises(error):
            fused_sampler.full(own, state, of, rows + 9)
    state.integers[0, 40] = 30
    with pytest.raises(IndexError):
        fused_sampler.full(logits, state, rows, rows + 9)


def test_operators_are_described_to_compilers() -> None:
    logits, rows = logits_of(3, 300, 0, torch.float32), torch.arange(3)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.stepgraph.sample_greedy.default, (logits,), test_utils=tests)
    weight = packed([torch.ones(40, 8)], torch.float32)
    torch.library.opcheck(
        torch.ops.stepgraph.packed_embedding.default,
        (rows, weight, 8, torch.float32),
        test_utils=tests,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 5000])
def test_masks_what_the_reference_masks(vocab_size: int, dtype: torch.dtype) -> None:
    logits = logits_of(5, vocab_size, 0, dtype)
    logits[0, 0], logits[1, -1], logits[2, vocab_size // 2] = float("nan"), torch.inf, -torch.inf
    masks = random_masks(vocab_size, torch.tensor([3, 1, 0, 6, 3]))
    masks.bits[3], masks.bits[1, 0] = -1, 0
    masked = mask_logits(logits, masks)
    assert torch.equal(fused_sampler.greedy(logits, masks), sample_greedy(masked))
    params = [SamplingParams(seed=lane, top_k=20, top_p=0.9) for lane in range(5)]
    states = [state_of(params, vocab_size) for _ in range(2)]
    lanes, positions = torch.arange(5), torch.full((5,), FIRST)
    reference = sample_full(masked, states[0], lanes, positions)
    output = fused_sampler.full(logits, states[1], lanes, positions, masks)
    assert_same(output, reference, masked)


def test_masks_that_do_not_fit_are_refused() -> None:
    logits, bits = torch.zeros(2, 40), torch.zeros(3, 2, dtype=torch.int32)
    for masks in (
        LaneMasks(bits[:, :1], torch.tensor([0, 1])),
        LaneMasks(bits.long(), torch.tensor([0, 1])),
        LaneMasks(bits, torch.tensor([0, 3])),
        LaneMasks(bits, torch.tensor([0])),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            fused_sampler.greedy(logits, masks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 128, 300, 5000])
def test_most_likely_tokens_and_their_probabilities(vocab_size: int, dtype: torch.dtype) -> None:
    logits = logits_of(5, vocab_size, 3, dtype)
    ids, probabilities = fused_most_likely(logits)
    assert torch.equal(ids, sample_greedy(logits))
    expected = logits.double().softmax(-1).amax(-1).float()
    torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=0)
    logits[1] = -torch.inf
    logits[2, -1] = torch.nan
    logits[3, 0] = torch.inf
    bad_ids, bad_probabilities = fused_most_likely(logits)
    assert bad_ids[1:4].tolist() == bad_probabilities[1:4].tolist() == [0, 0, 0]
    assert torch.equal(bad_ids[[0, 4]], ids[[0, 4]])
