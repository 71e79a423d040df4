"""act(gate) * up as a kernel of its own, after products that do not apply it.

Shapes: T rows, F features of gate and of up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..ops.activation import gated_activation
from ..ops.layer_operations import Activate, ActivationName
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear_tiles import activate

__all__ = ["NO_CLAMP", "Clamp", "activate_rows", "reference_activate_rows"]

_BLOCK = 1024


class Clamp(NamedTuple):
    """Traits of a clamped activation: those of `Activate`."""

    limit: float = 0.0
    alpha: float = 1.0
    up_offset: float = 0.0

    @classmethod
    def of(cls, activate: Activate) -> Clamp:
        """Return the traits of an operation."""
        return cls(activate.limit, activate.alpha, activate.up_offset)

    @property
    def constants(self) -> dict[str, Any]:
        """As kernels take them."""
        return {"LIMIT": self.limit, "ALPHA": self.alpha, "UP_OFFSET": self.up_offset}


NO_CLAMP = Clamp()


@triton.jit
def activation_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, F, BLOCK: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program makes `BLOCK` features of one row."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    let_dependents_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    gate = tl.load(x_ptr + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    out = activate(gate, up, GELU, dtype, LIMIT, ALPHA, UP_OFFSET)
    tl.store(out_ptr + row * F + f, out.to(dtype), mask=f < F)


def activate_rows(
    gate_up_TF: Tensor, out_TF: Tensor, *, gelu: bool, clamp: Clamp = NO_CLAMP
) -> None:
    """`out = act(gate) * up` of rows `[T, 2F]`, gate first: silu, or tanh's gelu.

    Both contiguous; each result is rounded to their dtype, as `ops/activation.py` does.
    """
    rows, features = out_TF.shape
    grid = (rows, -(-features // _BLOCK))
    inputs = (gate_up_TF, out_TF, features)
    call_kernel(activation_kernel, grid, *inputs, BLOCK=_BLOCK, GELU=gelu, **clamp.constants)


def reference_activate_rows(gate_up_TF: Tensor, *, gelu: bool, clamp: Clamp = NO_CLAMP) -> Tensor:
    """What `activate_rows` does, in plain torch."""
    function: ActivationName = "gelu_tanh" if gelu else "silu"
    features = gate_up_TF.shape[1] // 2
    activate = Activate(name="activate", function=function, features=features, **clamp._asdict())
    return gated_activation(activate)(*gate_up_TF.chunk(2, dim=-1))
