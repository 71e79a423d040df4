"""Paged attention: both implementations against float64, poisoned memory, batch invariance."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import AttentionForm, RaggedBatch
from stepgraph.runtime.kernels.ops import kv_storage

from ..rigs.attention_cases import Attention, Case, check, first_seen, make_case, poisoned_arena
from ..rigs.fake_graphs import Tape
from ..rigs.thread_rig import kernel_threads

pytestmark = pytest.mark.usefixtures("cpu_ops")

BOTH = [kernels.reference_paged_attention, kernels.paged_attention]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# heads, kv heads, head_dim
SHAPES = [(9, 3, 64), (4, 4, 8), (14, 2, 33), (5, 1, 80), (13, 1, 7), (2, 2, 128)]
# What a form can be, besides plain.
FORMS: dict[str, dict[str, Any]] = {
    "window": {"window": 70},
    "softcap": {"softcap": 2.0},
    "int8": {"storage": "int8"},
    "fp8": {"storage": "fp8"},
    "latent": {"latent": True, "value_dim": 20},
    "chunk": {"chunk": 70},
    "sinks": {"sinks": True},
    "sinks in int8": {"sinks": True, "softcap": 2.0, "chunk": 131, "storage": "int8"},
    "all": {"latent": True, "value_dim": 34, "window": 131, "softcap": 3.0, "storage": "fp8"},
}
EDGES = (0, 1, 15, 127, 128, 300)
DECODE, VERIFY = ([(cached, tokens) for cached in EDGES] for tokens in (1, 5))
PREFILL = [(0, 37), (250, 61), (5, 1), (126, 5)]
CASES: list[dict[str, Any]] = [
    *({"chunks": DECODE, "block_size": size} for size in (1, 16, 256)),
    *({"chunks": VERIFY, "block_size": size, "padding": 10} for size in (4, 32)),
    *({"chunks": PREFILL, "heads": heads, "block_size": 4, "padding": 3} for heads in SHAPES),
    *(
        {"chunks": chunks, "heads": (4, 2, 16), "window": window, "block_size": size}
        for window, size in ((1, 1), (5, 16), (16, 32), (40, 256), (128, 16), (129, 1), (1000, 32))
        for chunks in (DECODE, PREFILL)
    ),
    *(
        {"chunks": chunks, "heads": (4, 2, 64), "softcap": cap, "scale": 6.0}
        for cap in (0.5, 30.0, 1e4)
        for chunks in ([(300, 1)], [(20, 30), (5, 1)])
    ),
    # Many queries share a latent head.
    *(
        {"chunks": chunks, "heads": heads, "latent": True, "value_dim": 8, "storage": storage}
        for heads, storage in (((128, 1, 96), "fp8"), ((71, 1, 40), "model"))
        for chunks in ([(140, 1), (3, 1)], [(40, 3), (0, 20)])
    ),
]


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_edges_match_float64(attention: Attention, case: dict[str, Any]) -> None:
    check(make_case(**case), attention, 5e-5 if "softcap" in case else 1e-5)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", [{}, *FORMS.values()], ids=str)
def test_forms_in_all_dtypes(
    attention: Attention, dtype: torch.dtype, form: dict[str, Any]
) -> None:
    heads = (6, 1, 34) if "latent" in form else (6, 2, 34)
    for block_size, chunks in (
        (16, [(200, 1), (9, 1)]),
        (8, [(150, 3), (6, 3)]),
        (4, [(150, 20), (0, 33)]),
    ):
        case = make_case(chunks, heads, block_size, dtype, 1, **form)
        check(case, attention, TOLERANCES[dtype])


@settings(max_examples=20, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 269), st.integers(1, 49)), min_size=1, max_size=4),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(2, 69)),
    block_size=st.integers(1, 39),
    padding=st.integers(0, 3),
    window=st.just(0) | st.integers(1, 299),
    softcap=st.sampled_from([0.0, 1.5]),
    storage=st.sampled_from(["model", "model", "int8", "fp8"]),
    latent=st.booleans(),
    chunk=st.just(0) | st.integers(1, 299),
    sinks=st.booleans(),
)
def test_random_calls_agree(heads: tuple[int, int, int], **form: Any) -> None:
    queries, g, d = heads
    d -= d % 2 if form["storage"] != "model" else 0
    if form["latent"]:
        g, form["value_dim"] = 1, 1 + d // 2
    case = make_case(heads=(g * queries, g, d), **form)
    for attention in BOTH:
        check(case, attention, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "form"),
    [
        *[(heads, {}) for heads in [(9, 3, 64), (13, 1, 7)]],
        *[((6, 1, 34), FORMS[name]) for name in ("window", "int8", "sinks in int8", "all")],
        ((66, 1, 34), {"window": 150, "storage": "int8"}),
    ],
)
def test_a_token_does_not_see_its_batch(
    dtype: torch.dtype, heads: tuple[int, int, int], form: dict[str, object]
) -> None:
    """Bitwise: alone, in another order, in a chunk, with more threads, or read wider."""
    case = make_case([(0, 40), (100, 70), (390, 1)], heads, dtype=dtype, padding=2, **form)
    out, arena = case.run(kernels.paged_attention)
    written = replace(case, arena=arena)
    for t in [0, 1, 17, 39, 40, 67, 68, 69, 109, 110]:
        assert torch.equal(written.select([t]).run(kernels.paged_attention)[0][0], out[t])
    shuffled = torch.randperm(111, generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(written.select(shuffled).run(kernels.paged_attention)[0], out[shuffled])
    columns = case.batch.block_tables.shape[2]
    wider = case.with_batch(read_blocks=columns).run(kernels.paged_attention)[0]
    for count in (1, 2, 3):
        with kernel_threads(count):
            assert torch.equal(case.run(kernels.paged_attention)[0], out)
            alone = written.select([110]).run(kernels.paged_attention)[0]
            assert torch.equal(alone[0], out[110])
    assert torch.equal(wider, out)


def test_chunks_that_go_to_threads_only_where_memory_allows() -> None:
    """Of 31 tokens over 128 chunks the states take 33 MiB, more than the bound; of 24 less."""
    heads, dim, block_size, cached, new = 64, 32, 16, 16_300, 31
    rng = torch.Generator().manual_seed(0)
    positions = torch.arange(cached, cached + new)
    table = torch.arange(1, -(-(cached + new) // block_size) + 1, dtype=torch.int32)
    shape = (1, 1, len(table) + 1, 1, block_size, dim)
    arena = poisoned_arena(shape, torch.float32, "int8")
    q, k = (torch.randn(new, count, dim, generator=rng) for count in (heads, 1))
    history = torch.randn(cached, 1, dim, generator=rng)
    first_slots = block_size + torch.arange(cached)
    kv_storage.write_blocks(arena[0, 0], first_slots, history, block_size, "int8")
    batch = RaggedBatch(
        positions=positions,
        slots=block_size + positions[None],
        token_rows=torch.zeros(new, dtype=torch.int64),
        rows=torch.zeros(1, dtype=torch.int64),
        block_tables=torch.stack([table, torch.zeros_like(table)])[None],
        read_blocks=len(table),
        block_size=block_size,
        tokens_per_row=new,
    )
    form = AttentionForm(0.2, storage="int8", value_dim=dim)
    case = Case(q, k, None, arena, batch, form, torch.empty(0), new, layer=0)
    with kernel_threads(8):  # fewer tiles than 32 are
        out, written = case.run(kernels.paged_attention)
        some = replace(case, arena=written).select(list(range(24)))
        assert torch.equal(some.run(kernels.paged_attention)[0], out[:24])


@pytest.mark.parametrize(
    ("attention", "chunks", "bad"),
    [
        (kernels.reference_paged_attention, [(40, 3), (5, 3)], 1),  # drafts
        (kernels.paged_attention, [(40, 3), (5, 3)], 1),
        (kernels.paged_attention, [(4, 1), (5, 1)], 0),
        (kernels.paged_attention, [(3, 40), (0, 8)], 20),  # the first of a pair
        (kernels.paged_attention, [(3, 40), (0, 8)], 21),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [{}, {"window": 5}, {"window": 6}, *FORMS.values()], ids=str)
def test_what_is_not_finite_reaches_tokens_that_see_it(
    attention: Attention,
    chunks: list[tuple[int, int]],
    bad: int,
    dtype: torch.dtype,
    form: dict[str, Any],
) -> None:
    """Whatever a thread has left of other rows in its work space."""
    heads = (6, 1, 34) if "latent" in form else (6, 2, 34)
    case = make_case(chunks, heads, dtype=dtype, **form)
    expected, _ = case.run(attention)
    positions, token_rows = case.batch.positions, case.batch.token_rows
    first = torch.tensor([first_seen(int(position), case.form) for position in positions])
    seen = (token_rows == token_rows[bad]) & (first <= positions[bad])
    seen &= positions >= positions[bad]
    for name, value in (("k", torch.nan), ("v", torch.inf)):
        side = getattr(case, name)
        if side is not None:
            spoiled = side.clone()
            spoiled[bad] = value
            out, _ = replace(case, **{name: spoiled}).run(attention)
            assert torch.equal(out[~seen], expected[~seen])
            assert not out[seen].isfinite().all((1, 2)).any()


def test_columns_below_the_window_are_not_looked_at() -> None:
    case = make_case([(300, 1), (200, 20)], (4, 2, 16), window=50)
    out, _ = case.run(kernels.paged_attention)
    tables = case.batch.block_tables.clone()
    tables[0, 0, : (301 - 50) // 16] = -5
    tables[0, 1, : (201 - 50) // 16] = 1_000_000
    changed = case.with_batch(block_tables=tables)
    assert torch.equal(changed.run(kernels.paged_attention)[0], out)
    tables[0, 1, (201 - 50) // 16] = 1_000_000
    with pytest.raises(IndexError):
        changed.run(kernels.paged_attention)


@pytest.mark.parametrize("chunks", [[(40, 1), (9, 1)], [(40, 2), (9, 2)], [(40, 5), (0, 7)]])
@pytest.mark.parametrize("form", [{}, FORMS["sinks in int8"], FORMS["all"]], ids=str)
def test_the_reference_asks_for_no_value(
    form: dict[str, object], chunks: list[tuple[int, int]]
) -> None:
    case = make_case(chunks, (6, 1, 34), padding=2, **form)
    with Tape():  # as a capture would
        out, _ = case.run(kernels.reference_paged_attention)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    "change",
    [
        {"slots": torch.tensor([[0, 10_000, 0]])},
        {"positions": torch.tensor([0, 0, -1])},
        {"token_rows": torch.tensor([2, 0, 0])},
        {"block_tables": torch.full((1, 2, 2), 77, dtype=torch.int32)},
    ],
)
def test_indices_out_of_range_are_refused(change: dict[str, object]) -> None:
    case = make_case([(2, 3)])
    with pytest.raises(IndexError):
        case.with_batch(**change).run(kernels.paged_attention)
    with pytest.raises(IndexError):
        replace(case, layer=2).run(kernels.paged_attention)


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ({}, lambda case: {"q": case.q.double()}),
        ({}, lambda case: {"arena": case.arena.double()}),
        ({}, lambda case: {"k": case.k[:, :1], "v": case.v[:, :1]}),
        ({}, lambda case: {"k": case.k[:, :2]}),
        ({}, lambda case: {"v": None}),
        ({}, lambda case: {"batch": replace(case.batch, block_size=8)}),
        ({}, lambda case: {"batch": replace(case.batch, block_size=0)}),
        ({}, lambda case: {"form": case.form._replace(value_dim=8)}),
        ({}, lambda case: {"form": case.form._replace(storage="int4")}),
        ({}, lambda case: {"form": case.form._replace(storage="fp8")}),
        ({"storage": "int8"}, lambda case: {"arena": case.arena[..., :-16]}),
        ({"latent": True, "heads": (2, 1, 8)}, lambda case: {"v": case.k}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    form: dict[str, object], change: Callable[[Case], dict[str, object]]
) -> None:
    case = make_case([(2, 3)], **form)
    with pytest.raises(RuntimeError):
        replace(case, **change(case)).run(kernels.paged_attention)
