"""The roofline of decode steps: of an engine; on GPUs by operation, without loading the model.

A decode step is `begin`, the operations of each layer that `kernels/triton/fusion.py` finds in the
plan of the model, `final_norm`, `head` and `greedy`. It must read each weight once and the keys and
values of every row: these bytes over the bandwidth are the floor of its time. Activations, partial
results, the keys and values that it writes and the time between kernels come on top.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...cache.arena import Arena
from ...cache.spec import group_layers
from ...profiling.command_line import aligned
from ..config import EngineConfig
from ..errors import ConfigError
from ..kernels import select_kernels
from ..kernels.ops.experts import Experts
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.ops.operation import Operation
from ..kernels.ops.parameter import Parameter
from ..kernels.triton.fusion import Fused, fuse, fusion_obstacle
from ..loading.loader import resolve_source
from ..models.config import ModelConfig
from ..models.plan import model_plan, parameter_bytes
from ..models.resolved_config import ResolvedConfig
from ..models.sharding import shard_plan
from .memory_report import describe_experts, describe_stored, num_rows

if TYPE_CHECKING:
    from ..engine.engine import Engine


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


def step_bytes(
    plan: ModelPlan, config: ResolvedConfig, *, rows: int, context: int
) -> tuple[StepBytes, ...]:
    """Return the operations of a decode step in the order of their first launch.

    A step reads the whole head; the rows of the embedding do not count. Attention has an entry for
    each window size.

    Args:
        plan: the model, or the part of it that a rank of a tensor-parallel group has.
        config: dtypes of the model, its weights and its cache; nothing else of it counts.
        rows: rows that decode, without padding.
        context: tokens of each row, including the newest.
    """
    kernels = select_kernels("cpu", "eager", config.dtype, config.weights, "torch")
    groups = group_layers(plan.states)
    arena = Arena(groups, 1, 1, config.dtype, torch.device("meta"), config.storage)

    def weights(parameters: Iterable[Parameter]) -> int:
        return sum(parameter_bytes(p, kernels, config.dtype) for p in parameters)

    def weights_of(op: Operation, kernel: str) -> int:
        """Bytes that a kernel reads of an operation: of experts, of those that the rows choose."""
        if not isinstance(op, Experts):
            return weights(op.parameters)
        stacked = (op.gate_up, op.down, op.gate_up_bias, op.down_bias)
        if kernel == "route":
            return weights(p for p in op.parameters if p not in stacked)
        chosen = weights(p for p in op.parameters if p in stacked)
        return round(op.expected_experts(rows) * chosen / op.total)

    def reads(fused: Fused) -> StepBytes:
        parts = [op for op in fused.operations if op is not None]
        states = [state for op in parts for state in op.states]
        cache = rows * arena.bytes_read(group_layers(states), context) if states else 0
        window = states[0].window if states else None
        return StepBytes(fused.name, sum(weights_of(op, fused.name) for op in parts), cache, window)

    counted: Counter[StepBytes] = Counter()
    for layer, times in Counter(plan.layers).items():
        for fused in fuse(layer):
            counted[reads(fused)] += times
    names = list(dict.fromkeys(read.name for read in counted))
    in_order = sorted(counted.items(), key=lambda item: names.index(item[0].name))
    return (
        StepBytes("begin"),
        *(read._replace(launches=count) for read, count in in_order),
        StepBytes(plan.norm.name, weights(plan.norm.parameters)),
        StepBytes("head", weights(plan.head.parameters)),
        StepBytes("greedy"),
    )


def floor_bytes(reads: Sequence[StepBytes]) -> int:
    """Return the bytes of the step's floor: the weights and the cache of every row."""
    return sum(read.total for read in reads)


def operation_bytes(
    model: ModelConfig, config: ResolvedConfig, *, rows: int, context: int
) -> dict[str, int]:
    """Return `KernelNames.bytes_read` of a GPU; empty if its layers are made of other kernels."""
    plan = model_plan(model)
    total: Counter[str] = Counter()
    if fusion_obstacle(plan) is None:
        for read in step_bytes(plan, config, rows=rows, context=context):
            total[read.name] += read.total
    return dict(total)


def decode_roofline(
    engine: Engine, contexts: Sequence[int], bandwidth: float, seconds: float
) -> dict[str, float]:
    """Return the `roofline` of a decode step in the JSON.

    Decode is memory-bound: a step reads every weight once and the keys and values of every row, as
    this engine stores them. These bytes divided by the read bandwidth are its least time; the
    fraction is that time divided by the measured one, above 1 if the model fits into a cache.
    Activations, sampling and the keys and values that a step writes are left out. The ranks of a
    CPU share its bandwidth, so the bytes of all count; elsewhere the bytes of one rank.

    Args:
        engine: that runs the steps.
        contexts: tokens that each row attends to, the newest included.
        bandwidth: bytes per second that the device reads, measured.
        seconds: measured time of the step.
    """
    kv_bytes = sum(map(engine.kv_bytes_read, contexts))
    shared = engine.config.user.tensor_parallel if engine.config.device.type == "cpu" else 1
    read = shared * (engine.weight_bytes_read(len(contexts)) + kv_bytes)
    return {
        "bytes_per_step": read,
        "bandwidth_gb_s": bandwidth / 1e9,
        "floor_ms": 1e3 * read / bandwidth,
        "fraction": read / bandwidth / seconds,
    }


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

    def reads(plan: ModelPlan) -> tuple[StepBytes, ...]:
        return step_bytes(plan, resolved, rows=rows, context=context)

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
