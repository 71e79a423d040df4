"""Which operations of a model have native kernels on a device, and why others have none."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch

from ..errors import ConfigError
from .choice import Kernels
from .ops.layer_plan import ModelPlan
from .ops.packed_parts import can_pack, int8_inputs, pack_parts
from .ops.stack import stack_obstacle
from .triton.fusion import fusion_obstacle
from .weights import WeightStorage, quantise_int4
from .weights.grouped import GroupedFormat

KernelChoice = Literal["native", "torch"]
"""`native`: the C++ operators on a CPU, the Triton kernels on CUDA. `torch`: plain PyTorch around
the paged attention operation."""


def have_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


class Gap(NamedTuple):
    """Operations of a model that have no native version on a device."""

    name: str
    """`decoder layers` for all of them, else of the operation."""
    reason: str


def native_gaps(
    device_type: str, dtype: torch.dtype, weights: WeightStorage, plan: ModelPlan
) -> tuple[Gap, ...]:
    """Return the operations of a model that have no native kernel and run in plain PyTorch.

    Args:
        device_type: `cpu` or `cuda`.
        dtype: of weights and activations.
        weights: how weights of linear layers are stored.
        plan: the model.
    """
    gaps: list[Gap] = []
    obstacle = stack_obstacle(plan) if device_type == "cpu" else fusion_obstacle(plan)
    if obstacle is not None:
        gaps.append(Gap("decoder layers", f"native layers do not support {obstacle}"))
    elif device_type == "cpu" and not can_pack(dtype):
        named = str(dtype).removeprefix("torch.")
        gaps.append(Gap("decoder layers", f"the C++ operators have no linear layer in {named}"))
    if device_type != "cpu" and plan.rope_by_length:
        why = "its rotations do not depend on the length of a sequence; the layers run one by one"
        gaps.append(Gap("fused decode step", why))
    return tuple(gaps)


def native_obstacle(
    device_type: str, dtype: torch.dtype, weights: WeightStorage, plan: ModelPlan
) -> str | None:
    """Return the reasons of `native_gaps`, or None without gaps."""
    gaps = native_gaps(device_type, dtype, weights, plan)
    return "; ".join(gap.reason for gap in gaps) or None


def kernels_for(kernels: Kernels, plan: ModelPlan) -> Kernels:
    """Return the kernels, without a fused decode step where it does not support the model."""
    return replace(kernels, make_decode_step=None) if plan.rope_by_length else kernels


def int4_kernels(kernels: Kernels, plan: ModelPlan, dtype: torch.dtype) -> Kernels:
    """Return the kernels with the names of the parameters that they take in int4.

    Raises:
        ConfigError: they take none.
    """
    codes: dict[str, int] = {}
    formats: tuple[GroupedFormat, ...] = ()
    for parameter in plan.parameters():
        if parameter.is_matrix and parameter not in (plan.embedding, plan.head.weight):
            rows, columns = parameter.shape
            matrix = torch.empty(rows // parameter.matrices, columns, device="meta")
            part = quantise_int4(matrix)
            size = kernels.parts_bytes([part], dtype)
            if size is not None:
                codes[parameter.name] = size * parameter.matrices
                formats = (part.format,)
    if not codes:
        raise ConfigError(
            f"weight_dtype='int4': kernels={kernels.name!r} do not multiply by 4-bit codes; use"
            " kernels='native', or weight_dtype='int8'",
            field="weight_dtype",
        )
    return replace(kernels, codes=codes, formats=formats)


def int8_input_kernels(kernels: Kernels) -> Kernels:
    """Return the kernels with products over codes whose inputs are rounded to int8.

    Raises:
        ConfigError: the device has no such products, or the model has no weights in codes.
    """
    if kernels.pack_parts is None or not int8_inputs():
        why = "needs the native kernels of a CPU with AVX512-VNNI"
    elif not kernels.codes and kernels.weights.dtype is None:
        why = "needs quantised weights: a quantised checkpoint, or weight_dtype='int8' or 'int4'"
    else:
        return replace(kernels, pack_parts=partial(pack_parts, int8_inputs=True))
    raise ConfigError(
        f"activation_dtype='int8' {why}; use activation_dtype='auto'", field="activation_dtype"
    )
