"""Packed weights of linear layers, in the model's dtype or quantised. Rows may have different
formats, such as q, k and v of a checkpoint with 4-bit and 6-bit weights.

The parts are packed to one uint8 tensor, which every C++ operator takes in place of a weight: a
header describes the parts, and blocks of 32 output features follow, which are read sequentially.
Incomplete blocks are padded with zeros. Of numbers in the model's dtype a block consists of steps
`[32, w]` of w consecutive input features of each output feature: w = 2 in bfloat16, w = 1 in
float32. A block of codes consists of units of 32 bytes. For each group of inputs it contains the
scales of the 32 features and their minimums, as compact as they were, and the codes of the group, 8
inputs at a time. `cpu/csrc/codes.h` has the layout of both. Codes have 4, 5, 6 or 8 bits; codes of
2 and 3 bits take 4.

A sum of codes is the float32 sum of a group times its scale, minus the minimum times the sum of the
inputs, added up in the order of groups. As in `linear.py`, it does not depend on the batch.

Shapes: N output features, K input features, B blocks, G groups of a row, R runs of groups, C chunks
of 8 inputs, U units of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..choice import Parts
from ..weights.grouped import GroupedFormat, GroupedWeight, Levels, Scales, StoredRows

BLOCK = 32
_PER_STEP = {torch.bfloat16: 2, torch.float32: 1}
"""Input features per step, by the model's dtype."""
_UNIT = 32
"""Bytes."""
_CHUNK = 8
_LINE = 64
_MAGIC, _HEADER, _PART = 0x337374726170, 6 * 8, 16 * 8
_LEVELS = 256
_OUTER = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
_INNER = {None: 0, torch.int8: 1, torch.uint8: 2, torch.float8_e4m3fn: 3}
_CODES_AT_A_TIME = 1 << 20
"""Codes packed at once, which bounds temporary memory and stays in a cache."""


torch.library.define("stepgraph::instruction_sets", "(bool bf16) -> Dict(str, str)")


def instruction_sets(dtype: torch.dtype) -> dict[str, str]:
    """Return the instruction set of each kind of product of the operators, which must be loaded.

    Kinds are `weights` in the model's dtype, `codes` of weights, `int8 inputs` of codes (an empty
    string where the processor has no instruction for them) and `attention`. `faulty` is an
    instruction set that is not used because it gave wrong results, or empty.
    """
    return dict(torch.ops.stepgraph.instruction_sets.default(dtype == torch.bfloat16))


def int8_inputs() -> bool:
    """Whether the operators, which must be loaded, multiply codes by inputs in int8."""
    return bool(instruction_sets(torch.bfloat16)["int8 inputs"])


