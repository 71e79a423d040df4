"""Implementations of the operations of a model: plain PyTorch, C++ and Triton.

`select_kernels` returns the implementations for a device, a mode, a dtype and a choice of kernels.
Models call only what it returns.
"""

import os
from dataclasses import replace
from typing import Literal

import torch

from ..errors import KernelBuildError
from .choice import Kernels, no_parts
from .cpu.build import (
    build_cpu_ops,
    build_kernels,
    cpu_kernels_obstacle,
    have_compiler,
    load_cpu_ops,
)
from .cpu.recurrent import cpu_causal_conv, cpu_recurrence
from .cpu.threads import limit_threads, resolve_threads
from .ops.attention import AttentionForm, paged_attention, reference_paged_attention
from .ops.batch import LayerPlace, RaggedBatch
from .ops.experts import Experts, Routing, reference_experts
from .ops.experts_operator import opaque_experts, packed_experts
from .ops.linear import packed_linear, reference_linear
from .ops.packed_parts import can_pack, instruction_sets, pack_parts, parts_bytes
from .ops.stack import DecoderStack, DecodeStep, Stack, stack_obstacle
from .packed_memory import PackedMemory
from .result_check import warn
from .support import (
    Gap,
    KernelChoice,
    have_triton,
    kernels_for,
    native_gaps,
    native_obstacle,
)
from .weights import MODEL, WeightStorage

Mode = Literal["eager", "compile", "graph"]


def select_kernels(
    device: torch.device | str,
    mode: Mode,
    dtype: torch.dtype,
    weights: WeightStorage = MODEL,
    kernels: KernelChoice | None = None,
    *,
    load: bool = True,
) -> Kernels:
    """Return the kernels for a model in `dtype` on `device`; builds and loads what they need.

    Args:
        device: where the model runs.
        mode: how its steps run.
        dtype: of weights and activations.
        weights: how the weights of linear layers are stored.
        kernels: which to take; None: `torch` for `eager`, `native` for the other modes.
        load: False: for a memory plan only, so no C++ operators are built or loaded.

    Raises KernelBuildError where the C++ operators cannot be built, and on a CUDA device where
    Triton is set to interpret kernels instead of compiling them.
    """
    device_type = torch.device(device).type
    if kernels is None:
        kernels = "torch" if mode == "eager" else "native"
    plain = kernels == "torch" and mode == "eager"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted and device_type == "cuda" and torch.cuda.is_available() and not plain:
        raise KernelBuildError(
            "TRITON_INTERPRET=1 makes Triton interpret kernels on the CPU, also torch.compile's"
            " included: unset it, or use mode='eager' with kernels='torch'"
        )
    if kernels == "native":
        return (
            _cpu_kernels(dtype, weights, load=load)
            if device_type == "cpu"
            else _gpu_kernels(weights)
        )
    # But in eager steps, operations with state are ones that torch.compile does not look into.
    native_state = not plain and (device_type == "cpu" or have_triton())
    found = Kernels(
        name="torch",
        attention=reference_paged_attention if plain else paged_attention,
        linear=reference_linear,
        experts=reference_experts if plain else opaque_experts,
        ungated_experts=opaque_experts,
        bounded_by_length=False,
        masks=1,
        weights=weights,
    )
    if not native_state:
        return found
    if device_type != "cpu":
        return found.with_state_of(_gpu_kernels(weights))
    native = _cpu_kernels(dtype, weights, load=load)
    return replace(found.with_state_of(native), library=native.library)


def batch_invariant_kernels(kernels: Kernels) -> Kernels:
    """Return native kernels whose results for a token do not depend on the rest of a step."""
    if kernels.name == "triton":
        from .triton.backend import gpu_kernels

        kernels = gpu_kernels(kernels.weights, batch_invariant=True)
    return replace(kernels, batch_invariant=True)


def _cpu_kernels(dtype: torch.dtype, weights: WeightStorage, *, load: bool) -> Kernels:
    library = load_cpu_ops() if load else None
    if load and (faulty := instruction_sets(dtype)["faulty"]):
        warn(
            f"This processor's {faulty} instructions give other results than their specification"
            " and are not used. Products run on slower instructions; results are right"
        )
    packs = can_pack(dtype)
    return Kernels(
        name="cpu" if packs else "cpu, torch linear",
        attention=paged_attention,
        linear=packed_linear if packs else reference_linear,
        experts=packed_experts if packs else opaque_experts,
        ungated_experts=opaque_experts,
        bounded_by_length=True,
        masks=0,
        recurrence=cpu_recurrence,
        causal_conv=cpu_causal_conv,
        weights=weights,
        sampler="cpu",
        library=library,
        pack_parts=pack_parts if packs else None,
        parts_bytes=parts_bytes if packs else no_parts,
        make_stack=DecoderStack if packs else None,
        stack_obstacle=stack_obstacle,
    )


def _gpu_kernels(weights: WeightStorage) -> Kernels:
    from .triton.backend import gpu_kernels  # which needs this package

    return gpu_kernels(weights)


__all__ = [
    "AttentionForm",
    "DecodeStep",
    "DecoderStack",
    "Experts",
    "KernelChoice",
    "Kernels",
    "Mode",
    "LayerPlace",
    "PackedMemory",
    "RaggedBatch",
    "Routing",
    "Stack",
    "select_kernels",
    "paged_attention",
    "reference_paged_attention",
    "opaque_experts",
    "packed_experts",
    "packed_linear",
    "reference_experts",
    "reference_linear",
    "pack_parts",
    "KernelBuildError",
    "batch_invariant_kernels",
    "build_cpu_ops",
    "build_kernels",
    "cpu_kernels_obstacle",
    "have_compiler",
    "have_triton",
    "instruction_sets",
    "limit_threads",
    "load_cpu_ops",
    "Gap",
    "kernels_for",
    "native_gaps",
    "native_obstacle",
    "resolve_threads",
]
