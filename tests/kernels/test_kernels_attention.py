"""Paged attention: both implementations against float64, poisoned memory, batch invariance."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import AttentionForm, RaggedBatch
from stepgraph.runtime.kernels.ops import kv_storage
from torch.utils._python_dispatch import TorchDispatchMode

from ..rigs.attention_cases import Attention, Case, check, make_case, poisoned_arena
from ..rigs.thread_rig import kernel_threads

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

BOTH = [kernels.reference_paged_attention, kernels.paged_attention]
# heads, kv heads, head_dim
SHAPES = [(9, 3, 64), (4, 4, 8), (14, 2, 33), (5, 1, 80), (13, 1, 7), (2, 2, 128)]
# What a form can be, besides plain.
FORMS = {
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


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops() -> None:
    kernels.load_cpu_ops()


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 256])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_uniform_batches_match_float64(attention: Attention, block_size: int, tokens: int) -> None:
    chunks = [(cached, tokens) for cached in (0, 1, 15, 127, 128, 300)]
    check(make_case(chunks, block_size=block_size, padding=2 * tokens), attention, 1e-5)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("block_size", [4, 32])
def test_prefill_matches_float64(
    attention: Attention, heads: tuple[int, int, int], block_size: int
) -> None:
    case = make_case([(0, 37), (130, 61), (5, 1)], heads, block_size, padding=3)
    check(case, attention, 1e-5)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("heads", SHAPES)
def test_half_precision(
    attention: Attention, dtype: torch.dtype, tolerance: float, heads: tuple[int, int, int]
) -> None:
    check(make_case([(140, 1), (20, 1)], heads, dtype=dtype, padding=1), attention, tolerance)
    check(make_case([(40, 30), (0, 20)], heads, dtype=dtype, padding=1), attention, tolerance)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("window", [1, 5, 16, 40, 128, 129, 1000])
@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
def test_windows(attention: Attention, window: int, block_size: int) -> None:
    decode = [(0, 1), (127, 1), (128, 1), (139, 1), (300, 1)]
    check(make_case(decode, (4, 2, 16), block_size, padding=2, window=window), attention, 1e-5)
    prefill = [(0, 37), (250, 61), (5, 1), (126, 5)]
    check(make_case(prefill, (6, 2, 33), block_size, padding=2, window=window), attention, 1e-5)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_forms_in_all_dtypes(
    attention: Attention, dtype: torch.dtype, form: dict[str, object]
) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    heads = (6, 1, 34) if "latent" in form else (6, 2, 34)
    for block_size, chunks in (
        (16, [(200, 1), (9, 1)]),
        (8, [(150, 3), (6, 3)]),
        (4, [(150, 20), (0, 33)]),
    ):
        check(make_case(chunks, heads, block_size, dtype, 1, **form), attention, tolerance)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("storage", ["model", "int8", "fp8"])
@pytest.mark.parametrize("heads", [(128, 1, 96), (71, 1, 40)])
def test_many_queries_share_a_latent_head(
    attention: Attention, storage: str, heads: tuple[int, int, int]
) -> None:
    form = {"latent": True, "value_dim": heads[2] - 32, "storage": storage, "scale": 0.1}
    for chunks in ([(140, 1), (3, 1)], [(40, 3), (0, 20)]):
        check(make_case(chunks, heads, padding=1, **form), attention, 1e-5)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e4])
def test_soft_caps_of_scores_near_and_far(softcap: float) -> None:
    case = make_case([(300, 1), (20, 30)], (4, 2, 64), softcap=softcap, scale=6.0)
    check(case, kernels.paged_attention, 5e-5)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("form", ["plain", "window", "latent", "sinks", "int8", "fp8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_draft_that_is_not_finite_reaches_later_tokens_only(
    attention: Attention, form: str, bad: float
) -> None:
    """Steps that verify: token 1 of the first row is bad, in its keys or in its values."""
    heads = (6, 1, 34) if form == "latent" else (6, 2, 34)
    case = make_case([(40, 3), (5, 3)], heads, padding=3, **FORMS.get(form, {}))
    expected, _ = case.run(attention)
    for side in ("k", "v")[: 1 + (case.v is not None)]:
        x = getattr(case, side).clone()
        x[1] = bad
        out, _ = replace(case, **{side: x}).run(attention)
        assert torch.equal(out[[0, 3, 4, 5]], expected[[0, 3, 4, 5]])
        assert not out[1:3].isfinite().all((1, 2)).any()


@pytest.mark.parametrize("seed", range(16))
def test_random_calls_agree(seed: int) -> None:
    """What the two compute is the same for arguments drawn at random."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    chunks = [(draw(0, 270), draw(1, 50)) for _ in range(draw(1, 5))]
    latent = draw(0, 3) == 0
    g = 1 if latent else draw(1, 4)
    d = 2 * draw(1, 35)
    storage = ("model", "model", "int8", "fp8")[draw(0, 4)]
    case = make_case(
        chunks,
        (g * draw(1, 6), g, d + draw(0, 2) * (storage == "model")),
        draw(1, 40),
        padding=draw(0, 4),
        window=draw(0, 2) * draw(1, 300),
        softcap=draw(0, 2) * 1.5,
        storage=storage,
        latent=latent,
        value_dim=draw(1, d) if latent else 0,
        chunk=draw(0, 2) * draw(1, 300),
        sinks=draw(0, 2) == 1,
    )
    for attention in BOTH:
        check(case, attention, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "form"),
    [
        *[(heads, {}) for heads in [(9, 3, 64), (14, 2, 33), (13, 1, 7)]],
        *[((6, 1, 34), form) for form in FORMS.values()],
        ((6, 2, 34), {"window": 1}),
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


@pytest.mark.parametrize("storage", ["model", "int8"])
def test_chunks_that_go_to_threads_only_where_memory_allows(storage: str) -> None:
    """Of 31 tokens over 128 chunks the states take 33 MiB, more than the bound; of 24 less."""
    heads, dim, block_size, cached, new = 64, 32, 16, 16_300, 31
    rng = torch.Generator().manual_seed(0)
    positions = torch.arange(cached, cached + new)
    table = torch.arange(1, -(-(cached + new) // block_size) + 1, dtype=torch.int32)
    shape = (1, 1, len(table) + 1, 1, block_size, dim)
    arena = poisoned_arena(shape, torch.float32, storage)
    q, k = (torch.randn(new, count, dim, generator=rng) for count in (heads, 1))
    history = torch.randn(cached, 1, dim, generator=rng)
    first_slots = block_size + torch.arange(cached)
    kv_storage.write_blocks(arena[0, 0], first_slots, history, block_size, storage)
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
    form = AttentionForm(0.2, storage=storage, value_dim=dim)
    case = Case(q, k, None, arena, batch, form, torch.empty(0), new, layer=0)
    with kernel_threads(1):  # never split
        out, written = case.run(kernels.paged_attention)
    some = replace(case, arena=written).select(list(range(24)))
    with kernel_threads(8):  # fewer tiles than 32 are
        for _ in range(8):  # late threads of a call leave the results of later ones alone
            assert torch.equal(case.run(kernels.paged_attention)[0], out)
            assert torch.equal(some.run(kernels.paged_attention)[0], out[:24])


DTYPES_AND_STORAGES = [
    (dtype, storage)
    for dtype in (torch.float32, torch.bfloat16)
    for storage in ("model", "int8", "fp8")
]


@pytest.mark.parametrize(("dtype", "storage"), DTYPES_AND_STORAGES)
@pytest.mark.parametrize(
    ("chunks", "token"), [([(4, 1), (5, 1)], 1), ([(0, 5), (0, 8)], 10)], ids=["decode", "prefill"]
)
def test_what_is_not_finite_stays_in_its_row(
    dtype: torch.dtype, storage: str, chunks: list[tuple[int, int]], token: int
) -> None:
    """Whatever a thread that comes from that row has left in its work space."""
    case = make_case(chunks, (4, 2, 16), dtype=dtype, storage=storage)
    assert case.v is not None
    out, _ = case.run(kernels.paged_attention)
    for value in (torch.inf, torch.nan):
        v = case.v.clone()
        v[token] = value
        poisoned, _ = replace(case, v=v).run(kernels.paged_attention)
        assert torch.equal(poisoned[:token], out[:token])
        assert not torch.isfinite(poisoned[token:]).any()


@pytest.mark.parametrize(("dtype", "storage"), DTYPES_AND_STORAGES)
@pytest.mark.parametrize("token", [20, 21])  # first and second of a pair
def test_what_is_not_finite_leaves_with_the_window(
    dtype: torch.dtype, storage: str, token: int
) -> None:
    for window in (5, 6):
        case = make_case([(3, 40)], (4, 2, 16), dtype=dtype, window=window, storage=storage)
        assert case.v is not None
        out, _ = case.run(kernels.paged_attention)
        for side, value in ((case.k, torch.nan), (case.v, torch.inf)):
            broken = side.clone()
            broken[token] = value
            change = {"k": broken} if side is case.k else {"v": broken}
            poisoned, _ = replace(case, **change).run(kernels.paged_attention)
            end = token + window
            assert torch.equal(poisoned[:token], out[:token])
            assert not torch.isfinite(poisoned[token:end]).any()
            assert torch.equal(poisoned[end:], out[end:])


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


class NoHostValue(TorchDispatchMode):
    """Fails where the host asks what a tensor holds: a capture on CUDA would fail there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunks", [[(40, 1), (9, 1)], [(40, 2), (9, 2)], [(40, 5), (0, 7)]])
@pytest.mark.parametrize("form", [{}, *FORMS.values()], ids=["plain", *FORMS])
def test_the_reference_asks_for_no_value(
    form: dict[str, object], chunks: list[tuple[int, int]]
) -> None:
    case = make_case(chunks, (6, 1, 34), padding=2, **form)
    with NoHostValue():
        out, _ = case.run(kernels.reference_paged_attention)
    assert torch.isfinite(out).all()


def test_meta_tensors_have_the_shape_of_the_result() -> None:
    case = make_case([(2, 3)])
    out, _ = case.to("meta").run(kernels.paged_attention)
    assert out.shape == case.q.shape
    assert out.is_meta


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
        ({}, lambda case: {"form": case.form._replace(window=-1)}),
        ({}, lambda case: {"form": case.form._replace(softcap=-2.0)}),
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
    with pytest.raises(RuntimeError, match="paged_attention"):
        replace(case, **change(case)).run(kernels.paged_attention)
