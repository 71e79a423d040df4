"""Decode attention as a kernel: odd shapes, every length, splits, windows, storages, padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from stepgraph.runtime.kernels import (
    AttentionForm,
    LayerPlace,
    RaggedBatch,
    reference_paged_attention,
)
from stepgraph.runtime.kernels.ops.kv_storage import write_blocks
from stepgraph.runtime.kernels.ops.layer_operations import AttentionTemperature
from stepgraph.runtime.kernels.triton import decode_attention as da
from stepgraph.runtime.kernels.triton import kernel_calls, rotated_heads
from stepgraph.runtime.kernels.triton import split_attention as sa
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.kernels.triton.paged_attention import decode_ready_attention
from stepgraph.runtime.kernels.triton.rotated_heads import HeadRotation
from stepgraph.runtime.models.rope import rotate
from triton.runtime import interpreter

from ..rigs.attention_cases import first_seen, moved, poisoned_arena
from ..rigs.gpu_linear_rig import DEVICE, error
from ..rigs.gpu_references import reference_combine_splits

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
LAYER = 1
PLACE = LayerPlace(0, LAYER)


@dataclass
class Cache:
    """An arena full of NaN but for what rows of these lengths have written, and where it is."""

    arena: Tensor
    batch: RaggedBatch
    form: AttentionForm


def make_cache(
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    sides: int = 2,
    window: int = 0,
    softcap: float = 0.0,
    storage: str = "model",
    value_dim: int = 0,
    chunk: int = 0,
    sinks: int = 0,
) -> Cache:
    """A length counts the new token; 0 is a padded row. Blocks that have left the window hold
    poison, and columns of the tables that no row reads name a block that nobody has."""
    sinks_H = 3 * torch.randn(sinks, device=DEVICE).to(dtype) if sinks else None
    form = AttentionForm(0.3, window, softcap, storage, value_dim or head_dim, chunk, sinks_H)
    columns = max(lengths) // block_size + 2
    null_row = len(lengths)
    blocks = null_row * columns + 2
    arena = poisoned_arena((2, sides, blocks, kv_heads, block_size, head_dim), dtype, storage)
    arena[:, :, 0] = 0
    tables = torch.full((null_row + 1, columns), blocks - 1, dtype=torch.int32)
    tables[null_row] = 0
    ids = torch.randperm(blocks - 2).int() + 1
    slots, rows = torch.zeros(null_row, dtype=torch.long), torch.full((null_row,), null_row)
    for row, length in enumerate(lengths):
        if not length:
            continue
        used = (length - 1) // block_size + 1
        tables[row, :used] = ids[row * columns : row * columns + used]
        position = torch.arange(first_seen(length - 1, form), length)
        slot = tables[row, position // block_size].long() * block_size + position % block_size
        slots[row], rows[row] = slot[-1], row
        for side in arena[LAYER]:
            old = torch.randn(length, kv_heads, head_dim)[position].to(dtype)
            write_blocks(side, slot[:-1], old[:-1], block_size, storage)
    positions = torch.tensor([max(length - 1, 0) for length in lengths])
    batch = RaggedBatch(
        positions=positions,
        slots=slots[None],
        token_rows=rows,
        rows=rows,
        block_tables=tables[None],
        read_blocks=int(positions.max()) // block_size + 1,
        block_size=block_size,
        tokens_per_row=1,
    )
    return Cache(arena.to(DEVICE), moved(batch, DEVICE), form)


@dataclass
class Inputs:
    """Of the fused kernel."""

    qkv: Tensor
    rotation: HeadRotation


def make_inputs(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    norms: bool = False,
    offset: bool = False,
    all_heads: bool = False,
    temperature: AttentionTemperature | None = None,
) -> Inputs:
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.rand(rows, head_dim // 2) * 7
    sizes = [n * head_dim if all_heads else head_dim for n in (heads, kv_heads)]
    weights = [torch.randn(n).to(dtype).to(DEVICE) if norms else None for n in sizes]
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    return Inputs(qkv.to(DEVICE), HeadRotation(*weights, 1e-6, offset, cos, sin, temperature))


def launch(
    cache: Cache, x: Inputs, splits: int, tile: sa.Tile | None = None
) -> tuple[Tensor, Tensor, sa.Partials]:
    """Attended `[T, H * E]`, the arena, and the workspace, which was poisoned."""
    arena, rows = cache.arena.clone(), x.qkv.shape[0]
    head_dim, kv_heads = cache.form.value_dim, arena.shape[3]
    heads = x.qkv.shape[1] // head_dim - 2 * kv_heads
    partials = sa.new_partials(rows, heads, splits, head_dim, arena.device)
    out = torch.empty(rows, heads * head_dim, dtype=x.qkv.dtype, device=DEVICE)
    for tensor in (*partials, out):
        tensor.fill_(math.nan)
    counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE)
    da.decode_attention(
        x.qkv, arena, PLACE, x.rotation, cache.batch, cache.form, partials, counters, out, tile=tile
    )
    assert not counters.any(), "zeros for the next launch"
    return out, arena, partials


def run(cache: Cache, x: Inputs, splits: int, tile: sa.Tile | None = None) -> tuple[Tensor, Tensor]:
    """Attended `[T, H * E]`, and the arena."""
    return launch(cache, x, splits, tile)[:2]


def run_reference(cache: Cache, x: Inputs) -> tuple[Tensor, Tensor]:
    arena = cache.arena.clone()
    arguments = (PLACE, x.rotation, cache.batch, cache.form)
    return da.reference_decode_attention(x.qkv, arena, *arguments), arena


def close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    assert error(out, expected) < tolerance


def same_cache(arena: Tensor, expected: Tensor, cache: Cache, dtype: torch.dtype) -> None:
    """Untouched but for the slots; there as the reference has it, to a rounding of the dtype."""
    block_size, storage = cache.batch.block_size, cache.form.storage
    blocks = torch.unique(cache.batch.slots[0] // block_size)
    others = torch.ones(arena.shape[2], dtype=torch.bool, device=arena.device)
    others[blocks] = False
    bits = [a.view(torch.uint8) for a in (arena, cache.arena)]
    assert torch.equal(bits[0][:, :, others], bits[1][:, :, others])
    assert torch.equal(bits[0][0], bits[1][0])
    real = blocks[blocks != 0]
    if storage == "model":
        torch.testing.assert_close(
            arena[:, :, real], expected[:, :, real], equal_nan=True, rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype],
        )  # fmt: skip
    else:
        differing = (arena[:, :, real] != expected[:, :, real]).float().mean()
        assert differing < 0.02  # a rounding before that of the storage


def check(
    lengths: list[int],
    shape: tuple[int, int, int],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    splits: int = 2,
    tile: sa.Tile | None = None,
    *,
    norms: bool = False,
    offset: bool = False,
    all_heads: bool = False,
    sinks: bool = False,
    temperature: AttentionTemperature | None = None,
    **traits: Any,
) -> None:
    heads, kv_heads, head_dim = shape
    sinks_count = heads if sinks else 0
    cache = make_cache(lengths, kv_heads, head_dim, block_size, dtype, sinks=sinks_count, **traits)
    norm: dict[str, Any] = {"norms": norms, "offset": offset, "all_heads": all_heads}
    x = make_inputs(len(lengths), heads, kv_heads, head_dim, dtype, temperature=temperature, **norm)
    out, arena = run(cache, x, splits, tile)
    expected, expected_arena = run_reference(cache, x)
    real = torch.tensor(lengths, device=DEVICE) > 0
    close(out[real], expected[real], TOLERANCE[dtype])
    assert out.isfinite().all()
    same_cache(arena, expected_arena, cache, dtype)


SMALL = sa.Tile(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(4, 1, 64), (3, 3, 10), (4, 2, 80), (6, 2, 96), (8, 1, 32), (33, 1, 16)]
)
def test_groups_and_odd_sizes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check([37, 1], shape, dtype=dtype, splits=2, tile=SMALL._replace(heads=64))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "shape", "settings"),
    [
        # With float32 the new key is read back exactly as the reference does.
        ([1, 35, 0], (6, 2, 20), {"block_size": 8, "storage": "int8"}),
        ([1, 35, 0], (6, 2, 20), {"block_size": 8, "storage": "fp8"}),
        ([20, 1], (4, 2, 24), {"norms": True}),
        ([20, 1], (4, 2, 24), {"norms": True, "offset": True}),
        ([20, 1], (6, 2, 20), {"norms": True, "all_heads": True}),
        ([20, 1], (9, 3, 128), {"norms": True, "all_heads": True, "offset": True}),
        ([21, 1, 7, 0], (6, 2, 20), {"temperature": AttentionTemperature(7, 0.9)}),
        ([35, 1, 0], (6, 2, 16), {"sinks": True, "splits": 3}),
        ([50, 33], (4, 1, 16), {"sinks": True, "window": 9, "softcap": 2.0, "storage": "fp8"}),
        ([50, 33, 16], (4, 2, 16), {"chunk": 16, "sinks": True}),
        (
            [30, 0, 1, 50],
            (6, 2, 10),
            {"block_size": 5, "norms": True, "window": 21, "softcap": 3.0, "storage": "fp8",
             "splits": 3},
        ),
        ([150], (4, 1, 64), {"tile": None}),  # chosen
    ],
)  # fmt: skip
def test_traits_of_models_and_caches(
    lengths: list[int], shape: tuple[int, int, int], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    check(lengths, shape, dtype=dtype, **{"tile": SMALL, **settings})


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3).filter(any),
    splits=st.integers(1, 5),
    block_size=st.integers(1, 20),
    window=st.one_of(st.just(0), st.integers(1, 80)),
    chunk=st.sampled_from([0, 0, 1, 13, 32]),
    sinks=st.booleans(),
    storage=st.sampled_from(["model", "model", "int8", "fp8"]),
)
def test_any_lengths_splits_blocks_and_windows(
    lengths: list[int],
    splits: int,
    block_size: int,
    window: int,
    chunk: int,
    sinks: bool,
    storage: str,
) -> None:
    traits: dict[str, Any] = {"window": window, "chunk": chunk, "sinks": sinks, "storage": storage}
    check(lengths, (3, 1, 8), block_size, splits=splits, tile=SMALL, **traits)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["model", "int8", "fp8"])
@pytest.mark.parametrize(
    ("shape", "value_dim"), [((5, 1, 28), 20), ((20, 1, 48), 32), ((6, 3, 18), 18)]
)
def test_queries_that_are_ready(
    shape: tuple[int, int, int], value_dim: int, storage: str, dtype: torch.dtype
) -> None:
    """Latent attention, and the plain one, over keys that were written before."""
    heads, kv_heads, head_dim = shape
    lengths = [1, 33, 0]
    latent = value_dim != head_dim
    cache = make_cache(
        lengths, kv_heads, head_dim, 8, dtype, sides=1 if latent else 2, window=30, softcap=4.0,
        storage=storage, value_dim=value_dim,
    )  # fmt: skip
    q = torch.randn(3, heads, 2 * head_dim).to(dtype).to(DEVICE)[..., :head_dim]
    k, v = torch.randn(2, 3, kv_heads, head_dim).to(dtype).to(DEVICE)
    shared = (cache.arena, PLACE, cache.batch, cache.form)
    expected = reference_paged_attention(q, k, None if latent else v, *shared)
    partials = sa.new_partials(3, heads, 3, value_dim, q.device)
    out = torch.full((3, heads * value_dim), math.nan, dtype=dtype, device=DEVICE)
    for tensor in partials:
        tensor.fill_(math.nan)
    decode_ready_attention(q, *shared, partials, attended_TN=out, tile=SMALL)
    again = reference_combine_splits(partials).to(dtype)
    close(out, again, TOLERANCE[dtype])
    real = torch.tensor(lengths, device=DEVICE) > 0
    close(out[real], expected.flatten(1)[real], TOLERANCE[dtype])


def test_against_float64() -> None:
    """The textbook in float64, over what the cache holds."""
    cache = make_cache([45], 1, 32, 16, torch.float32)
    x = make_inputs(1, 3, 1, 32, torch.float32)
    out, arena = run(cache, x, 2, SMALL)
    table = cache.batch.block_tables[0, 0, : cache.batch.read_blocks].long()
    keys, values = (side[table, 0].flatten(0, 1)[:45].double() for side in arena[LAYER])
    q = rotate(x.qkv.view(1, 5, 32)[:, :3], x.rotation.cos, x.rotation.sin)[0].double()
    expected = (q @ keys.T * 0.3).softmax(-1) @ values
    close(out.view(3, 32), expected, 1e-5)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_that_need_no_other_kernel(splits: int, dtype: torch.dtype) -> None:
    """A single split writes the result itself, in both kernels."""
    cache, x = make_cache([35, 1, 0], 2, 16, 16, dtype), make_inputs(3, 6, 2, 16, dtype)
    expected, arena = run_reference(cache, x)
    out, _, partials = launch(cache, x, splits, SMALL)
    close(out[:2], expected[:2], TOLERANCE[dtype])
    q = rotated_heads.reference_turned(x.qkv[:, :96].view(3, 6, 16), x.rotation.cos, x.rotation.sin)
    out.fill_(math.nan)
    shared = (arena, PLACE, cache.batch, cache.form)
    decode_ready_attention(q, *shared, partials, attended_TN=out, tile=SMALL)
    close(out[:2], expected[:2], TOLERANCE[dtype])
    assert out.isfinite().all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("splits", range(2, 9))
def test_the_last_program_puts_the_splits_together(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows use one of the splits, or some; whoever is last finds the same."""
    dtype = torch.bfloat16 if splits % 2 else torch.float32
    cache, x = make_cache([90, 1, 0, 40], 1, 10, 8, dtype), make_inputs(4, 3, 1, 10, dtype)
    out, _ = run(cache, x, splits, SMALL)
    expected, _ = run_reference(cache, x)
    close(out[[0, 1, 3]], expected[[0, 1, 3]], TOLERANCE[dtype])
    assert out.isfinite().all()
    if INTERPRETED:  # in turn: from the last split to the first, then the middle last
        order = [*range(splits - 1, -1, -1)]
        for _ in range(2):
            run_in_order(monkeypatch, order)
            assert torch.equal(run(cache, x, splits, SMALL)[0], out)
            order.append(order.pop(splits // 2))
    for _ in range(3):
        assert torch.equal(run(cache, x, splits, SMALL)[0], out)


def run_in_order(monkeypatch: pytest.MonkeyPatch, splits: list[int]) -> None:
    """Let the interpreter run the programs of splits in this order."""
    builder = interpreter.InterpreterBuilder
    original = getattr(builder.set_grid_idx, "original", builder.set_grid_idx)

    def set_grid_idx(self: object, x: int, y: int, z: int) -> None:
        original(self, x, splits[y], z)

    set_grid_idx.original = original  # type: ignore[attr-defined]
    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


@pytest.mark.parametrize("shape", [(33, 1, 64), (6, 2, 80)])
def test_groups_that_are_put_together_in_turns(shape: tuple[int, int, int]) -> None:
    cache = make_cache([50], *shape[1:], 16, torch.float32)
    x = make_inputs(1, *shape, torch.float32)
    out, _ = run(cache, x, 3, SMALL._replace(heads=64, num_warps=1))
    close(out, run_reference(cache, x)[0], TOLERANCE[torch.float32])


@given(
    rows=st.integers(1, 256),
    kv_heads=st.integers(1, 64),
    positions=st.integers(1, 1 << 17),
    processors=st.integers(1, 200),
)
def test_splits_that_are_chosen(rows: int, kv_heads: int, positions: int, processors: int) -> None:
    splits = sa.choose_splits(rows, kv_heads, positions, processors)
    assert 1 <= splits <= min(-(-positions // 64), sa.MOST_SPLITS)
    assert splits == 1 or rows * kv_heads * splits <= 2 * processors
    assert splits >= sa.choose_splits(rows + 3, kv_heads, positions, processors) or rows <= 2


@given(rows=st.integers(1, 256), kv_heads=st.integers(1, 64), processors=st.integers(1, 200))
def test_there_are_counters_for_all_that_is_split(
    rows: int, kv_heads: int, processors: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_calls, "MULTIPROCESSORS", processors)
        counters = sa.new_counters(torch.device("meta"))
    assert counters.dtype == torch.int32
    splits = sa.choose_splits(rows, kv_heads, 1 << 17, processors)
    assert splits == 1 or counters.numel() >= rows * kv_heads
    assert not sa.new_counters(torch.device(DEVICE)).any()
