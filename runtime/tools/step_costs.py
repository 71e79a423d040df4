"""Bytes that each kernel of a decode step on a GPU must move, and the time this takes at least.

A decode step is `begin`, five operations a layer, `head` and `greedy`. Up to four rows each of them
is one kernel; for more rows the norm before a product and its epilogue (residual, activation, sum
of parts) are kernels of their own. Each operation reads its weights once and its share of the
cache, like the floor of the step (`roofline.py`); it also reads and writes what the floor leaves
out: activations, partial results, the keys and values of the new tokens. All of that is counted as
if it came from memory, though what one kernel leaves to the next mostly stays in the L2 cache. A
prediction is bytes over bandwidth, and for each kernel an edge: what passes between the end of one
and the first loads of the next.

The kernels are those that `kernels/triton/fusion.py` finds in the plan of the model.
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
from ..kernels.triton.fusion import Activation, Attention, Fused, GateUp, ResidualLinear, fuse

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
"""Between two kernels of a CUDA graph on an H100 or H200: an assumption, nothing measured here."""

DEPENDENT_EDGE_SECONDS = 0.35e-6
"""The same with programmatic dependent launch (CUDA Programming Guide), where the next kernel is
set up and may load its weights before the one before it has ended."""

FEW_ROWS = 4
"""Rows up to which every operation is one kernel (`triton/linear.py`)."""

VOCABULARY_CHUNK = 32
"""Neighbouring tokens of which the head keeps the largest logit, for `greedy` to choose from: those
of a program for few rows, by default for vocabularies of more than 17,000."""

ROWS_CHUNK = 128
"""The same of more rows, where a kernel here makes the logits (`triton/row_product.py`)."""

LIBRARY_CHUNK = 1024
"""The same where the library makes the logits (`triton/head.py`)."""

Parts = Callable[[str, int, int], int]
"""(operation, output features, input features) -> how its product of more than four rows is
computed: 0 by the library, else the parts of the input features of `row_product.py`. The output
features of `gate_up` are those of the result."""

_FLOAT32 = 4
_INT32 = 4
_INT64 = 8


class StoredSizes(NamedTuple):
    """How tensors are stored, as far as the bytes of a step depend on it."""

    matrix_bytes: Callable[[int, int], int]
    """(output features, input features) -> bytes of the weight of a linear layer, or of so many
    rows of the embedding, as stored: scales included."""
    element_bytes: int
    """Of an activation, of the weight of a norm and of a bias."""
    kv_vector_bytes: int
    """Of a key or a value of one head as the cache stores it, scale included."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What one launch of a kernel moves, in bytes."""

    name: str
    launches: int
    """In a step."""
    weight_bytes: int
    cache_bytes: int
    """Keys and values that rows attend to."""
    other_bytes: int
    """What the floor of a step leaves out."""
    window: int | None = None
    """Tokens that the layers attend to at most; of attention."""
    kernels: int = 1
    """Kernels that one launch of the operation consists of."""
    library_kernels: int = 0
    """How many of them are the library's, which have no dependent launch."""

    @property
    def bytes(self) -> int:
        """All that one launch moves."""
        return self.weight_bytes + self.cache_bytes + self.other_bytes

    def seconds(self, bandwidth_bytes_per_s: float) -> float:
        """Return the seconds of one launch at the bandwidth, without edges."""
        return floor_seconds(self.bytes, bandwidth_bytes_per_s)

    def edge_seconds(self, edge_seconds: float) -> float:
        """Return the seconds of the edges of one launch, given those of one edge.

        The edges before and after a kernel of the library take at least `EDGE_SECONDS`.
        """
        plain = max(EDGE_SECONDS, edge_seconds)
        return self.kernels * edge_seconds + 2 * self.library_kernels * (plain - edge_seconds)


@dataclass(frozen=True, slots=True)
class _Product:
    """Which kernels compute a product of a decode step."""

    parts: int
    """0: by the library."""
    kernels: int
    """The product, and the kernels before and after it."""
    bytes: int
    """Written by one of them and read by another."""

    @property
    def library_kernels(self) -> int:
        return int(self.parts == 0)


