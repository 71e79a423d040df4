"""The operations of a GPU in plain torch, with the signatures of `Operations`.

They write where the kernels write, have static shapes and wait for nothing, so a step made of them
can be captured. The arithmetic is that of the `reference_*` functions next to each kernel. Large
weights and long rows are processed in parts, to bound the memory of intermediate results.

Shapes are those of the kernels: T tokens or rows, K and N features, H heads, E head_dim, S splits,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.attention import AttentionForm, reference_attend, reference_paged_attention
from ..ops.batch import LayerPlace, RaggedBatch
from .activation import NO_CLAMP, Clamp, reference_activate_rows
from .begin import reference_begin_decode
from .decode_attention import reference_decode_attention
from .expert_routing import reference_routing
from .experts import reference_experts_of_choice
from .greedy import reference_pick_greedy
from .head import reference_softcap
from .linear import GpuLinear, GpuNorm, Pending, reference_linear
from .norm import reference_norm_rows
from .prefill_tiles import PrefillTiling, num_prefill_tiles
from .rotated_heads import HeadRotation
from .split_attention import Partials, reference_combine_splits
from .store import reference_rotate_and_store

__all__ = [
    "activate_rows",
    "begin_decode",
    "combine_output",
    "decode_attention",
    "experts",
    "gate_up",
    "head",
    "linear",
    "norm_linear",
    "norm_rows",
    "paged_attention",
    "pick_greedy",
    "prefill_attention",
    "prefill_tiles",
    "residual_linear",
    "rotate_and_store",
    "route",
]

_WIDENED = 1 << 24
"""Elements of an 8-bit weight that are float32 at a time."""
_GATHERED_BYTES = 256 << 20
"""Keys and values of a decode step that are gathered at a time."""

begin_decode = reference_begin_decode
pick_greedy = reference_pick_greedy
paged_attention = reference_paged_attention
rotate_and_store = reference_rotate_and_store
route = reference_routing
experts = reference_experts_of_choice


def linear(x_TK: Tensor, linear_: GpuLinear, out_TN: Tensor) -> None:
    """`out = linear(x)`, accumulated in float32."""
    weight, scales, bias = linear_
    if scales is None:
        if bias is None:
            torch.mm(x_TK, weight.T, out=out_TN)
        else:
            torch.addmm(bias, x_TK, weight.T, out=out_TN)
        return
    n, k = weight.shape
    rows = max(1, _WIDENED // k)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        some = GpuLinear(weight[part], scales[part], None if bias is None else bias[part])
        out_TN[:, part] = reference_linear(x_TK, some)


def norm_rows(
    x_TD: Tensor, norm: GpuNorm | None, out_TD: Tensor, pending: Pending | None = None
) -> None:
    """See `norm.norm_rows`."""
    out_TD.copy_(reference_norm_rows(x_TD, norm, pending))


def activate_rows(
    gate_up_TF: Tensor, out_TF: Tensor, *, gelu: bool, clamp: Clamp = NO_CLAMP
) -> None:
    """See `activation.activate_rows`."""
    out_TF.copy_(reference_activate_rows(gate_up_TF, gelu=gelu, clamp=clamp))


def norm_linear(
    x_TK: Tensor,
    norm: GpuNorm | None,
    linear_: GpuLinear,
    out_TN: Tensor,
    pending: Pending | None = None,
) -> None:
    """See `norm_linear.norm_linear`."""
    linear(reference_norm_rows(x_TK, norm, pending), linear_, out_TN)


def gate_up(
    x_TK: Tensor,
    norm: GpuNorm | None,
    linear_: GpuLinear,
    out_TF: Tensor,
    *,
    gelu: bool,
    pending: Pending | None = None,
) -> None:
    """See `gate_up.gate_up`."""
    product_TF = out_TF.new_empty(x_TK.shape[0], 2 * out_TF.shape[1])
    norm_linear(x_TK, norm, linear_, product_TF, pending)
    activate_rows(product_TF, out_TF, gelu=gelu)


def residual_linear(
    a_TK: Tensor,
    linear_: GpuLinear,
    residual_TN: Tensor | None,
    out_TN: Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """See `residual_linear.residual_linear`."""
    product_TN = out_TN if residual_TN is None else torch.empty_like(residual_TN)
    linear(a_TK, linear_, product_TN)
    if scale != 1.0:
        product_TN *= scale
    if residual_TN is not None:
        torch.add(residual_TN, product_TN, out=out_TN)


def combine_output(
    acc_THSE: Tensor,
    max_THS: Tensor,
    sum_THS: Tensor,
    linear_: GpuLinear,
    residual_TN: Tensor | None,
    out_TN: Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """See `combine_output.combine_output`."""
    combined_TK = reference_combine_splits(Partials(acc_THSE, max_THS, sum_THS))
    residual_linear(combined_TK.to(out_TN.dtype), linear_, residual_TN, out_TN, scale=scale)


def decode_attention(
    qkv_TN: Tensor,
    arena: Tensor,
    place: LayerPlace,
    rotation: HeadRotation,
    batch: RaggedBatch,
    form: AttentionForm,
    partials: Partials,
    *,
    attended_TN: Tensor | None = None,
    counters: Tensor | None = None,
    next_weights: Sequence[Tensor] = (),
) -> None:
    """See `decode_attention.decode_attention`.

    Without `attended_TN` the first split holds the result, and the others have no positions.
    """
    tokens, kv_heads = qkv_TN.shape[0], arena.shape[3]
    positions = batch.read_blocks * batch.block_size
    row_bytes = 2 * positions * kv_heads * form.value_dim * qkv_TN.itemsize
    rows = max(1, _GATHERED_BYTES // row_bytes)
    for start in range(0, tokens, rows):
        part = slice(start, min(start + rows, tokens))
        angles = rotation._replace(cos=rotation.cos[part], sin=rotation.sin[part])
        out_TN = reference_decode_attention(
            qkv_TN[part], arena, place, angles, batch.of_rows(part), form
        )
        if attended_TN is not None:
            attended_TN[part] = out_TN
            continue
        partials.m[part].fill_(float("-inf"))
        partials.l[part].zero_()
        partials.m[part, :, 0].zero_()
        partials.l[part, :, 0].fill_(1.0)
        partials.acc[part, :, 0] = out_TN.unflatten(1, (-1, form.value_dim)).float()


def prefill_tiles(token_rows_T: Tensor, rows: int, tokens_of_tile: int) -> Tensor:
    """See `prefill_tiles.prefill_tiles`; as `reference_prefill_tiles`, without waiting."""
    tokens, device = token_rows_T.shape[0], token_rows_T.device
    token_T = torch.arange(tokens, device=device)
    begins_T = token_T % tokens_of_tile == 0
    begins_T[1:] |= token_rows_T[1:] != token_rows_T[:-1]
    count = num_prefill_tiles(tokens, rows, tokens_of_tile) + 1
    # Tokens that begin no tile are written after the last one.
    place_T = torch.where(begins_T, begins_T.cumsum(0) - 1, count)
    tiles = torch.full((count + 1,), tokens, dtype=torch.int32, device=device)
    tiles.scatter_(0, place_T, token_T.int())
    return tiles[:count]


def prefill_attention(
    q_THD: Tensor,
    arena: Tensor,
    place: LayerPlace,
    batch: RaggedBatch,
    form: AttentionForm,
    tiles: Tensor,
    tiling: PrefillTiling,
) -> Tensor:
    """See `prefill_attention.prefill_attention`."""
    return reference_attend(q_THD, arena, place, batch, form)


def head(
    x_TD: Tensor,
    norm: GpuNorm,
    linear_: GpuLinear,
    softcap: float = 0.0,
    pending: Pending | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `head.head`; the whole vocabulary is one chunk."""
    logits_TV = x_TD.new_empty(x_TD.shape[0], linear_.weight.shape[0])
    norm_linear(x_TD, norm, linear_, logits_TV, pending)
    if scale != 1.0:
        logits_TV *= scale
    if softcap:
        logits_TV = reference_softcap(logits_TV, softcap)
    ids_T1 = logits_TV.argmax(-1, keepdim=True)
    return logits_TV, logits_TV.gather(1, ids_T1).float(), ids_T1.to(torch.int32)
