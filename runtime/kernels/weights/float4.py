"""4-bit floating-point numbers in groups with scales: MXFP4 and NVFP4.

A number is a sign, two bits of exponent and one of mantissa (E2M1; Open Compute Project,
"Microscaling Formats", 2023), two of them in a byte, the first one in the lower bits.

MXFP4 has an exponent (uint8, with a bias of 127) for each 32 inputs. gpt-oss stores stacked experts
`[..., K]` as `NAME_blocks` (`[..., K / 32, 16]`) and `NAME_scales` (`[..., K / 32]`), and other
weights as `NAME.weight_blocks` and `NAME.weight_scales`; compressed-tensors stores
`NAME.weight_packed` (`[N, K / 2]`) and `NAME.weight_scale`.

NVFP4 has a float8_e4m3fn scale for each 16 inputs and a float32 one for the tensor: `NAME.weight`,
`NAME.weight_scale` and `NAME.weight_scale_2`, whose product is the scale (ModelOpt); or
`NAME.weight_packed`, `NAME.weight_scale` and `NAME.weight_global_scale`, whose quotient it is
(compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat, Header
from .grouped import DOUBLED_E2M1, GroupedWeight, Scales, powers_of_two


@dataclass(frozen=True)
class Float4(CheckpointFormat):
    """See the top of this file."""

    name = "4-bit float"
    ignored = (".input_scale", ".input_global_scale")

    suffixes: tuple[str, ...]  # type: ignore[misc]
    """Of numbers, scales of groups, and the scale of the tensor, if there is one."""
    weight_suffix: str = ".weight"  # type: ignore[misc]

    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        (kind, packed), (scale_kind, scales), *_ = (headers[s] for s in self.suffixes)
        of_tensor = len(self.suffixes) > 2
        group, wanted = (16, ("F8_E4M3",)) if of_tensor else (32, ("U8", "F8_E8M0"))
        if kind != "U8" or scale_kind not in wanted or len(scales) < 2 or 0 in scales:
            return None
        shape = (*scales[:-1], scales[-1] * group)
        fits = packed in ((*shape[:-1], shape[-1] // 2), (*scales, group // 2))
        return shape if fits else None

    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        numbers, scales, *of_tensor = (stored[suffix] for suffix in self.suffixes)
        codes = torch.stack((numbers & 15, numbers >> 4), dim=-1).view(shape)
        if not of_tensor:
            # Levels are doubled. A scale of 255, which the format reserves, is 2 ** 128.
            halves = Scales(powers_of_two(scales.view(torch.uint8), 128))
            return GroupedWeight(DOUBLED_E2M1, codes, 32, halves)
        factor = of_tensor[0].float()
        factor = 0.5 / factor if "global" in self.suffixes[2] else 0.5 * factor
        factor = factor.flatten()[..., None, None] if len(shape) > 2 else factor.flatten()
        outer = factor.expand(*shape[:-1], 1)
        halves = Scales(outer, scales, scales.shape[-1])
        return GroupedWeight(DOUBLED_E2M1, codes, 16, halves)


GPT_OSS = Float4(("_blocks", "_scales"), "_blocks")
BLOCKS_MXFP4 = Float4((".weight_blocks", ".weight_scales"))
MXFP4 = Float4((".weight_packed", ".weight_scale"))
MODELOPT_NVFP4 = Float4((".weight", ".weight_scale", ".weight_scale_2"))
NVFP4 = Float4((".weight_packed", ".weight_scale", ".weight_global_scale"))