_ONE_KERNEL = _Product(1, 1, 0)


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

    Whether the embedding is tied to the head makes no difference to a step: it reads all of the
    head, and one row of the embedding for each row that decodes. Layers of different windows have
    an attention of their own each.

    Args:
        plan: the model.
        sizes: how it is stored.
        rows: that decode, without padding.
        context: tokens of each row, the newest included.
        splits: parts that the positions of a row are attended to in.
        parts: what carries out the products of more than four rows; the library, if not given.

    Raises:
        ValueError: one of these numbers is less than 1, or an operation of the plan has no kernel.
    """
    for name, value in (("rows", rows), ("context", context), ("splits", splits)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    step = _Step(plan, sizes, rows, context, splits, parts)
    layers = {layer: fuse(layer) for layer in dict.fromkeys(plan.layers)}
    by_name: dict[str, Counter[KernelCost]] = {}
    for layer in plan.layers:
        for fused in layers[layer]:
            cost = step.cost(fused)
            by_name.setdefault(cost.name, Counter())[cost] += 1
    return (
        step.begin(),
        *(
            replace(cost, launches=count)
            for costs in by_name.values()
            for cost, count in costs.items()
        ),
        *step.ends(),
    )


class _Step:
    """The costs of one decode step, kernel by kernel."""

    def __init__(
        self,
        plan: ModelPlan,
        sizes: StoredSizes,
        rows: int,
        context: int,
        splits: int,
        parts: Parts,
    ) -> None:
        self._plan, self._sizes, self._rows = plan, sizes, rows
        self._context, self._splits, self._parts = context, splits, parts
        self._few = rows <= FEW_ROWS
        self._x = self._activations(plan.hidden_size)
        self._rotations = rows * plan.rope_dim * _FLOAT32  # half of them cosines, half sines

    def begin(self) -> KernelCost:
        """What the first kernel reads and writes: tokens, embeddings and rotations."""
        rows = self._sizes.matrix_bytes(self._rows, self._plan.hidden_size)
        return _cost("begin", 0, rows + self._x + self._plan.rope_kinds * self._rotations)

    def cost(self, fused: Fused) -> KernelCost:
        """Of one launch of a kernel of a layer."""
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
        """Of the head, and of greedy, which reads the largest logit of each chunk.

        It writes the token, as the row's newest one and as the step's output, and its position.
        """
        plan, vocabulary = self._plan, self._plan.vocab_size
        product = self._product("head", vocabulary, plan.hidden_size, normed=True)
        if product.parts == 0:  # the logits are a result too, which is written anyway
            product = replace(product, bytes=product.bytes - self._activations(vocabulary))
        chunk = LIBRARY_CHUNK if product.parts == 0 else ROWS_CHUNK
        maxima = self._rows * -(-vocabulary // (VOCABULARY_CHUNK if self._few else chunk))
        logits = self._activations(vocabulary) + maxima * (_FLOAT32 + _INT32)
        weights = self._norm(plan.norm) + self._linear(plan.head)
        yield _cost("head", weights, self._x + logits, product)
        yield _cost("greedy", 0, maxima * _FLOAT32 + self._rows * 3 * _INT64)

    def _attention(self, fused: Attention) -> KernelCost:
        attend, rows = fused.attend, self._rows
        qkv = self._activations(attend.query_features + 2 * attend.kv_features)
        position = attend.sides * attend.kv_heads * self._sizes.kv_vector_bytes
        norms = () if fused.qk_norm is None else fused.qk_norm.parameters
        # Up to four rows the next kernel reads the partials, of more rows attention itself does.
        if self._few:
            written = self._partials(attend.features)
        else:
            written = self._activations(attend.features)
            if self._splits > 1:
                written += 2 * self._partials(attend.features)
        return replace(
            _cost(
                fused.name,
                sum(norm.elements for norm in norms) * self._sizes.element_bytes,
                qkv + self._rotations + rows * position + written,
            ),
            cache_bytes=rows * min(self._context, attend.window or self._context) * position,
            window=attend.window or None,
        )

    def _activations(self, features: int) -> int:
        return self._rows * features * self._sizes.element_bytes

    def _partials(self, features: int) -> int:
        """Of each split of each head a vector of sums, a maximum and a denominator."""
        heads = features // self._plan.layers[0].attend.value_dim
        return self._rows * self._splits * (features + 2 * heads) * _FLOAT32

    def _norm(self, norm: Norm | None) -> int:
        return 0 if norm is None else norm.weight.elements * self._sizes.element_bytes

    def _linear(self, linear: Linear) -> int:
        bias = 0 if linear.bias is None else linear.bias.elements
        matrix = self._sizes.matrix_bytes(linear.out_features, linear.in_features)
        return matrix + bias * self._sizes.element_bytes

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
        """The kernels of a product, and the bytes that they pass to each other.

        One that is `bare` needs no kernel after it, unless it was computed in parts.
        """
        if self._few:
            return _ONE_KERNEL
        count, stored = self._parts(name, n, k), stored or n
        finished = not bare if count == 0 else count > 1
        size = self._sizes.element_bytes
        moved = 2 * self._rows * stored * (count * _FLOAT32 if count else size) if finished else 0
        return _Product(count, 1 + normed + finished, moved + 2 * normed * self._activations(k))


def _cost(name: str, weights: int, other: int, product: _Product = _ONE_KERNEL) -> KernelCost:
    return KernelCost(
        name,
        1,
        weight_bytes=weights,
        cache_bytes=0,
        other_bytes=other + product.bytes,
        kernels=product.kernels,
        library_kernels=product.library_kernels,
    )


def floor_bytes(costs: Sequence[KernelCost]) -> int:
    """Return the bytes of the step's floor: the weights and the cache of every row."""
    return sum(cost.launches * (cost.weight_bytes + cost.cache_bytes) for cost in costs)


def operation_costs(costs: Sequence[KernelCost]) -> list[OperationCost]:
    """Return what one launch of each operation must read: what the floor counts of it.

    Layers of different windows are one operation, of which a launch reads the mean.
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
    """Return the seconds of the step: all bytes at the bandwidth, and an edge for each kernel.

    Raises:
        ValueError: the bandwidth is not positive, or an edge takes less than no time.
    """
    if not edge_seconds >= 0:  # NaN fails too
        raise ValueError(f"edge_seconds is {edge_seconds}; it must not be negative")
    return sum(
        cost.launches * (cost.seconds(bandwidth_bytes_per_s) + cost.edge_seconds(edge_seconds))
        for cost in costs
    )
