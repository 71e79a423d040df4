"""Attention over a paged KV cache: writes the step's keys and values, then attends.

Shapes: T tokens, R rows, H query heads, G kv heads (G divides H), D head_dim, E value_dim, L
positions read. The arena is that of `cache/arena.py`. With block_size 16, slot 37 is offset 5 of
block 2, and position 20 of a row lives in block `block_tables[row, 1]`, offset 4.

Token t of row r = `token_rows[t]` attends to the positions 0 ... p of r with p = `positions[t]`, or
with a window w to p - w + 1 ... p. All T tokens are written before any is read, so the tokens of a
prefill chunk see each other, causally. Memory that no such position reaches is never used, not even
multiplied by zero: a recycled block may hold NaN, and what has left the window belongs to others. A
padded token has the null row, position 0 and slot 0; its output is finite and means nothing.

Latent attention has one side only: no v, and the values are the first E elements of the keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_storage import read_blocks as read_side
from .kv_storage import write_blocks as write_side


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the tokens of one forward pass stand and where their keys and values go."""

    positions: Tensor
    """int64 `[T]`: position of each token in its sequence."""
    slots: Tensor
    """int64 `[groups, T]`, the write index: slot of each token in each layer group; padding writes
    to the null block."""
    token_rows: Tensor
    """int64 `[T]`: row of each token."""
    rows: Tensor
    """int64 `[R]`: the distinct rows of the pass, padded with the null row. R = T when decoding,
    and by chance in other passes."""
    block_tables: Tensor
    """int32 `[groups, max_rows + 1, max_blocks_per_row]`: the read index of every row."""
    read_blocks: int
    """Columns of the block tables that may be read: all positions lie below them."""
    block_size: int
    """Slots of a block."""


