"""Packed weights in memory of their own."""

import torch
from stepgraph.runtime.kernels import pack_parts
from stepgraph.runtime.kernels.choice import Parts
from stepgraph.runtime.kernels.ops.packed_parts import parts_bytes
from torch import Tensor


def packed(parts: Parts, dtype: torch.dtype, *, int8_inputs: bool = False) -> Tensor:
    """Parts of one weight as the C++ operators take it, of a model in this dtype."""
    memory = torch.empty(parts_bytes(parts, dtype) or 0, dtype=torch.uint8)
    pack_parts(parts, dtype, memory, int8_inputs=int8_inputs)
    return memory
