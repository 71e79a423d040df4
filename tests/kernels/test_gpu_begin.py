"""The kernel that begins a decode step, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton.begin import EmbeddingTable, begin_decode
from stepgraph.runtime.kernels.weights import INT8, dequantise

from ..rigs.gpu_references import DEVICE


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
    own = torch.randperm(rows, device=DEVICE)[:tokens]
    token_ids = torch.randint(2 * vocab if held else vocab, (rows,), device=DEVICE)
    positions = torch.randint(columns * block_size, (rows,), device=DEVICE)
    tables = torch.randint(100, (groups, rows, columns), dtype=torch.int32, device=DEVICE)
    frequencies, amplitudes = torch.rand(2, 3, 1, half, device=DEVICE).unbind()
    embedding = EmbeddingTable(weight, scales, dtype, factor, held)
    rotations = frequencies[:, 0], amplitudes[:, 0]
    out = begin_decode(own, token_ids, positions, tables, block_size, embedding, rotations)
    position = positions[own]
    angles = position[:, None].float() * frequencies
    exact = weight if scales is None else dequantise(weight, scales).to(dtype)
    places = token_ids[own] - (held.start if held else 0)
    x = exact[places.clamp(0, vocab - 1)] * factor
    x[(places < 0) | (places >= vocab)] = 0.0
    slots = tables[:, own, position // block_size] * block_size + position % block_size
    expected = (x, position, slots.long(), angles.cos() * amplitudes, angles.sin() * amplitudes)
    torch.testing.assert_close(tuple(out), expected, atol=1e-6, rtol=1e-6)


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
