"""The memory that holds all keys and values, at addresses that never change."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import torch

from .blocks import NULL_BLOCK
from .row_states import Copies, RowPools
from .spec import LayerGroup, PagedState, RowLayout, layouts

Storage = Literal["model", "int8", "fp8"]
"""How keys and values are stored: in the model's dtype, or as 8-bit numbers with a bfloat16 scale
for each vector (fp8 is float8_e4m3fn)."""

SCALE_BYTES: dict[Storage, int] = {"model": 0, "int8": 2, "fp8": 2}
"""Bytes of the scale of a stored vector."""

COPY_BYTES = 16 << 20
"""Maximum bytes of one batch of block copies within an arena."""

CopyKind = Literal["within", "to_host", "from_host"]
"""Where blocks are copied: in the device's memory, from it to the host, or back."""

BlockPair = tuple[int, int]
"""(source block, destination block) of a copy."""


def arena_views(
    arena: torch.Tensor, counts: Mapping[PagedState, int], block_size: int, storage: Storage
) -> tuple[torch.Tensor, ...]:
    """Return the tensor of each of `layouts` in the memory of an `Arena`, in their order."""
    if len(counts) == 1:
        return (arena,)
    shapes = [_shape(*counted, block_size, storage) for counted in counts.items()]
    sizes = [math.prod(shape) for shape in shapes]
    num_blocks = arena.numel() // sum(sizes)
    parts = arena.split([num_blocks * size for size in sizes])
    return tuple(
        part.view(*shape[:2], num_blocks, *shape[3:])
        for part, shape in zip(parts, shapes, strict=True)
    )


def _shape(layout: PagedState, count: int, block_size: int, storage: Storage) -> tuple[int, ...]:
    """Shape of `count` layers of a layout, with one block."""
    sides = (count, layout.sides, 1, layout.heads)
    if storage == "model":
        return (*sides, block_size, layout.head_dim)
    return (*sides, block_size * (layout.head_dim + SCALE_BYTES[storage]))


