"""The arena: layout, views, the null block, one address for life."""

from __future__ import annotations

import pytest
import torch
from stepgraph.cache.arena import Arena
from stepgraph.cache.blocks import NULL_BLOCK
from stepgraph.cache.spec import FullAttentionSpec, LayerGroup, group_layers

CPU = torch.device("cpu")
SPEC = FullAttentionSpec(num_kv_heads=3, head_dim=8, element_bytes=2)
NUM_BLOCKS, BLOCK_SIZE = 7, 4


def make_arena(groups: tuple[LayerGroup, ...] | None = None, device: torch.device = CPU) -> Arena:
    if groups is None:
        groups = group_layers([SPEC] * 2)
    return Arena(groups, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, device)


def test_layout() -> None:
    arena = make_arena()
    assert arena.tensor.shape == (2, 2, NUM_BLOCKS, 3, BLOCK_SIZE, 8)
    assert arena.tensor.is_contiguous()
    assert arena.nbytes == 2 * NUM_BLOCKS * SPEC.block_bytes(BLOCK_SIZE)
    assert arena.address == arena.tensor.data_ptr()


def test_views_are_windows_on_the_arena() -> None:
    arena = make_arena()
    expected = torch.randn(arena.tensor.shape).bfloat16()
    address = arena.address
    for layer in (0, 1):
        arena.key_blocks(layer).copy_(expected[layer, 0])
        arena.value_blocks(layer).copy_(expected[layer, 1])
    assert torch.equal(arena.tensor, expected)
    assert arena.address == address


def test_slots_of_a_head_are_adjacent() -> None:
    keys = make_arena().key_blocks(1)
    assert keys[5, 2].is_contiguous()
    assert keys.stride() == (3 * BLOCK_SIZE * 8, BLOCK_SIZE * 8, 8, 1)


def test_null_block_is_zero_and_nothing_else_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.full(*args, float("nan"), **kwargs)

    monkeypatch.setattr(torch, "empty", poisoned)
    tensor = make_arena().tensor
    assert tensor[:, :, NULL_BLOCK].eq(0).all()
    assert tensor[:, :, 1:].isnan().all()


def test_groups_share_the_arena_by_layer_index() -> None:
    groups = (LayerGroup(0, SPEC, (0, 2)), LayerGroup(1, SPEC, (1, 3)))
    arena = make_arena(groups)
    assert arena.tensor.shape[0] == 2
    assert [arena.layer_index(layer) for layer in range(4)] == [0, 0, 1, 1]
    assert arena.key_blocks(2).data_ptr() == arena.key_blocks(3).data_ptr()
    with pytest.raises(KeyError):
        arena.layer_index(4)


def test_unequal_groups_are_refused() -> None:
    other = FullAttentionSpec(num_kv_heads=6, head_dim=8, element_bytes=2)
    with pytest.raises(ValueError, match="groups of one arena must be alike"):
        make_arena(group_layers([SPEC, other]))
    with pytest.raises(ValueError, match="groups of one arena must be alike"):
        make_arena((LayerGroup(0, SPEC, (0, 2)), LayerGroup(1, SPEC, (1,))))
    with pytest.raises(ValueError, match="at least one layer group"):
        make_arena(())


def test_dtype_must_have_the_size_of_the_spec() -> None:
    with pytest.raises(ValueError, match=r"float32 has 4 bytes per element, the spec says 2"):
        Arena(group_layers([SPEC]), NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    arena = make_arena(device=torch.device("cuda"))
    assert arena.tensor.is_cuda
    assert arena.tensor[:, :, NULL_BLOCK].eq(0).all()
