"""A short causal convolution over the tokens of a sequence, as an operation of a layer.

Shapes: T tokens, F features, K taps of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....cache.spec import RowState, StatePart
from .operation import Binding, LayerStep, Operation, Run, Vector
from .parameter import Parameter


@dataclass(frozen=True, kw_only=True)
class CausalConv(Operation):
    """A depthwise convolution of the value, `[T, F]`, or of its first part.

    Output t of feature f is the sum over k of weight[f, k] * input[t - K + 1 + k, f], and the bias.
    """

    weight: Parameter
    """`[F, 1, K]`."""
    bias: Parameter | None = None
    """`[F]`."""
    silu: bool = False
    """Whether silu follows. Other parts of the value are passed on."""
    gated: bool = False
    """Whether the value is (b, c, x), and the result c * conv(b * x) (LFM2)."""

    @property
    def features(self) -> int:
        """F."""
        return self.weight.shape[0]

    @property
    def title(self) -> str:
        return "convolutions"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def row_state(self) -> RowState:
        """The last K - 1 inputs."""
        features, taps = self.features, self.weight.shape[2]
        return RowState((StatePart((taps - 1, features)),), (StatePart((features,)),))

    def bind(self, to: Binding) -> Run:
        conv, place, convolution = (
            to.module(self.weight, Vector),
            to.row_place,
            to.kernels.causal_conv,
        )
        silu = self.silu
        assert place is not None, "the engine has memory for recurrent state"

        def run(x_TF: Tensor, step: LayerStep) -> Tensor:
            return convolution(x_TF, conv.weight, conv.bias, silu, step.batch, place)

        def run_gated(value: tuple[Tensor, Tensor, Tensor], step: LayerStep) -> Tensor:
            b_TF, c_TF, x_TF = value
            return c_TF * run(b_TF * x_TF, step)

        def run_first(value: Any, step: LayerStep) -> Any:
            if isinstance(value, tuple):
                return (run(value[0], step), *value[1:])
            return run(value, step)

        return run_gated if self.gated else run_first

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if ranks > 1:
            yield "its convolutions are not split"

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * 6 * self.features + 4 * (3 if eager else 2) * self.features
