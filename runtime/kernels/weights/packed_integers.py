"""Integers packed along the inputs, as compressed-tensors and MLX store them.

compressed-tensors (`pack-quantized`): of a weight `[N, K]`, `NAME.weight_packed` (int32
`[N, ceil(K * b / 32)]`) holds numbers of b bits (2, 4 or 8) of consecutive inputs in a word, from
the lowest bits on, each plus 2 ** (b - 1). `NAME.weight_scale` is `[N, G]`, `NAME.weight_shape` is
(N, K). `NAME.weight_zero_point` (int32 `[ceil(N * b / 32), G]`), if it is there, holds as many bits
of consecutive outputs, with the same offset. `NAME.weight_g_idx` (`[K]`) is the group g of an
input, if it is not k // (K / G). w[n, k] = (q[n, k] - zero[n, g]) * scale[n, g].

MLX: `NAME.weight` (uint32 `[N, K * b / 32]`) holds unsigned numbers in the same way, and with
`NAME.scales` and `NAME.biases`, both `[N, G]`, w[n, k] = q[n, k] * scale[n, g] + bias[n, g].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat, Header, checked_groups, group_of, unpacked
from .grouped import GroupedWeight, Scales, integers

_BITS = (2, 4, 8)
_ZEROS, _G_IDX = ".weight_zero_point", ".weight_g_idx"


@dataclass(frozen=True)
class PackedIntegers(CheckpointFormat):
    """`pack-quantized` of compressed-tensors; see the top of this file."""

    name = "compressed-tensors"
    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")
    optional = (_ZEROS, _G_IDX)

    sizes: tuple[int, ...] = ()
    """Of groups, from `config.json`."""

    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        (words, packed), (_, scales), (_, size) = (headers[s] for s in self.suffixes)
        if words != "I32" or len(packed) != 2 or len(scales) != 2 or size != (2,):
            return None
        n, k = map(int, read(".weight_shape").tolist())
        if not 0 < k < 1 << 31 or (n, n) != (packed[0], scales[0]) or scales[1] > k:
            return None
        bits = next((bits for bits in _BITS if packed[1] == -(-k * bits // 32)), None)
        if bits is None or group_of(k, scales[1], self.sizes) is None:
            return None
        zeros, g_idx = ("I32", (-(-n * bits // 32), scales[1])), ("I32", (k,))
        fits = (headers.get(_ZEROS, zeros), headers.get(_G_IDX, g_idx)) == (zeros, g_idx)
        return (n, k) if fits else None

    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        words_NW, scales_NG = stored[".weight_packed"], stored[".weight_scale"]
        (n, k), groups = shape, scales_NG.shape[1]
        bits = next(b for b in _BITS if words_NW.shape[1] == -(-k * b // 32))
        shifts = range(0, 32, bits)
        codes_NK = unpacked(words_NW, shifts, bits)[:, :k]
        zeros_NG, group = None, group_of(k, groups, self.sizes)
        assert group is not None, "shapes that were refused"
        if _ZEROS in stored:
            zeros_NG = unpacked(stored[_ZEROS].T, shifts, bits).T[:n]
        if _G_IDX in stored:
            g_idx_K = stored[_G_IDX]
            if not g_idx_K.is_meta and bool((g_idx_K == -1).all()):  # it was not reordered
                g_idx_K = torch.arange(k) // group
            g_idx_K, group = checked_groups(g_idx_K, groups), 1
            scales_NG = scales_NG[:, g_idx_K]
            zeros_NG = None if zeros_NG is None else zeros_NG[:, g_idx_K]
        scales = Scales(scales_NG)
        if zeros_NG is None:
            return GroupedWeight(integers(bits, 1 << bits - 1), codes_NK, group, scales)
        minimums = Scales(scales_NG, zeros_NG)
        return GroupedWeight(integers(bits), codes_NK, group, scales, minimums)


@dataclass(frozen=True)
class MLX(CheckpointFormat):
    """See the top of this file."""

    name = "mlx"
    suffixes = (".weight", ".scales", ".biases")

    settings: Mapping[str, Any] = field(default_factory=dict)
    """`quantization` of `config.json`: `bits` and `group_size`, and others for some modules."""

    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        (words, packed), (_, scales), (_, biases) = (headers[s] for s in self.suffixes)
        own = self.settings.get(name)
        settings = self.settings if not isinstance(own, Mapping) else {**self.settings, **own}
        bits, group = settings.get("bits"), settings.get("group_size")
        if words != "U32" or len(packed) != 2 or bits not in _BITS or not isinstance(group, int):
            return None
        n, k = packed[0], packed[1] * 32 // bits
        fits = scales == biases == (n, k // max(group, 1)) and group_of(k, scales[1]) == group
        return (n, k) if fits else None

    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        words_NW, scales_NG = stored[".weight"], stored[".scales"]
        bits = 32 * words_NW.shape[1] // shape[1]
        codes_NK = unpacked(words_NW.view(torch.int32), range(0, 32, bits), bits)
        minimums = Scales(-stored[".biases"])
        group = shape[1] // scales_NG.shape[1]
        return GroupedWeight(integers(bits), codes_NK, group, Scales(scales_NG), minimums)
