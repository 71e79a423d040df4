"""Attention over a paged KV cache: writes the step's keys and values, then attends.

Shapes: T tokens, R rows, H query heads, G kv heads (G divides H), D head_dim, E value_dim, L
positions read. `cache/arena.py` describes the arena. With block_size 16, slot 37 is offset 5 of
block 2, and position 20 of a row lives in block `block_tables[row, 1]`, offset 4.

The tokens of a call are a `RaggedBatch` (`batch.py`). Token t of row r = `token_rows[t]` attends to
positions 0 ... p of r with p = `positions[t]`. With a window w it attends to p - w + 1 ... p, with
chunks of c positions to its own chunk, p - p % c ... p. All T tokens are written before
any is read, so the tokens of a row attend to each other, causally. No other
memory affects the result, not even multiplied by zero: a reused block may contain NaN, and blocks
that left the window may belong to other rows. A padded token has the null row, position 0 and slot
0; its output is finite but undefined.

Latent attention stores no v: the values are the first E elements of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....cache.spec import PagedState
from .batch import LayerPlace, RaggedBatch
from .kv_storage import read_blocks as read_side
from .kv_storage import write_blocks as write_side
from .operation import (
    Binding,
    LayerStep,
    NeededUnits,
    Operation,
    Run,
    ShardedLayer,
    Vector,
    per_token,
)
from .parameter import Parameter, cut


class AttentionForm(NamedTuple):
    """Fields of `Attend` as constants of a compiled step, the storage, and the tensor of sinks."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    storage: str = "model"
    """Storage of vectors in the arena: `model` (the dtype of q), `int8` or `fp8`."""
    value_dim: int = 0
    """Elements of a value: head_dim, or the latent part of a key."""
    chunk: int = 0
    sinks: Tensor | None = None
    """`[H]`."""


_SCHEMA = (
    "(Tensor q, Tensor? k, Tensor? v, Tensor(a!) arena, int layer, Tensor positions, Tensor slots,"
    " Tensor token_rows, Tensor rows, Tensor block_tables, SymInt read_blocks, int block_size,"
    " SymInt? tokens_per_row, Tensor? query_start_loc, float scale, int window, float softcap,"
    " str storage, int value_dim, int chunk, Tensor? sinks) -> Tensor"
)
"""The arguments of `PagedAttention` for one layer group, taken apart: operators take no tuples.
Compiled code would be specific to an `int`, and one version serves all values of a `SymInt`."""

PagedAttention = Callable[
    [Tensor, "Tensor | None", "Tensor | None", Tensor, LayerPlace, RaggedBatch, AttentionForm],
    Tensor,
]


def define_paged_attention(name: str, implementation: PagedAttention) -> PagedAttention:
    """Define the operator `stepgraph::<name>` with an implementation for CUDA; return its wrapper.

    The operator is opaque to torch.compile.
    """
    torch.library.define(f"stepgraph::{name}", _SCHEMA)
    operator = getattr(torch.ops.stepgraph, name).default

    def call(*given: Any) -> Tensor:
        *tensors, place, batch, form = given
        out: Tensor = operator(
            *(*tensors, place.position, batch.positions, batch.slots[place.group]),
            *(batch.token_rows, batch.rows, batch.block_tables[place.group], batch.read_blocks),
            *(batch.block_size, batch.tokens_per_row, batch.query_start_loc, *form),
        )
        return out

    def run(q: Tensor, k: Tensor | None, v: Tensor | None, arena: Tensor, *rest: Any) -> Tensor:
        layer, positions, slots, token_rows, rows, tables, *sizes = rest
        batch = RaggedBatch(positions, slots[None], token_rows, rows, tables[None], *sizes[:4])
        form = AttentionForm(*sizes[4:])
        return implementation(q, k, v, arena, LayerPlace(0, layer), batch, form)

    def fake(q_THD: Tensor, *given: Any) -> Tensor:
        *_, value_dim, _chunk, _sinks = given
        return q_THD.new_empty(*q_THD.shape[:2], value_dim)

    torch.library.impl(f"stepgraph::{name}", "CUDA", run)
    torch.library.register_fake(f"stepgraph::{name}", fake)
    return call


