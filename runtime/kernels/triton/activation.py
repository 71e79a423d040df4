"""act(gate) * up as a kernel of its own, after products that do not apply it.

Shapes: T rows, F features of gate and of up.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear_tiles import activate

__all__ = ["activate_rows", "reference_activate_rows"]

_BLOCK = 1024


@triton.jit
def activation_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, F, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program makes `BLOCK` features of one row."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    let_dependents_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    gate = tl.load(x_ptr + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * F + f, activate(gate, up, GELU, dtype).to(dtype), mask=f < F)


def activate_rows(gate_up_TF: Tensor, out_TF: Tensor, *, gelu: bool) -> None:
    """`out = act(gate) * up` of rows `[T, 2F]`, gate first: silu, or tanh's gelu.

    Both contiguous; each result is rounded to their dtype, as `models.decoder.Layer` does.
    """
    rows, features = out_TF.shape
    grid = (rows, -(-features // _BLOCK))
    call_kernel(activation_kernel, grid, gate_up_TF, out_TF, features, BLOCK=_BLOCK, GELU=gelu)


def reference_activate_rows(gate_up_TF: Tensor, *, gelu: bool) -> Tensor:
    """What `activate_rows` does, in plain torch."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return (F.gelu(gate_TF, approximate="tanh") if gelu else F.silu(gate_TF)) * up_TF