class AttentionForm(NamedTuple):
    """What a layer's attention is, besides its tensors; constants of a compiled step."""

    block_size: int
    scale: float
    """Multiplies q . k."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all before it."""
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap); 0: they stay."""
    storage: str = "model"
    """How the arena stores vectors: `model` (the dtype of q), `int8` or `fp8`."""
    value_dim: int = 0
    """Elements of a value: head_dim, or the latent part of a key."""
    sinks: Tensor | None = None
    """`[H]`: a logit of each head in the softmax that stands for no value; plain attention only."""


PAGED_ATTENTION_SCHEMA = (
    "(Tensor q, Tensor k, Tensor? v, Tensor(a!) arena, int layer, Tensor slots,"
    " Tensor block_tables, Tensor token_rows, Tensor rows, Tensor positions, int read_blocks,"
    " int block_size, float scale, int window, float softcap, str storage, int value_dim)"
    " -> Tensor"
)
torch.library.define("stepgraph::paged_attention", PAGED_ATTENTION_SCHEMA)


def fake_paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor | None,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    read_blocks: int,
    block_size: int,
    scale: float,
    window: int,
    softcap: float,
    storage: str,
    value_dim: int,
) -> Tensor:
    """Return what the operation returns, without computing it: for torch.compile."""
    return q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], value_dim)


torch.library.register_fake("stepgraph::paged_attention", fake_paged_attention)


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor | None,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    read_blocks: int,
    form: AttentionForm,
) -> Tensor:
    """The operation as `torch.ops.stepgraph.paged_attention`; opaque to torch.compile.

    Arguments and result as in `reference_paged_attention`, which is what runs on CUDA. On CPU,
    after `load_cpu_ops`, each token costs what its own length (or window) asks for whatever
    `read_blocks` is, and its result is bitwise the same in any batch; there a RuntimeError tells of
    arguments that do not fit together, an IndexError of an index out of range.
    """
    out: Tensor = torch.ops.stepgraph.paged_attention.default(
        q_THD,
        k_TGD,
        v_TGE,
        arena,
        layer,
        slots_T,
        block_tables,
        token_rows_T,
        rows_R,
        positions_T,
        read_blocks,
        *form[:-1],
    )
    return out


def plain_paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor | None,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    read_blocks: int,
    form: AttentionForm,
) -> Tensor:
    """`reference_paged_attention` as an operation that torch.compile does not look into."""
    out: Tensor = torch.ops.stepgraph.plain_paged_attention.default(
        q_THD,
        k_TGD,
        v_TGE,
        arena,
        layer,
        slots_T,
        block_tables,
        token_rows_T,
        rows_R,
        positions_T,
        read_blocks,
        *form,
    )
    return out


def reference_paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor | None,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    read_blocks: int,
    form: AttentionForm,
) -> Tensor:
    """Plain torch; static shapes and no synchronisation, so it can be captured. `[T, H, E]`.

    q, k and v share one dtype, and the arena too where it stores the model's; the softmax is in
    float32. `arena[layer]` is written in place. `slots_T`, `token_rows_T`, `rows_R`, `positions_T`
    are int64; `block_tables`, those of the layer's group, is int32 `[max_rows + 1, max_blocks]`.
    All positions are below `read_blocks * block_size`: the cost is that of reading so many blocks
    for each row.

    `rows_R` holds the rows that occur in `token_rows_T`, padded with the null row. R == T reads
    the blocks of each token (a decode step, which passes `token_rows_T` itself); R < T reads each
    row once, masked for all tokens (a prefill chunk). The result is the same, the memory is
    R * L either way.
    """
    for side, x_TGX in zip(arena[layer], (k_TGD, v_TGE), strict=False):
        assert x_TGX is not None, "an arena of two sides takes keys and values"
        write_side(side, slots_T, x_TGX, form.block_size, form.storage)
    return reference_attend(
        q_THD, arena, layer, block_tables, token_rows_T, rows_R, positions_T, read_blocks, form
    )


def reference_attend(
    q_THD: Tensor,
    arena: Tensor,
    layer: int,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    read_blocks: int,
    form: AttentionForm,
) -> Tensor:
    """The second half of `reference_paged_attention`, of keys and values that are written."""
    kv = arena[layer]
    position_L = torch.arange(read_blocks * form.block_size, device=q_THD.device)
    seen_TL = position_L <= positions_T[:, None]
    if form.window:
        seen_TL &= position_L > positions_T[:, None] - form.window
    if rows_R.shape[0] == q_THD.shape[0]:
        tables = block_tables[token_rows_T, :read_blocks]
        return _attend_each(q_THD, kv, tables, seen_TL, form)
    out_THE = q_THD.new_zeros(q_THD.shape[0], q_THD.shape[1], form.value_dim)
    # Not block_tables[row]: an index that is a tensor of no dimension is read by the host.
    tables_RB = block_tables.index_select(0, rows_R)[:, :read_blocks]
    for row, table_B in zip(rows_R.unbind(), tables_RB.unbind(), strict=True):
        own_T = token_rows_T == row
        seen_by_row_L = (own_T[:, None] & seen_TL).any(0)
        row_THE = _attend_row(q_THD, kv, table_B, seen_by_row_L, seen_TL, form)
        out_THE = torch.where(own_T[:, None, None], row_THE, out_THE)
    return out_THE


def _paged_attention_op(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor | None,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    read_blocks: int,
    *form: int | float | str | Tensor | None,
) -> Tensor:
    """The reference with the signature of the schema."""
    return reference_paged_attention(
        q_THD,
        k_TGD,
        v_TGE,
        arena,
        layer,
        slots_T,
        block_tables,
        token_rows_T,
        rows_R,
        positions_T,
        read_blocks,
        AttentionForm(*form),  # type: ignore[arg-type]  # checked by the schema
    )


torch.library.impl("stepgraph::paged_attention", "CUDA", _paged_attention_op)
torch.library.define(
    "stepgraph::plain_paged_attention",
    PAGED_ATTENTION_SCHEMA.replace("int value_dim)", "int value_dim, Tensor? sinks)"),
)
torch.library.impl(
    "stepgraph::plain_paged_attention", "CompositeExplicitAutograd", _paged_attention_op
)
torch.library.register_fake(
    "stepgraph::plain_paged_attention",
    lambda *arguments: fake_paged_attention(*arguments[:-1]),
)


def _attend_each(
    q_THD: Tensor, kv: Tensor, tables_TB: Tensor, seen_TL: Tensor, form: AttentionForm
) -> Tensor:
    """Every token over blocks of its own. The heads of a group stand where queries usually do."""
    t, h, d = q_THD.shape
    k_TGLD, v_TGLE = _keys_and_values(kv, tables_TB, seen_TL[:, None, :, None], q_THD, form)
    q_TGHD = q_THD.reshape(t, k_TGLD.shape[1], -1, d)
    sinks = None if form.sinks is None else form.sinks.view(k_TGLD.shape[1], -1, 1)
    out = _attend(q_TGHD, k_TGLD, v_TGLE, seen_TL[:, None, None], form, sinks)
    return out.reshape(t, h, form.value_dim)


def _attend_row(
    q_THD: Tensor,
    kv: Tensor,
    table_B: Tensor,
    seen_by_row_L: Tensor,
    seen_TL: Tensor,
    form: AttentionForm,
) -> Tensor:
    """All tokens over the blocks of one row. Meant for the tokens of that row only."""
    t, h, d = q_THD.shape
    k_GLD, v_GLE = _keys_and_values(kv, table_B, seen_by_row_L[:, None], q_THD, form)
    g = k_GLD.shape[0]
    q_GTD = q_THD.view(t, g, h // g, d).transpose(0, 1).reshape(g, -1, d)
    seen = seen_TL.repeat_interleave(h // g, dim=0)
    sinks = None if form.sinks is None else form.sinks.view(g, -1, 1).repeat(1, t, 1)
    out = _attend(q_GTD[None], k_GLD[None], v_GLE[None], seen, form, sinks)
    return out.view(g, t, h // g, -1).transpose(0, 1).reshape(t, h, form.value_dim)


def _keys_and_values(
    kv: Tensor, tables: Tensor, seen: Tensor, q_THD: Tensor, form: AttentionForm
) -> tuple[Tensor, Tensor]:
    """What is read of the blocks, in the dtype of q, with zeros where nobody looks."""
    sides = [
        read_side(side, tables, form.block_size, form.storage).masked_fill(~seen, 0).to(q_THD.dtype)
        for side in kv
    ]
    return sides[0], sides[-1][..., : form.value_dim]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, form: AttentionForm, sinks: Tensor | None
) -> Tensor:
    """Softmax attention `[..., Q, E]` of queries `[..., Q, D]`, keys `[..., L, D]`, values.

    `sinks` is a logit for each query, `[..., Q, 1]`.
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
