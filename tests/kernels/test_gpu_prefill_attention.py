"""Prefill attention as kernels: how tokens are dealt to tiles, and what a tile computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from stepgraph.runtime.kernels import AttentionForm, LayerPlace, RaggedBatch
from stepgraph.runtime.kernels.triton import prefill_attention as tiling_module
from stepgraph.runtime.kernels.triton.prefill_attention import (
    PrefillTiling,
    prefill_attention,
    prefill_tiles,
    prefill_tiling,
)

from ..rigs.attention_cases import Attention, check, make_case
from ..rigs.gpu_references import reference_prefill_tiles, reference_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
SMALL = PrefillTiling(block_m=16, block_n=16, num_warps=4, num_stages=1)
# (positions before, tokens now) of each row
CHUNKS = [(0, 37), (45, 1), (130, 21), (5, 1)]


def attend(tiling: PrefillTiling) -> Attention:
    """Paged attention that writes as the reference does and attends with the kernel."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        arena: Tensor,
        place: LayerPlace,
        batch: RaggedBatch,
        form: AttentionForm,
    ) -> Tensor:
        slots = batch.slots[place.group]
        reference_store(k, v, arena, place.position, slots, batch.block_size, form.storage)
        tokens_of_tile = tiling.tokens(q.shape[1] // arena.shape[3])
        tiles = prefill_tiles(batch.token_rows, len(batch.rows), tokens_of_tile)
        return prefill_attention(q, arena, place, batch, form, tiles, tiling)

    return attention


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    padding=st.integers(0, 30),
    tokens_of_tile=st.integers(1, 20),
    spare_rows=st.integers(0, 2),
)
def test_tiles_of_any_partition(
    counts: list[int], padding: int, tokens_of_tile: int, spare_rows: int
) -> None:
    """Every token is in one tile, no tile mixes rows or is too long, and the tiles are enough."""
    rows = torch.randperm(9)[: len(counts)]
    pieces = [torch.full((n,), int(row)) for n, row in zip(counts, rows, strict=True)]
    token_rows = torch.cat([*pieces, torch.full((padding,), 9)])
    most_rows = len(counts) + spare_rows
    tiles = prefill_tiles(token_rows.to(DEVICE), most_rows, tokens_of_tile).cpu()
    assert torch.equal(tiles, reference_prefill_tiles(token_rows, most_rows, tokens_of_tile))
    assert tiles[0] == 0
    assert tiles[-1] == len(token_rows)
    for begin, end in zip(tiles.tolist(), tiles.tolist()[1:], strict=False):
        assert 0 <= end - begin <= tokens_of_tile
        assert len(token_rows[begin:end].unique()) <= 1


def test_tiles_of_more_tokens_than_are_scanned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling_module, "_SCAN", 16)
    token_rows = torch.tensor([3] * 20 + [1] * 13 + [0] * 40 + [9] * 7)
    tiles = prefill_tiles(token_rows.to(DEVICE), 30, 6)
    assert torch.equal(tiles.cpu(), reference_prefill_tiles(token_rows, 30, 6))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "form",
    [
        {"storage": "int8"},
        {"storage": "fp8", "softcap": 2.0},
        {"softcap": 0.7, "sinks": True},
        {"chunk": 16, "sinks": True, "storage": "fp8"},
        {"latent": True, "value_dim": 32},
        {"latent": True, "value_dim": 20, "storage": "int8", "window": 30},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forms(form: dict[str, Any], dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    heads = (5, 1, 48) if "latent" in form else (4, 2, 34)
    case = make_case([(0, 9), (40, 7)], heads, 8, dtype, 2, **form)
    check(case.to(DEVICE), attend(SMALL), tolerance)


def test_more_heads_a_group_than_a_tile() -> None:
    case = make_case([(3, 2), (20, 3)], (39, 1, 24), padding=1, latent=True, value_dim=16)
    check(case.to(DEVICE), attend(SMALL), 1e-5)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunks=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=4),
    padding=st.integers(0, 9),
    group=st.integers(1, 5),
    window=st.sampled_from([0, 0, 3, 24]),
    chunk=st.sampled_from([0, 0, 5, 16]),
    sinks=st.booleans(),
)
def test_any_partition_into_rows(
    chunks: list[tuple[int, int]],
    padding: int,
    group: int,
    window: int,
    chunk: int,
    sinks: bool,
) -> None:
    form: dict[str, Any] = {"window": window, "chunk": chunk, "sinks": sinks}
    case = make_case(chunks, (group, 1, 8), 4, padding=padding, **form)
    check(case.to(DEVICE), attend(SMALL), 1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    case = make_case([(0, 5), (20, 6), (0, 4)], (4, 2, 16))
    assert case.v is not None
    out, _ = case.to(DEVICE).run(attend(SMALL))
    v = case.v.clone()
    v[10] = value  # the last token of the second row
    poisoned, _ = replace(case, v=v).to(DEVICE).run(attend(SMALL))
    others = torch.tensor([*range(5), *range(11, 15)], device=DEVICE)
    assert torch.equal(poisoned[others], out[others])
    assert not torch.isfinite(poisoned[10]).any()


@pytest.mark.parametrize(
    ("heads", "form"),
    [
        ((4, 1, 64), {}),
        ((4, 1, 128), {"storage": "fp8"}),
        ((16, 1, 576), {"latent": True, "value_dim": 512}),
    ],
    ids=["64", "128", "latent"],
)
def test_the_tiles_of_real_models(heads: tuple[int, int, int], form: dict[str, Any]) -> None:
    """Their sizes, chosen for few tokens and for many."""
    case = make_case([(60, 9), (5, 3)], heads, dtype=torch.bfloat16, padding=2, scale=0.1, **form)
    for tokens in (14, 1 << 20):
        tiling = prefill_tiling(
            tokens, *heads, torch.bfloat16, case.form.storage, torch.device(DEVICE)
        )
        check(case.to(DEVICE), attend(tiling), 2e-2)
