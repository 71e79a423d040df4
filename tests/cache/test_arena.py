"""The arenas: layout, the null block, copies, one address for life."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stepgraph.cache.arena import Arena, HostArena, Storage
from stepgraph.cache.blocks import NULL_BLOCK
from stepgraph.cache.spec import LayerSpec, group_layers

CPU = torch.device("cpu")
SPEC = LayerSpec(num_kv_heads=3, head_dim=8, element_bytes=2)
BYTES = replace(SPEC, element_bytes=1, scale_bytes=2)
LATENT = LayerSpec(num_kv_heads=1, head_dim=12, element_bytes=2, sides=1)
LATENT_BYTES = replace(LATENT, element_bytes=1, scale_bytes=2)
NUM_BLOCKS, BLOCK_SIZE = 7, 4
LAYOUTS: list[tuple[LayerSpec, Storage, tuple[int, ...]]] = [
    (SPEC, "model", (2, 2, NUM_BLOCKS, 3, BLOCK_SIZE, 8)),
    (BYTES, "int8", (2, 2, NUM_BLOCKS, 3, BLOCK_SIZE * (8 + 2))),
    (BYTES, "fp8", (2, 2, NUM_BLOCKS, 3, BLOCK_SIZE * (8 + 2))),
    (LATENT, "model", (2, 1, NUM_BLOCKS, 1, BLOCK_SIZE, 12)),
    (LATENT_BYTES, "int8", (2, 1, NUM_BLOCKS, 1, BLOCK_SIZE * (12 + 2))),
]
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def make_arena(
    spec: LayerSpec = SPEC, storage: Storage = "model", device: torch.device = CPU
) -> Arena:
    return Arena(group_layers([spec] * 2), NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, device, storage)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, in which NaNs are equal if their bits are."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("spec", "storage", "shape"), LAYOUTS)
def test_null_block_is_zero_and_nothing_else_is_touched(
    spec: LayerSpec, storage: Storage, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(*args: object, dtype: torch.dtype, **kwargs: object) -> torch.Tensor:
        poison = float("nan") if dtype.is_floating_point else 255
        return torch.full(*args, poison, dtype=dtype, **kwargs)

    monkeypatch.setattr(torch, "empty", poisoned)
    tensor = make_arena(spec, storage).tensor
    assert tensor.shape == shape
    assert as_bytes(tensor[:, :, NULL_BLOCK]).eq(0).all()
    rest = tensor[:, :, 1:]
    assert (rest.isnan() if storage == "model" else rest.eq(255)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "storage", "shape"), LAYOUTS)
def test_copied_blocks_are_the_same_bytes_in_all_layers(
    spec: LayerSpec, storage: Storage, shape: tuple[int, ...], device: torch.device
) -> None:
    """Within the arena, to the host and back."""
    arena = make_arena(spec, storage, device)
    host = HostArena(arena, 3)
    addresses = arena.address, host.address
    assert host.num_blocks == 3
    assert host.nbytes == 3 * arena.nbytes // NUM_BLOCKS
    noise = torch.Generator().manual_seed(1)
    before = torch.randint(0, 256, as_bytes(arena.tensor).shape, dtype=torch.uint8, generator=noise)
    arena.tensor.view(torch.uint8).copy_(before)
    expected = before.clone()
    arena.copy_blocks([])
    arena.copy_blocks([(2, 6), (2, 1), (5, 3)])
    for source, destination in [(2, 6), (2, 1), (5, 3)]:
        expected[:, :, destination] = before[:, :, source]
    assert torch.equal(as_bytes(arena.tensor).cpu(), expected)
    host.swap_out([(4, 2), (1, 0)])
    assert torch.equal(as_bytes(arena.tensor).cpu(), expected)
    arena.tensor[:, :, 1:].view(torch.uint8).fill_(255)  # others had the blocks meanwhile
    host.swap_in([(2, 6), (0, 4)])
    swapped = torch.full_like(before, 255)
    swapped[:, :, NULL_BLOCK] = before[:, :, NULL_BLOCK]
    swapped[:, :, 6], swapped[:, :, 4] = expected[:, :, 4], expected[:, :, 1]
    assert torch.equal(as_bytes(arena.tensor).cpu(), swapped)
    assert (arena.address, host.address) == addresses
