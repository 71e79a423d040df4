"""Types of GGUF tensors: rows of weights as blocks of bytes (llama.cpp, ggml-common.h).

A block holds the codes of E consecutive inputs, in planes of some of their bits each, and the
scales of its groups. Several types have scales in two levels, a float16 for the block and a small
integer for each group.

Shapes: N output features, S blocks of a row, B bytes of a block, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.parameter import Selection, Source
from .checkpoint_format import rows_and_columns
from .grouped import (
    DOUBLED_E2M1,
    INT8,
    GroupedWeight,
    Levels,
    Scales,
    integers,
    powers_of_two,
)


class PlainType(NamedTuple):
    """A type of tensors without blocks."""

    name: str
    dtype: torch.dtype
    elements: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


PLAIN_TYPES = {
    0: PlainType("F32", torch.float32),
    1: PlainType("F16", torch.float16),
    30: PlainType("BF16", torch.bfloat16),
}
"""By their numbers in files."""


Plane = tuple[int, int, int, int]
"""Some bits of all codes of a block: first byte, bytes, run and bits, as of `_plane`."""


@dataclass(frozen=True)
class GGUFType:
    """A type of quantised tensors."""

    name: str
    number: int
    """In files."""
    elements: int
    """Inputs of a block."""
    nbytes: int
    """Bytes of a block."""
    levels: Levels
    group: int
    """Consecutive inputs that share a scale."""
    planes: tuple[Plane, ...]
    """Of the codes: the lower bits and, if there are more, the upper ones."""
    scales: Callable[[Tensor], tuple[Scales, Scales | None]]
    """Returns the scales and minimums of blocks uint8 `[..., N, S, B]`."""

    def weight(self, blocks: Tensor, scale: float = 1.0) -> GroupedWeight:
        """Return the weight `[..., N, S * E]` of blocks uint8 `[..., N, S, B]`.

        Args:
            blocks: of the rows.
            scale: of the whole tensor.
        """
        lower, *upper = self.planes
        codes = _plane(blocks, *lower)
        for plane in upper:
            codes |= _plane(blocks, *plane) << lower[-1]
        numbers = [found for found in self.scales(blocks) if found is not None]
        if scale != 1.0:
            numbers = [found._replace(outer=found.outer.float() * scale) for found in numbers]
        return GroupedWeight(self.levels, codes.flatten(-2), self.group, *numbers)

    def read(
        self,
        blocks: Tensor,
        selection: Selection | None,
        scale: float,
        inputs: Tensor | None = None,
    ) -> GroupedWeight:
        """Return a part of the weight with its inputs in an order, see `GroupedWeight.reordered`;
        only rows that it has are unpacked."""
        rows, columns = rows_and_columns(selection)
        for part in rows:
            blocks = part.read(blocks)
        weight = self.weight(blocks, scale)
        weight.check_scales()
        if inputs is not None:
            weight = weight.reordered(inputs)
        return weight if columns is None else weight.columns(columns.start, columns.count)

    def described(
        self, source: Source, scale: float, inputs: Tensor | None = None
    ) -> GroupedWeight:
        """Return a weight in the format and the shape that `read` returns for a source, of a row
        of zeros."""
        row = torch.zeros(1, source.shape[-1] // self.elements, self.nbytes, dtype=torch.uint8)
        weight = self.read(row, rows_and_columns(source.selection)[1], scale, inputs)
        return weight.over(lambda tensor: tensor.expand(*source.part_shape[:-1], -1))


def _plane(blocks: Tensor, start: int, size: int, run: int, bits: int) -> Tensor:
    """Return some bits of all codes of blocks `[..., B]`, as uint8 `[..., E]`.

    They are in `size` bytes from `start` on. Each byte of a run has `bits` bits of several codes:
    byte i has those of codes i, i + run, i + 2 * run and so on, from the lowest bits on. The next
    run has the codes after them.
    """
    packed = blocks[..., start : start + size]
    if bits == 8:
        return packed
    if run == 1:
        numbers = _numbers_of_bytes(bits).index_select(0, packed.flatten().int())
        return numbers.view(*packed.shape[:-1], -1)
    word = torch.int64 if run % 8 == 0 else torch.int32  # several bytes at a time
    mask = int.from_bytes(bytes([(1 << bits) - 1] * word.itemsize), "little")
    aligned = packed.clone(memory_format=torch.contiguous_format).view(word)
    runs = aligned.unflatten(-1, (-1, run // word.itemsize))
    shifted = [runs >> shift & mask for shift in range(0, 8, bits)]
    return torch.stack(shifted, dim=-2).flatten(-3).view(torch.uint8)


@cache
def _numbers_of_bytes(bits: int) -> Tensor:
    """Return the numbers of `bits` bits in each byte, uint8 `[256, 8 / bits]`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return torch.arange(256, dtype=torch.uint8)[:, None] >> shifts & (1 << bits) - 1


