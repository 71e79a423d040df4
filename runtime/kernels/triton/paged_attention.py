"""Paged attention in Triton, the operation `stepgraph::triton_paged_attention`: write, then attend.

The reference is `ops/attention.reference_paged_attention`, whose signature this has. A batch of one
token a row is attended to as a decode step, any other one as a prefill step.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.attention import AttentionForm, define_paged_attention
from ..ops.batch import LayerPlace, RaggedBatch
from .kernel_calls import num_multiprocessors
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
    place: LayerPlace,
    batch: RaggedBatch,
    form: AttentionForm,
) -> Tensor:
    """Arguments and result as in `reference_paged_attention`: `[T, H, E]`.

    Each token costs what its own length (or window) asks for, whatever `read_blocks` is. No
    argument is read by the host. Raises ValueError for quantised blocks whose scales stand at odd
    addresses.
    """
    if q_THD.stride(-1) != 1:
        q_THD = q_THD.contiguous()
    slots_T = batch.slots[place.group]
    store_keys_and_values(
        k_TGD, v_TGE, arena, place.position, slots_T, batch.block_size, form.storage
    )
    if batch.tokens_per_row == 1:
        return _decode(q_THD, arena, place, batch, form)
    tokens, heads, head_dim = q_THD.shape
    group = heads // k_TGD.shape[1]
    tiling = prefill_tiling(
        tokens, heads, k_TGD.shape[1], head_dim, q_THD.dtype, form.storage, q_THD.device
    )
    tiles = prefill_tiles(batch.token_rows, batch.rows.shape[0], tiling.tokens(group))
    return prefill_attention(q_THD, arena, place, batch, form, tiles, tiling)


def _decode(
    q_THD: Tensor, arena: Tensor, place: LayerPlace, batch: RaggedBatch, form: AttentionForm
) -> Tensor:
    """One token a row, whose key and value are written."""
    tokens, heads, head_dim = q_THD.shape
    kv_heads, device = arena.shape[3], q_THD.device
    tile = choose_tile(heads // kv_heads, head_dim, form.value_dim, arena.element_size())
    longest = batch.read_blocks * batch.block_size
    for most in filter(None, (form.window, form.chunk)):
        longest = min(longest, most)
    splits = choose_splits(tokens, kv_heads, longest, num_multiprocessors(device), tile.positions)
    partials = new_partials(tokens, heads, splits, form.value_dim, device)
    out = q_THD.new_empty(tokens, heads * form.value_dim)
    decode_ready_attention(q_THD, arena, place, batch, form, partials, attended_TN=out, tile=tile)
    return out.view(tokens, heads, form.value_dim)


paged_attention_on_gpu = define_paged_attention("triton_paged_attention", triton_paged_attention)
"""`triton_paged_attention` as an operation that torch.compile does not look into."""
