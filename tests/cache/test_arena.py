"""The arenas: layout, the null block, copies, one address for life."""

from __future__ import annotations

import pytest
import torch
from stepgraph.cache.arena import Arena, HostArena, Storage
from stepgraph.cache.blocks import NULL_BLOCK
from stepgraph.cache.spec import PagedState, group_layers

CPU = torch.device("cpu")
KEYS_AND_VALUES = PagedState(heads=3, head_dim=8)
LATENT = PagedState(heads=1, head_dim=12, sides=1)
NUM_BLOCKS, BLOCK_SIZE = 7, 4
SHAPES = {
    "model": [(2, 2, NUM_BLOCKS, 3, BLOCK_SIZE, 8), (2, 1, NUM_BLOCKS, 1, BLOCK_SIZE, 12)],
    "int8": [(2, 2, NUM_BLOCKS, 3, BLOCK_SIZE * 10), (2, 1, NUM_BLOCKS, 1, BLOCK_SIZE * 14)],
}
LAYOUTS = [(KEYS_AND_VALUES,), (LATENT,), (KEYS_AND_VALUES, LATENT)]
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def make_arena(
    states: tuple[PagedState, ...], storage: Storage, device: torch.device = CPU
) -> Arena:
    """Two layers with these states."""
    groups = group_layers(states * 2)
    return Arena(groups, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, device, storage)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, in which NaNs are equal if their bits are."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("storage", ["model", "int8", "fp8"])
@pytest.mark.parametrize("states", LAYOUTS)
def test_null_block_is_zero_and_nothing_else_is_touched(
    states: tuple[PagedState, ...], storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(*args: object, dtype: torch.dtype, **kwargs: object) -> torch.Tensor:
        poison = float("nan") if dtype.is_floating_point else 255
        return torch.full(*args, poison, dtype=dtype, **kwargs)

    monkeypatch.setattr(torch, "empty", poisoned)
    arena = make_arena(states, storage)
    both = SHAPES["model" if storage == "model" else "int8"]
    shapes = [both[(KEYS_AND_VALUES, LATENT).index(state)] for state in states]
    assert [view.shape for view in arena.views] == shapes
    assert arena.nbytes == sum(view.nbytes for view in arena.views)
    for view in arena.views:
        assert as_bytes(view[:, :, NULL_BLOCK]).eq(0).all()
        rest = view[:, :, 1:]
        assert (rest.isnan() if storage == "model" else rest.eq(255)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("states", LAYOUTS)
def test_copied_blocks_are_the_same_bytes_in_all_layers(
    states: tuple[PagedState, ...], storage: Storage, device: torch.device
) -> None:
    """Within the arena, to the host and back."""
    arena = make_arena(states, storage, device)
    host = HostArena(arena, 3)
    addresses = arena.tensor.data_ptr(), host.address
    assert host.num_blocks == 3
    assert host.nbytes == 3 * arena.nbytes // NUM_BLOCKS
    noise = torch.Generator().manual_seed(1)
    for view in arena.views:
        random = torch.randint(0, 256, as_bytes(view).shape, dtype=torch.uint8, generator=noise)
        view.view(torch.uint8).copy_(random)
    before = [as_bytes(view).cpu().clone() for view in arena.views]
    expected = [view.clone() for view in before]

    def holds(contents: list[torch.Tensor]) -> bool:
        held = [as_bytes(view).cpu() for view in arena.views]
        return all(map(torch.equal, held, contents))

    arena.copy_blocks([])
    arena.copy_blocks([(2, 6), (2, 1), (5, 3)])
    for source, destination in [(2, 6), (2, 1), (5, 3)]:
        for old, new in zip(before, expected, strict=True):
            new[:, :, destination] = old[:, :, source]
    assert holds(expected)
    host.swap_out([(4, 2), (1, 0)])
    assert holds(expected)
    for view in arena.views:
        view[:, :, 1:].view(torch.uint8).fill_(255)  # others had the blocks meanwhile
    host.swap_in([(2, 6), (0, 4)])
    swapped = [torch.full_like(view, 255) for view in before]
    for old, copied, new in zip(before, expected, swapped, strict=True):
        new[:, :, NULL_BLOCK] = old[:, :, NULL_BLOCK]
        new[:, :, 6], new[:, :, 4] = copied[:, :, 4], copied[:, :, 1]
    assert holds(swapped)
    assert (arena.tensor.data_ptr(), host.address) == addresses
