"""Short causal convolutions over the state of rows: one kernel for steps of all kinds.

Shapes: T tokens, F features, K taps of the kernel, C tokens of a block.

A program has some features of one token. Inputs of earlier tokens come from the step itself, from
the input blocks since the snapshot that the token's lane begins with, or from that snapshot, which
has the K - 1 inputs before its block (see `row_states.py`). None depends on a result, so all
programs run in any order. The first token of a lane stores the snapshot of its block where it is
missing, and later tokens that begin a block store the snapshot of theirs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ....cache.spec import RowPlace
from ..ops.batch import RaggedBatch
from ..ops.convolution import CONVOLUTION_ARGUMENTS
from ..ops.row_states import StateBatch, define_state_operator
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear_kernels import appended
from .row_states import entry_of, first_column, state_arguments

_BLOCK_F = 512
"""Features of a program."""


@triton.jit
def _earlier_input(  # type: ignore[no-untyped-def]
    x_ptr, snapshots_ptr, inputs_ptr, snapshot_tables_ptr, input_tables_ptr, columns,
    snapshot_stride, input_stride, state_at, inputs_at, row, first, start, column, position, f,
    F: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Inputs at a position of a lane that begins with token `first` at position `start`, in
    float32; zeros before the sequence. `column` is the snapshot that the lane begins with."""
    begin = column * C
    in_step = position >= start
    in_blocks = (position >= begin) & (position < start)
    in_snapshot = (position >= 0) & (position < begin)
    inside = f < F
    token = (first + position - start).to(tl.int64)
    x = tl.load(x_ptr + token * F + f, mask=in_step & inside, other=0.0).to(tl.float32)
    entry = entry_of(input_tables_ptr, row, columns, position // C, in_blocks)
    at = entry * input_stride + inputs_at + position % C * F
    x += tl.load(inputs_ptr + at + f, mask=in_blocks & inside, other=0.0).to(tl.float32)
    entry = entry_of(snapshot_tables_ptr, row, columns, column, in_snapshot)
    at = entry * snapshot_stride + state_at + (TAPS - 1 - (begin - position)) * F
    return x + tl.load(snapshots_ptr + at + f, mask=in_snapshot & inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["lanes"])
def _causal_conv(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    snapshots_ptr, inputs_ptr, snapshot_tables_ptr, input_tables_ptr, stored_ptr, positions_ptr,
    rows_ptr, starts_ptr, columns, snapshot_stride, input_stride, state_at, inputs_at, lanes,
    F: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, C: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of features)."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    t = tl.program_id(0)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = f < F
    newest = tl.load(weight_ptr + f * TAPS + TAPS - 1, mask=inside, other=0.0)
    weights = (newest.to(tl.float32),)
    for lag in tl.static_range(1, TAPS):
        weight = tl.load(weight_ptr + f * TAPS + TAPS - 1 - lag, mask=inside, other=0.0)
        weights = appended(weights, weight.to(tl.float32))
    bias = tl.zeros([BLOCK_F], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + f, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    out_at = out_ptr + t.to(tl.int64) * F + f
    if TOKENS:
        lane = t // TOKENS
        first = lane * TOKENS
    else:
        r = tl.arange(0, BLOCK_R)
        ends = tl.load(starts_ptr + 1 + r, mask=r < lanes, other=1 << 40)
        lane = tl.sum((ends <= t).to(tl.int32), axis=0)
        if lane >= lanes:  # padding
            tl.store(out_at, tl.zeros([BLOCK_F], dtype), mask=inside)
            return
        first = tl.load(starts_ptr + lane).to(tl.int32)
    row = tl.load(rows_ptr + lane)
    start = tl.load(positions_ptr + first).to(tl.int32)
    position = start + t - first
    valid = tl.load(positions_ptr + t) == position
    if not valid:
        tl.store(out_at, tl.zeros([BLOCK_F], dtype), mask=inside)
        return
    column = first_column(row, start, stored_ptr, C)

    x = tl.load(x_ptr + t.to(tl.int64) * F + f, mask=inside, other=0.0)
    out = weights[0] * x.to(tl.float32)
    for lag in tl.static_range(1, TAPS):
        earlier = _earlier_input(
            x_ptr, snapshots_ptr, inputs_ptr, snapshot_tables_ptr, input_tables_ptr, columns,
            snapshot_stride, input_stride, state_at, inputs_at, row, first, start, column,
            position - lag, f, F, TAPS, C,
        )  # fmt: skip
        out += weights[lag] * earlier
    out += bias
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    tl.store(out_at, out.to(dtype), mask=inside)

    entry = entry_of(input_tables_ptr, row, columns, position // C, True)
    at = entry * input_stride + inputs_at + position % C * F
    tl.store(inputs_ptr + at + f, x, mask=inside & (entry > 0))
    own_column = position // C
    begins = (t > first) & (position % C == 0)
    missing = (t == first) & (column < own_column)
    if begins | missing:
        entry = entry_of(snapshot_tables_ptr, row, columns, own_column, True)
        at = entry * snapshot_stride + state_at
        for i in tl.static_range(0, TAPS - 1):
            earlier = _earlier_input(
                x_ptr, snapshots_ptr, inputs_ptr, snapshot_tables_ptr, input_tables_ptr, columns,
                snapshot_stride, input_stride, state_at, inputs_at, row, first, start, column,
                own_column * C - (TAPS - 1) + i, f, F, TAPS, C,
            )  # fmt: skip
            tl.store(snapshots_ptr + at + i * F + f, earlier.to(dtype), mask=inside & (entry > 0))


def _convolution(
    x_TF: Tensor, weight: Tensor, bias_F: Tensor | None, silu: bool, *given: Any
) -> Tensor:
    """`given` is a `StateBatch`."""
    batch = StateBatch(*given)
    x_TF = x_TF.contiguous()
    (tokens, features), lanes = x_TF.shape, batch.rows.shape[0]
    out_TF = x_TF.new_empty(x_TF.shape)
    call_kernel(
        _causal_conv, (tokens, triton.cdiv(features, _BLOCK_F)),
        x_TF, weight, bias_F, out_TF, *state_arguments(batch, x_TF.dtype), lanes,
        F=features, TAPS=weight.shape[2], SILU=silu, C=batch.block_size,
        TOKENS=batch.tokens_per_row or 0, BLOCK_F=_BLOCK_F,
        BLOCK_R=0 if batch.tokens_per_row else triton.next_power_of_2(lanes),
    )  # fmt: skip
    return out_TF


def triton_causal_conv(
    x_TF: Tensor,
    weight: Tensor,
    bias_F: Tensor | None,
    silu: bool,
    batch: RaggedBatch,
    place: RowPlace,
) -> Tensor:
    """As `ops.convolution.causal_conv`, by the kernel of this file. No argument is read by the
    host; the result of a token has the same bits in any step."""
    return _convolution(x_TF, weight, bias_F, silu, *StateBatch.of(batch, place))


causal_conv_on_gpu = define_state_operator(
    "triton_causal_conv", CONVOLUTION_ARGUMENTS, _convolution, like=0, devices=("CUDA",)
)
"""`triton_causal_conv` as an operation that torch.compile does not look into."""
