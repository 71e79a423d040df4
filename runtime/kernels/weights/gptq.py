"""GPTQ: 4-bit integers with a scale and a zero point for each group of inputs (Frantar et al. 2022,
arXiv 2210.17323), in the layout that GPTQModel calls `gptq` (v1).

Of a weight `[N, K]`, `NAME.qweight` (int32 `[K / 8, N]`) holds 8 numbers of consecutive inputs in a
word, and `NAME.qzeros` (int32 `[G, N / 8]`) the zero points of 8 consecutive outputs, both from the
lowest 4 bits on; `ONES` has been subtracted from the words of zero points. `NAME.scales` is
`[G, N]`. `NAME.g_idx` (int32 `[K]`) is the group of each input, which must be g = k // (K / G), and
w[n, k] = (q[k, n] - zero[g, n]) * scale[g, n].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .awq import AWQ, unpacked
from .checkpoint_format import CheckpointFormat
from .grouped import GroupedWeight

ONES = 0x11111111
"""1 in each 4 bits of a word. A zero point of 0 borrows from the next one."""

_SHIFTS = tuple(range(0, 32, 4))
"""Lowest bit of each of the 8 numbers of a word."""


class _GPTQ(CheckpointFormat):
    name = "gptq"
    suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")
    weight_suffix = ".weight"
    required: ClassVar[Mapping[str, object]] = {
        "bits": 4,
        "desc_act": False,
        "format": "gptq",
        "checkpoint_format": "gptq",  # the older name of `format`
    }

    def shape(self, headers: Mapping[str, tuple[str, Shape]]) -> Shape | None:
        (words, numbers), (zero_words, zeros), (_, scales), (index, inputs) = (
            headers[suffix] for suffix in self.suffixes
        )
        if (words, zero_words, index) != ("I32",) * 3 or (len(scales), len(inputs)) != (2, 1):
            return None
        (groups, n), (k,) = scales, inputs
        if k % 8 or n % 8 or numbers != (k // 8, n) or zeros != (groups, n // 8):
            return None
        return None if not groups or not k or k % groups else (n, k)

    def grouped(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        scales_GN, g_idx_K = stored[".scales"], stored[".g_idx"]
        groups, k = len(scales_GN), len(g_idx_K)
        ordered = torch.arange(k, device=g_idx_K.device) // (k // groups)
        if not g_idx_K.is_meta and not torch.equal(g_idx_K.long(), ordered):
            raise ValueError(
                f"its g_idx does not assign {k // groups} inputs after the other to each of "
                f"{groups} groups; only weights quantised with desc_act = False are supported"
            )
        numbers_NK = unpacked(stored[".qweight"].T, _SHIFTS)
        zeros_GN = unpacked(stored[".qzeros"] + ONES, _SHIFTS)
        return numbers_NK.unflatten(1, (groups, -1)), zeros_GN.T, scales_GN.T

    def weight(self, *grouped: Tensor) -> GroupedWeight:
        return AWQ.weight(*grouped)


GPTQ = _GPTQ()