def _float16(blocks: Tensor, start: int = 0) -> Tensor:
    """Return the number of each block that begins at a byte: float16 `[..., S]`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def _two_levels(outer: Tensor, inner: Tensor) -> Scales:
    """Return scales of blocks `[..., N, S]` times those of their groups `[..., N, S, groups]`."""
    return Scales(outer, inner.flatten(-2), inner.shape[-1])


def _scale(blocks: Tensor) -> tuple[Scales, None]:
    return Scales(_float16(blocks)), None


def _with_minimum(blocks: Tensor) -> tuple[Scales, Scales]:
    """Files have the number to add, not to subtract."""
    return Scales(_float16(blocks)), Scales(-_float16(blocks, 2))


def _q2_k(blocks: Tensor) -> tuple[Scales, Scales]:
    scales, minimums = blocks[..., :16] & 15, blocks[..., :16] >> 4
    return _two_levels(_float16(blocks, 80), scales), _two_levels(_float16(blocks, 82), minimums)


def _q3_k(blocks: Tensor) -> tuple[Scales, None]:
    low, high = _plane(blocks, 96, 8, 8, 4), _plane(blocks, 104, 4, 4, 2)
    return _two_levels(_float16(blocks, 108), (low | high << 4).to(torch.int8) - 32), None


def _q4_k(blocks: Tensor) -> tuple[Scales, Scales]:
    """The first four groups have 6 bits in a byte; their upper two bits belong to the others."""
    scales, minimums, low = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = torch.cat((scales & 63, low & 15 | scales >> 2 & 48), dim=-1)
    minimums = torch.cat((minimums & 63, low >> 4 | minimums >> 2 & 48), dim=-1)
    return _two_levels(_float16(blocks), scales), _two_levels(_float16(blocks, 2), minimums)


def _q6_k(blocks: Tensor) -> tuple[Scales, None]:
    return _two_levels(_float16(blocks, 208), blocks[..., 192:208].view(torch.int8)), None


def _iq4_xs(blocks: Tensor) -> tuple[Scales, None]:
    low, high = _plane(blocks, 4, 4, 1, 4), _plane(blocks, 2, 2, 1, 2)
    return _two_levels(_float16(blocks), (low | high << 4).to(torch.int8) - 32), None


def _mxfp4(blocks: Tensor) -> tuple[Scales, None]:
    """Exponents with a bias of 127; the levels are doubled."""
    return Scales(powers_of_two(blocks[..., 0], 128)), None


def _nvfp4(blocks: Tensor) -> tuple[Scales, None]:
    """float8_e4m3fn without sign, whose NaN is 0 in llama.cpp; the levels are doubled."""
    scales = blocks[..., :4] & 127
    inner = torch.where(scales == 127, 0, scales).view(torch.float8_e4m3fn).flatten(-2)
    halves = torch.full((*inner.shape[:-1], 1), 0.5, device=blocks.device)
    return Scales(halves, inner, inner.shape[-1]), None


_IQ4 = Levels(
    "iq4",
    tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))),
)

GGUF_TYPES: dict[int, GGUFType] = {
    found.number: found
    for found in (
        GGUFType("Q4_0", 2, 32, 18, integers(4, 8), 32, ((2, 16, 16, 4),), _scale),
        GGUFType("Q4_1", 3, 32, 20, integers(4), 32, ((4, 16, 16, 4),), _with_minimum),
        GGUFType("Q5_0", 6, 32, 22, integers(5, 16), 32, ((6, 16, 16, 4), (2, 4, 1, 1)), _scale),
        GGUFType("Q5_1", 7, 32, 24, integers(5), 32, ((8, 16, 16, 4), (4, 4, 1, 1)), _with_minimum),
        GGUFType("Q8_0", 8, 32, 34, INT8, 32, ((2, 32, 32, 8),), _scale),
        GGUFType("Q2_K", 10, 256, 84, integers(2), 16, ((16, 64, 32, 2),), _q2_k),
        GGUFType(
            "Q3_K", 11, 256, 110, integers(3, 4), 16, ((32, 64, 32, 2), (0, 32, 32, 1)), _q3_k
        ),
        GGUFType("Q4_K", 12, 256, 144, integers(4), 32, ((16, 128, 32, 4),), _q4_k),
        GGUFType("Q5_K", 13, 256, 176, integers(5), 32, ((48, 128, 32, 4), (16, 32, 32, 1)), _q4_k),
        GGUFType(
            "Q6_K", 14, 256, 210, integers(6, 32), 16, ((0, 128, 64, 4), (128, 64, 32, 2)), _q6_k
        ),
        GGUFType("IQ4_NL", 20, 32, 18, _IQ4, 32, ((2, 16, 16, 4),), _scale),
        GGUFType("IQ4_XS", 23, 256, 136, _IQ4, 32, ((8, 128, 16, 4),), _iq4_xs),
        GGUFType("MXFP4", 39, 32, 17, DOUBLED_E2M1, 32, ((1, 16, 16, 4),), _mxfp4),
        GGUFType("NVFP4", 40, 64, 36, DOUBLED_E2M1, 16, ((4, 32, 8, 4),), _nvfp4),
    )
}
"""By number."""
