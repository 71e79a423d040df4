"""Linear layers over weights that may be packed once, for the few tokens of a decode step.

Shapes: T tokens, K input features, N output features.

`packed_parts.py` has the layout of a packed weight, in the model's dtype or quantised. It replaces
the original: for a tied embedding `packed_embedding` reads it.

The C++ version computes each output as one chain of multiply-adds in the order of K, for any T. So
row t of `packed_linear(x, ...)` is bitwise the same in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..choice import Kernels, Parts
from ..weights import dequantise
from .operation import Binding, Operation, Run, ShardedLayer, on_part
from .parameter import Parameter, cut

torch.library.define(
    "stepgraph::packed_linear",
    "(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor",
)
torch.library.define(
    "stepgraph::packed_embedding",
    "(Tensor tokens, Tensor packed, int k, ScalarType dtype) -> Tensor",
)
torch.library.register_fake(
    "stepgraph::packed_linear",
    lambda x_TK, packed, bias_N, n: x_TK.new_empty(x_TK.shape[0], n),
)
torch.library.register_fake(
    "stepgraph::packed_embedding",
    lambda tokens_T, packed, k, dtype: packed.new_empty(tokens_T.shape[0], k, dtype=dtype),
)


def stored_bytes(kernels: Kernels, n: int, k: int, dtype: torch.dtype, matrices: int = 1) -> int:
    """Return the bytes of a `[n, k]` weight of a model in `dtype` as kernels store it.

    Padding and scales count. It consists of `matrices` stacked matrices, each of which is packed.
    """
    if kernels.pack_parts is None:
        return kernels.weights.nbytes(n, k, dtype)
    matrix = torch.empty(n // matrices, k, dtype=dtype, device="meta")
    size = kernels.parts_bytes([kernels.weights.part(matrix)], dtype)
    assert size is not None, "all but codes of some checkpoints can be packed"
    return matrices * size


def packed_embedding(tokens_T: Tensor, packed: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Rows `tokens_T` (int64) of the packed weight, `[T, k]` in `dtype`, the model's: `F.embedding`
    for a tied head.

    Runs on CPU after `load_cpu_ops`. Raises IndexError for a token outside the weight's blocks;
    padding rows of the last block are zeros.
    """
    rows: Tensor = torch.ops.stepgraph.packed_embedding.default(tokens_T, packed, k, dtype)
    return rows


