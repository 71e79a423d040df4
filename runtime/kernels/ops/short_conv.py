"""A short causal convolution over the tokens of a sequence, gated before and after (LFM2).

What it must remember of earlier tokens are its last inputs, one vector a token. They lie in the
paged cache like keys and values of a layer with a sliding window of the kernel's size, so that
blocks are shared, copied, swapped, freed and written again after rejected drafts as those are. A
vector of F elements fills as many layers' worth of keys and values as it needs.

Shapes: T tokens, F features, K taps of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ....cache.spec import PagedState
from .kv_storage import write_blocks
from .operation import Binding, LayerStep, Operation, Run, Vector
from .parameter import Parameter

torch.library.define(
    "stepgraph::short_conv",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) arena, Tensor positions, Tensor slots,"
    " Tensor token_rows, Tensor block_tables, int[] groups, int[] layers) -> Tensor",
)


def reference_short_conv(
    x_TF: Tensor,
    weight: Tensor,
    bias_F: Tensor | None,
    arena: Tensor,
    positions_T: Tensor,
    slots: Tensor,
    token_rows_T: Tensor,
    block_tables: Tensor,
    groups: Sequence[int],
    layers: Sequence[int],
) -> Tensor:
    """Return the convolution `[T, F]`, summed in float32 from the newest token on.

    Args:
        x_TF: the inputs, in the dtype of the arena.
        weight: `[F, 1, K]`.
        bias_F: added before the sum is rounded.
        arena: of the cache, where the inputs are written; see `cache/arena.py`.
        positions_T: of the tokens.
        slots: of `RaggedBatch`.
        token_rows_T: of `RaggedBatch`.
        block_tables: of `RaggedBatch`.
        groups: layer group of each part of an input.
        layers: the first coordinate in the arena of each part.
    """
    _, sides, _, heads, size, dim = arena.shape
    padded = F.pad(x_TF, (0, -x_TF.shape[1] % (len(layers) * sides * heads * dim)))
    parts = padded.view(-1, len(layers), sides, heads, dim).unbind(1)
    for group, layer, part in zip(groups, layers, parts, strict=True):
        for side, own in zip(arena[layer], part.unbind(1), strict=True):
            write_blocks(side, slots[group], own, size, "model")
    weight_FK = weight[:, 0].float()
    out_TF = weight_FK[:, -1] * x_TF.float()
    for lag in range(1, weight_FK.shape[1]):
        earlier_T = (positions_T - lag).clamp(min=0)
        columns_T, offsets_T = earlier_T // size, earlier_T % size
        read = [
            arena[layer][:, block_tables[group][token_rows_T, columns_T].long(), :, offsets_T]
            for group, layer in zip(groups, layers, strict=True)
        ]
        earlier_TF = torch.stack(read, 1).flatten(1)[:, : x_TF.shape[1]].float()
        earlier_TF = earlier_TF.masked_fill((positions_T < lag)[:, None], 0.0)
        out_TF = out_TF + weight_FK[:, -1 - lag] * earlier_TF
    return (out_TF if bias_F is None else out_TF + bias_F.float()).to(x_TF.dtype)


for _device in ("CPU", "CUDA"):
    torch.library.impl("stepgraph::short_conv", _device, reference_short_conv)
torch.library.register_fake("stepgraph::short_conv", lambda x_TF, *_: torch.empty_like(x_TF))


@dataclass(frozen=True, kw_only=True)
class ShortConv(Operation):
    """Of (b, c, x), `c * conv(b * x)` with a depthwise convolution: `[T, F]`.

    Output t of feature f is the sum over k of weight[f, k] * input[t - K + 1 + k, f].
    """

    weight: Parameter
    """`[F, 1, K]`."""
    bias: Parameter | None = None
    """`[F]`, added to the convolution."""
    state: PagedState
    """Layout of the layers that hold its inputs, with a window of K tokens."""

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
    def states(self) -> tuple[PagedState, ...]:
        elements = self.state.sides * self.state.heads * self.state.head_dim
        return (self.state,) * math.ceil(self.features / elements)

    def bind(self, to: Binding) -> Run:
        assert to.storage == "model", "the inputs of a convolution keep the model's dtype"
        conv, places = to.module(self.weight, Vector), to.places
        groups, layers = [p.group for p in places], [p.position for p in places]
        layout = places[0].layout

        def run(value: tuple[Tensor, Tensor, Tensor], step: LayerStep) -> Tensor:
            b_TF, c_TF, x_TF = value
            batch = step.batch
            # Opaque to torch.compile, whose code for these writes and reads of one tensor fails.
            out_TF: Tensor = torch.ops.stepgraph.short_conv.default(
                *(b_TF * x_TF, conv.weight, conv.bias, step.arenas[layout], batch.positions),
                *(batch.slots, batch.token_rows, batch.block_tables, groups, layers),
            )
            return c_TF * out_TF

        return run

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if ranks > 1:
            yield "its convolutions are not split"

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * 6 * self.features + 4 * (3 if eager else 2) * self.features
