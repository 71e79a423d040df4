"""One piece of memory for all packed weights of a model.

A decode step reads every weight, and with pages of 4 KiB the processor looks up an address for
each of them: on Zen 5 a step of a 135M model took 10 to 15 % longer than with pages of 2 MiB. The
system hands out large ones only for memory that is asked for in large pieces, before it is touched.
"""

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes of a cache line."""

torch.library.define("stepgraph::advise_huge_pages", "(Tensor memory) -> ()")


class PackedMemory:
    """Hands out parts of one allocation, which lives as long as any of them."""

    def __init__(self, nbytes: int, parts: int) -> None:
        """Room for `parts` tensors of `nbytes` bytes together; needs `load_cpu_ops`."""
        memory = torch.empty(nbytes + parts * _ALIGNMENT, dtype=torch.uint8, device="cpu")
        torch.ops.stepgraph.advise_huge_pages.default(memory)
        self._free = memory[-memory.data_ptr() % _ALIGNMENT :]
        """What is not handed out; begins at a cache line."""

    def take(self, nbytes: int) -> Tensor:
        """Return memory on cache lines of its own, uint8 `[nbytes]`."""
        assert nbytes <= self._free.nbytes, "more weights than there was to be room for"
        part = self._free[:nbytes]
        self._free = self._free[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return part
