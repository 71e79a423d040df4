"""The roofline of decode steps on GPUs, operation by operation, without loading the model.

A decode step is `begin`, the operations of each layer that `kernels/triton/fusion.py` finds in the
plan of the model, `final_norm`, `head` and `greedy`. It must read each weight once and the keys and
values of every row: these bytes over the bandwidth are the floor of its time. Activations, partial
results, the keys and values that it writes and the time between kernels come on top.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...cache.arena import SCALE_BYTES
from ...profiling.attribution import OperationCost
from ...profiling.command_line import aligned
from ..config import EngineConfig
from ..errors import ConfigError
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.ops.linear import Linear
from ..kernels.ops.norms import Norm
from ..kernels.triton.fusion import (
    Activation,
    Attention,
    Fused,
    Mixture,
    ResidualLinear,
    fuse,
    fusion_obstacle,
)
from ..loading.loader import resolve_source
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..models.resolved_config import ResolvedConfig
from ..models.sharding import shard_plan
from .memory_report import describe_experts, describe_stored, num_rows

_FLOAT32 = 4


class StoredSizes(NamedTuple):
    """Bytes of stored tensors."""

    matrix_bytes: Callable[[int, int], int]
    """(output features, input features) -> bytes of the weight of a linear layer, or of as many
    rows of the embedding, as stored with its scales."""
    element_bytes: int
    """Bytes of an element of activations, norm weights and biases."""
    kv_vector_bytes: int
    """Bytes of the key or value of one head in the cache, with its scale."""


class StepBytes(NamedTuple):
    """Bytes that one launch of an operation must read."""

    name: str
    """The operation, as `fusion.py` names it, or `begin`, `final_norm`, `head` or `greedy`."""
    weights: int = 0
    """Of weights, scales, norms and biases included."""
    cache: int = 0
    """Of keys and values that rows attend to."""
    window: int | None = None
    """Sliding window of attention, in tokens; None for full attention and other operations."""
    launches: int = 1
    """Launches in a step."""

    @property
    def total(self) -> int:
        """Bytes of all launches."""
        return self.launches * (self.weights + self.cache)


def stored_sizes(config: ResolvedConfig, head_dim: int) -> StoredSizes:
    """Return the bytes of what a step reads, as an engine stores it."""
    return StoredSizes(
        matrix_bytes=lambda n, k: config.weights.nbytes(n, k, config.dtype),
        element_bytes=config.dtype.itemsize,
        kv_vector_bytes=head_dim * config.kv_element_bytes + SCALE_BYTES[config.storage],
    )


def step_bytes(
    plan: ModelPlan, sizes: StoredSizes, *, rows: int, context: int
) -> tuple[StepBytes, ...]:
    """Return the operations of a decode step in the order of their first launch.

    A step reads the whole head; the rows of the embedding do not count. Attention has an entry for
    each window size.

    Args:
        plan: the model, or the part of it that a rank of a tensor-parallel group has.
        sizes: bytes of its stored tensors.
        rows: rows that decode, without padding.
        context: tokens of each row, including the newest.
    """
    counted: Counter[StepBytes] = Counter()
    for layer, times in Counter(plan.layers).items():
        for fused in fuse(layer):
            for read in _reads(fused, sizes, rows, context):
                counted[read] += times
    names = list(dict.fromkeys(read.name for read in counted))
    in_order = sorted(counted.items(), key=lambda item: names.index(item[0].name))
    return (
        StepBytes("begin"),
        *(read._replace(launches=count) for read, count in in_order),
        StepBytes(plan.norm.name, _norm(plan.norm, sizes)),
        StepBytes("head", _linear(plan.head, sizes)),
        StepBytes("greedy"),
    )


def _reads(fused: Fused, sizes: StoredSizes, rows: int, context: int) -> Iterator[StepBytes]:
    """Yield the operations that compute a part of a layer."""
    if isinstance(fused, Mixture):
        yield from _mixture(fused, sizes, rows)
    elif isinstance(fused, Attention):
        attend = fused.attend
        vectors = attend.parameters + (() if fused.qk_norm is None else fused.qk_norm.parameters)
        position = attend.sides * attend.kv_heads * sizes.kv_vector_bytes
        yield StepBytes(
            fused.name,
            sum(vector.elements for vector in vectors) * sizes.element_bytes,
            rows * min(context, attend.reach or context) * position,
            attend.reach or None,
        )
    elif isinstance(fused, Activation):
        yield StepBytes(fused.name)
    else:
        norm = None if isinstance(fused, ResidualLinear) and fused.norm is None else fused.norm
        yield StepBytes(fused.name, _norm(norm, sizes) + _linear(fused.linear, sizes))


def _mixture(fused: Mixture, sizes: StoredSizes, rows: int) -> Iterator[StepBytes]:
    """Yield the operations of a mixture, which reads the experts that the rows choose."""
    op, element_bytes = fused.experts, sizes.element_bytes
    hidden, features = op.router.shape[1], op.activate.features
    expert = sizes.matrix_bytes(2 * features, hidden) + sizes.matrix_bytes(hidden, features)
    biases = sum(p.elements for p in (op.gate_up_bias, op.down_bias) if p is not None)
    used = op.expected_experts(rows) * (expert + biases // op.total * element_bytes)
    router = op.router.elements * element_bytes
    if op.router_bias is not None:
        router += op.router_bias.elements * element_bytes
    if op.correction is not None:
        router += op.correction.elements * _FLOAT32
    reads = {
        "norm_rows": _norm(fused.norm, sizes),
        "route": router,
        "experts": round(used) + _norm(fused.output_norm, sizes),
    }
    for name in fused.operations:
        yield StepBytes(name, reads[name])


def _norm(norm: Norm | None, sizes: StoredSizes) -> int:
    return 0 if norm is None else norm.weight.elements * sizes.element_bytes


def _linear(linear: Linear, sizes: StoredSizes) -> int:
    bias = 0 if linear.bias is None else linear.bias.elements
    matrix = sizes.matrix_bytes(linear.out_features, linear.in_features)
    return matrix + bias * sizes.element_bytes


def floor_bytes(reads: Sequence[StepBytes]) -> int:
    """Return the bytes of the step's floor: the weights and the cache of every row."""
    return sum(read.total for read in reads)


