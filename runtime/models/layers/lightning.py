"""Lightning attention: linear attention whose decay depends on the head and the layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ...kernels.ops.norms import GatedNorm
from ...kernels.ops.operation import Operation
from ...kernels.ops.state_space import LinearAttention
from .dimensions import Mixer, Number, Size
from .tensors import linear, vector

_NORM_EPS = 1e-6
"""Epsilon of the norm inside lightning attention, independent of the config."""


@dataclass(frozen=True, kw_only=True)
class Lightning(Mixer):
    """Lightning attention (MiniMax-01, arXiv 2501.08313). Raises `ConfigError`."""

    num_heads: Size
    head_dim: Size
    layer_slopes: tuple[Number, ...]
    """`LinearAttention.slope` of each layer of the model."""

    def operations(self, hidden: int, eps: float) -> Iterator[Operation]:
        """See `Mixer.operations`; the mixer is of one layer."""
        at, inner, (slope,) = "self_attn", self.num_heads * self.head_dim, self.layer_slopes
        parts = {f"{at}.output_gate": inner, f"{at}.qkv_proj": 3 * inner}
        yield linear("lightning.inputs", parts, hidden, split=(inner, 3 * inner))
        heads, size = self.num_heads, self.head_dim
        yield LinearAttention(name="linear_attention", heads=heads, head_dim=size, slope=slope)
        yield GatedNorm(
            name="gated_norm",
            weight=vector("lightning.norm", f"{at}.norm", inner),
            eps=_NORM_EPS,
            features=inner,
            group=inner,
            gate="sigmoid",
        )
        yield linear("lightning.output", {f"{at}.out_proj": hidden}, inner)

    def of_layers(self, layers: Sequence[int]) -> Self:
        """See `Mixer.of_layers`."""
        return replace(self, layer_slopes=tuple(self.layer_slopes[layer] for layer in layers))
