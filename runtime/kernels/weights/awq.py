"""AWQ: 4-bit integers with a scale and a zero point for each group of inputs (Lin et al. 2023,
arXiv 2306.00978), in the layout that AutoAWQ calls `gemm`.

A weight `[N, K]` is stored transposed: `NAME.qweight` (int32 `[K, N / 8]`) and `NAME.qzeros` (int32
`[G, N / 8]`) hold 8 numbers of consecutive outputs in a word, of which the lowest 4 bits are output
0, the next ones 2, 4, 6, 1, 3, 5 and 7. `NAME.scales` is `[G, N]`. Input k belongs to group
k // (K / G), and w[n, k] = (q[k, n] - zero[g, n]) * scale[g, n].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat
from .grouped import GroupedWeight, Scales, integers

_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Lowest bit of each of the 8 outputs of a word."""


class _AWQ(CheckpointFormat):
    name = "awq"
    suffixes = (".qweight", ".qzeros", ".scales")
    weight_suffix = ".weight"
    required: ClassVar[Mapping[str, object]] = {"bits": 4, "version": "gemm"}

    def shape(self, headers: Mapping[str, tuple[str, Shape]]) -> Shape | None:
        (words, numbers), (zero_words, zeros), (_, scales) = (headers[s] for s in self.suffixes)
        if (words, zero_words) != ("I32", "I32") or not len(numbers) == len(scales) == 2:
            return None
        (k, packed), (groups, n) = numbers, scales
        if packed * 8 != n or zeros != (groups, packed) or not groups or k % groups:
            return None
        return n, k

    def grouped(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        numbers_KN, zeros_GN = (unpacked(stored[s], _SHIFTS) for s in (".qweight", ".qzeros"))
        groups = len(zeros_GN)
        return numbers_KN.T.unflatten(1, (groups, -1)), zeros_GN.T, stored[".scales"].T

    def weight(self, *grouped: Tensor) -> GroupedWeight:
        codes_NGE, zeros_NG, scales_NG = grouped
        scales, minimums = Scales(scales_NG), Scales(scales_NG, zeros_NG)
        return GroupedWeight(
            integers(4), codes_NGE.flatten(-2), codes_NGE.shape[-1], scales, minimums
        )


AWQ = _AWQ()


def unpacked(words: Tensor, shifts: Sequence[int]) -> Tensor:
    """Return the 4-bit numbers of int32 words `[..., N / 8]`, as uint8 `[..., N]`.

    Args:
        words: 8 numbers each.
        shifts: lowest bit of each number of a word.
    """
    numbers = torch.empty(*words.shape, len(shifts), dtype=torch.uint8, device=words.device)
    for i, shift in enumerate(shifts):  # one after the other: int32 takes four times as much
        numbers[..., i] = words >> shift & 15
    return numbers.flatten(-2)
