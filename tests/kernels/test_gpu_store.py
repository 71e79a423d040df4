"""Keys and values go to their slots, plain or normed and rotated on the way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from stepgraph.runtime.kernels import AttentionForm, LayerPlace, RaggedBatch
from stepgraph.runtime.kernels.ops.kv_storage import read_blocks
from stepgraph.runtime.kernels.ops.layer_operations import AttentionTemperature
from stepgraph.runtime.kernels.triton.rotated_heads import HeadRotation
from stepgraph.runtime.kernels.triton.store import (
    rotate_and_store,
    store_keys_and_values,
)
from stepgraph.runtime.models.modules import RMSNorm
from stepgraph.runtime.models.rope import rotate

from ..rigs.attention_cases import poisoned_arena
from ..rigs.gpu_references import reference_rotate_and_store, reference_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STORAGES = ["model", "int8", "fp8"]
LAYER = 1


def new_arena(
    sides: int, blocks: int, g: int, block_size: int, e: int, dtype: torch.dtype, storage: str
) -> Tensor:
    return poisoned_arena((2, sides, blocks, g, block_size, e), dtype, storage).to(DEVICE)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Also of NaN, outside of the null block."""
    return torch.equal(a[:, :, 1:].view(torch.uint8), b[:, :, 1:].view(torch.uint8))


def batch_of(slots: Tensor) -> RaggedBatch:
    """Tokens that write to these slots of blocks of 4, each in a row of its own."""
    rows = torch.zeros_like(slots)
    tables = rows.int()[None, :, None]
    return RaggedBatch(rows, slots[None], rows, rows, tables, 1, 4, tokens_per_row=1)


def stored(arena: Tensor, slots: Tensor, storage: str) -> Tensor:
    """What stands at the slots of blocks of 4: `[sides, T, G, E]` in float32."""
    every = torch.arange(arena.shape[2], device=arena.device)
    sides = [read_blocks(side, every, 4, storage) for side in arena[LAYER]]
    return torch.stack([side[:, slots].transpose(0, 1).float() for side in sides])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["none", "plain", "offset", "all heads"])
@pytest.mark.parametrize("heads", [(6, 2, 16), (3, 1, 10), (5, 5, 128)])
def test_rotate_and_store(
    storage: str, dtype: torch.dtype, norm: str, heads: tuple[int, int, int]
) -> None:
    (h, g, e), tokens = heads, 4
    qkv = torch.randn(tokens, (h + 2 * g) * e, device=DEVICE).to(dtype)
    angles = 100 * torch.rand(tokens, e // 2, device=DEVICE)
    sizes = (h * e, g * e) if norm == "all heads" else (e, e)
    weights = [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]
    q_norm, k_norm = (None, None) if norm == "none" else weights
    slots = torch.tensor([5, 6, 12, 0], device=DEVICE)
    form = AttentionForm(1.0, storage=storage, value_dim=e)
    arena = new_arena(2, 4, g, 4, e, dtype, storage)
    other = arena.clone()
    rotation = HeadRotation(q_norm, k_norm, 1e-5, norm == "offset", angles.cos(), angles.sin())
    arguments = LayerPlace(0, LAYER), rotation, batch_of(slots), form
    out = rotate_and_store(qkv, arena, *arguments)
    expected = reference_rotate_and_store(qkv, other, *arguments)
    # Of a step of the dtype, where sums of another order were rounded to another number.
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out, expected, atol=close, rtol=close)
    there, wanted = stored(arena, slots[:3], storage), stored(other, slots[:3], storage)
    coarse = {"model": close, "int8": 0.02, "fp8": 0.15}[storage]
    torch.testing.assert_close(there[0], wanted[0], atol=coarse * 3, rtol=coarse)
    assert torch.equal(there[1], wanted[1])
    untouched = torch.ones(arena.shape[2] * 4, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert torch.isnan(stored(arena, untouched.nonzero()[:, 0].to(DEVICE), storage)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_temperature_of_queries(dtype: torch.dtype) -> None:
    """At the positions before and after a floor; keys have none."""
    positions = torch.tensor([0, 5, 6, 13, 699], device=DEVICE)
    tokens, h, g, e = len(positions), 3, 1, 10
    qkv = torch.randn(tokens, (h + 2 * g) * e, device=DEVICE).to(dtype)
    angles = torch.randn(tokens, e // 2, device=DEVICE)
    plain = HeadRotation(None, None, 1e-5, False, angles.cos(), angles.sin())
    warm = plain._replace(temperature=AttentionTemperature(7, 0.3))
    slots = torch.arange(4, 4 + tokens, device=DEVICE)
    batch = dataclasses.replace(batch_of(slots), positions=positions)
    form = AttentionForm(1.0, value_dim=e)

    def stored_by(function: Callable[..., Tensor], rotation: HeadRotation) -> tuple[Tensor, Tensor]:
        arena = new_arena(2, 4, g, 4, e, dtype, "model")
        q = function(qkv, arena, LayerPlace(0, LAYER), rotation, batch, form)
        return q, stored(arena, slots, "model")

    q, cached = stored_by(rotate_and_store, warm)
    unscaled, expected = stored_by(rotate_and_store, plain)
    assert torch.equal(cached, expected)
    factors = [1 + 0.3 * math.log(1 + (p + 1) // 7) for p in positions.tolist()]
    exact = unscaled.double() * torch.tensor(factors, device=DEVICE)[:, None, None]
    close = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(q, exact.to(dtype), rtol=close, atol=0)
    torch.testing.assert_close(q, stored_by(reference_rotate_and_store, warm)[0])


@pytest.mark.parametrize("offset", [False, True])
def test_the_reference_is_what_models_do(offset: bool) -> None:
    tokens, h, g, e = 3, 4, 2, 14
    qkv = torch.randn(tokens, (h + 2 * g) * e).bfloat16()
    angles = torch.randn(tokens, e // 2)
    norms = [RMSNorm(1e-5, offset=offset) for _ in "qk"]
    for norm in norms:
        norm.weight = torch.nn.Parameter(torch.randn(e).bfloat16(), requires_grad=False)
    form = AttentionForm(1.0, value_dim=e)
    arena = poisoned_arena((2, 2, 3, g, 4, e), torch.bfloat16, "model")
    slots = torch.tensor([4, 5, 11])
    rotation = HeadRotation(
        norms[0].weight, norms[1].weight, 1e-5, offset, angles.cos(), angles.sin()
    )
    place = LayerPlace(0, LAYER)
    out = reference_rotate_and_store(qkv, arena, place, rotation, batch_of(slots), form)
    q, k, v = qkv.view(tokens, -1, e).split((h, g, g), dim=1)
    assert torch.equal(out, rotate(norms[0](q), angles.cos(), angles.sin()))
    expected = torch.stack([rotate(norms[1](k), angles.cos(), angles.sin()), v]).float()
    assert torch.equal(stored(arena, slots, "model"), expected)


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
    k, v = torch.randn(2, 3, g, e, generator=generator).to(dtype).to(DEVICE)
    slots = torch.randperm(5 * block_size, generator=generator)[:3].to(DEVICE) + block_size
    arena = new_arena(sides, 6, g, block_size, e, dtype, storage)
    expected, values = arena.clone(), v if sides == 2 else None
    store_keys_and_values(k, values, arena, LAYER, slots, block_size, storage)
    reference_store(k, values, expected, LAYER, slots, block_size, storage)
    assert same_bytes(arena, expected)
