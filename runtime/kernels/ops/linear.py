"""Linear layers over weights that are packed once, for the few tokens of a decode step.

Shapes: T tokens, K input features, N output features.

A packed weight is a dense tensor `[ceil(N / 32), steps, 32, w]`: blocks of 32 output features,
which are read sequentially. A step contains w consecutive input features of each output feature of
the block: w = 2 in bfloat16 (steps = ceil(K / 2)), w = 1 in float32 (steps = K), w = 2 bytes for
int8 weights (`weights/stored.py`), in models of any dtype. Incomplete steps and blocks are padded
with zeros. The packed weight replaces the original: for a tied embedding `packed_embedding` reads
it.

The C++ version computes each output as one chain of multiply-adds in the order of K, for any T. So
row t of `packed_linear(x, ...)` is bitwise the same in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator
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

BLOCK = 32
_PER_STEP = {torch.bfloat16: 2, torch.float32: 1, torch.int8: 2}
"""Input features per step, by the dtype of the weight."""

torch.library.define(
    "stepgraph::packed_linear",
    "(Tensor x, Tensor packed, Tensor? bias, int out_features, Tensor? scales=None) -> Tensor",
)
torch.library.define(
    "stepgraph::packed_embedding",
    "(Tensor tokens, Tensor packed, int k, ScalarType? dtype=None) -> Tensor",
)
torch.library.register_fake(
    "stepgraph::packed_linear",
    lambda x_TK, packed, bias_N, n, scales_N=None: x_TK.new_empty(x_TK.shape[0], n),
)
torch.library.register_fake(
    "stepgraph::packed_embedding",
    lambda tokens_T, packed, k, dtype=None: packed.new_empty(tokens_T.shape[0], k, dtype=dtype),
)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` have a packed form (bfloat16, float32 and int8 do)."""
    return dtype in _PER_STEP


def _per_step(dtype: torch.dtype) -> int:
    if not can_pack(dtype):
        known = ", ".join(map(str, _PER_STEP))
        raise TypeError(f"no packed form for weights of {dtype}; use one of {known}")
    return _PER_STEP[dtype]


