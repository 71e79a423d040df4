"""Paged attention in Triton, what `stepgraph::paged_attention` runs on CUDA: write, then attend.

The reference is `kernels/attention.reference_paged_attention`, whose signature this has. A step of
one token a row (R == T) is attended to as a decode step, one of chunks (R < T) as a prefill step.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from ..attention import AttentionForm
from .launch import num_multiprocessors
from .prefill_attention import prefill_attention
from .prefill_tiles import prefill_tiles, prefill_tiling
from .ready_attention import decode_ready_attention
from .split_attention import choose_tile, new_partials
from .splits import choose_splits
from .store import store_keys_and_values

__all__ = ["register", "triton_paged_attention"]


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


def _triton_paged_attention_op(
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
    *form: int | float | str,
) -> Tensor:
    """`triton_paged_attention` with the signature of the schema."""
    return triton_paged_attention(
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


@cache
def register() -> None:
    """Let `torch.ops.stepgraph.paged_attention` on CUDA be these kernels, for the process."""
    with warnings.catch_warnings():
        # That the reference is replaced.
        warnings.filterwarnings("ignore", ".*verrid", UserWarning)
        torch.library.impl("stepgraph::paged_attention", "CUDA", _triton_paged_attention_op)
