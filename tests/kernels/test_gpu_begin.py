"""The kernel that begins a decode step, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton.begin import EmbeddingTable, begin_decode
from stepgraph.runtime.kernels.weights import INT8

from ..rigs.gpu_references import DEVICE, reference_begin_decode


def test_every_byte_of_fp8_is_decoded() -> None:
    byte = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 256)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out = begin_decode(
        *(zero, zero, zero, zero.int().view(1, 1, 1), 1),
        EmbeddingTable(byte.view(torch.float8_e4m3fn), torch.ones(1, device=DEVICE), torch.float32),
        (torch.ones(1, 1, device=DEVICE),) * 2,
    )
    expected = byte.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(out.x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8", "fp8", "fp8 blocks"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "half", "factor", "held"),
    [(1, 21, 5, 1.0, None), (5, 300, 32, 6.5, range(20, 57))],  # a rank's part of the vocabulary
)
def test_a_step_begins_as_in_torch(
    storage: str, tokens: int, hidden: int, half: int, factor: float, held: range | None
) -> None:
    rows, groups, columns, block_size, vocab = 9, 2, 7, 5, 37
    weight = torch.randn(vocab, hidden, device=DEVICE)
    scales, dtype = None, torch.bfloat16
    if storage == "int8":
        weight, scales = INT8.quantise(weight)
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
        torch.randint(2 * vocab if held else vocab, (rows,), device=DEVICE),
        torch.randint(columns * block_size, (rows,), device=DEVICE),
        torch.randint(100, (groups, rows, columns), dtype=torch.int32, device=DEVICE),
        block_size,
        EmbeddingTable(weight, scales, dtype, factor, held),
        torch.rand(2, 3, half, device=DEVICE).unbind(),
    )
    out, expected = begin_decode(*args), reference_begin_decode(*args)
    torch.testing.assert_close(tuple(out), tuple(expected), atol=1e-6, rtol=1e-6)
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
        EmbeddingTable(torch.ones(5, 1, device=DEVICE), None, torch.float32),
        (frequencies, torch.ones_like(frequencies)),
    )
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(out.cos[0].double(), angles.cos(), atol=1e-7, rtol=0)
    torch.testing.assert_close(out.sin[0].double(), angles.sin(), atol=1e-7, rtol=0)