def packed_linear(
    x_TK: Tensor,
    packed: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    scales: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias` as `[T, out_features]`, accumulated in float32.

    `packed` is what `pack_parts` returns for the dtype of `x_TK`; `bias_N` is `[out_features]` or
    None. Runs on CPU after `load_cpu_ops`. Raises RuntimeError for inconsistent arguments.
    """
    assert scales is None, "packed weights contain theirs"
    out: Tensor = torch.ops.stepgraph.packed_linear.default(x_TK, packed, bias_N, out_features)
    return out


def reference_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    scales: Tensor | None = None,
) -> Tensor:
    """`F.linear` with the signature of `packed_linear`, for an unpacked weight.

    An 8-bit weight (`WeightStorage.quantise`) is converted to float32 as a whole, which is correct
    on every device but slow. Scales of whole rows, `[N]`, are applied to the sums.
    """
    assert weight_NK.shape[0] == out_features
    if scales is None:
        return F.linear(x_TK, weight_NK, bias_N)
    if scales.dim() == 1:
        out_TN = F.linear(x_TK.float(), weight_NK.float()) * scales
    else:
        out_TN = F.linear(x_TK.float(), dequantise(weight_NK, scales))
    if bias_N is not None:
        out_TN = out_TN + bias_N.float()
    return out_TN.to(x_TK.dtype)


class LinearTensors(NamedTuple):
    """A linear layer as stored: `x @ (weight * scales).T + bias`."""

    weight: Tensor
    """`[N, K]` in the model's dtype, int8, float8_e4m3fn or 4-bit codes (`weights/stored.py`);
    packed if the kernels pack weights."""
    scales: Tensor | None = None
    """As `WeightStorage.quantise` or `Kernels.store_parts` returns them; None: the weight has the
    model's dtype, or is packed."""
    bias: Tensor | None = None
    """`[N]` in the model's dtype."""


def linear_in_float32(x_TK: Tensor, linear: LinearTensors) -> Tensor:
    """Return the product of an unpacked weight, computed and left in float32: `[T, N]`."""
    weight, scales, bias = linear
    if scales is None:
        weight = weight.float()
    bias = None if bias is None else bias.float()
    return reference_linear(x_TK.float(), weight, bias, len(weight), scales)


class Projection(nn.Module):
    """A linear layer whose weight is stored in the format of the selected kernels.

    With several `matrices` it holds one per expert, stacked along the first dimension.
    """

    def __init__(
        self, kernels: Kernels, out_features: int, in_features: int, matrices: int = 1
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.out_features = out_features
        self.in_features = in_features
        self.matrices = matrices
        self.weight: nn.Parameter | None = None
        self.scales: nn.Parameter | None = None
        """Of quantised weights that are not packed: float32 `[out_features]`, or of fp8 a scale
        for every 128 input features, `[out_features, ceil(in_features / 128)]`; or as `store_parts`
        returns them (`weights/stored.py`)."""
        self.bias: nn.Parameter | None = None
        self.dtype: torch.dtype | None = None
        """Of the weight as it was before it was quantised."""

    def as_stored(
        self,
        weight: Tensor | Parts,
        dtype: torch.dtype,
        device: torch.device,
        packed: Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return a weight `[out_features, in_features]`, quantised and packed as the kernels want.

        Args:
            weight: in the model's dtype, or as parts of which some are codes.
            dtype: the model's.
            device: where it is used.
            packed: uint8 memory for a packed weight.

        The result has the values of the attributes `weight` and, where kernels take them apart
        from it, `scales`. What is not packed is quantised on `device`.

        Raises ValueError for NaN or infinity in a weight to quantise, naming the row.
        """
        kernels = self.kernels
        if isinstance(weight, Tensor) and packed is None:
            weight = weight.to(device)
            if kernels.weights.dtype is None:
                return {"weight": weight}
            data, scales = kernels.weights.quantise(weight)
            return {"weight": data, "scales": scales}
        if kernels.store_parts is not None:
            assert not isinstance(weight, Tensor)
            data, scales = kernels.store_parts(weight, dtype)
            return {"weight": data.to(device), "scales": scales.to(device)}
        assert kernels.pack_parts is not None, "`Kernels.codes` is empty"
        assert packed is not None
        if isinstance(weight, Tensor):
            weight = [kernels.weights.part(matrix) for matrix in weight.chunk(self.matrices)]
        each = len(weight) // self.matrices
        for i, memory in enumerate(packed.chunk(self.matrices)):
            kernels.pack_parts(weight[i * each : (i + 1) * each], dtype, memory)
        return {"weight": packed.to(device)}

    def rows(self, index_T: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, `[T, in_features]`: the layer used as an embedding."""
        assert self.weight is not None
        assert self.dtype is not None
        if self.kernels.pack_parts is not None:
            return packed_embedding(index_T, self.weight, self.in_features, self.dtype)
        rows = F.embedding(index_T, self.weight)
        if self.scales is None:
            return rows
        return dequantise(rows, self.scales[index_T]).to(self.dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return self.kernels.linear(x_TD, self.weight, self.bias, self.out_features, self.scales)


def projection(to: Binding, weight: Parameter) -> Any:
    """Return the `Projection` that holds a weight, which may be stacked matrices."""
    rows, columns = weight.shape
    return to.module(weight, lambda: Projection(to.kernels, rows, columns, weight.matrices))


@dataclass(frozen=True, kw_only=True)
class Linear(Operation):
    """A product with a weight `[out_features, in_features]`, with an optional bias."""

    weight: Parameter
    bias: Parameter | None = None
    split: tuple[int, ...] = ()
    """Sizes of the parts of the result, in units; empty: one tensor."""
    unit: int = 1
    """Elements of a unit; with more than one, parts are `[T, units, unit]`."""
    part: int | None = None
    """The part of the value that is multiplied; None: the value is one tensor."""
    factors: tuple[tuple[int, float], ...] = ()
    """Features of the result, and a factor of them, by which they are multiplied after they are
    rounded (muP); empty: 1."""

    @property
    def out_features(self) -> int:
        """Features of the result."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Features of the input."""
        return self.weight.shape[1]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def bind(self, to: Binding) -> Run:
        linear = projection(to, self.weight)
        if self.factors:
            linear = _scaled(linear, self.factors)
        if not self.split:
            return on_part(linear, self.part)
        sizes, unit = self.split, self.unit
        if unit == 1:
            return lambda x_TF, step: linear(x_TF).split(sizes, dim=-1)
        return lambda x_TF, step: linear(x_TF).unflatten(1, (-1, unit)).split(sizes, dim=1)

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if ranks > 1 and self.factors:
            yield "its products with factors are not split"

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        if layer.is_cut and not self.reads:
            # Each rank multiplies its part of the input; one adds the bias.
            layer.is_cut = False
            weight, bias = layer.rank.columns(self.weight), layer.rank.once(self.bias)
            own = replace(self, weight=weight, bias=bias)
            yield from layer.rank.summed(own, self.out_features)
            return
        assert following is not None, "a product before the end of a layer"
        split = self.split or (self.out_features,)
        kept = following.needed_units(split, layer)
        layer.is_cut = kept is not None
        if kept is None:
            yield self
            return
        starts = accumulate(self.split[:-1], initial=0)
        blocks = [(units,) if isinstance(units, range) else units for units in kept]
        rows = [
            range((start + units.start) * self.unit, (start + units.stop) * self.unit)
            for start, own in zip(starts, blocks, strict=True)
            for units in own
        ]
        yield replace(
            self,
            weight=cut(self.weight, rows),
            bias=None if self.bias is None else cut(self.bias, rows),
            split=tuple(sum(map(len, own)) for own in blocks) if self.split else (),
        )


def _scaled(
    linear: Callable[[Tensor], Tensor], factors: Sequence[tuple[int, float]]
) -> Callable[[Tensor], Tensor]:
    """Return a linear layer whose results are multiplied by `Linear.factors`."""
    sizes = [size for size, _ in factors]

    def run(x_TK: Tensor) -> Tensor:
        parts = linear(x_TK).split(sizes, dim=-1)
        return torch.cat([x * by for x, (_, by) in zip(parts, factors, strict=True)], dim=-1)

    return run
