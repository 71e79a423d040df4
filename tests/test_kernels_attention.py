"""Paged attention: both implementations against float64, poisoned memory, batch invariance."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from stepgraph.runtime import kernels
from torch import Tensor
from torch._inductor.utils import run_and_get_code

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

Attention = Callable[..., Tensor]
BOTH = [kernels.reference_paged_attention, kernels.paged_attention]
# heads, kv heads, head_dim
SHAPES = [(9, 3, 64), (4, 4, 8), (14, 2, 33), (5, 1, 80), (13, 1, 7), (2, 2, 128)]


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops() -> None:
    kernels.load_cpu_ops()


@dataclass(frozen=True)
class Case:
    """Arguments of one call over a poisoned arena, and what float64 makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    arena: Tensor
    slots: Tensor
    block_tables: Tensor
    token_rows: Tensor
    rows: Tensor
    positions: Tensor
    expected: Tensor
    valid_tokens: int
    layer: int = 1
    scale: float = 0.3

    @property
    def read_blocks(self) -> int:
        return -(-(int(self.positions.max()) + 1) // self.arena.shape[4])

    def run(self, attention: Attention, read_blocks: int | None = None) -> tuple[Tensor, Tensor]:
        """Output and arena of a call that owns its arena."""
        arena = self.arena.clone()
        out = attention(
            self.q,
            self.k,
            self.v,
            arena,
            self.layer,
            self.slots,
            self.block_tables,
            self.token_rows,
            self.rows,
            self.positions,
            self.scale,
            self.read_blocks if read_blocks is None else read_blocks,
        )
        return out, arena

    def select(self, tokens: list[int]) -> "Case":
        """The same call for some of its tokens."""
        token_rows = self.token_rows[tokens]
        return replace(
            self,
            q=self.q[tokens],
            k=self.k[tokens],
            v=self.v[tokens],
            slots=self.slots[tokens],
            token_rows=token_rows,
            rows=token_rows,
            positions=self.positions[tokens],
        )


def make_case(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int, int] = (9, 3, 64),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seed: int = 0,
) -> Case:
    """`chunks`: for each row how many positions are cached and how many tokens follow now."""
    rng = torch.Generator().manual_seed(seed)
    h, g, d = heads
    max_blocks = max(-(-(cached + new) // block_size) for cached, new in chunks) + 1
    num_blocks = 1 + len(chunks) * max_blocks
    null_row = len(chunks)
    ids = torch.randperm(num_blocks - 1, generator=rng).to(torch.int32) + 1
    block_tables = torch.zeros(null_row + 1, max_blocks, dtype=torch.int32)
    arena = torch.full((2, 2, num_blocks, g, block_size, d), torch.nan, dtype=dtype)
    tokens = sum(new for _, new in chunks) + padding
    q = torch.randn(tokens, h, d, generator=rng).to(dtype)
    # Views of one fused projection, as a model makes them.
    fused = torch.randn(tokens, 2 * g * d, generator=rng).to(dtype)
    k, v = (side.view(tokens, g, d) for side in fused.split(g * d, dim=1))
    slots = torch.zeros(tokens, dtype=torch.int64)
    token_rows = torch.full((tokens,), null_row)
    positions = torch.zeros(tokens, dtype=torch.int64)
    expected = torch.full((tokens, h, d), torch.nan, dtype=torch.float64)
    first = 0
    for row, (cached, new) in enumerate(chunks):
        used = -(-(cached + new) // block_size)
        block_tables[row, :used] = ids[row * max_blocks : row * max_blocks + used]
        position = torch.arange(cached + new)
        slot = block_tables[row, position // block_size] * block_size + position % block_size
        history = torch.randn(2, cached, g, d, generator=rng).to(dtype)
        old = slot[:cached]
        arena[1, 0][old // block_size, :, old % block_size] = history[0]
        arena[1, 1][old // block_size, :, old % block_size] = history[1]
        mine = slice(first, first + new)
        slots[mine], token_rows[mine], positions[mine] = slot[cached:], row, position[cached:]
        keys = torch.cat([history[0], k[mine]]).double().repeat_interleave(h // g, dim=1)
        values = torch.cat([history[1], v[mine]]).double().repeat_interleave(h // g, dim=1)
        for t in range(new):
            n = cached + t + 1
            scores = torch.einsum("hd,nhd->hn", q[first + t].double(), keys[:n]) * 0.3
            expected[first + t] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values[:n])
        first += new
    rows = token_rows if all(new == 1 for _, new in chunks) else torch.arange(null_row + 1)
    return Case(q, k, v, arena, slots, block_tables, token_rows, rows, positions, expected, first)


def check(case: Case, attention: Attention, tolerance: float) -> None:
    out, arena = case.run(attention)
    n = case.valid_tokens
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[:n].double(), case.expected[:n], atol=tolerance, rtol=tolerance)
    # Every slot that was asked for is written, and nothing else is.
    touched = torch.zeros(arena.shape[2], arena.shape[4], dtype=torch.bool)
    touched.view(-1)[case.slots] = True
    block, offset = case.slots // arena.shape[4], case.slots % arena.shape[4]
    assert torch.equal(arena[1, 0][block, :, offset][:n], case.k[:n])
    assert torch.equal(arena[1, 1][block, :, offset][:n], case.v[:n])
    kept = ~touched[None, None, :, None, :, None].expand_as(arena).clone()
    kept[0] = True
    torch.testing.assert_close(arena[kept], case.arena[kept], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 256])
def test_decode_matches_float64(attention: Attention, block_size: int) -> None:
    chunks = [(0, 1), (1, 1), (15, 1), (127, 1), (128, 1), (300, 1)]
    check(make_case(chunks, block_size=block_size, padding=2), attention, 1e-5)


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


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_agree(seed: int) -> None:
    """What the two compute is the same for arguments drawn at random."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    chunks = [(draw(0, 270), draw(1, 50)) for _ in range(draw(1, 5))]
    g = draw(1, 4)
    case = make_case(chunks, (g * draw(1, 6), g, draw(1, 70)), draw(1, 40), padding=draw(0, 4))
    for attention in BOTH:
        check(case, attention, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(9, 3, 64), (14, 2, 33), (13, 1, 7)])
def test_a_token_does_not_see_its_batch(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """Bitwise: alone, in another order, in a chunk, with more threads, or read wider."""
    case = make_case([(0, 40), (100, 70), (390, 1)], heads, dtype=dtype, padding=2)
    out, arena = case.run(kernels.paged_attention)
    written = replace(case, arena=arena)
    for t in [0, 1, 17, 39, 40, 67, 68, 69, 109, 110]:
        assert torch.equal(written.select([t]).run(kernels.paged_attention)[0][0], out[t])
    shuffled = torch.randperm(111, generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(written.select(shuffled).run(kernels.paged_attention)[0], out[shuffled])
    wider = case.run(kernels.paged_attention, case.block_tables.shape[1])[0]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(case.run(kernels.paged_attention)[0], out)
            alone = written.select([110]).run(kernels.paged_attention)[0]
            assert torch.equal(alone[0], out[110])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(wider, out)


def test_a_later_token_that_is_not_finite_harms_no_earlier_one() -> None:
    case = make_case([(3, 9)], (4, 2, 16))
    out, _ = case.run(kernels.paged_attention)
    k, v = case.k.clone(), case.v.clone()
    k[5], v[5] = torch.nan, torch.inf
    poisoned, _ = replace(case, k=k, v=v).run(kernels.paged_attention)
    assert torch.equal(poisoned[:5], out[:5])
    assert torch.isnan(poisoned[5:]).all()


def test_compiled_call_writes_the_arena_in_place() -> None:
    case = make_case([(20, 1), (130, 1)], padding=1, dtype=torch.bfloat16)
    read_blocks = case.read_blocks

    def step(q: Tensor, k: Tensor, v: Tensor, arena: Tensor) -> Tensor:
        for layer in (1, 0, 1):
            q = kernels.paged_attention(
                q + 1,
                k * 2,
                v,
                arena,
                layer,
                case.slots,
                case.block_tables,
                case.token_rows,
                case.rows,
                case.positions,
                case.scale,
                read_blocks,
            )
        return q

    eager_arena = torch.nan_to_num(case.arena, nan=0.5)
    compiled_arena = eager_arena.clone()
    expected = step(case.q, case.k, case.v, eager_arena)
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    address = compiled_arena.data_ptr()
    out, (code,) = run_and_get_code(compiled, case.q, case.k, case.v, compiled_arena)
    assert torch.equal(out, expected)
    assert torch.equal(compiled_arena, eager_arena)
    assert compiled_arena.data_ptr() == address
    # Nothing of the arena's size is allocated: the mutation was not turned into a copy.
    shape = ", ".join(str(size) for size in case.arena.shape)
    assert f"empty_strided_cpu(({shape})" not in code
    assert "clone" not in code


def test_meta_tensors_have_the_shape_of_the_result() -> None:
    case = make_case([(2, 3)])
    on_meta = replace(
        case,
        **{
            name: getattr(case, name).to("meta")
            for name in ("q", "k", "v", "arena", "slots", "block_tables", "token_rows", "rows")
        },
    )
    out, _ = on_meta.run(kernels.paged_attention, read_blocks=1)
    assert out.shape == case.q.shape
    assert out.is_meta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([0, 10_000, 0])}, r"slots\[1\] is 10000"),
        ({"positions": torch.tensor([0, 0, -1])}, r"positions\[2\] is -1"),
        ({"token_rows": torch.tensor([2, 0, 0])}, r"token_rows\[0\] is 2"),
        ({"block_tables": torch.full((2, 2), 77, dtype=torch.int32)}, "block_tables.* is 77"),
        ({"layer": 2}, "layer 2 of an arena of 2"),
    ],
)
def test_indices_out_of_range_are_named(change: dict[str, object], message: str) -> None:
    case = replace(make_case([(2, 3)]), **change)
    with pytest.raises(IndexError, match=message):
        case.run(kernels.paged_attention, read_blocks=1)


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case([(2, 3)])
    with pytest.raises(RuntimeError, match="share one dtype"):
        replace(case, q=case.q.double()).run(kernels.paged_attention)
    with pytest.raises(RuntimeError, match="do not fit together"):
        replace(case, k=case.k[:, :1], v=case.v[:, :1]).run(kernels.paged_attention)
