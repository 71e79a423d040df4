"""The operations a model is made of, each as plain torch and as a fast version, chosen once.

`select_kernels` answers for a device, a mode and a dtype; a model calls what it gets and knows no
difference.
"""

import importlib.util
import logging
import os
from typing import Literal

import torch

from ..errors import KernelBuildError
from .attention import AttentionForm, AttentionInputs, paged_attention, reference_paged_attention
from .choice import Kernels
from .cpu import KernelLibrary, build_cpu_ops, have_compiler, load_cpu_ops
from .linear import (
    can_pack,
    pack_linear,
    packed_bytes,
    packed_embedding,
    packed_linear,
    reference_linear,
    reference_packed_embedding,
    unpack_linear,
)
from .packed_memory import PackedMemory
from .stack import (
    DecodeEnds,
    DecodeResult,
    DecoderStack,
    DecodeStep,
    Stack,
    StackLayer,
    StackLinear,
    StackShape,
)
from .weight_storage import (
    WeightStorage,
    dequantise_weight,
    quantise_weight,
    quantised_dtype,
    stored_bytes,
)

Mode = Literal["eager", "compile", "graph"]

logger = logging.getLogger("stepgraph.runtime")


def select_kernels(
    device: torch.device | str,
    mode: Mode,
    dtype: torch.dtype,
    weights: WeightStorage = "model",
) -> Kernels:
    """The kernels for a model in `dtype` on `device`; builds and loads them where they need it.

    `weights` says how those of linear layers are stored. There is no fast linear layer over fp8
    weights for a CPU: a warning says so where it was not chosen by `eager`.

    Raises KernelBuildError where the fast CPU kernels cannot be built, and on a CUDA device where
    Triton is told to interpret kernels instead of building them.
    """
    device_type = torch.device(device).type
    if device_type == "cpu" and mode != "eager":
        library = load_cpu_ops()
        packs = can_pack(quantised_dtype(weights) or dtype) and can_pack(dtype)
        if weights == "fp8":
            logger.warning(
                "fp8 weights are widened by plain PyTorch in every step on a CPU, which is several"
                " times slower: weight_dtype='int8' is as small and fast"
            )
        return Kernels(
            name="cpu" if packs else "cpu, torch linear",
            attention=paged_attention,
            linear=packed_linear if packs else reference_linear,
            pack=pack_linear if packs else None,
            bounded_by_length=True,
            masks=0,
            weights=weights,
            sampler="cpu",
            library=library,
            make_stack=DecoderStack if packs else None,
        )
    if device_type == "cuda" and mode != "eager":
        if os.environ.get("TRITON_INTERPRET") == "1" and torch.cuda.is_available():
            raise KernelBuildError(
                "TRITON_INTERPRET=1 has kernels interpreted on the CPU, those that torch compiles"
                " too: unset it, or choose mode='eager', which runs without kernels"
            )
        if importlib.util.find_spec("triton") is not None or not torch.cuda.is_available():
            from .gpu.selection import gpu_kernels  # which needs this package

            return gpu_kernels(weights)
        logger.warning("Triton is not installed: steps run in plain PyTorch, several times slower")
    opaque = device_type == "cuda" and mode != "eager"
    return Kernels(
        name="torch, opaque attention" if opaque else "torch",
        attention=paged_attention if opaque else reference_paged_attention,
        linear=reference_linear,
        pack=None,
        bounded_by_length=False,
        masks=1,
        weights=weights,
    )


__all__ = [
    "AttentionForm",
    "AttentionInputs",
    "DecodeEnds",
    "DecodeResult",
    "DecodeStep",
    "DecoderStack",
    "KernelLibrary",
    "Kernels",
    "Mode",
    "PackedMemory",
    "Stack",
    "StackLayer",
    "StackLinear",
    "StackShape",
    "WeightStorage",
    "select_kernels",
    "paged_attention",
    "reference_paged_attention",
    "packed_linear",
    "reference_linear",
    "pack_linear",
    "unpack_linear",
    "packed_bytes",
    "packed_embedding",
    "reference_packed_embedding",
    "can_pack",
    "quantise_weight",
    "stored_bytes",
    "dequantise_weight",
    "KernelBuildError",
    "build_cpu_ops",
    "have_compiler",
    "load_cpu_ops",
]
