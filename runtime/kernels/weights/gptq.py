"""GPTQ: integers with a scale and a zero point for each group of inputs (Frantar et al. 2022, arXiv
2210.17323), in the layouts that GPTQModel calls `gptq` (v1) and `gptq_v2`.

Of a weight `[N, K]`, `NAME.qweight` (int32 `[K * b / 32, N]`) holds numbers of b bits (2, 4 or 8)
of consecutive inputs in a word, and `NAME.qzeros` (int32 `[G, N * b / 32]`) the zero points of
consecutive outputs, both from the lowest bits on; in v1, one has been subtracted from every zero
point. `NAME.scales` is `[G, N]`. `NAME.g_idx` (int32 `[K]`) is the group g of each input, if it is
not k // (K / G), and w[n, k] = (q[k, n] - zero[g, n]) * scale[g, n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .awq import with_zeros
from .checkpoint_format import CheckpointFormat, Header, checked_groups, group_of, unpacked
from .grouped import GroupedWeight

_G_IDX = ".g_idx"


@dataclass(frozen=True)
class GPTQ(CheckpointFormat):
    """See the top of this file."""

    name = "gptq"
    suffixes = (".qweight", ".qzeros", ".scales")
    optional = (_G_IDX,)

    zero_offset: int = 1
    """What has been subtracted from zero points."""
    reordered: bool = False
    """Whether inputs of a group need not be consecutive (`desc_act`)."""
    sizes: tuple[int, ...] = ()
    """Of groups, from `config.json`."""

    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        (words, numbers), (zero_words, zeros), (_, scales) = (headers[s] for s in self.suffixes)
        if (words, zero_words) != ("I32", "I32") or not len(numbers) == len(zeros) == 2:
            return None
        if len(scales) != 2 or not scales[1] or numbers[1] != scales[1] or zeros[0] != scales[0]:
            return None
        (groups, n), bits = scales, zeros[1] * 32 // scales[1]
        k = numbers[0] * 32 // bits if bits in (2, 4, 8) else 0
        if zeros[1] * 32 != n * bits or group_of(k, groups, self.sizes) is None:
            return None
        return (n, k) if headers.get(_G_IDX, Header("I32", (k,))) == ("I32", (k,)) else None

    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        words_NW, scales_NG = stored[".qweight"].T, stored[".scales"].T
        (k, groups), bits = (shape[1], scales_NG.shape[1]), 32 * words_NW.shape[1] // shape[1]
        shifts = range(0, 32, bits)
        # A zero point of 0 has borrowed from the next one in its word, so words are added.
        offsets = sum(self.zero_offset << shift for shift in shifts)
        zeros_NG = unpacked(stored[".qzeros"] + offsets, shifts, bits).T
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
        return with_zeros(unpacked(words_NW, shifts, bits), group, zeros_NG, scales_NG, bits)
