"""Bytes that each kernel of a decode step on a GPU moves, and the least time this takes.

A decode step is `begin`, the operations of each layer that `kernels/triton/fusion.py` finds in the
plan of the model, `head` and `greedy`. For up to four rows each operation is one kernel. For more
rows the norm before a product and its epilogue (residual, activation, sum of parts) are kernels of
their own. Like the floor of the step (`roofline.py`), each operation reads its weights once and its
share of the cache. In addition it reads and writes what the floor leaves out: activations, partial
results, and the keys and values of the new tokens. All of it is counted as memory traffic, although
most of what one kernel writes for the next stays in the L2 cache. The predicted time is bytes over
bandwidth, plus an edge for each kernel: the time between its end and the first loads of the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...profiling.kernel_names import OperationCost
from ...profiling.roofline import floor_seconds
from ..kernels.ops.layer_operations import Linear, Norm
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.triton.fusion import (
    Activation,
    Attention,
    Fused,
    GateUp,
    Mixture,
    NormLinear,
    ResidualLinear,
    fuse,
)
from .expert_costs import mixture_costs

__all__ = [
    "DEPENDENT_EDGE_SECONDS",
    "EDGE_SECONDS",
    "KernelCost",
    "Parts",
    "StoredSizes",
    "floor_bytes",
    "kernel_costs",
    "operation_costs",
    "predicted_seconds",
]

EDGE_SECONDS = 1.3e-6
"""Seconds between two kernels of a CUDA graph on an H100 or H200: assumed, not measured."""

DEPENDENT_EDGE_SECONDS = 0.35e-6
"""The same with programmatic dependent launch (CUDA Programming Guide), where the next kernel
starts and may load its weights before the previous one ends. Assumed too."""

FEW_ROWS = 4
"""Largest number of rows for which every operation is one kernel (`triton/linear.py`)."""

VOCABULARY_CHUNK = 32
"""Consecutive tokens of the vocabulary of which the head keeps the largest logit, for `greedy` to
choose from: the tokens of a program for up to four rows. Default for more than 17,000 tokens."""

ROWS_CHUNK = 128
"""The same for more rows where `triton/row_product.py` computes the logits."""

LIBRARY_CHUNK = 1024
"""The same where cuBLAS computes the logits (`triton/head.py`)."""

Parts = Callable[[str, int, int], int]
"""(operation, output features, input features) -> implementation of its product for more than four
rows: 0 for cuBLAS, otherwise the number of parts that `row_product.py` splits the input features
into. Output features of `gate_up` are counted after the activation."""

_FLOAT32 = 4
_INT32 = 4
_INT64 = 8


class StoredSizes(NamedTuple):
    """Bytes of stored tensors."""

    matrix_bytes: Callable[[int, int], int]
    """(output features, input features) -> bytes of the weight of a linear layer, or of as many
    rows of the embedding, as stored with its scales."""
    element_bytes: int
    """Bytes of an element of activations, norm weights and biases."""
    kv_vector_bytes: int
    """Bytes of the key or value of one head in the cache, with its scale."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Bytes that one launch of an operation moves."""

    name: str
    """The operation, as `fusion.py` names it, or `begin`, `head` or `greedy`."""
    launches: int
    """Launches in a step."""
    weight_bytes: int
    """Bytes of weights read, scales, norms and biases included."""
    cache_bytes: int
    """Bytes of keys and values that rows attend to."""
    other_bytes: int
    """Bytes that the floor of a step leaves out, mostly activations."""
    window: int | None = None
    """Sliding window of attention, in tokens; None for full attention and other operations."""
    kernels: int = 1
    """Kernels in one launch of the operation."""
    library_kernels: int = 0
    """How many of them are from cuBLAS, which has no dependent launch."""

    @property
    def bytes(self) -> int:
        """Bytes that one launch moves in total."""
        return self.weight_bytes + self.cache_bytes + self.other_bytes

    def seconds(self, bandwidth_bytes_per_s: float) -> float:
        """Return the seconds of one launch at this bandwidth, without edges."""
        return floor_seconds(self.bytes, bandwidth_bytes_per_s)

    def edge_seconds(self, edge_seconds: float) -> float:
        """Return the seconds of all edges of one launch, given the seconds of one edge.

        The edges before and after a cuBLAS kernel take at least `EDGE_SECONDS`.
        """
        plain = max(EDGE_SECONDS, edge_seconds)
        return self.kernels * edge_seconds + 2 * self.library_kernels * (plain - edge_seconds)


class _Product(NamedTuple):
    """The kernels that compute a product of a decode step."""

    parts: int = 1
    """As `Parts`."""
    kernels: int = 1
    """Number of kernels: the product, and those before and after it."""
    bytes: int = 0
    """Bytes that one of them writes and another one reads."""


