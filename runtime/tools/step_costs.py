"""Predicts decode steps on GPUs from bytes, kernel by kernel, without loading the model.

A decode step is `begin`, the operations of each layer that `kernels/triton/fusion.py` finds in the
plan of the model, `head` and `greedy`. For up to four rows each operation is one kernel. For more
rows the norm before a product and its epilogue (residual, activation, sum of parts) are kernels of
their own. Like the floor of the step (`roofline.py`), each operation reads its weights once and its
share of the cache. In addition it reads and writes what the floor leaves out: activations, partial
results, and the keys and values of the new tokens. All of it is counted as memory traffic, although
most of what one kernel writes for the next stays in the L2 cache. The predicted time is bytes over
bandwidth, plus an edge for each kernel: the time between its end and the first loads of the next.

The ranks of a tensor-parallel group run the kernels of their part of the plan, and add the
collective operations. A message of n bytes takes latency + n / bandwidth (Hockney, The
communication challenge for MPP, Parallel Computing 20, 1994). Nothing overlaps.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...profiling.kernel_names import OperationCost
from ...profiling.markdown import aligned
from ...profiling.roofline import floor_seconds
from ..config import EngineConfig
from ..errors import ConfigError
from ..kernels import stored_bytes
from ..kernels.ops.layer_operations import AllReduce, Linear, Norm, QKNorm
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.ops.weight_storage import quantised_dtype
from ..kernels.triton.fusion import (
    Activation,
    Attention,
    Fused,
    GateUp,
    Mixture,
    NormLinear,
    ResidualLinear,
    fuse,
    fusion_obstacle,
    runs_by_pair,
)
from ..kernels.triton.linear import ROW_CLASSES
from ..kernels.triton.linear_configs import default_config
from ..kernels.triton.splits import choose_splits
from ..loading.loader import resolve_source
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..models.sharding import shard_plan
from ..resolved_config import ResolvedConfig
from .memory_report import describe_experts

__all__ = [
    "DEPENDENT_EDGE_SECONDS",
    "EDGE_SECONDS",
    "NVLINK_4",
    "KernelCost",
    "Link",
    "Parts",
    "StoredSizes",
    "collective_seconds",
    "decode_operation_costs",
    "explain_step",
    "floor_bytes",
    "kernel_costs",
    "operation_costs",
    "predicted_seconds",
    "stored_sizes",
    "untuned_parts",
]

MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM)."""

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
        plan: the model, or the part of it that a rank of a tensor-parallel group has, without its
            collective operations.
        sizes: bytes of its stored tensors.
        rows: rows that decode, without padding.
        context: tokens of each row, including the newest.
        splits: splits of attention along the positions of a row.
        parts: implementation of the products for more than four rows; default: cuBLAS.
    """
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
        if isinstance(fused, Mixture):
            yield from self._mixture(fused)
        else:
            yield self._cost(fused)

    def _mixture(self, fused: Mixture) -> Iterator[KernelCost]:
        """Yield the operations of a mixture, which reads the experts that the rows choose.

        Unless each pair of a row and an expert is computed by itself, pairs are sorted by expert,
        and their products written as float32.
        """
        op, element_bytes = fused.experts, self.sizes.element_bytes
        hidden, features = op.router.shape[1], op.activate.features
        matrix_bytes = self.sizes.matrix_bytes
        expert = matrix_bytes(2 * features, hidden) + matrix_bytes(hidden, features)
        by_pair = runs_by_pair(op, self.rows, expert)
        biases = sum(p.elements for p in (op.gate_up_bias, op.down_bias) if p is not None)
        used = op.expected_experts(self.rows) * (expert + biases // op.total * element_bytes)
        router = op.router.elements * element_bytes
        if op.router_bias is not None:
            router += op.router_bias.elements * element_bytes
        if op.correction is not None:
            router += op.correction.elements * _FLOAT32
        state, scores = self._activations(hidden), self.rows * op.routed * _FLOAT32
        pairs = self.rows * op.per_token
        choice = scores + pairs * (_FLOAT32 + _INT32)
        moved = choice + 2 * pairs * features * element_bytes + 3 * state
        if not by_pair:
            moved += 2 * pairs * hidden * _FLOAT32 + 2 * pairs * _INT32
        costs = {
            "norm_rows": (self._norm(fused.norm), 2 * state, 1),
            "route": (router, state + choice + scores, 2),
            "experts": (round(used) + self._norm(fused.output_norm), moved, 2 if by_pair else 4),
        }
        for name in fused.operations:
            weights, other, kernels = costs[name]
            yield _cost(name, weights, other, _Product(kernels=kernels))

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
    """Return the seconds of the step: all bytes at this bandwidth, and an edge for each kernel."""
    return sum(
        cost.launches * (cost.seconds(bandwidth_bytes_per_s) + cost.edge_seconds(edge_seconds))
        for cost in costs
    )


class Link(NamedTuple):
    """The full-duplex connection of a device with the other devices of its group."""

    bytes_per_s: float
    """In one direction."""
    latency_s: float
    """Seconds of a collective operation of one phase and no bytes, its kernel included."""

    def all_reduce_seconds(self, size: int, ranks: int) -> float:
        """Return the seconds of the sum of a value of `size` bytes, by the faster algorithm.

        One-shot reads the values of all other ranks; two-shot is a reduce-scatter and an all-gather
        (Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH,
        2005, with the steps of each phase at the same time).
        """
        one_shot = self.latency_s + (ranks - 1) * size / self.bytes_per_s
        two_shot = 2 * self.latency_s + 2 * (ranks - 1) / ranks * size / self.bytes_per_s
        return min(one_shot, two_shot)


NVLINK_4 = Link(320e9, 5e-6)
"""Of an H100 or H200 (SXM): fitted to times of a one-shot kernel that vLLM's pull request 24111
reports for six H100, 13 to 70 µs for 0.5 to 4 MiB, within 3 %. NVIDIA specifies 450 GB/s a
direction."""


def collective_seconds(plan: ModelPlan, link: Link, *, rows: int, element_bytes: int) -> float:
    """Return the seconds of the collective operations of a greedy decode step; 0 for a whole model.

    They are the `AllReduce` operations of the layers, one for the embeddings, the sums of squares
    of norms over the heads of all ranks (two float32 values a row), and the choice among the
    largest logits of all ranks (a float32 value and an int64 id a row).

    Args:
        plan: of one rank.
        link: between the devices.
        rows: that decode.
        element_bytes: of an activation.
    """
    if plan.shard is None:
        return 0.0
    sizes = Counter([plan.hidden_size * element_bytes, _FLOAT32 + _INT64])
    for op in (op for layer in plan.layers for op in layer.operations):
        if isinstance(op, AllReduce):
            sizes[op.features * element_bytes] += 1
        elif isinstance(op, QKNorm) and op.ranks > 1:
            sizes[2 * _FLOAT32] += 1
    ranks = plan.shard.ranks
    return sum(n * link.all_reduce_seconds(rows * size, ranks) for size, n in sizes.items())


def stored_sizes(config: ResolvedConfig, head_dim: int) -> StoredSizes:
    """Return the bytes of what a step reads, as an engine stores it."""
    return StoredSizes(
        matrix_bytes=lambda n, k: stored_bytes(config.weights, n, k, config.dtype),
        element_bytes=config.dtype.itemsize,
        kv_vector_bytes=head_dim * config.kv_element_bytes + config.kv_scale_bytes,
    )


def untuned_parts(config: ResolvedConfig, rows: int, multiprocessors: int) -> Parts:
    """Return how the products of decode steps of `rows` rows are computed without tuning.

    Args:
        config: dtypes of the model and its weights; other fields are not used.
        rows: that decode.
        multiprocessors: of the device.
    """
    dtype = quantised_dtype(config.weights) or config.dtype

    def parts(operation: str, n: int, k: int) -> int:
        if rows > ROW_CLASSES[-1]:
            return 0
        kernel = {"combine_output": "residual_linear", "down": "residual_linear"}
        sizes = (rows, n, k, dtype.itemsize, multiprocessors)
        chosen = default_config(kernel.get(operation, operation), *sizes)
        return 0 if chosen.kind == "library" else chosen.splits

    return parts


def decode_operation_costs(
    model: ModelConfig, config: ResolvedConfig, *, rows: int, context: int
) -> list[OperationCost]:
    """Return what each operation of a decode step on a GPU must read, for `KernelNames.costs`.

    Empty for models whose layers are made of other kernels.

    Args:
        model: shapes.
        config: dtypes of the model, its weights and its cache; nothing else of it counts.
        rows: that decode.
        context: tokens of each, the newest included.
    """
    plan = model_plan(model)
    if fusion_obstacle(plan) is not None:
        return []
    # What splits of attention move on top is written by one kernel for the next: not counted here.
    sizes = stored_sizes(config, model.head_dim)
    return operation_costs(kernel_costs(plan, sizes, rows=rows, context=context, splits=1))


def explain_step(
    source: str | Path,
    config: EngineConfig,
    *,
    rows: int,
    context: int,
    bandwidth: float,
    ranks: Sequence[int] = (),
    link: Link = NVLINK_4,
) -> str:
    """Return a greedy decode step as text: its kernels, or with `ranks` the steps of groups.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read.
        config: dtypes of the model, its weights and its cache; nothing else of it counts.
        rows: that decode.
        context: tokens of each.
        bandwidth: bytes that each device reads in a second.
        ranks: sizes of tensor-parallel groups, to compare with one device.
        link: between the devices of a group.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: the configuration cannot work with this model, a number of ranks does not
            divide it, or its layers are made of other kernels, as those of latent attention are.
    """
    model = resolve_source(source, config_only=True, model_impl=config.model_impl).native
    # The device can be hypothetical and does not determine dtypes.
    on_cpu = dataclasses.replace(config, device="cpu", mode="eager")
    resolved = ResolvedConfig.resolve(on_cpu, model)
    if context > resolved.max_model_len:
        raise ConfigError(
            f"a context of {context} exceeds the {resolved.max_model_len} positions of the model"
        )
    plan = model_plan(model)
    step = _GreedyStep(resolved, stored_sizes(resolved, model.head_dim), rows, context)
    point = (
        f"{source} in {_dtypes(resolved)}, {rows} {'row' if rows == 1 else 'rows'} of"
        f" {context:,} tokens at {bandwidth / 1e9:,.0f} GB/s"
    )
    if ranks:
        links = f"links of {link.bytes_per_s / 1e9:,.0f} GB/s and {link.latency_s * 1e6:g} µs"
        return "\n".join(
            [f"{point} a device, {links}", "", *step.group_table(plan, ranks, bandwidth, link)]
        )
    costs = step.costs(plan)
    return "\n".join(
        [
            point,
            "",
            *_step_table(costs, bandwidth),
            "",
            *describe_experts(plan, rows),
            *_summary(costs, bandwidth),
        ]
    )


@dataclass(frozen=True)
class _GreedyStep:
    """A greedy decode step of a model, or of the ranks that share it, without tuned products."""

    config: ResolvedConfig
    sizes: StoredSizes
    rows: int
    context: int

    def costs(self, plan: ModelPlan) -> tuple[KernelCost, ...]:
        """Return the kernels of a model or of a rank.

        Raises:
            ConfigError: names what its layers have that these kernels do not compute.
        """
        if (obstacle := fusion_obstacle(plan)) is not None:
            raise ConfigError(
                f"the layers of a model with {obstacle} are not made of the kernels that are"
                " counted here"
            )
        kv_heads = plan.layers[0].attend.kv_heads
        return kernel_costs(
            plan,
            self.sizes,
            rows=self.rows,
            context=self.context,
            splits=choose_splits(self.rows, kv_heads, self.context, MULTIPROCESSORS),
            parts=untuned_parts(self.config, self.rows, MULTIPROCESSORS),
        )

    def group_table(
        self, plan: ModelPlan, ranks: Sequence[int], bandwidth: float, link: Link
    ) -> list[str]:
        """Return what groups of GPUs take: the slowest rank, its collectives, the speed-up.

        The kernel of a collective operation adds no edge: its latency is the time of a kernel.
        """
        head = ["ranks", "weights MB", "cache MB", "floor µs", "kernels µs", "collectives µs"]
        head += ["predicted µs", "speed-up", "efficiency", "without dependent launch µs"]
        cells, single = [], 0.0
        for count in sorted({1, *ranks}):
            plans = [shard_plan(plan, rank, count) for rank in range(count)]
            costs = max(
                map(self.costs, plans), key=lambda c: sum(each.launches * each.bytes for each in c)
            )
            weights, cache = (
                sum(cost.launches * getattr(cost, name) for cost in costs)
                for name in ("weight_bytes", "cache_bytes")
            )
            exchange = collective_seconds(
                plans[0], link, rows=self.rows, element_bytes=self.sizes.element_bytes
            )
            kernels, slower = (
                predicted_seconds(costs, bandwidth, edge)
                for edge in (DEPENDENT_EDGE_SECONDS, EDGE_SECONDS)
            )
            seconds = kernels + exchange
            single = single or seconds
            floor = floor_seconds(floor_bytes(costs), bandwidth)
            cells.append(
                [
                    str(count),
                    *(f"{n / 1e6:,.1f}" for n in (weights, cache)),
                    *(f"{s * 1e6:,.0f}" for s in (floor, kernels, exchange, seconds)),
                    f"{single / seconds:.2f}",
                    f"{single / seconds / count:.0%}",
                    f"{(slower + exchange) * 1e6:,.0f}",
                ]
            )
        return aligned(head, cells, 0)


def _dtypes(config: ResolvedConfig) -> str:
    dtype = str(config.dtype).removeprefix("torch.")
    weights = "" if config.weights == "model" else f", weights in {config.weights}"
    cache = "" if config.storage == "model" else f", cache in {config.storage}"
    return dtype + weights + cache


def _summary(costs: tuple[KernelCost, ...], bandwidth: float) -> list[str]:
    """The floor, and what is predicted, with and without dependent launch."""
    floor = floor_seconds(floor_bytes(costs), bandwidth)
    lines = [f"floor {floor * 1e6:,.0f} µs: {floor_bytes(costs) / 1e6:,.1f} MB"]
    for edge, how in ((DEPENDENT_EDGE_SECONDS, "with"), (EDGE_SECONDS, "without")):
        seconds = predicted_seconds(costs, bandwidth, edge)
        lines.append(
            f"predicted {seconds * 1e6:,.0f} µs {how} dependent launch ({edge * 1e6:g} µs for each"
            f" of {sum(cost.launches * cost.kernels for cost in costs)} edges, assumed):"
            f" the floor is {floor / seconds:.0%} of it"
        )
    return lines


def _step_table(costs: Sequence[KernelCost], bandwidth: float) -> list[str]:
    """Return the kernels of a step, as Markdown: what one launch of each moves, and how long.

    Microseconds are those of the bytes at `bandwidth`, in bytes per second.
    """
    head = ["kernel", "launches", "weights MB", "cache MB", "other MB", "µs", "µs a step", "share"]
    step_bytes = sum(cost.launches * cost.bytes for cost in costs)
    cells = [
        [
            cost.name if cost.window is None else f"{cost.name}, window {cost.window:,}",
            str(cost.launches),
            *(f"{n / 1e6:.2f}" for n in (cost.weight_bytes, cost.cache_bytes, cost.other_bytes)),
            f"{cost.seconds(bandwidth) * 1e6:.2f}",
            f"{cost.launches * cost.seconds(bandwidth) * 1e6:.1f}",
            f"{cost.launches * cost.bytes / step_bytes:.1%}",
        ]
        for cost in costs
    ]
    return aligned(head, cells, 1)
