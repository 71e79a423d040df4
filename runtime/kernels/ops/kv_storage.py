"""8-bit keys and values with one scale per vector: the PyTorch reference.

A vector x is stored as `data * scale` with `scale = amax(|x|) / 127` for int8 and `/ 448` for fp8
(float8_e4m3fn, whose largest number is 448). x is divided by the scale after that is rounded up to
bfloat16. So no element exceeds the range, and the rounding of the scale adds no error.

In the arena (see `cache/arena.py`) a head of a block has `block_size * (D + 2)` bytes. Each slot
has a scale of two bytes:

    D bytes of slot 0 | D bytes of slot 1 | ... | scale 0 | scale 1 | ...
"""

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""Largest number of each storage; both are symmetric around zero."""
DATA_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantise(x: Tensor, storage: str) -> tuple[Tensor, Tensor]:
    """Return data `[..., D]` as bytes (uint8) and scales `[...]` in bfloat16 of vectors `[..., D]`.

    A vector of zeros has scale 0. A vector with NaN or infinity has a non-finite scale, so that the
    error remains visible.
    """
    x = x.float()
    amax = x.abs().amax(-1)
    exact = amax / LARGEST[storage]
    scale = exact.to(torch.bfloat16)
    bits = scale.view(torch.int16)
    # The next bfloat16 away from zero is the next integer; infinity is unchanged.
    scale = torch.where(scale.float() < exact, (bits + 1).view(torch.bfloat16), scale)
    divisor = torch.where(scale == 0, 1.0, scale.float())
    scaled = (x / divisor[..., None]).clamp(-LARGEST[storage], LARGEST[storage])
    if storage == "int8":
        scaled = scaled.nan_to_num(0.0).round()
    return scaled.to(DATA_DTYPES[storage]).view(torch.uint8), scale


def dequantise(data: Tensor, scale: Tensor, storage: str) -> Tensor:
    """Return float32 `[..., D]` of the bytes `[..., D]` and scales `[...]`."""
    return data.view(DATA_DTYPES[storage]).float() * scale[..., None].float()


def write_blocks(
    side: Tensor, slots_T: Tensor, x_TGD: Tensor, block_size: int, storage: str
) -> None:
    """Store the vectors of T tokens in one side of a layer, in place.

    Args:
        side: the arena of one side: `[num_blocks, G, block_size, D]`, or if quantised bytes
            `[num_blocks, G, block_size * (D + 2)]`.
        slots_T: int64, slot of each token.
        x_TGD: vectors to store.
        block_size: slots of a block.
        storage: `model`, `int8` or `fp8`.
    """
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    if storage == "model":
        side[blocks_T, :, offsets_T] = x_TGD
        return
    heads, width = x_TGD.shape[1:]
    data_TGD, scale_TG = quantise(x_TGD, storage)
    pieces = data_TGD, scale_TG[..., None].contiguous().view(torch.uint8)
    starts = offsets_T * width, block_size * width + offsets_T * 2
    head_G = torch.arange(heads, device=side.device)[:, None]
    for piece, start_T in zip(pieces, starts, strict=True):
        byte = torch.arange(piece.shape[-1], device=side.device)
        index = (blocks_T[:, None, None], head_G, start_T[:, None, None] + byte)
        side.index_put_(index, piece)


def read_blocks(side: Tensor, tables: Tensor, block_size: int, storage: str) -> Tensor:
    """Return the contents of the blocks `[..., B]`, in order: `[..., G, B * block_size, D]`.

    In the arena's dtype, or float32 if it is quantised; `side` as in `write_blocks`.
    """
    gathered = side[tables.long()].transpose(len(tables.shape) - 1, len(tables.shape))
    if storage == "model":
        return gathered.flatten(-3, -2)
    width = gathered.shape[-1] // block_size - 2
    data, scale = gathered.split((block_size * width, block_size * 2), dim=-1)
    data = data.unflatten(-1, (block_size, width))
    scale = scale.contiguous().view(torch.bfloat16)
    return dequantise(data, scale, storage).flatten(-3, -2)
