"""Decodes mxfp4, the storage of experts in published checkpoints of gpt-oss.

A tensor `[..., columns]` is stored as two: `NAME_blocks` (uint8 `[..., columns / 32, 16]`) has two
elements in a byte, the first one in the lower bits, and `NAME_scales` (uint8 `[..., columns / 32]`)
the exponent of 32 consecutive elements, with a bias of 127. An element is a sign, two bits of
exponent and one of mantissa (E2M1; Open Compute Project, "Microscaling Formats", 2023). bfloat16
represents its product with the scale exactly.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..kernels.ops.parameter import Narrowed, Selection

__all__ = ["DTYPE", "decode", "decoded_shape", "read", "scales_name"]

Shape = tuple[int, ...]
DTYPE = "MXFP4"
"""Name of the dtype in headers, as safetensors has names for its own."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
"""Bytes of a block."""
_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Twice the magnitude of an element by its lower three bits; twice, so that half of the largest
scale is finite."""
_BIAS = 127 + 1


def scales_name(name: str) -> str | None:
    """Return the name of the scales of a tensor, or None if its name is not one of blocks."""
    return name.removesuffix(_BLOCKS) + _SCALES if name.endswith(_BLOCKS) else None


def decoded_shape(blocks: tuple[str, Shape], scales: tuple[str, Shape]) -> Shape | None:
    """Return the shape that blocks and scales decode to, from their dtypes and shapes.

    None if they are not mxfp4.
    """
    (dtype, shape), (scale_dtype, scale_shape) = blocks, scales
    fits = len(shape) > 2 and shape[-1] == _BYTES and scale_shape == shape[:-1]
    if not fits or (dtype, scale_dtype) != ("U8", "U8"):
        return None
    return (*shape[:-2], shape[-2] * 2 * _BYTES)


def read(selection: Selection | None, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return a part of the decoded tensor, bfloat16; only blocks that it has elements of are read.

    Rows are selected in the stored tensors, columns of them in whole blocks.
    """
    if isinstance(selection, Narrowed) and selection.part.dim == 1:
        columns, width = selection.part, 2 * _BYTES
        first, last = columns.start // width, -(-(columns.start + columns.count) // width)
        blocks, scales = (selection.of.read(x)[:, first:last] for x in (blocks, scales))
        return decode(blocks, scales).narrow(1, columns.start - first * width, columns.count)
    if selection is not None:
        blocks, scales = selection.read(blocks), selection.read(scales)
    return decode(blocks, scales)


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 `[..., columns]`. A scale of 255, which the format reserves, is 2**128."""
    # Both elements of a byte are one number of 32 bits.
    pairs = _pairs().index_select(0, blocks.flatten().to(torch.int32)).view(torch.bfloat16)
    values = pairs.view(*scales.shape, 2 * _BYTES)
    factors = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - _BIAS)
    return values.mul_(factors.to(torch.bfloat16)[..., None]).flatten(-2)


@cache
def _pairs() -> Tensor:
    """The two elements of each byte, twice their values, as int32 `[256]`."""
    magnitudes = torch.tensor(_DOUBLED, dtype=torch.bfloat16)
    elements = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256)
    pairs = torch.stack((elements[byte & 15], elements[byte >> 4]), dim=-1)
    return pairs.view(torch.int32).flatten()
