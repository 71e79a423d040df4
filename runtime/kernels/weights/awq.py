"""AWQ: 4-bit integers with a scale and a zero point for each group of inputs (Lin et al. 2023,
arXiv 2306.00978), in the layout that AutoAWQ calls `gemm`.

A weight `[N, K]` is stored transposed: `NAME.qweight` (int32 `[K, N / 8]`) and `NAME.qzeros` (int32
`[G, N / 8]`) hold 8 numbers of consecutive outputs in a word, of which the lowest 4 bits are output
0, the next ones 2, 4, 6, 1, 3, 5 and 7. `NAME.scales` is `[G, N]`. Input k belongs to group
k // (K / G), and w[n, k] = (q[k, n] - zero[g, n]) * scale[g, n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat, Header, group_of, unpacked
from .grouped import GroupedWeight, Scales, integers

_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Lowest bit of each of the 8 outputs of a word."""


@dataclass(frozen=True)
class AWQ(CheckpointFormat):
    """See the top of this file."""

    name = "awq"
    suffixes = (".qweight", ".qzeros", ".scales")

    sizes: tuple[int, ...] = ()
    """Of groups, from `config.json`."""

    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        (words, numbers), (zero_words, zeros), (_, scales) = (headers[s] for s in self.suffixes)
        if (words, zero_words) != ("I32", "I32") or not len(numbers) == len(scales) == 2:
            return None
        (k, packed), (groups, n) = numbers, scales
        if packed * 8 != n or zeros != (groups, packed) or group_of(k, groups, self.sizes) is None:
            return None
        return n, k

    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        codes_KN, zeros_GN = (unpacked(stored[s], _SHIFTS) for s in (".qweight", ".qzeros"))
        group = group_of(shape[1], len(zeros_GN), self.sizes)
        assert group is not None, "shapes that were refused"
        return with_zeros(codes_KN.T, group, zeros_GN.T, stored[".scales"].T)


def with_zeros(
    codes_NK: Tensor, group: int, zeros_NG: Tensor, scales_NG: Tensor, bits: int = 4
) -> GroupedWeight:
    """Return the weight (codes - zeros) * scales, in groups of this size."""
    minimums = Scales(scales_NG, zeros_NG)
    return GroupedWeight(integers(bits), codes_NK, group, Scales(scales_NG), minimums)
