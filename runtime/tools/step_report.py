"""Predicts the time of a decode step on a GPU, kernel by kernel, without loading the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ...profiling.kernel_names import OperationCost
from ...profiling.markdown import aligned
from ...profiling.roofline import floor_seconds
from ..config import EngineConfig
from ..errors import ConfigError
from ..kernels import stored_bytes
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.ops.weight_storage import quantised_dtype
from ..kernels.triton.fusion import fusion_obstacle
from ..kernels.triton.linear import ROW_CLASSES
from ..kernels.triton.linear_configs import default_config
from ..loading.loader import resolve_source
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..resolved_config import ResolvedConfig
from .expert_report import describe_experts
from .group_costs import MULTIPROCESSORS, check_kernels, group_step
from .step_costs import (
    DEPENDENT_EDGE_SECONDS,
    EDGE_SECONDS,
    KernelCost,
    Parts,
    StoredSizes,
    floor_bytes,
    kernel_costs,
    operation_costs,
    predicted_seconds,
)

__all__ = [
    "MULTIPROCESSORS",
    "decode_operation_costs",
    "describe_point",
    "explain_step",
    "read_model",
    "stored_sizes",
    "untuned_parts",
]


def explain_step(
    source: str | Path, config: EngineConfig, *, rows: int, context: int, bandwidth: float
) -> str:
    """Return the kernels of a greedy decode step as text: bytes, microseconds, and their sum.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read.
        config: dtypes of the model, its weights and its cache; nothing else of it counts.
        rows: that decode.
        context: tokens of each.
        bandwidth: bytes that the device reads in a second.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: the configuration cannot work with this model, or its layers are made of
            other kernels, as those of latent attention are.
    """
    model, plan, resolved = read_model(source, config, context)
    step = group_step(
        (plan,),
        stored_sizes(resolved, model.head_dim),
        untuned_parts(resolved, rows, MULTIPROCESSORS),
        rows=rows,
        context=context,
    )
    return "\n".join(
        [
            describe_point(source, resolved, rows, context, bandwidth),
            "",
            _step_table(step.slowest, bandwidth),
            "",
            *describe_experts(plan, rows),
            _summary(step.slowest, bandwidth),
        ]
    )


def read_model(
    source: str | Path, config: EngineConfig, context: int
) -> tuple[ModelConfig, ModelPlan, ResolvedConfig]:
    """Return a model whose decode steps are made of the kernels that are counted here.

    Raises:
        CheckpointError, ConfigError: as `explain_step`.
    """
    model = resolve_source(source, config_only=True, model_impl=config.model_impl).native
    # The device can be hypothetical and does not determine dtypes.
    resolved = ResolvedConfig.resolve(
        dataclasses.replace(config, device="cpu", mode="eager"), model
    )
    if context > resolved.max_model_len:
        raise ConfigError(
            f"a context of {context} exceeds the {resolved.max_model_len} positions of the model"
        )
    plan = model_plan(model)
    check_kernels(plan)
    return model, plan, resolved


def describe_point(
    source: str | Path, config: ResolvedConfig, rows: int, context: int, bandwidth: float
) -> str:
    """Return what is predicted, in a line."""
    return (
        f"{source} in {_dtypes(config)}, {rows} {'row' if rows == 1 else 'rows'} of"
        f" {context:,} tokens at {bandwidth / 1e9:,.0f} GB/s"
    )


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


def stored_sizes(config: ResolvedConfig, head_dim: int) -> StoredSizes:
    """Return the bytes of what a step reads, as an engine stores it."""
    return StoredSizes(
        matrix_bytes=lambda n, k: stored_bytes(config.weights, n, k, config.dtype),
        element_bytes=config.dtype.itemsize,
        kv_vector_bytes=head_dim * config.kv_element_bytes + config.kv_scale_bytes,
    )


def _dtypes(config: ResolvedConfig) -> str:
    dtype = str(config.dtype).removeprefix("torch.")
    weights = "" if config.weights == "model" else f", weights in {config.weights}"
    cache = "" if config.storage == "model" else f", cache in {config.storage}"
    return dtype + weights + cache


def _summary(costs: tuple[KernelCost, ...], bandwidth: float) -> str:
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
    return "\n".join(lines)


def _step_table(costs: Sequence[KernelCost], bandwidth: float) -> str:
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
    return "\n".join(aligned(head, cells, 1))