class Part(NamedTuple):
    """The shape and the format of consecutive rows of a weight."""

    n: int
    k: int
    format: GroupedFormat | None = None
    """None: numbers of the model's dtype."""

    @classmethod
    def of(cls, weight: Tensor | GroupedWeight | StoredRows) -> Part:
        """Return the part that a weight `[N, K]` is."""
        n, k = weight.shape
        return cls(n, k, None if isinstance(weight, Tensor) else weight.format)

    @property
    def blocks(self) -> int:
        """Blocks of 32 rows, the last one padded."""
        return -(-self.n // BLOCK)

    def groups(self) -> Iterator[range]:
        """Return the chunks of each group."""
        assert self.format is not None
        chunks, group = -(-self.k // _CHUNK), -(-min(self.format.group, self.k) // _CHUNK)
        return (range(at, min(at + group, chunks)) for at in range(0, chunks, group))

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a block, of a model in `dtype`."""
        if self.format is None:
            width = _PER_STEP[dtype]
            return BLOCK * -(-self.k // width) * width * dtype.itemsize
        return _aligned(len(_order(self)) * _UNIT)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of models in `dtype` can be packed."""
    return dtype in _PER_STEP


def _fits(part: Part) -> bool:
    if (form := part.format) is None:
        return True
    return (
        (form.group % _CHUNK == 0 or form.group >= part.k)
        and all(scale.outer in _OUTER and scale.inner in _INNER for scale in form.numbers)
        and _are_bfloat16(form.levels)
    )


@cache
def _are_bfloat16(levels: Levels) -> bool:
    table = levels.table()
    return torch.equal(table.bfloat16().float().nan_to_num(), table.nan_to_num())


def parts_bytes(parts: Parts, dtype: torch.dtype) -> int | None:
    """Return the bytes of these parts of one weight, on any device, packed for a model in `dtype`.

    None for parts that are not packed: all but the last one need a multiple of 32 rows, groups a
    multiple of 8 inputs or a whole row, levels that bfloat16 represents, and scales dtypes that
    the operators read.
    """
    described = [Part.of(part) for part in parts]
    whole = all(part.n % BLOCK == 0 for part in described[:-1])
    same = len({part.k for part in described}) == 1
    if not (can_pack(dtype) and whole and same and all(map(_fits, described))):
        return None
    return _header_bytes(described) + sum(
        part.blocks * part.block_bytes(dtype) for part in described
    )


def pack_parts(
    parts: Parts, dtype: torch.dtype, packed: Tensor, *, int8_inputs: bool = False
) -> None:
    """Pack weights `[N, K]`, the rows of one weight, for a model in `dtype`.

    With `int8_inputs` the operators round the inputs of each group to int8, with a scale, where
    codes are consecutive integers and the processor has AVX512-VNNI.

    Rows are read and packed a piece at a time to `packed`, uint8 `[parts_bytes(parts, dtype)]`.
    Packed weights of equal formats may be concatenated where an operator takes several matrices.
    """
    described = [Part.of(part) for part in parts]
    packed[: _header_bytes(described)] = 0
    _write_header(described, dtype, packed, int8_inputs)
    at = _header_bytes(described)
    for part, shape in zip(parts, described, strict=True):
        blocks = packed[at : at + shape.blocks * shape.block_bytes(dtype)].view(shape.blocks, -1)
        at += blocks.numel()
        if isinstance(part, Tensor):
            blocks.copy_(_steps(part.to(dtype)).view(torch.uint8).flatten(1))
            continue
        step = max(1, _CODES_AT_A_TIME // (BLOCK * shape.k))
        for first in range(0, shape.blocks, step):
            stop = min((first + step) * BLOCK, shape.n)
            units = _blocks(part.rows(first * BLOCK, stop))
            blocks[first : first + step, : units.shape[1]] = units
            blocks[first : first + step, units.shape[1] :] = 0


def _steps(weight_NK: Tensor) -> Tensor:
    """Return the blocks of a weight in the model's dtype, `[B, steps, 32, w]`."""
    n, k = weight_NK.shape
    width = _PER_STEP[weight_NK.dtype]
    padded = F.pad(weight_NK, (0, -k % width, 0, -n % BLOCK))
    return padded.view(-1, BLOCK, padded.shape[1] // width, width).transpose(1, 2).contiguous()


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _levels_at(parts: Sized) -> int:
    return _aligned(_HEADER + len(parts) * _PART)


def _header_bytes(parts: Sized) -> int:
    return _levels_at(parts) + len(parts) * _LEVELS * 2


def _write_header(
    parts: Sequence[Part], dtype: torch.dtype, packed: Tensor, int8_inputs: bool
) -> None:
    begins = accumulate(
        (part.blocks * part.block_bytes(dtype) for part in parts), initial=_header_bytes(parts)
    )
    n = sum(part.n for part in parts)
    numbers = [_MAGIC, n, parts[0].k, dtype.itemsize, len(packed), len(parts)]
    first = 0
    for i, (part, begin) in enumerate(zip(parts, begins, strict=False)):
        levels_at = _levels_at(parts) + i * _LEVELS * 2
        lowest = _lowest_integer(part)
        numbers += [first, begin, part.block_bytes(dtype), *_description(part), levels_at]
        numbers += [0] * 4 if lowest is None else [int8_inputs, 1, *lowest]
        first += part.blocks
        if part.format is not None:
            table = part.format.levels.table().bfloat16()
            levels = table.repeat(_LEVELS // len(table)).view(torch.uint8)
            packed[levels_at : levels_at + len(levels)] = levels
    header = torch.tensor(numbers).view(torch.uint8)
    packed[: len(header)] = header


def _description(part: Part) -> list[int]:
    """Return the bits, the steps of a group, and the types of scales and minimums."""
    if (form := part.format) is None:
        return [0] * 8
    (steps, *_) = (len(chunks) * _CHUNK // 2 for chunks in part.groups())
    types = [_bits(form), steps]
    for scale in form.numbers:
        types += [_OUTER[scale.outer], _INNER[scale.inner], scale.run]
    return types + [0] * (8 - len(types))


def _lowest_integer(part: Part) -> tuple[int, int] | None:
    """Return the level of code 0 and 0, of code 128 and 128 if codes are signed, or None if levels
    are not consecutive integers within int8's or uint8's range."""
    if (form := part.format) is None:
        return None
    levels = form.levels.values
    for first in (0, 128)[: 1 + (len(levels) == 256)]:
        lowest = levels[first]
        if all(level == lowest + (i ^ first) for i, level in enumerate(levels)):
            return int(lowest), first
    return None


def _bits(form: GroupedFormat) -> int:
    return next(bits for bits in (4, 5, 6, 8) if form.levels.bits <= bits)


@cache
def _order(part: Part) -> Tensor:
    """Return the units of a block, int64, numbered as `_blocks` concatenates them."""
    assert part.format is not None
    groups, scales, bits = list(part.groups()), part.format.numbers, _bits(part.format)
    sizes = [
        size
        for scale in scales
        for size in (
            -(-len(groups) // scale.run) * scale.outer.itemsize,
            0 if scale.inner is None else len(groups),
        )
    ]
    *starts, codes_at = accumulate(sizes, initial=0)
    order: list[int] = []
    for g, chunks in enumerate(groups):
        for scale, outer_at, inner_at in zip(scales, starts[::2], starts[1::2], strict=True):
            if g % scale.run == 0:
                outer, width = g // scale.run, scale.outer.itemsize
                order += range(outer_at + outer * width, outer_at + (outer + 1) * width)
            if scale.inner is not None:
                order.append(inner_at + g)
        order += range(codes_at + chunks.start * bits, codes_at + chunks.stop * bits)
    return torch.tensor(order)


def _blocks(weight: GroupedWeight) -> Tensor:
    """Return the blocks of a weight, uint8 `[B, U * 32]`."""
    scales = (weight.scales, weight.minimums)
    units = [unit for scale in scales if scale is not None for unit in _scale_units(scale)]
    units.append(_code_units(weight.codes, _bits(weight.format)))
    together = torch.cat(units, dim=1).view(torch.int64)
    return together.index_select(1, _order(Part.of(weight))).view(torch.uint8).flatten(1)


def _scale_units(scales: Scales) -> Iterator[Tensor]:
    for numbers in (scales.outer, scales.inner):
        if numbers is not None:
            # Flat: the one scale of each row, transposed, is contiguous with another last stride.
            as_bytes = numbers.contiguous().view(-1).view(torch.uint8).view(*numbers.shape, -1)
            padded = F.pad(as_bytes, (0, 0, 0, 0, 0, -len(numbers) % BLOCK))
            yield (
                padded.unflatten(0, (-1, BLOCK))
                .transpose(1, 2)
                .reshape(-1, numbers.shape[1] * numbers.itemsize, _UNIT)
            )


def _code_units(codes_NK: Tensor, bits: int) -> Tensor:
    """Return the chunks of codes, uint8 `[B, C * bits, 32]`.

    The 8 codes of a chunk in a row are the bytes of an int64, and are moved together.
    """
    n, k = codes_NK.shape
    codes = F.pad(codes_NK, (0, -k % _CHUNK, 0, -n % BLOCK)).contiguous()  # aligned, as a copy
    if bits == 8:  # [blocks, half, 4, 4 columns, chunks, step] of pairs -> [blocks, chunks, ...]
        pairs = codes.view(torch.int16).view(-1, 2, 4, 4, codes.shape[1] // _CHUNK, 4)
        units = pairs.permute(0, 4, 5, 2, 1, 3).reshape(len(pairs), -1, _UNIT // 2)
        return units.view(torch.uint8)
    words = codes.view(torch.int64).unflatten(0, (-1, BLOCK))
    units = torch.empty(len(words), words.shape[2], bits * _UNIT, dtype=torch.uint8)
    # Pairs of codes 0 and 2, 4 and 6, 1 and 3, 5 and 7 as bytes.
    low = words & 0x0F0F0F0F0F0F0F0F
    low = (low | low >> 12) & 0x0000FFFF0000FFFF
    low = low & 0xFF | low >> 24 & 0xFF00 | (low & 0xFF00) << 8 | low >> 16 & 0xFF000000
    units[..., : 4 * _UNIT].view(torch.int32).copy_(low.transpose(1, 2))
    if (more := bits - 4) > 0:
        # The upper bits of codes 0, 2, 4 and 6 as a byte, then of the others, for each half.
        high = words >> 4 & ((1 << more) - 1) * 0x0101010101010101
        high |= high >> 16 - more
        high = (high | high >> 32 - 2 * more) & 0xFFFF
        first, second = high.chunk(2, dim=1)
        if more == 1:
            joined, dtype = first | second << 4, torch.int16
        else:
            pairs = first | second << 16  # of bytes, each half has two
            joined = pairs & 0xFF0000FF | (pairs & 0xFF00) << 8 | (pairs & 0xFF0000) >> 8
            dtype = torch.int32
        units[..., 4 * _UNIT :].view(dtype).copy_(joined.transpose(1, 2))
    return units.view(len(units), -1, _UNIT)
