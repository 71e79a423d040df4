"""The operator of short causal convolutions over the tokens of a sequence.

Shapes: T tokens, F features, K taps of the kernel, C tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....cache.spec import RowPlace
from .batch import RaggedBatch
from .row_states import StateBatch, Walk, define_state_operator, walk

Convolution = Callable[[Tensor, Tensor, "Tensor | None", bool, RaggedBatch, RowPlace], Tensor]
"""Computes `[T, F]` from inputs `[T, F]`, the weight `[F, 1, K]`, a bias `[F]` or None, and whether
silu follows, and updates the state of the batch's rows."""
CONVOLUTION_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, bool silu"
"""The schema of its arguments before the batch."""


def reference_causal_conv(
    x_TF: Tensor, weight: Tensor, bias_F: Tensor | None, silu: bool, *given: Any
) -> Tensor:
    """Compute a convolution in plain PyTorch, token by token; `given` are those of `StateBatch`.

    It is summed in float32 from the newest token on; then the bias is added, silu applied, and the
    result rounded to the dtype of x. Tokens of padding are zero.
    """
    batch, taps = StateBatch(*given), weight.shape[2]
    out_TF, weight_FK = torch.zeros_like(x_TF), weight[:, 0].float()
    features = x_TF.shape[1]

    def earlier(state_KF: Tensor, x_CF: Tensor, offset: int) -> Tensor:
        """Return the K - 1 inputs before the token at an offset of its block, oldest first."""
        return torch.cat((state_KF, x_CF[:offset]))[offset:]

    def replay(states: Sequence[Tensor], inputs: Sequence[Tensor], count: int) -> list[Tensor]:
        return [earlier(states[0], inputs[0], count)]

    def token(t: int, offset: int, states: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        inputs[0][offset] = x_TF[t]
        before_KF = earlier(states[0], inputs[0], offset).float()
        sum_F = weight_FK[:, -1] * x_TF[t].float()
        for lag in range(1, taps):
            sum_F = sum_F + weight_FK[:, -1 - lag] * before_KF[-lag]
        if bias_F is not None:
            sum_F = sum_F + bias_F.float()
        out_TF[t] = F.silu(sum_F) if silu else sum_F

    state = x_TF.new_zeros(taps - 1, features)
    walk(batch, Walk([state], [x_TF.new_zeros(batch.block_size, features)], replay, token))
    return out_TF


causal_conv: Convolution = define_state_operator(
    "causal_conv", CONVOLUTION_ARGUMENTS, reference_causal_conv, like=0
)
"""`reference_causal_conv` as an operator, which is opaque to torch.compile."""
