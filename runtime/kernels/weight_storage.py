"""Weights of linear layers as 8-bit numbers with a scale an output channel.

Row n of a weight is stored as int8 q[n] and one float32 scale[n] = amax(|w[n]|) / 127; the number
that it stands for is q[n, k] * scale[n]. Rounding is to nearest, half to even, so a number is off
by half a scale at most. Activations are not quantised: a linear layer sums x[k] * q[n, k] in
float32 and multiplies the sum by scale[n] (see `linear.py`).

Shapes: N output features, K input features.
"""

from typing import Literal

import torch
from torch import Tensor

WeightStorage = Literal["model", "int8"]
"""How weights of linear layers are stored: in the model's dtype, or as int8 with scales."""

LARGEST = 127
SCALE_BYTES = 4

_NUMBERS_AT_A_TIME = 1 << 24
"""Quantised at once: bounds the float32 copies of a large weight."""


def quantise_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 `[N, K]`, from -127 to 127, and float32 scales `[N]` of a weight.

    A row of zeros has scale 0.

    Raises:
        ValueError: a row holds NaN or infinity; the message names the first such row.
    """
    data_NK = torch.empty_like(weight_NK, dtype=torch.int8)
    scale_N = torch.empty(weight_NK.shape[0], dtype=torch.float32, device=weight_NK.device)
    rows = max(1, _NUMBERS_AT_A_TIME // weight_NK.shape[1])
    for start in range(0, len(weight_NK), rows):
        part = slice(start, start + rows)
        weight = weight_NK[part].float()
        scale = weight.abs().amax(-1) / LARGEST
        bad = (~scale.isfinite()).nonzero()
        if len(bad):
            raise ValueError(f"row {start + int(bad[0])} holds NaN or infinity")
        divisor = torch.where(scale == 0, 1.0, scale)
        data_NK[part] = (weight / divisor[:, None]).round().clamp(-LARGEST, LARGEST)
        scale_N[part] = scale
    return data_NK, scale_N


def dequantise_weight(data_NK: Tensor, scale_N: Tensor) -> Tensor:
    """Return float32 `[N, K]`, of rows that `quantise_weight` returned."""
    return data_NK.float() * scale_N[:, None]
