"""Attention as kernels, write and all: decode and prefill against float64, over poisoned memory."""

from __future__ import annotations

from dataclasses import replace
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
    paged_attention,
    reference_paged_attention,
)
from stepgraph.runtime.kernels.ops.attention import AttentionTemperature
from stepgraph.runtime.kernels.triton import kernel_calls
from stepgraph.runtime.kernels.triton import prefill_attention as prefill_module
from stepgraph.runtime.kernels.triton import split_attention as sa
from stepgraph.runtime.kernels.triton.decode_attention import (
    decode_attention,
    decode_ready_attention,
    paged_attention_on_gpu,
    triton_paged_attention,
)
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.kernels.triton.prefill_attention import (
    PrefillTiling,
    prefill_attention,
    prefill_tiles,
    prefill_tiling,
)
from stepgraph.runtime.kernels.triton.store import HeadRotation, reference_rotated, rotate_and_store
from triton.runtime import interpreter

from ..rigs.attention_cases import Attention, check, make_case
from ..rigs.gpu_references import DEVICE, error, reference_store

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}
SMALL = sa.Tile(16, 16, 4, 1)
SMALL_TILING = PrefillTiling(block_m=16, block_n=16, num_warps=4, num_stages=1)
# Positions before, and tokens now, of each row.
DECODE = [(0, 1), (16, 1), (70, 1)]
VERIFY = [(0, 3), (15, 3), (70, 3)]
PREFILL = [(0, 19), (37, 6)]


class Decode:
    """Attention of one token a row with as many splits, as one kernel, or `apart`: after the kernel
    that norms, rotates and stores."""

    def __init__(
        self,
        splits: int = 3,
        *,
        apart: bool = False,
        tile: sa.Tile | None = SMALL,
        rotation: HeadRotation | None = None,
    ) -> None:
        self.splits, self.apart, self.tile, self.rotation = splits, apart, tile, rotation

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, arena: Tensor, place: LayerPlace,
        batch: RaggedBatch, form: AttentionForm,
    ) -> Tensor:  # fmt: skip
        (tokens, heads, width), where = q.shape, (arena, place, batch, form)
        group, itemsize = heads // arena.shape[3], arena.element_size()
        tile = self.tile or sa.choose_tile(group, width, form.value_dim, itemsize)
        rotation = self.rotation or unturned(tokens, width)
        if v is None:
            slots = batch.slots[place.group]
            reference_store(k, v, arena, place.position, slots, batch.block_size, form.storage)
            return decode_ready_attention(q, *where, self.splits, tile)
        if self.apart:
            q = rotate_and_store(fused(q, k, v), arena, place, rotation, batch, form)
            return decode_ready_attention(q, *where, self.splits, tile)
        partials = sa.new_partials(tokens, heads, self.splits, form.value_dim, q.device)
        out = q.new_empty(tokens, heads * form.value_dim)
        counters = torch.zeros(tokens * k.shape[1], dtype=torch.int32, device=q.device)
        decode_attention(
            fused(q, k, v), arena, place, rotation, batch, form, partials, counters, out,
            tile=tile,
        )  # fmt: skip
        assert not counters.any(), "zeros for the next launch"
        return out.view(tokens, heads, form.value_dim)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)


