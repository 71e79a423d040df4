"""Fills memory that torch allocates without writing it: with zeros, or with NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class FilledMemory(TorchDispatchMode):
    """Call `fill` with each tensor that is allocated uninitialised in this block."""

    def __init__(self, fill: Callable[[Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fill = fill

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled: torch would import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED:
            self._fill(result)
        return result


def poison(tensor: Tensor) -> None:
    """Fill with NaN; integers with -1, or 255 where they are unsigned."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(-1 if tensor.dtype.is_signed else 255)
