"""Weights of quantised checkpoints in the forms that kernels read (`weights/stored.py`).

Codes of at most 4 bits stay 4 bits, if they stand for integers of 8 bits: as they do in formats of
integers, MXFP4 and NVFP4 (doubled) and IQ4_NL, but not in nf4. Consecutive integers of more bits
become int8, and float8_e4m3fn stays what it is. Groups are powers of two, from 16 to 128 inputs:
larger groups are repeated. Scales keep their dtype, scales of two levels become float32.

All parts of a weight must have one form. Imports no Triton.

Shapes: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ..choice import Parts
from ..weights import GroupedWeight
from ..weights.grouped import E4M3, GroupedFormat, Levels, Scales
from ..weights.stored import FP8_BLOCK, LEVEL_BYTES
from .linear import row_bytes

_SCALES = {torch.float16, torch.bfloat16, torch.float32}
_LEAST_GROUP = 16
_CODES_AT_A_TIME = 1 << 24


class _Form(NamedTuple):
    """How a weight is stored."""

    levels: tuple[float, ...] | None
    """Of 4-bit codes; None: int8."""
    dtype: torch.dtype
    """Of the stored numbers, uint8 for 4-bit codes."""
    group: int | None
    """Inputs of a group; None: a row has one float32 scale."""
    scales: torch.dtype
    minimums: bool

    def bytes_of_row(self, k: int) -> int:
        """Return the bytes of a row of codes, and its scales and minimums."""
        groups = 1 if self.group is None else -(-k // self.group)
        return row_bytes(k, self.dtype) + groups * self.scales.itemsize * (1 + self.minimums)


def parts_bytes(parts: Parts, dtype: torch.dtype) -> int | None:
    """See `Kernels.parts_bytes`; parts in the model's dtype have no form."""
    form = _form_of(parts)
    if form is None:
        return None
    return sum(part.shape[0] * form.bytes_of_row(part.shape[1]) for part in parts)


def store_parts(parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `Kernels.store_parts`; rows are read and packed a piece at a time."""
    form = _form_of(parts)
    assert form is not None, "parts without `parts_bytes`"
    data, scales = [], []
    for part in parts:
        assert not isinstance(part, Tensor)
        n, k = part.shape
        step = max(1, _CODES_AT_A_TIME // k)
        for first in range(0, n, step):
            rows = part.rows(first, min(first + step, n))
            data.append(_codes(rows, form))
            scales.append(_scales(rows, form))
    return torch.cat(data), torch.cat(scales)


def _form_of(parts: Parts) -> _Form | None:
    """Return the form that all parts of a weight have, or None."""
    k = parts[0].shape[1]
    formats = {None if isinstance(part, Tensor) else part.format for part in parts}
    forms = {None if one is None else _form(one, k) for one in formats}
    return forms.pop() if len(forms) == 1 else None


def _whole_groups(group: int, k: int) -> int:
    """Return the largest power of two, at most 128, of which groups and rows are multiples."""
    common = gcd(group, k, FP8_BLOCK)
    return common & -common


def _form(stored: GroupedFormat, k: int) -> _Form | None:
    """Return the form of rows of `k` inputs, or None."""
    levels = stored.levels
    packed = levels.bits <= 4 and _are_int8(levels)
    if not packed and levels is not E4M3 and not _are_consecutive(levels):
        return None
    minimums = stored.minimums is not None or _shift(levels) != 0
    data = torch.float8_e4m3fn if levels is E4M3 else torch.uint8 if packed else torch.int8
    if stored.group >= k and not packed and not minimums:
        return _Form(None, data, None, torch.float32, False)
    group = _whole_groups(min(stored.group, k), k)
    if stored.group == FP8_BLOCK and not packed:
        group = FP8_BLOCK  # the last one may be shorter
    if group < _LEAST_GROUP:
        return None
    dtypes = {torch.float32 if one.inner is not None else one.outer for one in stored.numbers}
    exact = len(dtypes) == 1 and dtypes <= _SCALES and not _shift(levels)
    scales = dtypes.pop() if exact else torch.float32
    return _Form(levels.values if packed else None, data, group, scales, minimums)


@cache
def _are_int8(levels: Levels) -> bool:
    return all(level.is_integer() and -128 <= level < 128 for level in levels.values)


@cache
def _are_consecutive(levels: Levels) -> bool:
    """Whether the numbers are consecutive integers, modulo 256, and int8 after `_shift`."""
    first = levels.values[0]
    return first.is_integer() and all(
        (level - first - code) % 256 == 0 and -128 <= level - _shift(levels) < 128
        for code, level in enumerate(levels.values)
    )


def _shift(levels: Levels) -> int:
    """What levels above int8 are lowered by, and minimums by as many scales."""
    return 128 if levels is not E4M3 and max(levels.values) > 127 else 0


def _codes(weight: GroupedWeight, form: _Form) -> Tensor:
    """Return the stored numbers `[N, K]`, or 4-bit codes and their levels."""
    codes, levels = weight.codes.contiguous(), weight.levels
    if form.dtype == torch.uint8:
        table = codes.new_zeros(LEVEL_BYTES)
        table[: len(levels.values)] = (levels.table() + 128).to(torch.uint8)
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        return torch.cat((pairs, table.expand(len(pairs), -1)), dim=1)
    if form.dtype == torch.int8:
        codes = codes + int(levels.values[0] - _shift(levels)) % 256  # wraps
    return codes.view(form.dtype)


def _scales(weight: GroupedWeight, form: _Form) -> Tensor:
    """Return the scales `[N]` or `[N, G]`, or those and minimums `[N, 2, G]`."""
    k = weight.shape[1]

    def of_groups(scales: Scales) -> Tensor:
        numbers = scales.groups()
        if form.group is None or weight.group == form.group:
            return numbers
        starts = torch.arange(0, k, form.group)
        return numbers[:, starts // weight.group]

    scales = of_groups(weight.scales)
    if form.group is None:
        return scales[:, 0].contiguous()
    if not form.minimums:
        return scales.to(form.scales)
    minimums = -_shift(weight.levels) * scales
    if weight.minimums is not None:
        minimums = minimums + of_groups(weight.minimums)
    return torch.stack((scales, minimums), dim=1).to(form.scales)
