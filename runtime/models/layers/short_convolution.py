"""Gated short convolutions (LFM2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...kernels.ops.operation import Operation
from .dimensions import Mixer, Size
from .tensors import convolution, linear


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Mixer):
    """A gated short convolution. Raises `ConfigError`."""

    conv_taps: Size
    """Tokens that a convolution sees, the newest included."""
    conv_bias: bool = False
    """Whether it and its projections have biases."""

    def operations(self, hidden: int, eps: float) -> Iterator[Operation]:
        """See `Mixer.operations`."""
        inputs, biased, split = {"conv.in_proj": 3 * hidden}, self.conv_bias, (hidden,) * 3
        yield linear("conv.inputs", inputs, hidden, biased, split=split)
        taps = self.conv_taps
        yield convolution("conv.kernel", "conv.conv", hidden, taps, biased=biased, gated=True)
        yield linear("conv.output", {"conv.out_proj": hidden}, hidden, biased)