def reference_paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor | None,
    v_TGE: Tensor | None,
    arena: Tensor,
    place: LayerPlace,
    batch: RaggedBatch,
    form: AttentionForm,
) -> Tensor:
    """Attention `[T, H, E]` in plain PyTorch, with static shapes and no synchronisation.

    Without keys nothing is written: another layer has written the keys and values of the step to
    this place. q, k and v have one dtype, also the arena's if it stores the model's dtype. The
    softmax is in float32. `arena[place.position]` is written in place. Each row reads
    `batch.read_blocks` blocks, whatever its length. A uniform batch attends in one call, each row
    over its own blocks. A ragged batch processes one row after the other, in which all tokens of
    other rows see nothing.
    """
    kv, device = arena[place.position], q_THD.device
    for side, x_TGX in zip(kv, () if k_TGD is None else (k_TGD, v_TGE), strict=False):
        assert x_TGX is not None, "an arena with two sides needs keys and values"
        write_side(side, batch.slots[place.group], x_TGX, batch.block_size, form.storage)
    position_L = torch.arange(batch.read_blocks * batch.block_size, device=device)
    seen_TL = position_L <= batch.positions[:, None]
    if form.window:
        seen_TL &= position_L > batch.positions[:, None] - form.window
    if form.chunk:
        seen_TL &= position_L >= (batch.positions - batch.positions % form.chunk)[:, None]
    # Not block_tables[row]: indexing with a 0-d tensor synchronises with the host.
    tables = batch.block_tables[place.group].index_select(0, batch.rows)
    tables_RB = tables[:, : batch.read_blocks]
    if batch.tokens_per_row is not None:
        return _attend_rows(q_THD, kv, tables_RB, seen_TL, batch.block_size, form)
    assert batch.query_start_loc is not None, "a ragged batch needs query_start_loc"
    out_THE = q_THD.new_zeros(q_THD.shape[0], q_THD.shape[1], form.value_dim)
    token_T = torch.arange(q_THD.shape[0], device=device)
    starts = batch.query_start_loc.unbind()
    for start, end, table_B in zip(starts[:-1], starts[1:], tables_RB.unbind(), strict=True):
        own_T1 = ((token_T >= start) & (token_T < end))[:, None]
        row_THE = _attend_rows(q_THD, kv, table_B[None], seen_TL & own_T1, batch.block_size, form)
        out_THE = torch.where(own_T1[:, None], row_THE, out_THE)
    return out_THE


paged_attention = define_paged_attention("paged_attention", reference_paged_attention)
"""The operation as `torch.ops.stepgraph.paged_attention`; opaque to torch.compile.

Arguments and result as in `reference_paged_attention`, which runs on CUDA. On a CPU, after
`load_cpu_ops`, the cost of a token depends on its own length (or window), not on `read_blocks`, and
its result is bitwise the same in any batch. The CPU operator raises RuntimeError for inconsistent
arguments, and IndexError for an index out of range.
"""


