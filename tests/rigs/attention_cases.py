"""Calls of paged attention over poisoned memory, and what float64 makes of them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from stepgraph.runtime.kernels import AttentionForm, LayerPlace, RaggedBatch
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
    batch: RaggedBatch
    form: AttentionForm
    expected: Tensor
    valid_tokens: int
    layer: int = 1

    def run(self, attention: Attention) -> tuple[Tensor, Tensor]:
        """Output and arena of a call that owns its arena."""
        arena, place = self.arena.clone(), LayerPlace(0, self.layer)
        out = attention(self.q, self.k, self.v, arena, place, self.batch, self.form)
        return out, arena

    def with_batch(self, **changes: Any) -> "Case":
        """The same call with another batch."""
        return replace(self, batch=replace(self.batch, **changes))

    def to(self, device: str) -> "Case":
        """The same call on a device."""
        sinks = None if self.form.sinks is None else self.form.sinks.to(device)
        form = self.form._replace(sinks=sinks)
        return moved(replace(self, batch=moved(self.batch, device), form=form), device)

    def select(self, tokens: list[int]) -> "Case":
        """The same call for some of its tokens, each in a row of its own."""
        token_rows = self.batch.token_rows[tokens]
        selected = replace(
            self,
            q=self.q[tokens],
            k=self.k[tokens],
            v=None if self.v is None else self.v[tokens],
        )
        return selected.with_batch(
            slots=self.batch.slots[:, tokens],
            token_rows=token_rows,
            rows=token_rows,
            positions=self.batch.positions[tokens],
            tokens_per_row=1,
            query_start_loc=None,
        )


def moved(made: Any, device: str) -> Any:
    """The same dataclass with its tensors on a device."""
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    return replace(made, **{n: x.to(device) for n, x in values.items() if isinstance(x, Tensor)})


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


def first_seen(position: int, form: AttentionForm) -> int:
    """The first position that a token attends to."""
    windowed = max(0, position + 1 - form.window) if form.window else 0
    return max(windowed, position - position % form.chunk if form.chunk else 0)


def attend_float64(
    q_HD: Tensor, keys_NGD: Tensor, values_NGE: Tensor, form: AttentionForm
) -> Tensor:
    """Attention of one token to N positions, as the textbook has it."""
    group = q_HD.shape[0] // keys_NGD.shape[1]
    scores = torch.einsum("hd,nhd->hn", q_HD, keys_NGD.repeat_interleave(group, 1))
    scores = scores * form.scale
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    if form.sinks is not None:
        scores = torch.cat((scores, form.sinks.double()[:, None]), dim=1)
    shares = scores.softmax(-1)[:, : len(keys_NGD)]
    return torch.einsum("hn,nhe->he", shares, values_NGE.repeat_interleave(group, 1))


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
    chunk: int = 0,
    sinks: bool = False,
) -> Case:
    """`chunks`: for each row how many positions are cached and how many tokens follow now.

    What no token sees is poison. Table columns below all windows of a row name the null block or
    one that belongs to nobody.
    """
    rng = torch.Generator().manual_seed(seed)
    h, g, d = heads
    sinks_H = 3 * torch.randn(h, generator=rng).to(dtype) if sinks else None
    form = AttentionForm(scale, window, softcap, storage, value_dim or d, chunk, sinks_H)
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
        seen = first_seen(cached, form)
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
            span = slice(first_seen(end - 1, form), end)
            keys, values = read[0][span], read[-1][span, :, : form.value_dim]
            expected[first + t] = attend_float64(q[first + t].double(), keys, values, form)
        first += new
    counts = [new for _, new in chunks]
    starts = torch.tensor([0, *itertools.accumulate(counts), first])
    batch = RaggedBatch(
        positions=positions,
        slots=slots[None],
        token_rows=token_rows,
        rows=torch.arange(null_row + 1),
        block_tables=block_tables[None],
        read_blocks=-(-(int(positions.max()) + 1) // block_size),
        block_size=block_size,
        tokens_per_row=None,
        query_start_loc=starts,
    )
    n = counts[0]
    if set(counts) == {n} and padding % n == 0:
        rows = torch.cat([torch.arange(null_row), torch.full((padding // n,), null_row)])
        batch = replace(batch, tokens_per_row=n, rows=rows, query_start_loc=None)
    values = None if latent else kv[1]
    return Case(q, kv[0], values, arena, batch, form, expected, first)


def check(case: Case, attention: Attention, tolerance: float) -> None:
    out, arena = case.run(attention)
    n = case.valid_tokens
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[:n].double(), case.expected[:n], atol=tolerance, rtol=tolerance)
    # Every slot that was asked for is written, and nothing else is but the null block.
    written = case.arena.clone()
    for side, x in zip(written[case.layer], (case.k, case.v), strict=False):
        if x is not None:
            slots = case.batch.slots[0, :n]
            kv_storage.write_blocks(side, slots, x[:n], case.batch.block_size, case.form.storage)
    assert torch.equal(arena[:, :, 1:].view(torch.uint8), written[:, :, 1:].view(torch.uint8))
