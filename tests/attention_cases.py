"""Calls of paged attention over poisoned memory, and what float64 makes of them."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from stepgraph.runtime.kernels import AttentionForm
from stepgraph.runtime.kernels.ops import kv_storage
from torch import Tensor

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """Arguments of one call over a poisoned arena, and what float64 makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    arena: Tensor
    slots: Tensor
    block_tables: Tensor
    token_rows: Tensor
    rows: Tensor
    positions: Tensor
    form: AttentionForm
    expected: Tensor
    valid_tokens: int
    layer: int = 1

    @property
    def read_blocks(self) -> int:
        return -(-(int(self.positions.max()) + 1) // self.form.block_size)

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
            self.read_blocks if read_blocks is None else read_blocks,
            self.form,
        )
        return out, arena

    def to(self, device: str) -> "Case":
        """The same call on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def select(self, tokens: list[int]) -> "Case":
        """The same call for some of its tokens."""
        token_rows = self.token_rows[tokens]
        return replace(
            self,
            q=self.q[tokens],
            k=self.k[tokens],
            v=None if self.v is None else self.v[tokens],
            slots=self.slots[tokens],
            token_rows=token_rows,
            rows=token_rows,
            positions=self.positions[tokens],
        )


def poisoned_arena(shape: tuple[int, ...], dtype: torch.dtype, storage: str) -> Tensor:
    """`[layers, sides, blocks, heads, block_size, width]` full of NaN; as bytes if quantised."""
    if storage == "model":
        return torch.full(shape, torch.nan, dtype=dtype)
    *outer, block_size, width = shape
    return torch.full((*outer, block_size * (width + 2)), 0xFF, dtype=torch.uint8)


def stored(x: Tensor, storage: str) -> Tensor:
    """What is read back of x."""
    if storage == "model":
        return x.double()
    return kv_storage.dequantise(*kv_storage.quantise(x, storage), storage).double()


def attend_float64(
    q_HD: Tensor, keys_NGD: Tensor, values_NGE: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention of one token to N positions, as the textbook has it."""
    group = q_HD.shape[0] // keys_NGD.shape[1]
    scores = torch.einsum("hd,nhd->hn", q_HD, keys_NGD.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hn,nhe->he", scores.softmax(-1), values_NGE.repeat_interleave(group, 1))


def make_case(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int, int] = (9, 3, 64),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seed: int = 0,
    *,
    window: int = 0,
    softcap: float = 0.0,
    storage: str = "model",
    latent: bool = False,
    value_dim: int = 0,
    scale: float = 0.3,
) -> Case:
    """`chunks`: for each row how many positions are cached and how many tokens follow now.

    What no token sees is poison. Table columns below all windows of a row name the null block or
    one that belongs to nobody.
    """
    rng = torch.Generator().manual_seed(seed)
    h, g, d = heads
    form = AttentionForm(block_size, scale, window, softcap, storage, value_dim or d)
    max_blocks = max(-(-(cached + new) // block_size) for cached, new in chunks) + 1
    num_blocks = 2 + len(chunks) * max_blocks
    null_row = len(chunks)
    ids = torch.randperm(num_blocks - 1, generator=rng).to(torch.int32) + 1
    block_tables = torch.zeros(null_row + 1, max_blocks, dtype=torch.int32)
    sides = 1 if latent else 2
    arena = poisoned_arena((2, sides, num_blocks, g, block_size, d), dtype, storage)
    tokens = sum(new for _, new in chunks) + padding
    q = torch.randn(tokens, h, d, generator=rng).to(dtype)
    # Views of one fused projection, as a model makes them.
    fused = torch.randn(tokens, sides * g * d, generator=rng).to(dtype)
    kv = [side.view(tokens, g, d) for side in fused.split(g * d, dim=1)]
    slots = torch.zeros(tokens, dtype=torch.int64)
    token_rows = torch.full((tokens,), null_row)
    positions = torch.zeros(tokens, dtype=torch.int64)
    expected = torch.full((tokens, h, form.value_dim), torch.nan, dtype=torch.float64)
    first = 0
    for row, (cached, new) in enumerate(chunks):
        seen = max(0, cached - window + 1) if window else 0
        used = -(-(cached + new) // block_size)
        gone = seen // block_size
        block_tables[row, :gone] = torch.arange(gone) % 2 * ids[-1]
        block_tables[row, gone:used] = ids[row * max_blocks + gone : row * max_blocks + used]
        position = torch.arange(cached + new)
        slot = block_tables[row, position // block_size] * block_size + position % block_size
        mine = slice(first, first + new)
        slots[mine], token_rows[mine], positions[mine] = slot[cached:], row, position[cached:]
        read = []
        for side, x in zip(arena[1], kv, strict=True):
            history = torch.randn(cached, g, d, generator=rng).to(dtype)
            kv_storage.write_blocks(side, slot[seen:cached], history[seen:], block_size, storage)
            read.append(stored(torch.cat([history, x[mine]]), storage))
        for t in range(new):
            end = cached + t + 1
            span = slice(max(0, end - window) if window else 0, end)
            keys, values = read[0][span], read[-1][span, :, : form.value_dim]
            expected[first + t] = attend_float64(
                q[first + t].double(), keys, values, scale, softcap
            )
        first += new
    rows = token_rows if all(new == 1 for _, new in chunks) else torch.arange(null_row + 1)
    return Case(
        q,
        kv[0],
        None if latent else kv[1],
        arena,
        slots,
        block_tables,
        token_rows,
        rows,
        positions,
        form,
        expected,
        first,
    )


def check(case: Case, attention: Attention, tolerance: float) -> None:
    out, arena = case.run(attention)
    n = case.valid_tokens
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[:n].double(), case.expected[:n], atol=tolerance, rtol=tolerance)
    # Every slot that was asked for is written, and nothing else is but the null block.
    written = case.arena.clone()
    for side, x in zip(written[case.layer], (case.k, case.v), strict=False):
        if x is not None:
            kv_storage.write_blocks(
                side, case.slots[:n], x[:n], case.form.block_size, case.form.storage
            )
    assert torch.equal(arena[:, :, 1:].view(torch.uint8), written[:, :, 1:].view(torch.uint8))
