"""Paged attention in Triton, the operation `stepgraph::triton_paged_attention`: write, then attend.

The reference is `kernels/attention.reference_paged_attention`, whose signature this has. A step of
one token a row (R == T) is attended to as a decode step, one of chunks (R < T) as a prefill step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.attention import PAGED_ATTENTION_SCHEMA, AttentionForm, fake_paged_attention
from .launch import num_multiprocessors
from .prefill_attention import prefill_attention
from .prefill_tiles import prefill_tiles, prefill_tiling
from .ready_attention import decode_ready_attention
from .split_attention import choose_tile, new_partials
from .splits import choose_splits
from .store import store_keys_and_values

__all__ = ["paged_attention_on_gpu", "triton_paged_attention"]


def triton_paged_attention(
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
    """Arguments and result as in `reference_paged_attention`: `[T, H, E]`.

    Each token costs what its own length (or window) asks for, whatever `read_blocks` is. Where
    R < T the tokens of a row are neighbours and their positions follow one another. No argument is
    read by the host. Raises ValueError for quantised blocks whose scales stand at odd addresses.
    """
    if q_THD.stride(-1) != 1:
        q_THD = q_THD.contiguous()
    store_keys_and_values(k_TGD, v_TGE, arena, layer, slots_T, form)
    if rows_R.shape[0] == q_THD.shape[0]:
        return _decode(
            q_THD, arena, layer, block_tables, token_rows_T, positions_T, read_blocks, form
        )
    tokens, heads, head_dim = q_THD.shape
    group = heads // k_TGD.shape[1]
    tiling = prefill_tiling(
        tokens, heads, k_TGD.shape[1], head_dim, q_THD.dtype, form.storage, q_THD.device
    )
    tiles = prefill_tiles(token_rows_T, rows_R.shape[0], tiling.tokens(group))
    return prefill_attention(
        q_THD, arena, layer, block_tables, token_rows_T, positions_T, tiles, form, tiling
    )


def _decode(
    q_THD: Tensor,
    arena: Tensor,
    layer: int,
    block_tables: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    read_blocks: int,
    form: AttentionForm,
) -> Tensor:
    """One token a row, whose key and value are written."""
    tokens, heads, head_dim = q_THD.shape
    kv_heads, device = arena.shape[3], q_THD.device
    tile = choose_tile(heads // kv_heads, head_dim, form.value_dim, arena.element_size())
    longest = read_blocks * form.block_size
    if form.window:
        longest = min(longest, form.window)
    splits = choose_splits(tokens, kv_heads, longest, num_multiprocessors(device), tile.positions)
    partials = new_partials(tokens, heads, splits, form.value_dim, device)
    out = q_THD.new_empty(tokens, heads * form.value_dim)
    decode_ready_attention(
        q_THD,
        arena,
        layer,
        block_tables,
        token_rows_T,
        positions_T,
        form,
        partials,
        attended_TN=out,
        tile=tile,
    )
    return out.view(tokens, heads, form.value_dim)


def _schema_call(*arguments: Any) -> Tensor:
    """`triton_paged_attention` with the arguments of the schema: the form comes in pieces."""
    tensors, form = arguments[:_TENSORS], arguments[_TENSORS:]
    return triton_paged_attention(*tensors, AttentionForm(*form))  # type: ignore[call-arg]


_TENSORS = 11
"""Arguments of the schema before those of the form."""

torch.library.define("stepgraph::triton_paged_attention", PAGED_ATTENTION_SCHEMA)
torch.library.impl("stepgraph::triton_paged_attention", "CUDA", _schema_call)
torch.library.register_fake("stepgraph::triton_paged_attention", fake_paged_attention)


def paged_attention_on_gpu(
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
    """`triton_paged_attention` as an operation that torch.compile does not look into."""
    out: Tensor = torch.ops.stepgraph.triton_paged_attention.default(
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
