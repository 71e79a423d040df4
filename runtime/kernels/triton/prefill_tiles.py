"""How the tokens of a prefill step are dealt to the programs of its attention.

A tile is what a program takes: the heads of one group of some neighbouring tokens of one row. The
tiles of a step are laid out on the device, once for all its layers: `prefill_tiles` cuts the tokens
wherever the row changes and at every multiple of B tokens, which makes at most ceil(T / B) + R
pieces for R rows and padding. With B = 4 and rows 7 7 7 2 2 2 . . (null row 9):

    token_rows   7 7 7 2 2 2 9 9        tiles   0 3 4 6 8 8 8 ...   (a tile ends where the next
                                                                     begins; past T it is empty)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import call_kernel, let_dependents_start, num_multiprocessors, wait_for_inputs

__all__ = [
    "SPLIT",
    "PrefillTiling",
    "any_tiling",
    "num_prefill_tiles",
    "prefill_tiles",
    "prefill_tiling",
    "reference_prefill_tiles",
]

_SCAN = 1024
"""Tokens that the kernel of tiles looks at together."""


SPLIT = 1024
"""Positions of a part of the context in steps whose parts are the same in all steps."""


class PrefillTiling(NamedTuple):
    """Sizes of the attention kernel for a shape of model and step."""

    block_m: int
    """Queries (token, head of the group) of a program."""
    block_n: int
    """Positions of an iteration."""
    num_warps: int
    num_stages: int
    split: int = 0
    """Positions of a part of the context, a multiple of `block_n`: parts are summed alone, and then
    together in their order. Scores are masked in all of them. 0: the context is one part, where
    positions that all queries see have a loop of their own, without masks."""

    def heads(self, group: int) -> int:
        """Query heads of a tile, of `group` that share a kv head."""
        return min(group, self.block_m)

    def tokens(self, group: int) -> int:
        """Most tokens of a tile."""
        return self.block_m // self.heads(group)


def prefill_tiling(
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    storage: str,
    device: torch.device,
) -> PrefillTiling:
    """Sizes for a step of `tokens`; the same for the same arguments.

    Heads of usual width get 128 queries, two warp groups of Hopper, or 64, the least that a warp
    group multiplies. 64 queries read keys and values faster than the L2 cache gives them: 16 KiB
    for half a million multiplications, 0.14 us of a multiprocessor at its peak, 15 TB/s together.
    They pay only where 128 would leave more than a quarter of the device idle.

    Of the stages one is for the block table, the others hold keys and values. None of these spills
    registers.
    """
    small = any_tiling(head_dim, dtype, storage, device)
    if dtype == torch.float32 or head_dim > 128:
        return small
    wide = 128 if head_dim <= 64 else 64
    large = PrefillTiling(128, 32 if storage != "model" else wide, 8, 3)
    group = num_heads // num_kv_heads
    programs = triton.cdiv(tokens, large.tokens(group)) * num_kv_heads
    return large if 4 * programs >= 3 * num_multiprocessors(device) else small


def any_tiling(
    head_dim: int, dtype: torch.dtype, storage: str, device: torch.device
) -> PrefillTiling:
    """Sizes that do not depend on the step: of few queries, because a decode step has few."""
    if dtype == torch.float32:  # multiplied by the ordinary units: as small as products can be
        return PrefillTiling(16, 32 if head_dim <= 64 else 16, 8 if head_dim > 128 else 4, 1)
    quantised = storage != "model"
    if head_dim > 128:
        tight = head_dim > 256 and not _has_warp_groups(device)
        return PrefillTiling(32 if quantised else 64, 16 if tight else 32, 8, 3)
    if quantised:
        return PrefillTiling(64, 32, 8, 3)
    return PrefillTiling(64, 64 if head_dim <= 64 else 32, 4, 3)


def _has_warp_groups(device: torch.device) -> bool:
    """Whether products read both operands from shared memory: compute capability 9.0, which is
    what sizes are chosen for where there is no device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def num_prefill_tiles(tokens: int, rows: int, tokens_of_tile: int) -> int:
    """Tiles that are enough for any partition of `tokens` into `rows` rows and padding."""
    return -(-tokens // tokens_of_tile) + rows


def reference_prefill_tiles(token_rows_T: Tensor, rows: int, tokens_of_tile: int) -> Tensor:
    """Plain torch; arguments and result as in `prefill_tiles`."""
    tokens = token_rows_T.shape[0]
    token_T = torch.arange(tokens, device=token_rows_T.device)
    cut_T = token_T % tokens_of_tile == 0
    cut_T[1:] |= token_rows_T[1:] != token_rows_T[:-1]
    count = num_prefill_tiles(tokens, rows, tokens_of_tile) + 1
    tiles = torch.full((count,), tokens, dtype=torch.int32, device=token_rows_T.device)
    starts = token_T[cut_T]
    tiles[: len(starts)] = starts.int()
    return tiles


def prefill_tiles(token_rows_T: Tensor, rows: int, tokens_of_tile: int) -> Tensor:
    """First token of each tile, then T: int32 `[num_prefill_tiles(...) + 1]`.

    Args:
        token_rows_T: int64; equal ones are neighbours.
        rows: most distinct rows besides the null row.
        tokens_of_tile: most tokens of a tile.
    """
    tokens = token_rows_T.shape[0]
    count = num_prefill_tiles(tokens, rows, tokens_of_tile) + 1
    out = torch.empty(count, dtype=torch.int32, device=token_rows_T.device)
    call_kernel(
        _tiles_kernel,
        (1,),
        token_rows_T,
        out,
        tokens,
        count,
        TOKENS=tokens_of_tile,
        BLOCK=_SCAN,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["T", "COUNT"])
def _tiles_kernel(  # type: ignore[no-untyped-def]
    token_rows_ptr, tiles_ptr, T, COUNT,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the i-th token where a tile begins is written to place i, the rest are T."""
    wait_for_inputs(PDL)
    let_dependents_start(PDL)
    found = 0
    for start in range(0, T, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < T
        row = tl.load(token_rows_ptr + token, mask=there, other=0)
        before = tl.load(token_rows_ptr + token - 1, mask=there & (token > 0), other=-1)
        begins = (there & ((token % TOKENS == 0) | (row != before))).to(tl.int32)
        place = found + tl.cumsum(begins, axis=0) - 1
        tl.store(tiles_ptr + place, token, mask=(begins != 0) & (place < COUNT))
        found += tl.sum(begins, axis=0)
    for start in range(found, COUNT, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(tiles_ptr + place, tl.zeros_like(place) + T, mask=place < COUNT)