def operation_costs(reads: Sequence[StepBytes]) -> list[OperationCost]:
    """Return the bytes that one launch of each operation must read.

    For layers with different windows this is the mean.
    """
    launches: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for read in reads:
        launches[read.name] += read.launches
        total[read.name] += read.total
    return [OperationCost(name, n, round(total[name] / n)) for name, n in launches.items()]


def decode_operation_costs(
    model: ModelConfig, config: ResolvedConfig, *, rows: int, context: int
) -> list[OperationCost]:
    """Return what each operation of a decode step on a GPU must read, for `KernelNames.costs`.

    Empty for models whose layers are made of other kernels. Of `config` only the dtypes count.
    """
    plan = model_plan(model)
    if fusion_obstacle(plan) is not None:
        return []
    sizes = stored_sizes(config, model.head_dim)
    return operation_costs(step_bytes(plan, sizes, rows=rows, context=context))


def resolve_fused(source: str | Path, config: EngineConfig) -> tuple[ModelConfig, ResolvedConfig]:
    """Return a model whose layers are made of the fused kernels, and the choices for it.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: the configuration cannot work with this model, or its layers are made of other
            kernels, such as latent attention.
    """
    model = resolve_source(source, config_only=True, model_impl=config.model_impl).native
    resolved = ResolvedConfig.resolve(config, model)
    if (obstacle := fusion_obstacle(model_plan(model))) is not None:
        raise ConfigError(f"{source}: layers with {obstacle} are not made of the fused kernels")
    return model, resolved


def explain_step(
    source: str | Path,
    config: EngineConfig,
    *,
    rows: int,
    context: int,
    bandwidth: float,
    ranks: Sequence[int] = (),
) -> str:
    """Return the floor of a decode step by operation as text, or with `ranks` of groups.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read.
        config: dtypes of the model, its weights and its cache; nothing else of it counts.
        rows: that decode.
        context: tokens of each.
        bandwidth: bytes that each device reads in a second.
        ranks: sizes of tensor-parallel groups, to compare with one device.

    Raises as `resolve_fused`, and ConfigError where a number of ranks does not divide the model.
    """
    # The device can be hypothetical and does not determine dtypes.
    on_cpu = dataclasses.replace(config, device="cpu", mode="eager")
    model, resolved = resolve_fused(source, on_cpu)
    if context > resolved.max_model_len:
        raise ConfigError(
            f"a context of {context} exceeds the {resolved.max_model_len} positions of the model"
        )
    plan = model_plan(model)
    sizes = stored_sizes(resolved, model.head_dim)

    def reads(plan: ModelPlan) -> tuple[StepBytes, ...]:
        return step_bytes(plan, sizes, rows=rows, context=context)

    point = (
        f"{source} in {describe_stored(resolved)}, {num_rows(rows)} of {context:,} tokens at"
        f" {bandwidth / 1e9:,.0f} GB/s"
    )
    if ranks:
        cells = []
        for count in sorted({1, *ranks}):
            shards = (reads(shard_plan(plan, rank, count)) for rank in range(count))
            largest = max(shards, key=floor_bytes)
            weights = sum(read.launches * read.weights for read in largest)
            parts = weights, floor_bytes(largest) - weights
            floor_us = 1e6 * sum(parts) / bandwidth
            cells.append([str(count), *(f"{n / 1e6:,.1f}" for n in parts), f"{floor_us:,.0f}"])
        head = ["ranks", "weights MB", "cache MB", "floor µs"]
        return "\n".join([f"{point} a device", "", *aligned(head, cells, 0)])
    found = reads(plan)
    floor = floor_bytes(found) / bandwidth
    head = ["operation", "launches", "weights MB", "cache MB", "µs", "µs a step", "share"]
    cells = [
        [
            read.name if read.window is None else f"{read.name}, window {read.window:,}",
            str(read.launches),
            *(f"{n / 1e6:.2f}" for n in (read.weights, read.cache)),
            f"{read.total / read.launches / bandwidth * 1e6:.2f}",
            f"{read.total / bandwidth * 1e6:.1f}",
            f"{read.total / floor_bytes(found):.1%}",
        ]
        for read in found
        if read.total
    ]
    return "\n".join(
        [
            *(point, "", *aligned(head, cells, 1), "", *describe_experts(plan, rows)),
            f"floor {floor * 1e6:,.0f} µs: {floor_bytes(found) / 1e6:,.1f} MB,"
            f" {rows / floor:,.0f} tok/s",
        ]
    )
