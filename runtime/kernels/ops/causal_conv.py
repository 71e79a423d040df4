"""A short causal convolution over the tokens of a sequence, as an operation of a layer.

Shapes: T tokens, F features, K taps of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from ....cache.spec import RowState, StatePart
from .operation import Binding, LayerStep, NeededUnits, Operation, Run, ShardedLayer, Vector
from .parameter import Parameter, cut


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
    blocks: tuple[int, ...] = ()
    """Sizes of the blocks of features of which each rank has a part; empty: one block."""

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
        for size in self.blocks or (self.features,):
            if size % ranks:
                yield f"{ranks} does not divide {size} features of a convolution"

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        sizes = self.blocks or (self.features,)
        rows = self._own(layer, sizes)
        yield replace(
            self,
            weight=cut(self.weight, rows),
            bias=None if self.bias is None else cut(self.bias, rows),
            blocks=tuple(map(len, rows)) if self.blocks else (),
        )

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        others = [layer.rank.part(size) for size in split[1:]]
        return [self._own(layer, self.blocks or split[:1]), *others]

    def _own(self, layer: ShardedLayer, sizes: Sequence[int]) -> list[range]:
        """Return the features of a rank, of blocks of these sizes."""
        starts = accumulate(sizes, initial=0)
        parts = [(start, layer.rank.part(size)) for start, size in zip(starts, sizes, strict=False)]
        return [range(start + part.start, start + part.stop) for start, part in parts]

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * 6 * self.features + 4 * (3 if eager else 2) * self.features