def unturned(tokens: int, width: int) -> HeadRotation:
    cos = torch.ones(tokens, width // 2, device=DEVICE)
    return HeadRotation(None, None, 1e-6, False, cos, torch.zeros_like(cos))


def tiles_of(tiling: PrefillTiling) -> Attention:
    """Paged attention that writes as the reference does and attends with the kernel for tiles."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor | None, arena: Tensor, place: LayerPlace,
        batch: RaggedBatch, form: AttentionForm,
    ) -> Tensor:  # fmt: skip
        slots = batch.slots[place.group]
        reference_store(k, v, arena, place.position, slots, batch.block_size, form.storage)
        tokens_of_tile = tiling.tokens(q.shape[1] // arena.shape[3])
        tiles = prefill_tiles(batch.token_rows, len(batch.rows), tokens_of_tile)
        return prefill_attention(q, arena, place, batch, form, tiles, tiling)

    return attention


WAYS: dict[str, tuple[list[tuple[int, int]], Attention]] = {
    "fused": (DECODE, Decode()),
    "one split": (DECODE, Decode(splits=1)),
    "apart": (DECODE, Decode(apart=True)),
    "decode": (DECODE, triton_paged_attention),
    "verify": (VERIFY, triton_paged_attention),
    "prefill": (PREFILL, triton_paged_attention),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 13},
    "softcap": {"softcap": 2.0},
    "int8": {"storage": "int8"},
    "fp8": {"storage": "fp8"},
    "latent": {"latent": True, "value_dim": 32},
    "sinks": {"sinks": True, "storage": "fp8"},
    "sinks in windows": {"sinks": True, "window": 13, "softcap": 2.0},
    "chunks and sinks": {"chunk": 32, "sinks": True, "window": 20},
    "all": {"latent": True, "value_dim": 20, "window": 40, "softcap": 3.0, "storage": "int8"},
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_in_every_dtype(way: str, dtype: torch.dtype, form: dict[str, Any]) -> None:
    chunks, attention = WAYS[way]
    heads = (6, 1, 34) if "latent" in form else (6, 2, 34)
    case = make_case(chunks, heads, 16, dtype, 3 if chunks is VERIFY else 2, **form)
    check(case.to(DEVICE), attention, TOLERANCE[dtype])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["fused", "apart", "prefill"])
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [((5, 1, 80), 5), ((2, 2, 10), 1), ((7, 1, 7), 64), ((3, 1, 128), 16), ((33, 1, 16), 8)],
)
def test_odd_shapes(way: str, heads: tuple[int, int, int], block_size: int) -> None:
    chunks, attention = WAYS[way]
    if isinstance(attention, Decode):  # more heads than are put together at a time
        tile = SMALL._replace(heads=64, num_warps=1)
        attention = Decode(apart=attention.apart, tile=tile)
    case = make_case(chunks, heads, block_size, padding=1)
    check(case.to(DEVICE), attention, 1e-5)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=3),
    padding=st.integers(0, 5),
    splits=st.integers(1, 5),
    block_size=st.integers(1, 20),
    window=st.sampled_from([0, 0, 1, 9, 50]),
    chunk=st.sampled_from([0, 0, 1, 13, 32]),
    sinks=st.booleans(),
    storage=st.sampled_from(["model", "model", "int8", "fp8"]),
)
def test_any_chunks_splits_blocks_and_windows(
    chunks: list[tuple[int, int]], padding: int, splits: int, block_size: int, **form: Any
) -> None:
    """As rows of a prefill step, and each with one token in a decode step."""
    case = make_case(chunks, (4, 2, 8), block_size, padding=padding, **form)
    check(case.to(DEVICE), tiles_of(SMALL_TILING), 1e-5)
    lengths = [(before + now, 1) for before, now in chunks]
    case = make_case(lengths, (4, 2, 8), block_size, padding=padding, **form)
    for apart in (False, True):
        check(case.to(DEVICE), Decode(splits, apart=apart), 1e-5)


ROTATIONS: dict[str, dict[str, Any]] = {
    "turned": {"norms": ""},
    "normed": {"norms": "heads"},
    "offset": {"norms": "heads", "offset": True},
    "all heads": {"norms": "all"},
    "temperature": {"norms": "", "temperature": AttentionTemperature(7, 0.9)},
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(6, 2, 20), (9, 3, 128)], ids=str)
@pytest.mark.parametrize("traits", ROTATIONS.values(), ids=ROTATIONS)
def test_norms_rotations_and_temperatures(
    traits: dict[str, Any], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Of queries and of keys, which are cached, on their way to attention."""
    case = make_case([(19, 1), (0, 1), (6, 1)], heads, dtype=dtype, padding=1).to(DEVICE)
    rotation = random_rotation(len(case.q), heads, dtype, **traits)

    def plain(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        return reference_paged_attention(
            *reference_rotated(q, k, rotation, case.batch.positions), *rest
        )

    expected, cached = case.run(plain)
    close = {F32: 1e-5, F16: 4e-3, BF16: 1e-2}[dtype]
    for apart in (False, True):
        out, arena = case.run(Decode(apart=apart, rotation=rotation))
        assert error(out[:3], expected[:3]) < close
        # Where sums of another order were rounded to another number.
        torch.testing.assert_close(
            arena[:, :, 1:], cached[:, :, 1:], equal_nan=True, rtol=close, atol=close
        )


def random_rotation(
    tokens: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    norms: str,
    offset: bool = False,
    temperature: AttentionTemperature | None = None,
) -> HeadRotation:
    *counts, width = heads
    sizes = [n * width if norms == "all" else width for n in counts]
    weights = [torch.randn(n, device=DEVICE).to(dtype) if norms else None for n in sizes]
    angles = 100 * torch.rand(tokens, width // 2, device=DEVICE)
    return HeadRotation(*weights, 1e-6, offset, angles.cos(), angles.sin(), temperature)


@pytest.mark.parametrize("splits", [2, pytest.param(5, marks=pytest.mark.slow), 8])
def test_the_last_program_puts_the_splits_together(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows use one of the splits, or some; whoever is last finds the same."""
    case = make_case([(89, 1), (0, 1), (39, 1)], (3, 1, 10), 8, padding=1).to(DEVICE)
    out, _ = case.run(Decode(splits))
    check(case, Decode(splits), 1e-5)
    orders = [[*range(splits - 1, -1, -1)], [*range(1, splits), 0]]
    for order in orders if INTERPRETED else ():
        run_in_order(monkeypatch, order)
        assert torch.equal(case.run(Decode(splits))[0], out)


def run_in_order(monkeypatch: pytest.MonkeyPatch, splits: list[int]) -> None:
    """Let the interpreter run the programs of splits in this order."""
    builder = interpreter.InterpreterBuilder
    original = getattr(builder.set_grid_idx, "original", builder.set_grid_idx)

    def set_grid_idx(self: object, x: int, y: int, z: int) -> None:
        original(self, x, splits[y], z)

    set_grid_idx.original = original  # type: ignore[attr-defined]
    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_calls, "MULTIPROCESSORS", processors)
        counters = sa.new_counters(torch.device("cpu"))
    assert not counters.any()
    assert splits == 1 or counters.numel() >= rows * kv_heads


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    padding=st.integers(0, 30),
    tokens_of_tile=st.integers(1, 20),
    scan=st.sampled_from([16, 1024]),
)
def test_tiles_of_any_partition(
    counts: list[int], padding: int, tokens_of_tile: int, scan: int
) -> None:
    """Every token is in one tile, no tile mixes rows or is too long, and the tiles are enough."""
    rows = torch.randperm(9)[: len(counts)]
    pieces = [torch.full((n,), int(row)) for n, row in zip(counts, rows, strict=True)]
    token_rows = torch.cat([*pieces, torch.full((padding,), 9)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_module, "_SCAN", scan)
        tiles = prefill_tiles(token_rows.to(DEVICE), len(counts), tokens_of_tile).cpu()
    assert tiles[0] == 0
    assert tiles[-1] == len(token_rows)
    for begin, end in zip(tiles.tolist(), tiles.tolist()[1:], strict=False):
        assert 0 <= end - begin <= tokens_of_tile
        assert len(token_rows[begin:end].unique()) <= 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    case = make_case([(0, 5), (20, 6), (0, 4)], (4, 2, 16))
    assert case.v is not None
    out, _ = case.to(DEVICE).run(tiles_of(SMALL_TILING))
    v = case.v.clone()
    v[10] = value  # the last token of the second row
    poisoned, _ = replace(case, v=v).to(DEVICE).run(tiles_of(SMALL_TILING))
    others = torch.tensor([*range(5), *range(11, 15)], device=DEVICE)
    assert torch.equal(poisoned[others], out[others])
    assert not torch.isfinite(poisoned[10]).any()


@pytest.mark.parametrize(
    ("heads", "form"),
    [
        ((4, 1, 64), {}),
        ((4, 1, 128), {"storage": "fp8"}),
        ((16, 1, 576), {"latent": True, "value_dim": 512}),
        ((39, 1, 24), {"latent": True, "value_dim": 16}),  # more heads of a group than a tile
    ],
    ids=["64", "128", "latent", "many heads"],
)
def test_the_tiles_of_real_models(heads: tuple[int, int, int], form: dict[str, Any]) -> None:
    """Their sizes, chosen for few tokens and for many."""
    case = make_case([(60, 9), (5, 3)], heads, dtype=BF16, padding=2, scale=0.1, **form)
    for tokens in (14, 1 << 20):
        storage, device = case.form.storage, torch.device(DEVICE)
        tiling = prefill_tiling(tokens, *heads, BF16, storage, device)
        check(case.to(DEVICE), tiles_of(tiling), 2e-2)
    case = make_case([(149, 1)], heads, dtype=BF16, scale=0.1, **form)
    check(case.to(DEVICE), Decode(tile=None), 2e-2)


def test_both_operations_are_registered_for_cuda() -> None:
    """Engines with different kernels share a process, so neither may replace the other."""
    for attention in (paged_attention, paged_attention_on_gpu):
        case = make_case(PREFILL)
        assert case.to("meta").run(attention)[0].shape == case.q.shape
    for name in ("stepgraph::paged_attention", "stepgraph::triton_paged_attention"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
