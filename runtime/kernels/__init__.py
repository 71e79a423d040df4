"""The operations a model is made of, each as plain torch and as a fast version, chosen once.

`select_kernels` answers for a device, a mode and a dtype; a model calls what it gets and knows no
difference.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import KernelBuildError
from .attention import AttentionForm, AttentionInputs, paged_attention, reference_paged_attention
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
from .stack import DecoderStack, Stack, StackLayer, StackLinear, StackShape
from .weight_storage import (
    WeightStorage,
    dequantise_weight,
    quantise_weight,
    quantised_dtype,
    scale_bytes,
    stored_bytes,
)

Mode = Literal["eager", "compile", "graph"]

logger = logging.getLogger("stepgraph.runtime")


@dataclass(frozen=True)
class Kernels:
    """One choice of implementations, and what the rest of the house has to know about it."""

    name: str
    attention: Callable[..., Tensor]
    """Signature of `reference_paged_attention`."""
    linear: Callable[[Tensor, Tensor, Tensor | None, int, Tensor | None], Tensor]
    """`linear(x_TK, weight, bias_N or None, out_features, scales or None)`; the weight as `pack`
    returns it, the scales as `quantise_weight` does."""
    pack: Callable[[Tensor], Tensor] | None
    """Applied once to each `[N, K]` weight of a linear layer; None: weights stay as they are."""
    bounded_by_length: bool
    """Attention costs what the rows' lengths ask for, so one width of reading serves them all."""
    masks: int
    """Attention masks of `[tokens, positions]` alive at a time, for the memory plan."""
    fused_sampling: bool = False
    """Either sampler is one operation: `fused_sampler`."""
    library: KernelLibrary | None = None
    """What holds the operations of our own, where there is any."""
    make_stack: Callable[[StackShape, Sequence[StackLayer], Tensor], Stack] | None = None
    """Makes all layers of a decoder one operation: shape, layers, weight of the final norm."""
    weights: WeightStorage = "model"
    """How the weights of linear layers are stored; those of 8 bits come with scales."""

    def stored_bytes(self, n: int, k: int, dtype: torch.dtype) -> int:
        """Bytes of a `[n, k]` weight of a model in `dtype`, as stored: padding, scales and all."""
        if self.pack is None:
            return stored_bytes(self.weights, n, k, dtype)
        packed = packed_bytes(n, k, quantised_dtype(self.weights) or dtype)
        return packed + scale_bytes(self.weights, n, k)

    def unpacked_bytes(self, n: int, k: int) -> int:
        """Bytes of what the linear layer makes of a `[n, k]` weight while it runs."""
        return n * k * 4 if self.weights != "model" and self.pack is None else 0


def select_kernels(
    device: torch.device | str,
    mode: Mode,
    dtype: torch.dtype,
    weights: WeightStorage = "model",
) -> Kernels:
    """The kernels for a model in `dtype` on `device`; builds and loads them where they need it.

    `weights` says how those of linear layers are stored. There is no fast linear layer over fp8
    weights for a CPU: a warning says so where it was not chosen by `eager`.

    Raises KernelBuildError where the fast CPU kernels cannot be built.
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
            fused_sampling=True,
            library=library,
            make_stack=DecoderStack if packs else None,
        )
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
    "dequantise_weight",
    "stored_bytes",
    "KernelBuildError",
    "build_cpu_ops",
    "have_compiler",
    "load_cpu_ops",
]
