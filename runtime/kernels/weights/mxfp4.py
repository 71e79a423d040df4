"""mxfp4, the format of experts in published checkpoints of gpt-oss.

A tensor `[..., columns]` is stored as two: `NAME_blocks` (uint8 `[..., columns / 32, 16]`) has two
elements in a byte, the first one in the lower bits, and `NAME_scales` (uint8 `[..., columns / 32]`)
the exponent of 32 consecutive elements, with a bias of 127. An element is a sign, two bits of
exponent and one of mantissa (E2M1; Open Compute Project, "Microscaling Formats", 2023). bfloat16
represents its product with the scale exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat
from .grouped import DOUBLED_E2M1, GroupedWeight, Scales

_BLOCK_BYTES = 16
_BIAS = 127 + 1
"""Of scales of elements times two, of which the largest is finite."""


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

    def weight(self, *grouped: Tensor) -> GroupedWeight:
        """A scale of 255, which the format reserves, is 2**128."""
        blocks, exponents = grouped
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)
        scales = torch.ldexp(
            torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS
        )
        return GroupedWeight(DOUBLED_E2M1, codes, 2 * _BLOCK_BYTES, Scales(scales))


MXFP4 = _MXFP4()
