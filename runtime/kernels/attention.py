"""Attention over a paged KV cache: writes the step's keys and values, then attends.

Shapes: T tokens, R rows, H query heads, G kv heads (G divides H), D head_dim, L positions read.
The arena is `[layers, 2 (k|v), num_blocks, G, block_size, D]`. With block_size 16, slot 37 is
offset 5 of block 2, and position 20 of a row lives in block `block_tables[row, 1]`, offset 4.

Token t of row r = `token_rows[t]` attends to the positions 0 ... `positions[t]` of r. All T
tokens are written before any is read, so the tokens of a prefill chunk see each other, causally.
Memory that no position of a row reaches is never used, not even multiplied by zero: a recycled
block may hold NaN. A padded token has the null row, position 0 and slot 0; its output is finite
and means nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

torch.library.define(
    "stepgraph::paged_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, int layer, Tensor slots,"
    " Tensor block_tables, Tensor token_rows, Tensor rows, Tensor positions, float scale,"
    " int read_blocks) -> Tensor",
)


def _fake_paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    scale: float,
    read_blocks: int,
) -> Tensor:
    return q_THD.new_empty(q_THD.shape)


torch.library.register_fake("stepgraph::paged_attention", _fake_paged_attention)


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    scale: float,
    read_blocks: int,
) -> Tensor:
    """The operation as `torch.ops.stepgraph.paged_attention`; opaque to torch.compile.

    Arguments and result as in `reference_paged_attention`, which is what runs on CUDA. On CPU,
    after `load_cpu_ops`, each token costs what its own length asks for whatever `read_blocks`
    is, and its result is bitwise the same in any batch; there a RuntimeError tells of arguments
    that do not fit together, an IndexError of an index out of range.
    """
    out: Tensor = torch.ops.stepgraph.paged_attention.default(
        q_THD,
        k_TGD,
        v_TGD,
        arena,
        layer,
        slots_T,
        block_tables,
        token_rows_T,
        rows_R,
        positions_T,
        scale,
        read_blocks,
    )
    return out


def reference_paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    rows_R: Tensor,
    positions_T: Tensor,
    scale: float,
    read_blocks: int,
) -> Tensor:
    """Plain torch; static shapes and no synchronisation, so it can be captured. `[T, H, D]`.

    q, k, v and arena share one dtype; the softmax is in float32. `arena[layer]` is written in
    place. `slots_T`, `token_rows_T`, `rows_R`, `positions_T` are int64; `block_tables` is int32
    `[max_rows + 1, max_blocks]`. All positions are below `read_blocks * block_size`: the cost is
    that of reading so many blocks for each row.

    `rows_R` holds the rows that occur in `token_rows_T`, padded with the null row. R == T reads
    the blocks of each token (a decode step, which passes `token_rows_T` itself); R < T reads each
    row once, masked for all tokens (a prefill chunk). The result is the same, the memory is
    R * L either way.
    """
    block_size = arena.shape[4]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    arena[layer, 0][blocks_T, :, offsets_T] = k_TGD
    arena[layer, 1][blocks_T, :, offsets_T] = v_TGD
    position_L = torch.arange(read_blocks * block_size, device=q_THD.device)
    causal_TL = position_L <= positions_T[:, None]
    if rows_R.shape[0] == q_THD.shape[0]:
        tables = block_tables[token_rows_T, :read_blocks]
        return _attend_each(q_THD, arena[layer], tables, causal_TL, scale)
    out_THD = torch.zeros_like(q_THD)
    for row in rows_R.unbind():
        own_T = token_rows_T == row
        length = torch.where(own_T, positions_T + 1, 0).amax()
        table = block_tables[row, :read_blocks]
        row_THD = _attend_row(q_THD, arena[layer], table, position_L < length, causal_TL, scale)
        out_THD = torch.where(own_T[:, None, None], row_THD, out_THD)
    return out_THD


torch.library.impl("stepgraph::paged_attention", "CUDA", reference_paged_attention)


def _attend_each(
    q_THD: Tensor, kv: Tensor, tables_TB: Tensor, causal_TL: Tensor, scale: float
) -> Tensor:
    """Every token over blocks of its own. The heads of a group stand where queries usually do."""
    t, h, d = q_THD.shape
    g = kv.shape[2]
    k_TGLD, v_TGLD = (
        side[tables_TB]
        .transpose(1, 2)
        .reshape(t, g, -1, d)
        .masked_fill(~causal_TL[:, None, :, None], 0)
        for side in kv
    )
    out = F.scaled_dot_product_attention(
        q_THD.view(t, g, h // g, d), k_TGLD, v_TGLD, causal_TL[:, None, None], scale=scale
    )
    return out.reshape(t, h, d)


def _attend_row(
    q_THD: Tensor, kv: Tensor, table_B: Tensor, valid_L: Tensor, causal_TL: Tensor, scale: float
) -> Tensor:
    """All tokens over the blocks of one row. Meant for the tokens of that row only."""
    t, h, d = q_THD.shape
    g = kv.shape[2]
    k_GLD, v_GLD = (
        side[table_B].transpose(0, 1).reshape(g, -1, d).masked_fill(~valid_L[:, None], 0)
        for side in kv
    )
    q_GTD = q_THD.view(t, g, h // g, d).transpose(0, 1).reshape(g, -1, d)
    mask_TL = causal_TL.repeat_interleave(h // g, dim=0)
    out = F.scaled_dot_product_attention(
        q_GTD[None], k_GLD[None], v_GLD[None], mask_TL, scale=scale
    )
    return out.view(g, t, h // g, d).transpose(0, 1).reshape(t, h, d)
