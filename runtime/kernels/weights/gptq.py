"""GPTQ and AWQ: integers with a scale and a zero point for each group of inputs.

A weight `[N, K]` is stored transposed. `NAME.scales` is `[G, N]`, `NAME.qzeros` (int32
`[G, N * b / 32]`) holds zero points of b bits of consecutive outputs in a word, and

    w[n, k] = (q[k, n] - zero[g, n]) * scale[g, n], of group g = k // (K / G)

GPTQ (Frantar et al. 2022, arXiv 2210.17323), in the layouts that GPTQModel calls `gptq` (v1) and
`gptq_v2`: `NAME.qweight` (int32 `[K * b / 32, N]`) holds numbers of b bits (2, 4 or 8) of
consecutive inputs in a word, from the lowest bits on; in v1, one has been subtracted from every
zero point. `NAME.g_idx` (int32 `[K]`), if it is there, is the group g of each input.

AWQ (Lin et al. 2023, arXiv 2306.00978), in the layout that AutoAWQ calls `gemm`: `NAME.qweight`
(int32 `[K, N / 8]`) holds numbers of 4 bits of consecutive outputs in a word. In it and in
`NAME.qzeros`, the lowest bits are output 0, the next ones 2, 4, 6, 1, 3, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat, Header, checked_groups, group_of, unpacked
from .grouped import GroupedWeight, Scales, integers

_G_IDX = ".g_idx"


@dataclass(frozen=True)
class GPTQ(CheckpointFormat):
    """See the top of this file."""

    name = "gptq"
    suffixes = (".qweight", ".qzeros", ".scales")
    optional = (_G_IDX,)
    packs_outputs: ClassVar[bool] = False
    """Whether words of `.qweight` hold outputs, not inputs."""

    sizes: tuple[int, ...] = ()
    """Of groups, from `config.json`."""
    zero_offset: int = 1
    """What has been subtracted from zero points."""
    reordered: bool = False
    """Whether inputs of a group need not be consecutive (`desc_act`)."""

    def shifts(self, bits: int) -> Sequence[int]:
        """Return the lowest bit of each number of a word; empty: `bits` is not supported."""
        return range(0, 32, bits) if bits in (2, 4, 8) else ()

    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        (words, numbers), (zero_words, zeros), (_, scales) = (headers[s] for s in self.suffixes)
        two = len(numbers) == len(zeros) == len(scales) == 2
        if (words, zero_words) != ("I32", "I32") or not two or zeros[0] != scales[0]:
            return None
        (groups, packed), n = zeros, scales[1]
        per_word = len(self.shifts(packed * 32 // max(n, 1)))
        k, columns = (numbers[0], packed) if self.packs_outputs else (numbers[0] * per_word, n)
        if not n or n != packed * per_word or numbers[1] != columns:
            return None
        fits = headers.get(_G_IDX, Header("I32", (k,))) == ("I32", (k,))
        return (n, k) if fits and group_of(k, groups, self.sizes) is not None else None

    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        words, zero_words, scales_NG = (stored[suffix].T for suffix in self.suffixes)
        (n, k), groups = shape, scales_NG.shape[1]
        bits = 32 * len(zero_words) // n
        shifts = self.shifts(bits)
        if self.packs_outputs:
            codes_NK = unpacked(words.T, shifts).T
        else:
            codes_NK = unpacked(words, shifts, bits)
        # A zero point of 0 has borrowed from the next one in its word, so words are added.
        offsets = sum(self.zero_offset << shift for shift in shifts)
        zeros_NG = unpacked(zero_words.T + offsets, shifts, bits).T
        group = group_of(k, groups, self.sizes)
        assert group is not None, "shapes that were refused"
        if _G_IDX in stored:
            g_idx_K = checked_groups(stored[_G_IDX], groups)
            if self.reordered:
                group, zeros_NG, scales_NG = 1, zeros_NG[:, g_idx_K], scales_NG[:, g_idx_K]
            elif not g_idx_K.is_meta and not torch.equal(g_idx_K, torch.arange(k) // group):
                raise ValueError(
                    f"its g_idx does not assign {group} inputs after the other to each of "
                    f"{groups} groups, as desc_act = False in its config.json says"
                )
        minimums = Scales(scales_NG, zeros_NG)
        return GroupedWeight(integers(bits), codes_NK, group, Scales(scales_NG), minimums)


@dataclass(frozen=True)
class AWQ(GPTQ):
    """See the top of this file."""

    name = "awq"
    packs_outputs = True

    zero_offset: int = 0

    def shifts(self, bits: int) -> Sequence[int]:
        return (0, 16, 4, 20, 8, 24, 12, 28) if bits == 4 else ()
