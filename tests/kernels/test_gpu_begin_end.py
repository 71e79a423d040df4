"""The kernels that begin and end a decode step, against plain torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels.ops.batch import NON_FINITE, Feedback
from stepgraph.runtime.kernels.ops.weight_storage import quantise_weight
from stepgraph.runtime.kernels.triton.begin import (
    Embedding,
    Rotations,
    begin_decode,
)
from stepgraph.runtime.kernels.triton.head import head, pick_greedy, reference_head
from stepgraph.runtime.kernels.triton.linear import GpuLinear, GpuNorm, LinearConfig, Pending

from ..rigs.gpu_references import reference_begin_decode, reference_pick_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8", "fp8", "fp8 blocks"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "half", "factor"), [(1, 21, 5, 1.0), (5, 300, 32, 6.5)]
)
def test_a_step_begins_as_in_torch(
    storage: str, tokens: int, hidden: int, half: int, factor: float
) -> None:
    rows, groups, columns, block_size, vocab = 9, 2, 7, 5, 37
    weight = torch.randn(vocab, hidden, device=DEVICE)
    scales, dtype = None, torch.bfloat16
    if storage == "int8":
        weight, scales = quantise_weight(weight)
    elif storage == "fp8":
        weight, scales = weight.to(torch.float8_e4m3fn), torch.rand(vocab, device=DEVICE)
    elif storage == "fp8 blocks":
        weight = weight.to(torch.float8_e4m3fn)
        scales = torch.rand(vocab, -(-hidden // 128), device=DEVICE)
    else:
        dtype = getattr(torch, storage)
        weight = weight.to(dtype)
    args = (
        torch.randperm(rows, device=DEVICE)[:tokens],
        torch.randint(vocab, (rows,), device=DEVICE),
        torch.randint(columns * block_size, (rows,), device=DEVICE),
        torch.randint(100, (groups, rows, columns), dtype=torch.int32, device=DEVICE),
        block_size,
        Embedding(weight, scales, dtype, factor),
        Rotations(*torch.rand(2, 3, half, device=DEVICE)),
    )
    out, expected = begin_decode(*args), reference_begin_decode(*args)
    for field in dataclasses.fields(expected):
        value = getattr(expected, field.name)
        torch.testing.assert_close(getattr(out, field.name), value, atol=1e-6, rtol=1e-6)
    assert torch.equal(out.slots, expected.slots)


def test_angles_of_long_contexts() -> None:
    positions = torch.tensor([0, 1, 1000, 131071, 10_000_000], device=DEVICE)
    rows = torch.arange(5, device=DEVICE)
    frequencies = torch.tensor([[1.0, 0.7, 1e-3, 1e-6]], device=DEVICE)
    out = begin_decode(
        rows,
        rows,
        positions,
        torch.ones(1, 5, 10_000_001, dtype=torch.int32, device=DEVICE),
        1,
        Embedding(torch.ones(5, 1, device=DEVICE), None, torch.float32),
        Rotations(frequencies, torch.ones_like(frequencies)),
    )
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(out.cos[0].double(), angles.cos(), atol=1e-7, rtol=0)
    torch.testing.assert_close(out.sin[0].double(), angles.sin(), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (3, 7), (4, 1500)])
def test_the_best_token_becomes_the_newest(tokens: int, chunks: int) -> None:
    rows = torch.randperm(6, device=DEVICE)[:tokens]
    rows[-1] = 5  # the null row
    maxima = torch.randn(tokens, chunks, device=DEVICE)
    maxima[0, chunks // 2 :] = maxima.max() + 1  # many are the best: the first one counts
    ids = torch.arange(chunks, dtype=torch.int32, device=DEVICE) * 3 + torch.randint(
        3, (tokens, chunks), dtype=torch.int32, device=DEVICE
    )
    positions = torch.randint(50, (tokens,), device=DEVICE)
    token_ids, state_positions = torch.arange(6, device=DEVICE), torch.arange(6, device=DEVICE)
    state_positions[5] = 0
    expected_ids, expected_positions = token_ids.clone(), state_positions.clone()
    picked = pick_greedy(maxima, ids, Feedback(rows, positions, token_ids, state_positions))
    expected = reference_pick_greedy(
        maxima, ids, Feedback(rows, positions, expected_ids, expected_positions)
    )
    assert torch.equal(picked, expected)
    assert torch.equal(pick_greedy(maxima, ids), expected)
    assert torch.equal(token_ids, expected_ids)
    assert torch.equal(state_positions, expected_positions)
    assert int(state_positions[5]) == 0


def test_a_row_that_is_not_a_distribution_gets_no_token() -> None:
    maxima = torch.randn(3, 300, device=DEVICE)
    maxima[0, 250], maxima[1] = float("inf"), float("-inf")
    ids = torch.arange(300, dtype=torch.int32, device=DEVICE).repeat(3, 1) + 1
    state = [torch.full((4,), 7, device=DEVICE) for _ in range(2)]
    rows = torch.arange(3, device=DEVICE)
    picked = pick_greedy(maxima, ids, Feedback(rows, rows + 20, *state))
    assert picked.tolist() == [NON_FINITE, NON_FINITE, int(maxima[2].argmax()) + 1]
    assert torch.equal(picked, reference_pick_greedy(maxima, ids))
    assert state[0].tolist() == [0, 0, int(picked[2]), 7]  # what the next step begins with
    assert state[1].tolist() == [21, 22, 23, 7]


FEW = LinearConfig(16, 16)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "config", "chunk"),
    [(1, FEW, 16), (3, FEW, 16), (5, None, 1024), (33, None, 1024)],
)
@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (3.0, 1.0), (0.0, 0.11), (3.0, 0.2)])
def test_logits_and_the_best_of_each_chunk(
    dtype: torch.dtype,
    tokens: int,
    config: LinearConfig | None,
    chunk: int,
    softcap: float,
    scale: float,
) -> None:
    hidden, vocab = 37, 131 if chunk < 1024 else 1100
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype)
    weight = torch.randn(vocab, hidden, device=DEVICE, dtype=dtype)
    norm = GpuNorm(torch.randn(hidden, device=DEVICE, dtype=dtype), 1e-5)
    linear = GpuLinear(weight)
    logits, maxima, ids = head(x, norm, linear, softcap, None, config, scale=scale)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    expected, _, _ = reference_head(x, norm, linear, softcap, scale=scale)
    assert (logits - expected).float().norm() <= tolerance * expected.float().norm()
    for i, part in enumerate(logits.float().split(chunk, dim=1)):
        assert torch.equal(maxima[:, i], part.amax(-1))
        assert torch.equal(ids[:, i], (part.argmax(-1) + i * chunk).int())


def test_equal_logits_and_what_is_no_number() -> None:
    weight = torch.ones(40, 16, device=DEVICE)
    weight[33] = float("nan")
    norm = GpuNorm(torch.ones(16, device=DEVICE), 1e-5)
    x = torch.rand(2, 16, device=DEVICE)
    x[1] = float("nan")  # a row of its own
    logits, maxima, ids = head(x, norm, GpuLinear(weight), config=FEW)
    assert ids[0, :2].tolist() == [0, 16]
    assert bool(((ids >= 0) & (ids < 40)).all())
    assert bool(logits[0, :33].isfinite().all())
    assert bool(maxima[0, :2].isfinite().all())
    assert maxima[0, 2] == torch.inf
    assert maxima[1].eq(torch.inf).all()


def test_pending_rows_are_added_first() -> None:
    x, delta = torch.randn(2, 2, 24, device=DEVICE).unbind(0)
    norm, post = (GpuNorm(torch.randn(24, device=DEVICE), 1e-6, offset=True) for _ in range(2))
    linear = GpuLinear(torch.randn(50, 24, device=DEVICE))
    summed, expected_sum = torch.full_like(x, float("nan")), torch.empty_like(x)
    logits, _, _ = head(x, norm, linear, 0.0, Pending(delta, post, summed), FEW)
    expected, _, _ = reference_head(x, norm, linear, 0.0, Pending(delta, post, expected_sum))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(summed, expected_sum)