class Arena:
    """One allocation for all layers, blocks and heads.

    In the model's dtype its shape is `[layers, sides, num_blocks, kv_heads, block_size, head_dim]`
    with as many layers as a layer group has. The two sides are keys and values; latent attention
    has one side. A quantised arena has bytes, `[layers, sides, num_blocks, kv_heads, block_size *
    (head_dim + 2)]`: for each head of a block `[block_size, head_dim]` 8-bit numbers, then
    `block_size` bfloat16 scales. If layers differ in heads, elements or sides, such tensors of each
    layout follow each other (`views`).

    A block id that a group holds is that block in each of its layers. Layers of different groups at
    the same index share `views[layout][index]`, but never a block. Inside a block each head is one
    contiguous `[block_size, head_dim]`, so a kernel reads the keys of a head in long runs. The slot
    of a token is `block * block_size + offset`.

    Captured steps contain the address, so the memory is never replaced or resized.

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
        counts = layouts(groups)
        shapes = [_shape(*counted, block_size, storage) for counted in counts.items()]
        shape: tuple[int, ...] = (num_blocks * sum(map(math.prod, shapes)),)
        if len(shapes) == 1:
            shape = (*shapes[0][:2], num_blocks, *shapes[0][3:])
        element = dtype if storage == "model" else torch.uint8
        self.storage: Storage = storage
        self.num_blocks = num_blocks
        self.tensor: Final = torch.empty(shape, dtype=element, device=device)
        """The allocation, contiguous: in the shape of the class docstring, or flat if there are
        several layouts."""
        self.views = arena_views(self.tensor, counts, block_size, storage)
        """The tensor of each layout, in the shape of the class docstring."""
        for view in self.views:
            view[:, :, NULL_BLOCK].zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.tensor.nbytes

    def bytes_read(self, groups: Sequence[LayerGroup], context: int) -> int:
        """Bytes that the newest of `context` tokens reads in all layers of these groups."""
        elements = sum(
            group.positions_read(context) * math.prod(_shape(state, 1, 1, self.storage))
            for group in groups
            for state in group.states
        )
        return elements * self.tensor.itemsize

    def copy_blocks(self, pairs: Sequence[BlockPair]) -> None:
        """Copy whole blocks, in all layers. No destination may be a source.

        Copies run in batches of at most `COPY_BYTES`, which limits the temporary memory.
        """
        if not pairs:
            return
        pinned = self.tensor.is_cuda  # a copy from pageable memory would wait for all earlier work
        ids = torch.tensor(pairs, pin_memory=pinned).to(self.tensor.device, non_blocking=True)
        for piece in ids.split(max(1, COPY_BYTES * self.num_blocks // self.nbytes)):
            source, destination = piece.unbind(1)
            for view in self.views:
                view.index_copy_(2, destination, view.index_select(2, source))


class StateMemory:
    """The memory of recurrent state, at addresses that never change; see `cache/row_states.py`.

    An entry of `snapshots`, or of `inputs`, has the parts of all layers. Entry 0 is zero and never
    written to: padding reads and skips it. Others may contain anything until they are written.
    """

    def __init__(
        self, layout: RowLayout, pools: RowPools, block_size: int, device: torch.device
    ) -> None:
        """Allocate uint8 `[pools.snapshots, bytes]`, and likewise for the inputs of blocks."""
        sizes = layout.snapshot_bytes, block_size * layout.token_bytes
        entries = pools.snapshots, pools.inputs
        tensors = [
            torch.empty(shape, dtype=torch.uint8, device=device)
            for shape in zip(entries, sizes, strict=True)
        ]
        for tensor in tensors:
            tensor[0].zero_()
        self.snapshots: Final = tensors[0]
        self.inputs: Final = tensors[1]
        self._swapped = HostMemory(pools.host * sum(sizes), device, "swapped recurrent state")
        parts = self._swapped.tensor.split([pools.host * size for size in sizes])
        self._host = [part.view(-1, size) for part, size in zip(parts, sizes, strict=True)]
        """Snapshots and inputs of swapped requests."""

    def close(self) -> None:
        """Unpin the host's memory. Copies must not follow. Idempotent."""
        self._swapped.close()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.snapshots.nbytes + self.inputs.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes for swapped requests."""
        return self._swapped.tensor.nbytes

    def copy(self, kind: CopyKind, copies: Copies) -> None:
        """Issue the copies of snapshots and inputs: within the memory, to the host or back."""
        memory = [self.snapshots, self.inputs]
        sources = self._host if kind == "from_host" else memory
        targets = self._host if kind == "to_host" else memory
        for source, target, pairs in zip(
            sources, targets, (copies.snapshots, copies.inputs), strict=True
        ):
            for of, to in pairs:
                target[to].copy_(source[of], non_blocking=True)


class HostMemory:
    """Host memory that copies from and to a device use, pinned for CUDA.

    torch's allocator of pinned memory rounds sizes up to a power of two and never frees them. So
    the memory is allocated as pageable, and registered with CUDA until `close`.
    """

    def __init__(self, nbytes: int, device: torch.device, contents: str) -> None:
        """Allocate bytes for `contents`, which an error names.

        Raises:
            RuntimeError: CUDA cannot pin so much memory.
        """
        self.tensor: Final = torch.empty(nbytes, dtype=torch.uint8)
        self._unpin: weakref.finalize[[int], HostMemory] | None = None
        if device.type == "cuda" and nbytes:
            address = self.tensor.data_ptr()
            status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
            if int(status) != 0:
                raise RuntimeError(
                    f"CUDA cannot pin {nbytes} bytes of host memory for {contents}"
                    f" ({status}): lower host_cache_bytes"
                )
            unregister = torch.cuda.cudart().cudaHostUnregister
            self._unpin = weakref.finalize(self, unregister, address)
            self._unpin.atexit = False

    def close(self) -> None:
        """Unpin the memory. Copies must not follow. Idempotent."""
        if self._unpin is not None:
            self._unpin()


class HostArena:
    """Blocks in host memory (pinned for a CUDA arena) for swapped requests.

    `[num_blocks, layers, sides, ...]` for each layout of the arena: a block of it is contiguous, so
    that it is transferred in one piece. Copies are asynchronous, on the arena's stream.
    """

    def __init__(self, arena: Arena, num_blocks: int) -> None:
        """Allocate `num_blocks` host blocks for `arena`. The host has no null block.

        Raises:
            RuntimeError: CUDA cannot pin so much memory.
        """
        self.num_blocks = num_blocks
        blocks_first = [view.movedim(2, 0) for view in arena.views]
        sizes = [num_blocks * view[0].numel() for view in blocks_first]
        nbytes = sum(sizes) * arena.tensor.itemsize
        self._memory = HostMemory(nbytes, arena.tensor.device, "swapped blocks")
        self._tensor = self._memory.tensor.view(arena.tensor.dtype)
        self._views = [
            (device, host.view(num_blocks, *device.shape[1:]))
            for device, host in zip(blocks_first, self._tensor.split(sizes), strict=True)
        ]
        """Of each layout: the arena and the host's memory, blocks first."""

    def close(self) -> None:
        """Unpin the memory. Copies must not follow. Idempotent."""
        self._memory.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self._tensor.nbytes

    @property
    def address(self) -> int:
        """Host address of the first element."""
        return self._tensor.data_ptr()

    def swap_out(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (arena block, host block) from the arena."""
        for block, host_block in pairs:
            for device, host in self._views:
                host[host_block].copy_(device[block], non_blocking=True)

    def swap_in(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (host block, arena block) to the arena."""
        for host_block, block in pairs:
            for device, host in self._views:
                device[block].copy_(host[host_block], non_blocking=True)
