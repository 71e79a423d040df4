"""A weight as small codes, of which a group of consecutive inputs shares a scale and a minimum.

    w[n, k] = levels[codes[n, k]] * scale[n, k // E] - minimum[n, k // E]

Every quantised format of checkpoints is an arrangement of these numbers: what codes stand for, the
size E of a group, and how scales and minimums are stored. Kernels take codes and scales as they are
here (`Kernels.pack_parts`); where none does, `decode` gives the numbers.

Shapes: N output features, K input features, G groups of a row, R runs of groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

_CODES_AT_A_TIME = 1 << 22
"""Codes converted to int32 at once, which indices have to be."""


@dataclass(frozen=True)
class Levels:
    """The numbers that codes stand for."""

    name: str
    values: tuple[float, ...]
    """Of each code: 2, 4, 8, 16, 32, 64 or 256 numbers."""

    @cached_property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.values) - 1).bit_length()

    def table(self) -> Tensor:
        """Return the numbers as float32 `[2 ** bits]`."""
        return _table(self)


@cache
def _table(levels: Levels) -> Tensor:
    return torch.tensor(levels.values, dtype=torch.float32)


@cache
def integers(bits: int, offset: int = 0) -> Levels:
    """Return the levels of unsigned codes of `bits` bits minus `offset`."""
    return Levels(f"u{bits}-{offset}", tuple(float(i - offset) for i in range(1 << bits)))


def _float8() -> tuple[float, ...]:
    return tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())


INT8 = Levels("int8", tuple(float(i - 256 * (i > 127)) for i in range(256)))
"""A byte in two's complement."""
E4M3 = Levels("e4m3", _float8())
"""float8_e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433)."""
_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
DOUBLED_E2M1 = Levels("2*e2m1", _E2M1 + tuple(-level for level in _E2M1))
"""A sign, two bits of exponent and one of mantissa (Open Compute Project, "Microscaling Formats",
2023), times two: so that all are integers. Scales are halved."""

