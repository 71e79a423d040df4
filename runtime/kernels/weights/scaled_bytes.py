"""Bytes with scales: float8_e4m3fn or int8, one scale for a tensor, a row, a block or a group.

A weight `[N, K]`, or stacked weights `[experts, N, K]`, is stored as it is, and its scales under
several names and shapes:

    NAME.weight_scale_inv   float `[N / 128, K / 128]`; DeepSeek and others (not inverted)
    NAME.weight_scale       one number (ModelOpt, compressed-tensors), `[N, 1]` or `[N]` (a row), or
                            `[N, G]`; uint8 are exponents with a bias of 127 (MXFP8)
    NAME.SCB                float `[N]`, 127 times the scale of a row of int8 (bitsandbytes)

w[n, k] = q[n, k] * scale. The last blocks of rows and columns may be smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat, Header
from .grouped import E4M3, INT8, GroupedWeight, Scales, powers_of_two

_LEVELS = {"F8_E4M3": E4M3, "I8": INT8}
_ZEROS = ".weight_zero_point"
_BLOCKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class ScaledBytes(CheckpointFormat):
    """See the top of this file."""

    name = "8-bit"
    optional = (_ZEROS,)
    ignored = (".input_scale", ".activation_scale", ".weight_format")

    scale: str
    """What the name of the scales ends with."""
    block: tuple[int, ...] = ()
    """Rows and columns of a block, from `config.json`; empty: not said."""

    @property
    def suffixes(self) -> tuple[str, ...]:  # type: ignore[override]
        return (".weight", self.scale)

    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        (kind, shape), (_, scales) = headers[".weight"], headers[self.scale]
        if kind not in _LEVELS or len(shape) < 2 or 0 in shape:
            return None
        if headers.get(_ZEROS, headers[self.scale]).shape != scales:
            return None
        return None if self._block(shape, scales) is None else shape

    def _block(self, shape: Shape, scales: Shape) -> tuple[int, int] | None:
        """Return the rows and columns that share a scale; None if the shapes do not fit."""
        *stacked, n, k = shape
        same, of_weight = scales[: len(stacked)], scales[len(stacked) :]
        if list(same) != stacked or len(of_weight) > 2:
            return None
        rows, columns = (*of_weight, 1, 1)[:2]
        block = tuple(
            next((b for b in (*known, size, 1, *_BLOCKS) if -(-size // b) == count), 0)
            for known, size, count in (
                (self.block[:1], n, rows),
                (self.block[1:], k, columns),
            )
        )
        return None if 0 in block else (block[0], block[1])

    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        data, scales = stored[".weight"], stored[self.scale]
        block = self._block(shape, tuple(scales.shape))
        assert block is not None, "shapes that were refused"
        if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
            scales = powers_of_two(scales.view(torch.uint8), 127)
        if self.scale == ".SCB":
            scales = scales / 127
        *stacked, n, k = shape
        blocks = (*stacked, -(-n // block[0]), -(-k // block[1]))

        def of_rows(numbers: Tensor) -> Tensor:
            return numbers.reshape(blocks).repeat_interleave(block[0], -2)[..., :n, :]

        minimums = None
        if _ZEROS in stored:
            minimums = Scales(of_rows(scales), of_rows(stored[_ZEROS]))
        levels = E4M3 if data.dtype == torch.float8_e4m3fn else INT8
        codes = data.view(torch.uint8)
        return GroupedWeight(levels, codes, block[1], Scales(of_rows(scales)), minimums)