def packed_bytes(n: int, k: int, dtype: torch.dtype) -> int:
    """Bytes of a packed `[n, k]` weight, padding included. TypeError as `pack_linear`."""
    width = _per_step(dtype)
    return -(-n // BLOCK) * BLOCK * -(-k // width) * width * dtype.itemsize


def stored_bytes(kernels: Kernels, n: int, k: int, dtype: torch.dtype, matrices: int = 1) -> int:
    """Return the bytes of a `[n, k]` weight of a model in `dtype` as kernels store it.

    Padding and scales count. It consists of `matrices` stacked matrices, each of which is packed.
    """
    if kernels.pack is None:
        return kernels.weights.nbytes(n, k, dtype)
    packed = packed_bytes(n // matrices, k, kernels.weights.dtype or dtype)
    return matrices * packed + kernels.weights.scale_bytes(n, k)


def pack_linear(weight_NK: Tensor) -> Tensor:
    """Pack a `[N, K]` weight to `[ceil(N / 32), steps, 32, w]`; see the top of this file.

    Raises TypeError for a dtype without packed form, and ValueError if it is not a matrix.
    """
    if weight_NK.dim() != 2:
        raise ValueError(f"a weight to pack must be [N, K], got shape {tuple(weight_NK.shape)}")
    n, k = weight_NK.shape
    width = _per_step(weight_NK.dtype)
    padded = F.pad(weight_NK, (0, -k % width, 0, -n % BLOCK))
    return padded.view(-1, BLOCK, padded.shape[1] // width, width).transpose(1, 2).contiguous()


def packed_embedding(
    tokens_T: Tensor, packed: Tensor, k: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Rows `tokens_T` (int64) of the packed weight, `[T, k]`: `F.embedding` for a tied head.

    Rows of a weight that `pack_parts` packed are decoded to `dtype`, the model's. Runs on CPU after
    `load_cpu_ops`. Raises IndexError for a token outside the weight's blocks; padding rows of the
    last block are zeros.
    """
    rows: Tensor = torch.ops.stepgraph.packed_embedding.default(tokens_T, packed, k, dtype)
    return rows


def packed_linear(
    x_TK: Tensor,
    packed: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    scales_N: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias` as `[T, out_features]`, accumulated in float32.

    `packed` is `pack_linear(weight)` in the dtype of `x_TK`; `bias_N` is `[out_features]` or None.
    With `scales_N`, float32 `[out_features]`, the weight is int8 and each sum is multiplied by the
    scale of its feature before the bias is added and the result rounded. Runs on CPU after
    `load_cpu_ops`. Raises RuntimeError for inconsistent arguments.
    """
    out: Tensor = torch.ops.stepgraph.packed_linear.default(
        x_TK, packed, bias_N, out_features, scales_N
    )
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
    model's dtype."""
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
        """Of weights that are stored in 8 bits: float32 `[out_features]`, or of fp8 a scale for
        every 128 input features, `[out_features, ceil(in_features / 128)]`; or as `store_parts`
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
            packed: uint8 memory for the parts.

        The result has the values of the attributes `weight` and, if it is quantised, `scales`. It
        is quantised on `device`, but packed by the processor.

        Raises ValueError for NaN or infinity in a weight to quantise, naming the row.
        """
        if not isinstance(weight, Tensor):
            if self.kernels.store_parts is not None:
                data, scales = self.kernels.store_parts(weight, dtype)
                return {"weight": data.to(device), "scales": scales.to(device)}
            assert self.kernels.pack_parts is not None, "`Kernels.codes` is empty"
            assert packed is not None
            each = len(weight) // self.matrices
            for i, memory in enumerate(packed.chunk(self.matrices)):
                self.kernels.pack_parts(weight[i * each : (i + 1) * each], dtype, memory)
            return {"weight": packed.to(device)}
        stored: dict[str, torch.Tensor] = {}
        if self.kernels.pack is None:
            weight = weight.to(device)
        if self.kernels.weights.dtype is not None:
            weight, scales = self.kernels.weights.quantise(weight)
            stored["scales"] = scales.to(device)
        stored["weight"] = self._packed(weight).to(device)
        return stored

    def _packed(self, weight: torch.Tensor) -> torch.Tensor:
        if self.kernels.pack is None:
            return weight
        if self.matrices == 1:
            return self.kernels.pack(weight)
        matrices = weight.chunk(self.matrices)
        first = self.kernels.pack(matrices[0])
        packed = first.new_empty(self.matrices, *first.shape)
        for place, matrix in zip(packed, matrices, strict=True):
            place.copy_(self.kernels.pack(matrix))
        return packed.flatten(0, 1)

    def rows(self, index_T: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, `[T, in_features]`: the layer used as an embedding."""
        assert self.weight is not None
        assert self.dtype is not None
        if self.kernels.pack is None:
            rows = F.embedding(index_T, self.weight)
        else:
            dtype = self.dtype if self.weight.dtype == torch.uint8 else None
            rows = packed_embedding(index_T, self.weight, self.in_features, dtype)
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
        if not self.split:
            return on_part(linear, self.part)
        sizes, unit = self.split, self.unit
        if unit == 1:
            return lambda x_TF, step: linear(x_TF).split(sizes, dim=-1)
        return lambda x_TF, step: linear(x_TF).unflatten(1, (-1, unit)).split(sizes, dim=1)

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        if layer.is_cut:  # each rank multiplies its part of the input; one adds the bias
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
        rows = [
            range((start + units.start) * self.unit, (start + units.stop) * self.unit)
            for start, units in zip(starts, kept, strict=True)
        ]
        yield replace(
            self,
            weight=cut(self.weight, rows),
            bias=None if self.bias is None else cut(self.bias, rows),
            split=tuple(map(len, kept)) if self.split else (),
        )