def _attend_rows(
    q_THD: Tensor,
    kv: Tensor,
    tables_RB: Tensor,
    seen_TL: Tensor,
    block_size: int,
    form: AttentionForm,
) -> Tensor:
    """Attend each row to its own blocks; queries are the row's tokens and a group's heads.

    Rows have equal numbers of tokens. The output of a token that sees no position is undefined.
    """
    (t, h, d), n = q_THD.shape, len(q_THD) // len(tables_RB)
    seen_RNL = seen_TL.view(-1, n, seen_TL.shape[1])
    seen_RL = seen_TL if n == 1 else seen_RNL.any(1)
    # Zeros at positions that no token attends to, whatever the memory holds.
    unseen = ~seen_RL[:, None, :, None]
    sides = [read_side(side, tables_RB, block_size, form.storage) for side in kv]
    sides = [side.masked_fill(unseen, 0).to(q_THD.dtype) for side in sides]
    k_RGLD, v_RGLE = sides[0], sides[-1][..., : form.value_dim]
    r, g = k_RGLD.shape[:2]
    bad_RL: Tensor | None = None
    if n > 1:  # a later draft of the row may not be finite, which earlier tokens do not see
        finite_RGL = k_RGLD.isfinite().all(-1) & v_RGLE.isfinite().all(-1)
        bad_RL = ~finite_RGL.all(1) & ~seen_RNL.all(1)
        k_RGLD = k_RGLD.masked_fill(bad_RL[:, None, :, None], 0)
        v_RGLE = v_RGLE.masked_fill(bad_RL[:, None, :, None], 0)
    q_RGQD = q_THD.reshape(r, n, g, h // g, d).transpose(1, 2).flatten(2, 3)
    seen_RQL = seen_RNL if n == 1 else seen_RNL.repeat_interleave(h // g, dim=1)
    sinks = None if form.sinks is None else form.sinks.view(g, -1, 1).repeat(1, n, 1)
    out = _attend(q_RGQD, k_RGLD, v_RGLE, seen_RQL[:, None], form, sinks)
    out_THE: Tensor = out.unflatten(2, (n, h // g)).transpose(1, 2).reshape(t, h, form.value_dim)
    if bad_RL is None:
        return out_THE
    spoiled_T = (seen_RNL & bad_RL[:, None]).any(-1).flatten()
    return out_THE.masked_fill(spoiled_T[:, None, None], torch.nan)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, form: AttentionForm, sinks: Tensor | None
) -> Tensor:
    """Softmax attention `[..., Q, E]` of queries `[..., Q, D]`, keys `[..., L, D]`, values.

    `sinks` are a logit for each query, `[..., Q, 1]`.
    """
    if not form.softcap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=form.scale)
    scores = (q @ k.transpose(-1, -2)).float() * form.scale
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    sink = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1].to(v.dtype) @ v


@dataclass(frozen=True, kw_only=True)
class KeysAsValues(Operation):
    """Of (queries, keys), queries, keys and values: one projection makes both (Gemma 4)."""

    @property
    def title(self) -> str:
        return "values that are the keys"

    def bind(self, to: Binding) -> Run:
        return lambda qk, step: (*qk, qk[1])

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        return layer.rank_heads[: len(split)]


class AttentionTemperature(NamedTuple):
    """Factor of queries at position p, 1 + scale * log(1 + floor((p + 1) / floor)) (Llama 4)."""

    floor: int
    """In tokens."""
    scale: float


@dataclass(frozen=True, kw_only=True)
class Attend(Operation):
    """Write keys and values to the cache, then attend to it: `[T, H * (value_dim - padding)]`."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    """Elements of a value."""
    scale: float
    """Multiplies q . k."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all previous tokens."""
    chunk: int = 0
    """Positions of the chunk that a token attends to, its own only; 0: off (Llama 4)."""
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap); 0: off."""
    sinks: Parameter | None = None
    """`[H]`: attention sink of each head, a softmax logit without a value."""
    temperature: AttentionTemperature | None = None
    shared_values: bool = False
    """Whether the value is the first elements of the key: latent attention, whose cache has one
    side."""
    value_padding: int = 0
    """Elements at the end of each value that are zeros, and left out of the result: values are
    shorter than keys (MiMo-V2)."""
    keys_of: int | None = None
    """The layer whose keys and values it reads; it writes none, and takes queries only (Gemma 3n).
    None: its own."""

    @property
    def query_features(self) -> int:
        """Elements of the queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Elements of the keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def reach(self) -> int:
        """Most tokens that a token attends to, itself included; 0: all previous tokens."""
        return min(filter(None, (self.window, self.chunk)), default=0)

    @property
    def features(self) -> int:
        """Elements of the result of a token."""
        return self.heads * (self.value_dim - self.value_padding)

    @property
    def has_plain_softmax(self) -> bool:
        """Whether it is softmax(scale * q . k) with value_dim = head_dim, as in PyTorch's SDPA."""
        return not self.softcap and self.sinks is None and self.value_dim == self.head_dim

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return () if self.sinks is None else (self.sinks,)

    @property
    def source_layer(self) -> int | None:
        return self.keys_of

    @property
    def states(self) -> tuple[PagedState, ...]:
        if self.keys_of is not None:
            return ()
        window = None if self.shared_values else self.reach or None
        return (PagedState(self.kv_heads, self.head_dim, window, self.sides),)

    @property
    def sides(self) -> int:
        """Sides of the cache: 2 for keys and values, 1 if they are shared."""
        return 1 if self.shared_values else 2

    def form(self, storage: str, sinks: Tensor | None = None) -> AttentionForm:
        """Return its parameters, with the storage of the cache and the tensor of the sinks."""
        constants = (self.scale, self.window, self.softcap, storage, self.value_dim, self.chunk)
        return AttentionForm(*constants, sinks)

    def bind(self, to: Binding) -> Run:
        sinks = None if self.sinks is None else to.module(self.sinks, Vector)
        # `run` must not hold `to`, which holds the layer: memory in a cycle is freed late.
        attention, (place,), features = to.kernels.attention, to.places, self.features
        kept = self.value_dim - self.value_padding if self.value_padding else None
        temper = None
        if self.temperature is not None:
            temper = per_token(to.kernels, partial(tempered, self.temperature))
        constants = self.form(to.storage)[:-1]

        def run(value: tuple[Tensor, ...], step: LayerStep) -> Tensor:
            q_THE, *written = value
            if temper is not None:
                q_THE = temper(q_THE, step.batch.positions)
            form = AttentionForm(*constants, None if sinks is None else sinks.weight)
            k_TGE, v_TGE = (*written, None, None)[:2]
            arena = step.arenas[place.layout]
            attended_THE = attention(q_THE, k_TGE, v_TGE, arena, place, step.batch, form)
            if kept is not None:
                attended_THE = attended_THE[..., :kept]
            return attended_THE.reshape(q_THE.shape[0], features)

        return run

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if self.heads % ranks:
            yield f"{ranks} does not divide {self.heads} query heads"
        if self.kv_heads % ranks and ranks % self.kv_heads:
            yield f"{ranks} is neither a divisor nor a multiple of {self.kv_heads} kv heads"

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        heads = layer.rank.part(self.heads)
        yield replace(
            self,
            heads=len(heads),
            kv_heads=len(layer.rank.kv_heads(self.kv_heads)),
            sinks=None if self.sinks is None else cut(self.sinks, [heads]),
        )

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        return layer.rank_heads

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        queries, cached = self.query_features, self.sides * self.kv_features
        held = itemsize * (2 * hidden + 2 * queries + 2 * cached + self.features)
        return held + (12 * queries if eager else 0)


def tempered(temperature: AttentionTemperature, q_THE: Tensor, positions_T: Tensor) -> Tensor:
    """Multiply queries by the temperature of their positions, in float32."""
    floors_T = torch.floor((positions_T.float() + 1.0) / temperature.floor)
    factors_T = torch.log1p(floors_T) * temperature.scale + 1.0
    return (q_THE * factors_T[:, None, None]).to(q_THE.dtype)
