"""Keys and values that kernels write to their slots have the bits that plain torch writes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton.store import store_keys_and_values

from ..rigs.attention_cases import poisoned_arena
from ..rigs.gpu_references import DEVICE, reference_store

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STORAGES = ["model", "int8", "fp8"]
LAYER = 1


def stored(
    k: Tensor, v: Tensor | None, slots: Tensor, block_size: int, storage: str
) -> tuple[Tensor, Tensor]:
    """The bytes of the arena as the kernel leaves it and as the reference does; of poison before.

    The null block, which all padding writes to, is left out.
    """
    sides, (_, g, e) = 1 if v is None else 2, k.shape
    arena = poisoned_arena((2, sides, 6, g, block_size, e), k.dtype, storage).to(DEVICE)
    expected = arena.clone()
    store_keys_and_values(k, v, arena, LAYER, slots, block_size, storage)
    reference_store(k, v, expected, LAYER, slots, block_size, storage)
    return arena[:, :, 1:].view(torch.uint8), expected[:, :, 1:].view(torch.uint8)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sides=st.integers(1, 2),
    g=st.integers(1, 4),
    e=st.integers(1, 40).map(lambda half: 2 * half) | st.just(576),
    block_size=st.integers(1, 20),
    storage=st.sampled_from(STORAGES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_shape_is_stored_bitwise_as_by_the_reference(
    sides: int, g: int, e: int, block_size: int, storage: str, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.logspace(-6, 3, 3 * g).view(3, g, 1)
    x = torch.randn(2, 3, g, e, generator=generator) * magnitude
    x[:, 1, 0] = 0.0
    k, v = x.to(dtype).to(DEVICE)
    slots = torch.randperm(5 * block_size, generator=generator)[:3].to(DEVICE) + block_size
    assert torch.equal(*stored(k, v if sides == 2 else None, slots, block_size, storage))


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_scales_of_the_smallest_and_largest_vectors(storage: str) -> None:
    """Subnormal numbers and those whose quotient lies on a bfloat16 are rounded as there."""
    tops = [1e-45, 1e-40, 1.2e-38, 127.0, 448.0, 448.0 * 1.0078125, 3.3e38, 0.5]
    x = torch.tensor(tops)[:, None, None] * torch.linspace(-1, 1, 32)
    slots = torch.arange(4, 12, device=DEVICE)
    assert torch.equal(*stored(x.to(DEVICE), None, slots, 4, storage))


def test_numbers_are_rounded_to_the_nearest_even_one() -> None:
    """Vectors whose scale is 1: halves as int8; all numbers of fp8, all middles between two of
    them, and the floats around these."""
    halves = torch.cat((torch.tensor([127.0, -127.0]), torch.arange(-30, 32) / 2.0))
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    up, down = torch.tensor(1e9), torch.tensor(-1.0)
    near = torch.cat((numbers, middles, middles.nextafter(up), middles.nextafter(down)))
    near = torch.cat((near, -near, torch.tensor([1e-30, -1e-45])))
    for storage, x in (("int8", halves), ("fp8", near)):
        slots = torch.tensor([5], device=DEVICE)
        found, expected = stored(x[None, None].to(DEVICE), None, slots, 4, storage)
        assert torch.equal(found, expected)
        code = torch.int8 if storage == "int8" else torch.float8_e4m3fn
        codes = found[LAYER, 0, 0, 0, len(x) : 2 * len(x)].view(code).cpu()
        exact = x.round().to(code) if storage == "int8" else x.to(code)
        assert torch.equal(codes.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(storage: str, poison: float) -> None:
    x = torch.randn(2, 1, 8)
    x[1, 0, 3] = poison
    slots = torch.tensor([4, 9], device=DEVICE)
    found, expected = (
        side[LAYER, 0, :, 0] for side in stored(x.to(DEVICE), None, slots, 4, storage)
    )
    assert torch.equal(found[0], expected[0]), "the healthy neighbour"
    scales = found.view(torch.bfloat16)[:, 16:]
    assert scales[0, 0].isfinite()
    assert not scales[1, 1].isfinite()
    assert scales[1, 1] != 0
