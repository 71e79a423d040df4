"""mxfp4, the format of experts in published checkpoints of gpt-oss.

A tensor `[..., columns]` is stored as two: `NAME_blocks` (uint8 `[..., columns / 32, 16]`) has two
elements in a byte, the first one in the lower bits, and `NAME_scales` (uint8 `[..., columns / 32]`)
the exponent of 32 consecutive elements, with a bias of 127. An element is a sign, two bits of
exponent and one of mantissa (E2M1; Open Compute Project, "Microscaling Formats", 2023). bfloat16
represents its product with the scale exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat

_BLOCK_BYTES = 16
_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Twice the magnitude of an element by its lower three bits; twice, so that half of the largest
scale is finite."""
_BIAS = 127 + 1


class _MXFP4(CheckpointFormat):
    name = "mxfp4"
    suffixes = ("_blocks", "_scales")
    weight_suffix = "_blocks"

    def shape(self, headers: Mapping[str, tuple[str, Shape]]) -> Shape | None:
        (dtype, shape), scales = headers["_blocks"], headers["_scales"]
        fits = dtype == "U8" and len(shape) > 2 and shape[-1] == _BLOCK_BYTES
        if not fits or scales != ("U8", shape[:-1]):
            return None
        return (*shape[:-2], shape[-2] * 2 * _BLOCK_BYTES)

    def grouped(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return stored["_blocks"], stored["_scales"]

    def decode(self, *grouped: Tensor) -> Tensor:
        """Return bfloat16. A scale of 255, which the format reserves, is 2**128."""
        blocks, scales = grouped
        # Both elements of a byte are one number of 32 bits.
        pairs = _pairs().index_select(0, blocks.flatten().to(torch.int32)).view(torch.bfloat16)
        values = pairs.view(*scales.shape, 2 * _BLOCK_BYTES)
        factors = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - _BIAS)
        return values.mul_(factors.to(torch.bfloat16)[..., None]).flatten(-2)


MXFP4 = _MXFP4()


@cache
def _pairs() -> Tensor:
    """The two elements of each byte, twice their values, as int32 `[256]`."""
    magnitudes = torch.tensor(_DOUBLED, dtype=torch.bfloat16)
    elements = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256)
    pairs = torch.stack((elements[byte & 15], elements[byte >> 4]), dim=-1)
    return pairs.view(torch.int32).flatten()