_ONE_KERNEL = _Product()


def kernel_costs(
    plan: ModelPlan,
    sizes: StoredSizes,
    *,
    rows: int,
    context: int,
    splits: int,
    parts: Parts = lambda operation, n, k: 0,
) -> tuple[KernelCost, ...]:
    """Return the operations of a decode step in the order of their first launch.

    A step reads the whole head, and one row of the embedding for each row that decodes, whether or
    not they are tied. Attention has an entry for each window size.

    Args:
        plan: the model, or the part of it that a rank of a tensor-parallel group has; its
            collective operations are left out: `link_costs.py` counts them.
        sizes: bytes of its stored tensors.
        rows: rows that decode, without padding.
        context: tokens of each row, including the newest.
        splits: splits of attention along the positions of a row.
        parts: implementation of the products for more than four rows; default: cuBLAS.

    Raises:
        ValueError: one of these numbers is less than 1, or an operation of the plan has no kernel.
    """
    for name, value in (("rows", rows), ("context", context), ("splits", splits)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    step = _Step(plan, sizes, rows, context, splits, parts)
    counted: Counter[KernelCost] = Counter()
    for layer, times in Counter(plan.layers).items():
        for cost in (cost for fused in fuse(layer) for cost in step.costs(fused)):
            counted[cost] += times
    names = list(dict.fromkeys(cost.name for cost in counted))
    in_order = sorted(counted.items(), key=lambda item: names.index(item[0].name))
    launched = (replace(cost, launches=count) for cost, count in in_order)
    return (step.begin(), *launched, *step.ends())


@dataclass(frozen=True)
class _Step:
    """The costs of one decode step, kernel by kernel."""

    plan: ModelPlan
    sizes: StoredSizes
    rows: int
    context: int
    splits: int
    parts: Parts

    @property
    def _few(self) -> bool:
        return self.rows <= FEW_ROWS

    @property
    def _x(self) -> int:
        """Bytes of the hidden states."""
        return self._activations(self.plan.hidden_size)

    @property
    def _rotations(self) -> int:
        """Bytes of the cosines and sines."""
        return self.rows * self.plan.rope_dim * _FLOAT32

    def begin(self) -> KernelCost:
        """Return the cost of the first kernel: embeddings and rotations."""
        rows = self.sizes.matrix_bytes(self.rows, self.plan.hidden_size)
        return _cost("begin", 0, rows + self._x + self.plan.rope_kinds * self._rotations)

    def costs(self, fused: Fused) -> Iterator[KernelCost]:
        """Yield the costs of the operations that compute a part of a layer."""
        if not isinstance(fused, Mixture):
            yield self._cost(fused)
            return
        sizes = self.sizes
        for name, weights, other, kernels in mixture_costs(
            fused, sizes.matrix_bytes, sizes.element_bytes, rows=self.rows
        ):
            yield _cost(name, weights, other, _Product(parts=1, kernels=kernels))

    def _cost(
        self, fused: NormLinear | GateUp | Attention | ResidualLinear | Activation
    ) -> KernelCost:
        """Return the cost of one launch of a kernel of a layer."""
        name = fused.name
        if isinstance(fused, Attention):
            return self._attention(fused)
        if isinstance(fused, Activation):
            return _cost(name, 0, self._activations(3 * fused.activate.features))
        linear = fused.linear
        weights = self._norm(fused.norm) + self._linear(linear)
        n, k = linear.out_features, linear.in_features
        if isinstance(fused, ResidualLinear):
            inputs = self._activations(k)
            if name == "combine_output" and self._few:
                inputs = self._partials(k)
            bare = fused.norm is not None
            return _cost(name, weights, inputs + 2 * self._x, self._product(name, n, k, bare=bare))
        gated = isinstance(fused, GateUp)
        features = fused.activate.features if isinstance(fused, GateUp) else n
        product = self._product(name, features, k, stored=n, normed=True, bare=not gated)
        return _cost(name, weights, self._x + self._activations(features), product)

    def ends(self) -> Iterator[KernelCost]:
        """Yield the costs of the head, and of greedy, which reads the best of each chunk.

        greedy writes the token twice, to the row and to the step's output, and its position.
        """
        plan, vocabulary = self.plan, self.plan.head.out_features
        product = self._product("head", vocabulary, plan.hidden_size, normed=True)
        if product.parts == 0:  # the head writes the logits in any case
            product = product._replace(bytes=product.bytes - self._activations(vocabulary))
        chunk = LIBRARY_CHUNK if product.parts == 0 else ROWS_CHUNK
        maxima = self.rows * -(-vocabulary // (VOCABULARY_CHUNK if self._few else chunk))
        logits = self._activations(vocabulary) + maxima * (_FLOAT32 + _INT32)
        weights = self._norm(plan.norm) + self._linear(plan.head)
        yield _cost("head", weights, self._x + logits, product)
        yield _cost("greedy", 0, maxima * _FLOAT32 + self.rows * 3 * _INT64)

    def _attention(self, fused: Attention) -> KernelCost:
        attend, rows = fused.attend, self.rows
        qkv = self._activations(attend.query_features + 2 * attend.kv_features)
        position = attend.sides * attend.kv_heads * self.sizes.kv_vector_bytes
        vectors = attend.parameters + (() if fused.qk_norm is None else fused.qk_norm.parameters)
        # Up to four rows the next kernel reads the partials, above that attention itself.
        if self._few:
            written = self._partials(attend.features)
        else:
            written = self._activations(attend.features)
            if self.splits > 1:
                written += 2 * self._partials(attend.features)
        return replace(
            _cost(
                fused.name,
                sum(vector.elements for vector in vectors) * self.sizes.element_bytes,
                qkv + self._rotations + rows * position + written,
            ),
            cache_bytes=rows * min(self.context, attend.reach or self.context) * position,
            window=attend.reach or None,
        )

    def _activations(self, features: int) -> int:
        return self.rows * features * self.sizes.element_bytes

    def _partials(self, features: int) -> int:
        """Bytes of the splits: a vector of sums, a maximum and a denominator for each head."""
        heads = features // self.plan.layers[0].attend.value_dim
        return self.rows * self.splits * (features + 2 * heads) * _FLOAT32

    def _norm(self, norm: Norm | None) -> int:
        return 0 if norm is None else norm.weight.elements * self.sizes.element_bytes

    def _linear(self, linear: Linear) -> int:
        bias = 0 if linear.bias is None else linear.bias.elements
        matrix = self.sizes.matrix_bytes(linear.out_features, linear.in_features)
        return matrix + bias * self.sizes.element_bytes

    def _product(
        self,
        name: str,
        n: int,
        k: int,
        *,
        stored: int = 0,
        normed: bool = False,
        bare: bool = False,
    ) -> _Product:
        """The kernels of a product of `n` output and `k` input features.

        `stored` is the number of rows of the weight if that is not `n`. A `normed` product has a
        kernel before it. A `bare` one has a kernel after it only if it is computed in parts.
        """
        if self._few:
            return _ONE_KERNEL
        count, stored = self.parts(name, n, k), stored or n
        finished = not bare if count == 0 else count > 1
        size = self.sizes.element_bytes
        moved = 2 * self.rows * stored * (count * _FLOAT32 if count else size) if finished else 0
        return _Product(count, 1 + normed + finished, moved + 2 * normed * self._activations(k))


def _cost(name: str, weights: int, other: int, product: _Product = _ONE_KERNEL) -> KernelCost:
    return KernelCost(
        name,
        1,
        weight_bytes=weights,
        cache_bytes=0,
        other_bytes=other + product.bytes,
        kernels=product.kernels,
        library_kernels=int(product.parts == 0),
    )


def floor_bytes(costs: Sequence[KernelCost]) -> int:
    """Return the bytes of the step's floor: the weights and the cache of every row."""
    return sum(cost.launches * (cost.weight_bytes + cost.cache_bytes) for cost in costs)


def operation_costs(costs: Sequence[KernelCost]) -> list[OperationCost]:
    """Return the bytes that one launch of each operation must read: its part of the floor.

    For layers with different windows this is the mean.
    """
    launches: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for cost in costs:
        launches[cost.name] += cost.launches
        read[cost.name] += cost.launches * (cost.weight_bytes + cost.cache_bytes)
    return [
        OperationCost(name, count, round(read[name] / count)) for name, count in launches.items()
    ]


def predicted_seconds(
    costs: Sequence[KernelCost],
    bandwidth_bytes_per_s: float,
    edge_seconds: float = DEPENDENT_EDGE_SECONDS,
) -> float:
    """Return the seconds of the step: all bytes at this bandwidth, and an edge for each kernel.

    Raises:
        ValueError: the bandwidth is not positive, or `edge_seconds` is negative.
    """
    if not edge_seconds >= 0:  # NaN fails too
        raise ValueError(f"edge_seconds is {edge_seconds}; it must not be negative")
    return sum(
        cost.launches * (cost.seconds(bandwidth_bytes_per_s) + cost.edge_seconds(edge_seconds))
        for cost in costs
    )
