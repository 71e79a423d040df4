"""Measures the peak of live tensors, for tensors that have no data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate while it is active."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        """`held` are not counted: parameters and buffers, of which operations make views."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        """Most bytes at one time."""
        self._live = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in held}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size
