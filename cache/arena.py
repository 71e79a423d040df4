"""The tensor that holds all keys and values, at an address that never changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .blocks import NULL_BLOCK
from .spec import LayerGroup

__all__ = ["Arena"]


class Arena:
    """One allocation `[layers_per_group, 2 (k|v), num_blocks, kv_heads, block_size, head_dim]`.

    A block id that a group holds is that block in each of its layers; layers of different groups
    with the same `layer_index` share a view and are kept apart by block ids. Inside a block each
    head is one contiguous `[block_size, head_dim]`, so a kernel reads the keys of a head in long
    runs. Slot ids count over the blocks: `slot = block * block_size + offset`.

    Captured steps hold the address, so the tensor is made once and never replaced or resized.

    Memory is not initialised, except for the null block: padded reads of it reach arithmetic, and
    0 x NaN is NaN. All other slots past the end of a request, fresh or recycled, may hold anything,
    NaN included. That cannot leak because a reader takes masked positions out by *selection*, of
    the scores (before the softmax) and of the values (before the weighted sum), or does not read
    them at all. Multiplying values by a probability of zero is not enough.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the arena.

        Raises:
            ValueError: no group, groups that differ in spec or number of layers, or a `dtype`
                whose size is not the spec's `element_bytes`.
        """
        if not groups:
            raise ValueError("an arena needs at least one layer group, got none")
        spec = groups[0].spec
        layers_per_group = len(groups[0].layers)
        for group in groups:
            if group.spec != spec or len(group.layers) != layers_per_group:
                raise ValueError(
                    f"layer group {group.index} stores {len(group.layers)} layers of {group.spec} "
                    f"and layer group {groups[0].index} {layers_per_group} layers of {spec}: "
                    f"groups of one arena must be alike"
                )
        if dtype.itemsize != spec.element_bytes:
            raise ValueError(
                f"dtype {dtype} has {dtype.itemsize} bytes per element, "
                f"the spec says {spec.element_bytes}"
            )
        self._layer_index = {
            layer: index for group in groups for index, layer in enumerate(group.layers)
        }
        shape = (layers_per_group, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self._tensor = torch.empty(shape, dtype=dtype, device=device)
        self._tensor[:, :, NULL_BLOCK].zero_()
        # Compiled and captured steps may bake the address in instead of copying their input.
        torch._dynamo.mark_static_address(self._tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """`[layers_per_group, 2, num_blocks, kv_heads, block_size, head_dim]`, contiguous."""
        return self._tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self._tensor.nbytes

    @property
    def address(self) -> int:
        """Device address of the first element; the same for the life of the arena."""
        return self._tensor.data_ptr()

    def layer_index(self, layer: int) -> int:
        """Position of a layer of the model in its group: the first coordinate of the tensor.

        Raises:
            KeyError: no group has this layer.
        """
        return self._layer_index[layer]

    def key_blocks(self, layer: int) -> torch.Tensor:
        """View of the keys of a layer, `[num_blocks, kv_heads, block_size, head_dim]`."""
        return self._tensor[self.layer_index(layer), 0]

    def value_blocks(self, layer: int) -> torch.Tensor:
        """View of the values of a layer, `[num_blocks, kv_heads, block_size, head_dim]`."""
        return self._tensor[self.layer_index(layer), 1]
