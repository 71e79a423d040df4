"""The tensors that hold all keys and values, at addresses that never change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final, Literal

import torch

from .blocks import NULL_BLOCK
from .spec import LayerGroup, LayerSpec

__all__ = ["SCALE_BYTES", "Arena", "HostArena", "Storage"]

Storage = Literal["model", "int8", "fp8"]
"""How keys and values are stored: in the model's dtype, or as 8-bit numbers with a bfloat16 scale
for each vector (fp8 is float8_e4m3fn)."""

SCALE_BYTES: dict[Storage, int] = {"model": 0, "int8": 2, "fp8": 2}
"""Bytes of the scale of a stored vector."""

COPY_BYTES = 16 << 20
"""Maximum bytes of one batch of block copies within an arena."""

BlockPair = tuple[int, int]
"""(source block, destination block) of a copy."""


def _block_shape(spec: LayerSpec, block_size: int, storage: Storage) -> tuple[int, ...]:
    """Shape of one block of one side of one layer."""
    if storage == "model":
        return (spec.num_kv_heads, block_size, spec.head_dim)
    return (spec.num_kv_heads, block_size * (spec.head_dim + spec.scale_bytes))


class Arena:
    """One allocation for all layers, blocks and heads.

    In the model's dtype its shape is `[layers_per_group, sides, num_blocks, kv_heads, block_size,
    head_dim]`. The two sides are keys and values; latent attention has one side. A quantised arena
    has bytes, `[layers_per_group, sides, num_blocks, kv_heads, block_size * (head_dim + 2)]`: for
    each head of a block `[block_size, head_dim]` 8-bit numbers, then `block_size` bfloat16 scales.

    A block id that a group holds is that block in each of its layers. Layers of different groups at
    the same index share `arena[index]`, but never a block. Inside a block each head is one
    contiguous `[block_size, head_dim]`, so a kernel reads the keys of a head in long runs. The slot
    of a token is `block * block_size + offset`.

    Captured steps contain the address, so the tensor is never replaced or resized.

    Only the null block is initialised, because padding computes with its contents, and 0 * NaN is
    NaN. All other unused slots may contain anything, NaN included. They cannot affect a result:
    attention does not read masked positions, or replaces their scores (before the softmax) and
    their values (before the weighted sum). Multiplying values by a probability of zero would not be
    enough.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        storage: Storage = "model",
    ) -> None:
        """Allocate the arena for groups of `group_layers`; `dtype` is the model's."""
        spec, layers_per_group = groups[0].spec, len(groups[0].layers)
        element = dtype if storage == "model" else torch.uint8
        stored = (element.itemsize, SCALE_BYTES[storage])
        assert stored == (spec.element_bytes, spec.scale_bytes), f"{storage} of {dtype}: {spec}"
        self.storage: Storage = storage
        shape = (
            layers_per_group,
            spec.sides,
            num_blocks,
            *_block_shape(spec, block_size, storage),
        )
        self.tensor: Final = torch.empty(shape, dtype=element, device=device)
        """The allocation, contiguous, in the shape of the class docstring."""
        self.tensor[:, :, NULL_BLOCK].zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.tensor.nbytes

    @property
    def address(self) -> int:
        """Device address of the first element, which never changes."""
        return self.tensor.data_ptr()

    def copy_blocks(self, pairs: Sequence[BlockPair]) -> None:
        """Copy whole blocks, in all layers. No destination may be a source.

        Copies run in batches of at most `COPY_BYTES`, which limits the temporary memory.
        """
        if not pairs:
            return
        pinned = self.tensor.is_cuda  # a copy from pageable memory would wait for all earlier work
        ids = torch.tensor(pairs, pin_memory=pinned).to(self.tensor.device, non_blocking=True)
        block_bytes = self.tensor.nbytes // self.tensor.shape[2]
        for piece in ids.split(max(1, COPY_BYTES // block_bytes)):
            source, destination = piece.unbind(1)
            self.tensor.index_copy_(2, destination, self.tensor.index_select(2, source))


class HostArena:
    """Blocks in host memory (pinned for a CUDA arena) for swapped requests.

    `[num_blocks, layers_per_group, sides, ...]`: a block is contiguous, so that it is transferred
    in one piece. Copies are asynchronous, on the arena's stream.

    torch's allocator of pinned memory rounds sizes up to a power of two and never frees them. So
    the memory is allocated as pageable, and registered with CUDA until `close`.
    """

    def __init__(self, arena: Arena, num_blocks: int) -> None:
        """Allocate `num_blocks` host blocks for `arena`. The host has no null block.

        Raises:
            RuntimeError: CUDA cannot pin so much memory.
        """
        self._arena = arena.tensor.transpose(0, 2).transpose(1, 2)
        shape = (num_blocks, *self._arena.shape[1:])
        self._tensor = torch.empty(shape, dtype=self._arena.dtype)
        self._unpin: weakref.finalize[[int], HostArena] | None = None
        if arena.tensor.is_cuda:
            status = torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0)
            if int(status) != 0:
                raise RuntimeError(
                    f"CUDA cannot pin {self.nbytes} bytes of host memory for swapped blocks"
                    f" ({status}): lower host_cache_bytes"
                )
            unregister = torch.cuda.cudart().cudaHostUnregister
            self._unpin = weakref.finalize(self, unregister, self.address)
            self._unpin.atexit = False

    def close(self) -> None:
        """Unpin the memory. Copies must not follow. Idempotent."""
        if self._unpin is not None:
            self._unpin()

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self._tensor.nbytes

    @property
    def num_blocks(self) -> int:
        """Blocks of the host arena."""
        return self._tensor.shape[0]

    @property
    def address(self) -> int:
        """Host address of the first element."""
        return self._tensor.data_ptr()

    def swap_out(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (arena block, host block) from the arena."""
        for block, host_block in pairs:
            self._tensor[host_block].copy_(self._arena[block], non_blocking=True)

    def swap_in(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (host block, arena block) to the arena."""
        for host_block, block in pairs:
            self._arena[block].copy_(self._tensor[host_block], non_blocking=True)
