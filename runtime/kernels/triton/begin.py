"""The begin of a decode step: everything that follows from the rows and the device's state.

Shapes: T rows of the step, R rows of the state, G layer groups, B columns of a block table, K kinds
of rotation, E half of what is rotated of a head, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.linear import LinearTensors
from ..weights.stored import in_features
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .quantised import as_numbers, kernel_weight, load_groups


class EmbeddingTable(NamedTuple):
    """Rows of the embedding, as its layer stores them."""

    weight: Tensor
    """`[V, D]` in the model's dtype, or 8-bit numbers."""
    scales: Tensor | None
    """float32 `[V]`, or `[V, ceil(D / 128)]`, of 8-bit numbers."""
    dtype: torch.dtype
    """Of the model."""
    factor: float = 1.0
    """What embeddings are multiplied by, a number of the model's dtype."""
    held: range | None = None
    """The tokens whose rows these are: embeddings of others are zeros. None: all tokens."""


class Beginning(NamedTuple):
    """What the layers of a decode step begin with."""

    x: Tensor
    """`[T, D]`, embeddings in the model's dtype."""
    positions: Tensor
    """int64 `[T]`: position of each row's newest token."""
    slots: Tensor
    """int64 `[G, T]`, the write index: slot of that token in each layer group."""
    cos: Tensor
    sin: Tensor
    """float32 `[K, T, E]`."""


def begin_decode(
    rows_T: Tensor,
    token_ids_R: Tensor,
    positions_R: Tensor,
    block_tables: Tensor,
    block_size: int,
    embedding: EmbeddingTable,
    rotations: tuple[Tensor, Tensor],
) -> Beginning:
    """Read the rows' newest tokens and positions, and what follows from them; one kernel.

    `rows_T`, `token_ids_R` and `positions_R` are int64, `block_tables` is int32 `[G, R, B]`.
    `rotations` are the frequencies and amplitudes of a `BoundModel`.
    """
    tokens, hidden = rows_T.shape[0], in_features(embedding.weight)
    groups, state_rows, columns = block_tables.shape
    kinds, half = rotations[0].shape
    device = rows_T.device
    out = Beginning(
        x=torch.empty(tokens, hidden, dtype=embedding.dtype, device=device),
        positions=torch.empty(tokens, dtype=torch.int64, device=device),
        slots=torch.empty(groups, tokens, dtype=torch.int64, device=device),
        cos=torch.empty(kinds, tokens, half, device=device),
        sin=torch.empty(kinds, tokens, half, device=device),
    )
    block = min(1024, triton.next_power_of_2(hidden))
    weight, form = kernel_weight(LinearTensors(embedding.weight, embedding.scales))
    call_kernel(
        _begin_decode, (tokens, 1 + triton.cdiv(hidden, block)),
        rows_T, token_ids_R, positions_R, block_tables, weight, embedding.scales, *rotations, *out,
        tokens, state_rows, columns, block_size, hidden, half, embedding.factor,
        0 if embedding.held is None else embedding.held.start, weight.shape[0],
        GROUPS=groups, KINDS=kinds, BLOCK_D=block, BLOCK_E=triton.next_power_of_2(half),
        SCALED=embedding.factor != 1.0, PART=embedding.held is not None, FORM=form,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "first", "held"])
def _begin_decode(  # type: ignore[no-untyped-def]
    rows_ptr, token_ids_ptr, positions_ptr, tables_ptr, embedding_ptr, scales_ptr, frequencies_ptr,
    amplitudes_ptr, x_ptr, own_positions_ptr, slots_ptr, cos_ptr, sin_ptr, tokens, state_rows,
    columns, block_size, hidden, half, factor, first, held, GROUPS: tl.constexpr,
    KINDS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, SCALED: tl.constexpr,
    PART: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    part = tl.program_id(1)
    wait_for_inputs(PDL)  # the step before made the token, the host's copy the rows
    let_dependents_start(PDL)
    row = tl.load(rows_ptr + token)
    if part == 0:
        position = tl.load(positions_ptr + row)
        tl.store(own_positions_ptr + token, position)
        for group in tl.static_range(GROUPS):
            entry = (group * state_rows + row) * columns + position // block_size
            block = tl.load(tables_ptr + entry).to(tl.int64)
            tl.store(slots_ptr + group * tokens + token, block * block_size + position % block_size)
        e = tl.arange(0, BLOCK_E)
        for kind in tl.static_range(KINDS):
            frequency = tl.load(frequencies_ptr + kind * half + e, mask=e < half, other=0.0)
            amplitude = tl.load(amplitudes_ptr + kind * half + e, mask=e < half, other=0.0)
            cosine, sine = _cos_sin(position.to(tl.float32) * frequency)
            at = (kind * tokens + token) * half + e
            tl.store(cos_ptr + at, cosine * amplitude, mask=e < half)
            tl.store(sin_ptr + at, sine * amplitude, mask=e < half)
    else:
        d = (part - 1) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = d < hidden
        token_id = tl.load(token_ids_ptr + row)
        if PART:
            token_id -= first
            inside &= (token_id >= 0) & (token_id < held)
            token_id = tl.minimum(tl.maximum(token_id, 0), held - 1)
        if FORM.storage == "codes":
            row_ptr = embedding_ptr + token_id * (hidden // 8 + 4)
            code = tl.load(row_ptr + d // 8, mask=inside, other=0) >> (d % 8 * 4) & 15
            level = tl.load(row_ptr + hidden // 8 + code // 4) >> (code % 4 * 8) & 255
            x = (level - 128).to(tl.float32)
        else:
            x = tl.load(embedding_ptr + token_id * hidden + d, mask=inside, other=0)
            x = as_numbers(x, FORM)
        if FORM.groups:
            scales, minimums = load_groups(scales_ptr, token_id, d, inside, False, FORM)
            x = x * scales - minimums if FORM.minimums else x * scales
        elif scales_ptr is not None:
            x = x * tl.load(scales_ptr + token_id)
        x = x.to(x_ptr.dtype.element_ty)
        if SCALED:
            x = (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + token * hidden + d, x, mask=d < hidden)


@triton.jit
def _cos_sin(angle):  # type: ignore[no-untyped-def]
    """Cosine and sine of float32 angles of any size, to the precision of float32.

    Taylor series in float64 on what is left of a multiple of a right angle, at most pi / 4. The
    device library's own would need local memory for large angles.
    """
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = wide - quarter * 1.5707963267948966
    s = r * r
    sine = s * -2.505210838544172e-8 + 2.755731922398589e-6
    sine = s * sine - 1.984126984126984e-4
    sine = s * sine + 8.333333333333333e-3
    sine = (s * sine - 0.16666666666666666) * s * r + r
    cosine = s * 2.08767569878681e-9 - 2.755731922398589e-7
    cosine = s * cosine + 2.48015873015873e-5
    cosine = cosine * s - 1.388888888888889e-3
    cosine = cosine * s + 4.1666666666666664e-2
    cosine = (cosine * s - 0.5) * s + 1.0
    turn = quarter.to(tl.int64) & 3
    swapped = (turn & 1) == 1
    first = tl.where(swapped, sine, cosine)
    second = tl.where(swapped, cosine, sine)
    first = tl.where((turn == 1) | (turn == 2), -first, first)
    second = tl.where(turn >= 2, -second, second)
    return first.to(tl.float32), second.to(tl.float32)
