"""NF4, 4-bit quantiles of a normal distribution (Dettmers et al. 2023, arXiv 2305.14314), as
bitsandbytes stores them.

`NAME.weight` (uint8 `[N * K / 2, 1]`) holds two numbers in a byte, the first one in the higher
bits; `NAME.weight.absmax` the scale of each block of consecutive numbers, as float32, or as uint8
numbers a for which it is `nested_quant_map[a] * nested_absmax[block of a] + nested_offset`.
`NAME.weight.quant_state.bitsandbytes__nf4` is JSON, as bytes, with the sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.parameter import Shape
from .checkpoint_format import CheckpointFormat, Header, group_of
from .grouped import NF4, GroupedWeight, Scales

_STATE = ".weight.quant_state.bitsandbytes__nf4"
_ABSMAX, _MAP = ".weight.absmax", ".weight.quant_map"
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")


class BitsAndBytes(CheckpointFormat):
    """See the top of this file."""

    name = "nf4"
    suffixes = (".weight", _ABSMAX, _MAP, _STATE)
    optional = _NESTED

    def shape(
        self, name: str, headers: Mapping[str, Header], read: Callable[[str], Tensor]
    ) -> Shape | None:
        try:
            state = _state(read(_STATE))
            n, k = state["shape"]
            blocks = headers[_ABSMAX].shape[0]
            fits = min(n, k) > 0 and group_of(n * k, blocks) is not None
            fits = fits and k % (n * k // blocks) == 0
            if _NESTED[0] in headers:
                fits = fits and int(state["nested_blocksize"]) > 0
                float(state["nested_offset"])
        except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
            return None
        return (n, k) if fits and headers[".weight"] == ("U8", (n * k // 2, 1)) else None

    def weight(self, stored: Mapping[str, Tensor], shape: Shape) -> GroupedWeight:
        bytes_, absmax = stored[".weight"], stored[_ABSMAX]
        codes = torch.stack((bytes_ >> 4, bytes_ & 15), dim=-1).view(shape)
        group = shape[0] * shape[1] // len(absmax)
        if absmax.is_meta:
            return GroupedWeight(NF4, codes, group, Scales(absmax.float().view(shape[0], -1)))
        if not torch.allclose(stored[_MAP].float(), NF4.table(), rtol=0, atol=1e-6):
            raise ValueError("its quant_map has other numbers than NF4")
        if _NESTED[0] in stored:
            state, (outer, levels) = _state(stored[_STATE]), (stored[s] for s in _NESTED)
            outer = outer.repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
            absmax = levels[absmax.int()] * outer + float(state["nested_offset"])
        return GroupedWeight(NF4, codes, group, Scales(absmax.float().view(shape[0], -1)))


def _state(tensor: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(bytes(tensor.tolist()))
    return state