NF4 = Levels(
    "nf4",
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
"""Quantiles of a normal distribution (Dettmers et al. 2023, arXiv 2305.14314, appendix E)."""


def powers_of_two(exponents: Tensor, bias: int) -> Tensor:
    """Return 2 ** (exponents - bias) as bfloat16, which is exact, of uint8 exponents."""
    ones = torch.ones_like(exponents, dtype=torch.float32)
    return torch.ldexp(ones, exponents.int() - bias).bfloat16()


class ScaleFormat(NamedTuple):
    """The dtypes of `Scales`."""

    outer: torch.dtype
    inner: torch.dtype | None = None
    run: int = 1


class GroupedFormat(NamedTuple):
    """What a `GroupedWeight` is but for its shape and its numbers."""

    levels: Levels
    group: int
    scales: ScaleFormat
    minimums: ScaleFormat | None = None

    @property
    def numbers(self) -> tuple[ScaleFormat, ...]:
        """The scales and, if there are any, the minimums."""
        return (self.scales,) if self.minimums is None else (self.scales, self.minimums)


class Scales(NamedTuple):
    """A number for each group of a row: `outer` of a run of groups, times `inner` of the group."""

    outer: Tensor
    """`[..., N, R]`, of a floating-point dtype."""
    inner: Tensor | None = None
    """`[..., N, G]`, int8, uint8 or float8_e4m3fn; None: all 1."""
    run: int = 1
    """Groups of a run, of which the last one may have fewer; 1 without `inner`."""

    @property
    def format(self) -> ScaleFormat:
        """The dtypes."""
        inner = None if self.inner is None else self.inner.dtype
        return ScaleFormat(self.outer.dtype, inner, self.run)

    def groups(self) -> Tensor:
        """Return the numbers, float32 `[..., N, G]`."""
        outer = self.outer.float()
        if self.inner is None:
            return outer
        if self.run > 1:
            outer = outer.repeat_interleave(self.run, -1)[..., : self.inner.shape[-1]]
        return outer * self.inner.float()

    def over(self, convert: Callable[[Tensor], Tensor]) -> Scales:
        """Return the scales with both tensors converted, which keeps their last dimension."""
        inner = None if self.inner is None else convert(self.inner)
        return self._replace(outer=convert(self.outer), inner=inner)

    def narrow(self, first: int, stop: int) -> Scales:
        """Return the numbers of the groups from `first` to before `stop`."""
        inner = None if self.inner is None else self.inner[..., first:stop]
        if first % self.run:  # groups of a run part
            outer = self.outer.repeat_interleave(self.run, -1)[..., first:stop]
            return Scales(outer, inner)
        runs = slice(first // self.run, -(-stop // self.run))
        return self._replace(outer=self.outer[..., runs], inner=inner)


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight `[..., N, K]` as codes in groups."""

    levels: Levels
    codes: Tensor
    """uint8 `[..., N, K]`, a code in each byte."""
    group: int
    """Consecutive inputs of a group; the last group of a row may be shorter."""
    scales: Scales
    minimums: Scales | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]`."""
        return tuple(self.codes.shape)

    @property
    def format(self) -> GroupedFormat:
        """The levels, the size of a group and the dtypes of scales."""
        minimums = None if self.minimums is None else self.minimums.format
        return GroupedFormat(self.levels, self.group, self.scales.format, minimums)

    def over(self, convert: Callable[[Tensor], Tensor]) -> GroupedWeight:
        """Return the weight with its tensors converted, such as some rows of each."""
        minimums = None if self.minimums is None else self.minimums.over(convert)
        return replace(
            self, codes=convert(self.codes), scales=self.scales.over(convert), minimums=minimums
        )

    def rows(self, first: int, stop: int) -> GroupedWeight:
        """Return consecutive rows of a matrix."""
        return self.over(itemgetter(slice(first, stop)))

    def check_scales(self) -> None:
        """Raise ValueError if a scale or a minimum is NaN or infinite."""
        for scales in (self.scales, self.minimums):
            for numbers in (scales.outer, scales.inner) if scales is not None else ():
                if numbers is None or numbers.is_meta or not numbers.is_floating_point():
                    continue
                if not bool(numbers.float().isfinite().all()):
                    raise ValueError("a scale is NaN or infinite")

    def columns(self, start: int, count: int) -> GroupedWeight:
        """Return consecutive inputs of all rows.

        If they do not begin and end with groups, the result has groups of one input.
        """
        k, stop = self.codes.shape[-1], start + count
        if start % self.group or (stop % self.group and stop != k):
            return self._in_groups_of_one().columns(start, count)
        groups = start // self.group, -(-stop // self.group)
        return replace(
            self,
            codes=self.codes[..., start:stop],
            scales=self.scales.narrow(*groups),
            minimums=None if self.minimums is None else self.minimums.narrow(*groups),
        )

    def reordered(self, inputs: Tensor) -> GroupedWeight:
        """Return the weight with its inputs in another order, int64 `[K]`.

        If that parts groups, the result has groups of one input.
        """
        first, within = inputs[:: self.group], torch.arange(self.group)
        whole = len(inputs) % self.group == 0 and not bool((first % self.group).any())
        if not (whole and torch.equal((first[:, None] + within).flatten(), inputs)):
            return self._in_groups_of_one().reordered(inputs)
        order = first // self.group

        def each(scales: Scales) -> Scales:
            if scales.inner is None:
                return Scales(scales.outer[..., order])
            return Scales(scales.outer[..., order // scales.run], scales.inner[..., order])

        minimums = None if self.minimums is None else each(self.minimums)
        codes = self.codes[..., inputs]
        return replace(self, codes=codes, scales=each(self.scales), minimums=minimums)

    def _in_groups_of_one(self) -> GroupedWeight:
        def each(scales: Scales) -> Scales:
            inputs = scales.groups().repeat_interleave(self.group, -1)
            return Scales(inputs[..., : self.codes.shape[-1]])

        minimums = None if self.minimums is None else each(self.minimums)
        return replace(self, group=1, scales=each(self.scales), minimums=minimums)

    def decode(self) -> Tensor:
        """Return the numbers, float32 `[..., N, K]`."""
        k, table = self.codes.shape[-1], self.levels.table()
        numbers = torch.empty(self.codes.shape, dtype=torch.float32)
        parts = numbers.view(-1).split(_CODES_AT_A_TIME)
        for part, codes in zip(parts, self.codes.flatten().split(_CODES_AT_A_TIME), strict=True):
            torch.index_select(table, 0, codes.int(), out=part)
        scales = self.scales.groups()
        minimums = None if self.minimums is None else self.minimums.groups()
        whole = k // self.group * self.group
        ranges = [(slice(0, whole), slice(0, whole // self.group))] if whole else []
        if whole < k:
            ranges.append((slice(whole, k), slice(-1, None)))
        for inputs, groups in ranges:
            part = numbers[..., inputs].unflatten(-1, (scales[..., groups].shape[-1], -1))
            part.mul_(scales[..., groups, None])
            if minimums is not None:
                part.sub_(minimums[..., groups, None])
        return numbers


def random_weight(
    form: GroupedFormat, n: int, k: int, generator: torch.Generator | None = None
) -> GroupedWeight:
    """Return a weight `[n, k]` in a format, with numbers of about the size `k ** -0.5`.

    `generator` is of the CPU; None: torch's own.
    """
    levels = form.levels.table()
    valid = levels.isfinite().nonzero()[:, 0]  # float8 has codes of NaN
    codes = valid[torch.randint(len(valid), (n, k), generator=generator)].to(torch.uint8)
    groups = -(-k // form.group)

    def scales(dtypes: ScaleFormat, size: float) -> Scales:
        def around(count: int, mean: float) -> Tensor:
            return mean * (0.5 + torch.rand(n, count, generator=generator))

        if dtypes.inner is None:
            return Scales(around(groups, size).to(dtypes.outer))
        outer = around(-(-groups // dtypes.run), size / 16)
        return Scales(outer.to(dtypes.outer), around(groups, 16).to(dtypes.inner), dtypes.run)

    scale = k**-0.5 / float(levels[valid].square().mean().sqrt())
    middle = scale * float(levels[valid].mean())
    minimums = None if form.minimums is None else scales(form.minimums, middle)
    return GroupedWeight(form.levels, codes, form.group, scales(form.scales, scale), minimums)


class StoredRows(NamedTuple):
    """A matrix as codes in groups whose rows are read one piece after the other."""

    described: GroupedWeight
    """The matrix on the device `meta`."""
    rows: Callable[[int, int], GroupedWeight]
    """Reads the rows from a first one to before another one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`[N, K]`."""
        return self.described.shape

    @property
    def format(self) -> GroupedFormat:
        """What it is but for its shape and its numbers."""
        return self.described.format
