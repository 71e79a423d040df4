"""Finds operations whose result depends on more than embeddings, positions and the cache.

A step has some tokens of several sequences. So a model may not count positions from its input's
first token, nor combine tokens outside of attention, nor read the ids of tokens, of which the
engine passes embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["PositionalUses"]

aten = torch.ops.aten
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_BY_SHAPE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
)
"""Operations that read the shape of their input only."""
_SUMS = (aten.cumsum.default, aten.cumsum.out)


class PositionalUses(TorchDispatchMode):
    """Records such operations while it is active."""

    def __init__(self, ids: Tensor, embedding: Tensor) -> None:
        """`ids` `[1, T]` are the input, with a T that no size of the model equals; `embedding` is
        the weight of its input embeddings."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens, self._embedding = ids.shape[1], embedding
        self._storage = ids.untyped_storage()._cdata
        self._from_ids = WeakTensorKeyDictionary()
        """Tensors of integers or booleans that are computed from `ids`."""
        self._from_ids[ids] = True
        self.counts = False
        """Whether it made positions from the number of tokens."""
        self.convolves = False
        """Whether it convolved, which combines tokens."""
        self.embeds_again = False
        """Whether it read `ids`, or a function of them, in another embedding."""
        self.changes_ids = False
        """Whether its input embeddings are those of other ids, such as of padding for images."""
        self.counts_ids = False
        """Whether it made positions from `ids`: it counts those that are not padding."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        values = [*args, *(kwargs or {}).values()]
        has_ids = any(isinstance(v, Tensor) and v in self._from_ids for v in values)
        if func in _COUNTS:
            self.counts |= result.numel() == self._tokens
        elif func is aten.convolution.default:
            self.convolves = True
        elif func is aten.embedding.default:
            if args[0] is not self._embedding:
                self.embeds_again |= has_ids
            else:
                self.changes_ids |= args[1].untyped_storage()._cdata != self._storage
        elif has_ids and func not in _BY_SHAPE:
            self.counts_ids |= func in _SUMS
            for made in torch.utils._pytree.tree_leaves(result):
                if isinstance(made, Tensor) and not made.is_floating_point():
                    self._from_ids[made] = True
        return result
