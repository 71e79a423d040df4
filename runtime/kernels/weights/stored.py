"""Formats that kernels read: weights in the model's dtype, or as 8-bit numbers with scales.

int8: row n of a weight is stored as q[n] and one float32 scale[n] = amax(|w[n]|) / 127; the number
represented is q[n, k] * scale[n]. Rounding is to nearest, half to even, so the error is at most
half a scale. Activations are not quantised: a linear layer sums x[k] * q[n, k] in
float32 and multiplies the sum by scale[n].

fp8: q is float8_e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433), with one scale, amax / 448,
per block of 128 consecutive inputs of a row: w[n, k] has scale[n, k // 128]. The last block of a
row may be shorter. The error is at most 1/16 of the number, or 2**-10 of the scale if that is
larger.

Weights of quantised checkpoints that GPU kernels take as they are (`triton/packed_codes.py`) are
stored alike, with scales in float16, bfloat16 or float32: bytes with a scale for a row, or for each
group of 16, 32, 64 or 128 inputs, `[N, B]`, or with minimums, `[N, 2, B]`:

    w[n, k] = q[n, k] * scales[n, 0, k // group] - scales[n, 1, k // group]

4-bit codes are uint8 `[N, K / 2 + 16]`: two codes a byte, the first one in the lower bits, and at
the end of each row the 16 integers that codes stand for, plus 128.

Shapes: N output features, K input features, B blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .grouped import E4M3, GroupedWeight, Scales, integers
from .grouped import INT8 as INT8_LEVELS

FP8_BLOCK = 128
"""Consecutive inputs of a row that share a scale."""

LEVEL_BYTES = 16
"""At the end of a row of 4-bit codes: the integers that they stand for, plus 128."""
_GROUPS = (FP8_BLOCK, 64, 32, 16)

SCALE_BYTES = 4
INT4_GROUP = 32
"""Consecutive inputs of a row that share a scale and a minimum in int4."""

_NUMBERS_AT_A_TIME = 1 << 24
"""Maximum elements quantised at once, which bounds float32 copies of a large weight."""


@dataclass(frozen=True)
class WeightStorage:
    """How the weights `[N, K]` of linear layers are stored."""

    name: str
    """As `EngineConfig.weight_dtype`; `model` for `auto`."""
    dtype: torch.dtype | None = None
    """Dtype of the stored numbers; None: the model's dtype, without scales."""
    largest: int = 0
    """The largest number."""
    block: int | None = None
    """Consecutive inputs of a row that share a scale; None: all."""

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    def scale_bytes(self, n: int, k: int) -> int:
        """Return the bytes of the scales of a `[n, k]` weight."""
        return 0 if self.dtype is None else SCALE_BYTES * n * -(-k // (self.block or k))

    def nbytes(self, n: int, k: int, dtype: torch.dtype) -> int:
        """Return the bytes of a `[n, k]` weight of a model in `dtype`, scales included."""
        if self == INT4:
            return n * (-(-k // 2) + 4 * -(-k // INT4_GROUP))
        return n * k * (self.dtype or dtype).itemsize + self.scale_bytes(n, k)

    def quantise(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the 8-bit numbers `[N, K]` of a weight and their float32 scales.

        `int8`: numbers from -127 to 127, scales `[N]`; `fp8`: numbers as float8_e4m3fn, scales `[N,
        B]`. What holds zeros only has scale 0. Raises `ValueError` if a row holds NaN or infinity;
        the message names the first such row.
        """
        assert self.dtype is not None, "left in the model's dtype"
        n, k = weight_NK.shape
        block = self.block or k
        data_NK = torch.empty_like(weight_NK, dtype=self.dtype)
        scale_NB = torch.empty(n, -(-k // block), dtype=torch.float32, device=weight_NK.device)
        rows = max(1, _NUMBERS_AT_A_TIME // k)
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            weight = F.pad(weight_NK[part].float(), (0, -k % block)).unflatten(1, (-1, block))
            scale = weight.abs().amax(-1) / self.largest
            # "meta" weights (of recorded steps) have no values to check.
            if not scale.is_meta and len(bad := (~scale.isfinite()).any(-1).nonzero()):
                raise ValueError(f"row {start + int(bad[0])} holds NaN or infinity")
            numbers = weight / torch.where(scale == 0, 1.0, scale)[..., None]
            if not self.dtype.is_floating_point:
                numbers = numbers.round()
            # A tiny scale has few bits left in float32 and may divide to more than the largest.
            numbers = numbers.clamp(-self.largest, self.largest).flatten(1)[:, :k]
            data_NK[part] = numbers.to(self.dtype)
            scale_NB[part] = scale
        return data_NK, scale_NB if self.block else scale_NB[:, 0]

    def part(self, weight_NK: Tensor) -> Tensor | GroupedWeight:
        """Return a weight as it is packed: of 8 bits as `codes`, else as it is."""
        return weight_NK if self.dtype is None else self.codes(weight_NK)

    def codes(self, weight_NK: Tensor) -> GroupedWeight:
        """Return a weight as codes; of 8 bits the numbers and scales of `quantise`.

        Raises `ValueError` as `quantise` and `quantise_int4`.
        """
        if self == INT4:
            return quantise_int4(weight_NK)
        data_NK, scales = self.quantise(weight_NK)
        levels = INT8_LEVELS if data_NK.dtype == torch.int8 else E4M3
        n, k = data_NK.shape
        codes_NK = data_NK.view(torch.uint8)
        return GroupedWeight(levels, codes_NK, self.block or k, Scales(scales.view(n, -1)))


MODEL = WeightStorage("model")
INT8 = WeightStorage("int8", torch.int8, 127)
INT4 = WeightStorage("int4")
"""Linear layers but the head and routers as codes, see `quantise_int4`."""
FP8 = WeightStorage("fp8", torch.float8_e4m3fn, 448, FP8_BLOCK)


def quantise_int4(weight_NK: Tensor) -> GroupedWeight:
    """Return a weight as codes of 4 bits, with a scale and a minimum for each 32 inputs of a row.

    The codes 0 and 15 stand for the smallest and the largest number of a group, of which 0 is one;
    the others are rounded to nearest. Scales and minimums are float16. Raises `ValueError` if a
    scale is NaN, infinite or too large for that; the message names the first such row.
    """
    n, k = weight_NK.shape
    codes_NK = torch.empty_like(weight_NK, dtype=torch.uint8)
    scale_NG, minimum_NG = (
        torch.empty(n, -(-k // INT4_GROUP), dtype=torch.float16, device=weight_NK.device)
        for _ in range(2)
    )
    rows = max(1, _NUMBERS_AT_A_TIME // k)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        groups = F.pad(weight_NK[part].float(), (0, -k % INT4_GROUP)).unflatten(1, (-1, INT4_GROUP))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale, minimum = ((high - low) / 15).half(), (-low).half()
        finite = scale.isfinite() & minimum.isfinite()
        if not scale.is_meta and len(bad := (~finite).any(-1).nonzero()):
            row = start + int(bad[0])
            raise ValueError(f"row {row} holds NaN, infinity or numbers beyond float16")
        step = torch.where(scale == 0, 1.0, scale.float())[..., None]
        codes = ((groups + minimum.float()[..., None]) / step).round().clamp(0, 15)
        codes_NK[part] = codes.flatten(1)[:, :k].to(torch.uint8)
        scale_NG[part], minimum_NG[part] = scale, minimum
    return GroupedWeight(integers(4), codes_NK, INT4_GROUP, Scales(scale_NG), Scales(minimum_NG))


def in_features(data_NK: Tensor) -> int:
    """Return K of a weight as it is stored."""
    columns = data_NK.shape[-1]
    return 2 * (columns - LEVEL_BYTES) if data_NK.dtype == torch.uint8 else columns


def group_size(k: int, groups: int) -> int:
    """Return the inputs of each of the groups of a row; of one or several, 128 before fewer."""
    return next(size for size in _GROUPS if -(-k // size) == groups)


def dequantise(data_NK: Tensor, scales: Tensor) -> Tensor:
    """Return float32 `[N, K]`, of rows in one of the forms of this file and their scales.

    Of 8-bit numbers nothing else as large is allocated.
    """
    k = in_features(data_NK)
    wide_NK: Tensor
    if data_NK.dtype == torch.uint8:
        pairs, levels = data_NK.split((k // 2, LEVEL_BYTES), dim=1)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        wide_NK = levels.gather(1, codes.long()).float() - 128.0
    else:
        wide_NK = data_NK.float()
    if scales.dim() == 1:
        return wide_NK.mul_(scales[:, None])
    group = group_size(k, scales.shape[-1])
    blocks = k // group
    whole = blocks * group
    factors, *minimums = scales[:, None].unbind(1) if scales.dim() == 2 else scales.unbind(1)
    inner = wide_NK[:, :whole].unflatten(1, (blocks, group))
    inner.mul_(factors[:, :blocks, None])
    wide_NK[:, whole:].mul_(factors[:, blocks:])
    for minimum in minimums:
        inner.sub_(minimum[:, :blocks, None])
        wide_NK[:, whole:].sub_(minimum[:, blocks:])
    return wide_NK
